"""The log, what flows beside it, and what happens between topics."""
