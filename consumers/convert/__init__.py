"""Sharded checkpoints made into Hugging Face folders, on a CPU and one shard at a time."""

from .convert import Outcome, Request, convert
from .errors import ConvertFailed

__all__ = ["ConvertFailed", "Outcome", "Request", "convert"]
