"""Sources: where batches come from."""
