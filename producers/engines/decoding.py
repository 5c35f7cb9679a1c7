"""The token loop of one batch: left-padded prefill, a KV cache, one draw a step for all rows.

Legend: U distinct prompts, B rows, L longest prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from .engine import Request
from .sampling import Sampler


class Written(NamedTuple):
    """What the loop wrote; row i holds `lengths[i]` tokens, the rest is noise."""

    tokens_BN: torch.Tensor
    logprobs_BN: torch.Tensor
    lengths_B: torch.Tensor
    stopped_B: torch.Tensor


@torch.inference_mode()
def decode(
    model: Any,
    requests: Sequence[Request],
    limits: Sequence[int],
    end_tokens: torch.Tensor,
    check: Callable[[], None],
) -> Written:
    """Continue every prompt until an end token or its limit.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        requests: B rows; equal prompts are computed once.
        limits: most tokens a row may get, at least 1.
        end_tokens: int64 [E] on the model's device.
        check: called once a step; what it raises ends the loop.
    """
    state = _Batch(model, requests, limits, end_tokens)
    logits_BV = state.prefill()
    step = 0
    while state.write(logits_BV, step):
        check()
        logits_BV = state.forward(step)
        step += 1
    return state.written()


def cache_argument(model: Any) -> str:
    """What `forward` calls its cache: transformers 5.24 renamed past_key_values."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _Batch:
    """The rows still open, their cache, and the columns written so far."""

    def __init__(
        self, model: Any, requests: Sequence[Request], limits: Sequence[int], end: torch.Tensor
    ) -> None:
        self._model, self._device = model, end.device
        self._cache_name = cache_argument(model)
        self._sampler = Sampler(requests, end, end.device)
        self._end_E = end
        self._limits_B = torch.tensor(limits, device=end.device)
        self._rows_B = torch.arange(len(requests), device=end.device)
        self._open_B = torch.ones(len(requests), dtype=torch.bool, device=end.device)
        self._num_open = len(requests)
        distinct = list(dict.fromkeys(r.tokens for r in requests))
        where = {tokens: i for i, tokens in enumerate(distinct)}
        self._prompts = distinct
        self._prompt_of_B = torch.tensor([where[r.tokens] for r in requests], device=end.device)
        columns = min(max(limits), 128)
        self._tokens_BN = torch.zeros(len(requests), columns, dtype=torch.int64, device=end.device)
        self._logprobs_BN = torch.zeros(
            len(requests), columns, dtype=torch.float32, device=end.device
        )
        self._lengths_B = self._limits_B.clone()
        self._stopped_B = torch.zeros_like(self._open_B)

    def prefill(self) -> torch.Tensor:
        """Run the distinct prompts; returns the logits [B, V] of each row's first token."""
        longest = max(len(p) for p in self._prompts)
        ids_UL = torch.zeros(len(self._prompts), longest, dtype=torch.int64)
        mask_UL = torch.zeros_like(ids_UL)
        for i, prompt in enumerate(self._prompts):
            ids_UL[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask_UL[i, longest - len(prompt) :] = 1
        ids_UL, mask_UL = ids_UL.to(self._device), mask_UL.to(self._device)
        self._cache = DynamicCache(config=self._model.config)
        out = self._model(
            input_ids=ids_UL,
            attention_mask=mask_UL,
            position_ids=(mask_UL.cumsum(-1) - 1).clamp(min=0),
            **{self._cache_name: self._cache},
            use_cache=True,
            logits_to_keep=1,
        )
        logits_UV = out.logits[:, -1]
        if len(self._prompts) == len(self._rows_B):
            self._mask_BL = mask_UL
            self._position_B = mask_UL.sum(-1)
            return logits_UV
        self._cache.batch_select_indices(self._prompt_of_B)
        self._mask_BL = mask_UL[self._prompt_of_B]
        self._position_B = self._mask_BL.sum(-1)
        return logits_UV[self._prompt_of_B]

    def write(self, logits_BV: torch.Tensor, step: int) -> bool:
        """Draw and note the tokens of `step`; False when every row has ended."""
        self._grow(step)
        self._next_B, logprobs_B = self._sampler.draw(logits_BV, step)
        self._tokens_BN[self._rows_B, step] = self._next_B
        self._logprobs_BN[self._rows_B, step] = logprobs_B
        stops_B = torch.isin(self._next_B, self._end_E)
        ends_B = self._open_B & (stops_B | (self._limits_B <= step + 1))
        ended = self._rows_B[ends_B]
        self._lengths_B[ended] = step + 1
        self._stopped_B[ended] = stops_B[ends_B]
        self._open_B = self._open_B & ~ends_B
        self._num_open -= len(ended)
        if self._num_open and self._num_open * 4 <= len(self._rows_B) * 3:
            self._drop_ended()
        return self._num_open > 0

    def forward(self, step: int) -> torch.Tensor:
        """Logits [B, V] after the tokens drawn at `step`."""
        one_B1 = torch.ones_like(self._mask_BL[:, :1])
        self._mask_BL = torch.cat([self._mask_BL, one_B1], dim=1)
        out = self._model(
            input_ids=self._next_B[:, None],
            attention_mask=self._mask_BL,
            position_ids=(self._position_B + step)[:, None],
            **{self._cache_name: self._cache},
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def written(self) -> Written:
        """The result, one row a request."""
        return Written(self._tokens_BN, self._logprobs_BN, self._lengths_B, self._stopped_B)

    def _drop_ended(self) -> None:
        """Copying the cache of three quarters of the rows costs less than a step of the rest."""
        keep = self._open_B.nonzero().squeeze(-1)
        self._cache.batch_select_indices(keep)
        self._sampler.keep(keep)
        self._rows_B, self._open_B = self._rows_B[keep], self._open_B[keep]
        self._limits_B, self._position_B = self._limits_B[keep], self._position_B[keep]
        self._mask_BL, self._next_B = self._mask_BL[keep], self._next_B[keep]

    def _grow(self, step: int) -> None:
        if step == self._tokens_BN.shape[1]:
            self._tokens_BN = torch.nn.functional.pad(self._tokens_BN, (0, step))
            self._logprobs_BN = torch.nn.functional.pad(self._logprobs_BN, (0, step))
