"""Processes that begin with everything heavy imported: forked in milliseconds, not started in 4 s.

A session has one fork server, whoever asks for one, and the last list of what it imports wins: so
there is one list, here. It swallows what it cannot import, and does not know this folder.
"""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "streamrft.consumers.trainer",
        "streamrft.producers.explorer",
        "streamrft.producers.engines.transformers_engine",
        "transformers.models.llama.modeling_llama",
        "safetensors.torch",
    ]
)
