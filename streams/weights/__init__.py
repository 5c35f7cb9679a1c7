"""How new weights reach explorers."""
