"""Engine over a Hugging Face causal model in this process: CPUs and small models."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ...streams.weights import adapters
from .decoding import Written, decode
from .engine import EngineError, Generation, Interrupted, PromptTooLong, Request, WeightsMismatch

_KV_CACHE_BYTES = 2 << 30


class TransformersEngine:
    """Own batched generation loop over a model of transformers.

    ready -> generating -> ready; weights change only between two calls of `generate`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        policy_version: int,
        branch: str,
        dtype: str = "float32",
        num_threads: int | None = None,
        kv_cache_bytes: int = _KV_CACHE_BYTES,
        adapter: str | Path | None = None,
    ) -> None:
        """Load the model of `folder`. `kv_cache_bytes` bounds how many rows run at a time.

        `adapter` is a folder of peft; new weights are then its matrices, and the model stays.

        Raises:
            WeightsMismatch: an adapter that does not fit the model. MissingExtra: no peft.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.policy_version, self.branch = policy_version, branch
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = _load(str(folder), dtype)
        self._tied: dict[str, str] = dict(model.all_tied_weights_keys)
        self._places: dict[str, str] = {}
        if adapter is not None:
            self._tied, self._places = {}, _adapted(model, Path(adapter))
        self._model = model.to(self._device).eval()
        self._end_E = torch.tensor(_end_tokens(self._model), device=self._device)
        self._max_positions = int(
            getattr(self._model.config, "max_position_embeddings", None) or 1 << 30
        )
        self.max_prompt_tokens = self._max_positions - 1
        self._kv_cache_bytes = kv_cache_bytes
        self._interrupted = threading.Event()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See `Engine.generate`."""
        limits = [self._limit(i, r) for i, r in enumerate(requests)]
        results: list[Generation] = []
        start = 0
        while start < len(requests):
            end = self._batch_end(requests, limits, start)
            part = slice(start, end)
            written = decode(
                self._model, requests[part], limits[part], self._end_E, self._check_interrupt
            )
            results += self._generations(written)
            start = end
        return results

    def load_weights(
        self, state_dict: Mapping[str, torch.Tensor], policy_version: int, branch: str
    ) -> None:
        """See `Engine.load_weights`."""
        own = self._model.state_dict()
        if self._places:
            own = {name: own[key] for name, key in self._places.items()}
        _check_tensors(own, state_dict, self._tied)
        with torch.no_grad():
            for name, tensor in state_dict.items():
                if name not in self._tied:
                    own[name].copy_(tensor)
        self.policy_version, self.branch = policy_version, branch

    def interrupt(self) -> None:
        """See `Engine.interrupt`."""
        self._interrupted.set()

    def _check_interrupt(self) -> None:
        if self._interrupted.is_set():
            raise Interrupted("the engine was asked to stop; its unfinished rows are lost")

    def _limit(self, index: int, request: Request) -> int:
        """Most tokens that a row may get."""
        room = self._max_positions - len(request.tokens)
        if room < 1 or not request.tokens:
            raise PromptTooLong(
                f"requests[{index}]: a prompt of {len(request.tokens)} tokens; the model takes 1 "
                f"to {self._max_positions - 1}. Lower model.max_prompt_tokens or cut the row."
            )
        wanted = request.sampling.max_tokens
        return room if wanted is None else max(1, min(wanted, room))

    def _batch_end(self, requests: Sequence[Request], limits: list[int], start: int) -> int:
        """One past the last row whose keys and values fit beside the others' from `start` on."""
        budget = max(1, self._kv_cache_bytes // _kv_bytes_per_token(self._model))
        longest = most = 0
        for end in range(start, len(requests)):
            longest = max(longest, len(requests[end].tokens))
            most = max(most, limits[end])
            if end > start and (longest + most) * (end - start + 1) > budget:
                return end
        return len(requests)

    def _generations(self, written: Written) -> list[Generation]:
        tokens_BN = written.tokens_BN.to(torch.int32).cpu().numpy()
        logprobs_BN = written.logprobs_BN.cpu().numpy()
        return [
            Generation(
                tokens=tokens_BN[i, :length].copy(),
                logprobs=logprobs_BN[i, :length].copy(),
                policy_versions=np.full(length, self.policy_version, dtype=np.int32),
                branch=self.branch,
                finish_reason="stop" if stopped else "length",
            )
            for i, (length, stopped) in enumerate(
                zip(written.lengths_B.tolist(), written.stopped_B.tolist(), strict=True)
            )
        ]


def _load(folder: str, dtype: str) -> Any:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise EngineError(f"dtype {dtype!r} is none of torch; use float32, bfloat16 or float16")
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=kind)


def _adapted(model: Any, folder: Path) -> dict[str, str]:
    """Lay the adapter of a folder on the model; gives the places of its matrices."""
    try:
        adapters.lay_on(model, adapters.read_config(folder))
        adapters.fill(model, folder)
    except adapters.AdapterMismatch as error:
        raise WeightsMismatch(str(error)) from error
    return adapters.places(model)


def _end_tokens(model: Any) -> list[int]:
    """Ids that end a row, from generation_config, else from the model's config."""
    for config in (model.generation_config, model.config):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return list(end) if isinstance(end, (list, tuple)) else [int(end)]
    return []


def _kv_bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize


def _check_tensors(
    own: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], tied: Mapping[str, str]
) -> None:
    """Every tensor of the model arrives, in its shape, and nothing else.

    `tied`: name -> the tensor that it shares; a checkpoint may leave it out or repeat it.
    """
    missing = sorted(own.keys() - new.keys() - tied.keys())
    unknown = sorted(new.keys() - own.keys())
    shapes = [
        f"{name} {tuple(new[name].shape)} instead of {tuple(own[name].shape)}"
        for name in sorted(new.keys() & own.keys())
        if new[name].shape != own[name].shape
    ]
    parted = [
        f"{name} differs from {source}, which the model ties to it"
        for name, source in tied.items()
        if name in new and source in new and not torch.equal(new[name], new[source])
    ]
    faults = [
        *(f"missing {name}" for name in missing),
        *(f"unknown {name}" for name in unknown),
        *shapes,
        *parted,
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise WeightsMismatch(
            f"{len(faults)} of {len(own)} tensors do not fit the model: "
            f"{'; '.join(faults[:5])}{more}. The checkpoint belongs to another model."
        )
