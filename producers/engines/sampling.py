"""Draw one token a row, each row from its own stream of random numbers, all rows at once.

Legend: B rows, V vocabulary, E end tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .engine import Request

_SLICE = 1 << 25
"""Logits handled at a time: bounds the float64 copies to 256 MiB."""


def uniforms(seeds: npt.NDArray[np.uint64], index: int) -> npt.NDArray[np.float64]:
    """The `index`-th number in [0, 1) of the stream of each seed, shape as `seeds`.

    Source: SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014; the state is a counter, so any number is reached at once.
    """
    with np.errstate(over="ignore"):
        z = seeds + np.uint64(0x9E3779B97F4A7C15) * np.uint64(index + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Sampler:
    """The sampling arguments of a batch as columns, kept in step with its rows."""

    def __init__(
        self, requests: Sequence[Request], end_tokens: torch.Tensor, device: torch.device
    ) -> None:
        """`end_tokens` int64 [E]."""
        asked = [r.sampling for r in requests]
        heat = torch.tensor([s.temperature for s in asked], dtype=torch.float32, device=device)
        self._greedy_B = heat == 0
        self._heat_B = torch.where(self._greedy_B, 1.0, heat)
        self._top_p_B = torch.tensor([s.top_p for s in asked], dtype=torch.float64, device=device)
        self._top_k_B = torch.tensor([s.top_k for s in asked], device=device)
        self._min_B = torch.tensor([s.min_tokens for s in asked], device=device)
        self._seeds_B = np.array([r.seed for r in requests], dtype=np.uint64)
        self._end_E = end_tokens
        self._min_tokens = max(s.min_tokens for s in asked)
        self._plain_heat = all(s.temperature in (0.0, 1.0) for s in asked)
        self._all_greedy = all(s.temperature == 0 for s in asked)
        self._filters = any(s.top_p < 1 or s.top_k > 0 for s in asked)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows only, int64 [B']."""
        self._greedy_B, self._heat_B = self._greedy_B[rows], self._heat_B[rows]
        self._top_p_B, self._top_k_B = self._top_p_B[rows], self._top_k_B[rows]
        self._min_B, self._seeds_B = self._min_B[rows], self._seeds_B[rows.cpu().numpy()]

    def draw(self, logits_BV: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the tokens of step `step`, from 0.

        Returns:
            Token ids int64 [B] and their log-probabilities float32 [B] at the row's temperature.
        """
        size, vocabulary = logits_BV.shape
        rows = max(1, _SLICE // vocabulary)
        if size <= rows:
            return self._draw(logits_BV, step, slice(None))
        parts = [
            self._draw(logits_BV[i : i + rows], step, slice(i, i + rows))
            for i in range(0, size, rows)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _draw(
        self, logits_BV: torch.Tensor, step: int, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled_BV = logits_BV.float()
        if not self._plain_heat:
            scaled_BV = scaled_BV / self._heat_B[part, None]
        lse_B1 = scaled_BV.logsumexp(-1, keepdim=True)
        allowed_BV = scaled_BV
        if step < self._min_tokens:
            allowed_BV = self._without_end(scaled_BV, step, part)
        tokens_B = allowed_BV.argmax(-1)
        if not self._all_greedy:
            chances_BV = (allowed_BV - lse_B1).double().exp()
            if self._filters:
                chances_BV = truncated(chances_BV, self._top_k_B[part], self._top_p_B[part])
            drawn_B = self._invert(chances_BV, step, part)
            tokens_B = torch.where(self._greedy_B[part], tokens_B, drawn_B)
        logprobs_B = (scaled_BV.gather(-1, tokens_B[:, None]) - lse_B1).squeeze(-1)
        return tokens_B, logprobs_B

    def _without_end(self, scaled_BV: torch.Tensor, step: int, part: slice) -> torch.Tensor:
        allowed_BV = scaled_BV.clone()
        early_B1 = (step < self._min_B[part])[:, None]
        allowed_BV[:, self._end_E] = allowed_BV[:, self._end_E].masked_fill(early_B1, -torch.inf)
        return allowed_BV

    def _invert(self, chances_BV: torch.Tensor, step: int, part: slice) -> torch.Tensor:
        """Inverse CDF: the first token whose cumulated chance is above u times the whole."""
        cdf_BV = chances_BV.cumsum(-1)
        u_B = torch.from_numpy(uniforms(self._seeds_B[part], step)).to(cdf_BV.device)
        target_B1 = (u_B * cdf_BV[:, -1])[:, None]
        tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
        return tokens_B1.squeeze(-1).clamp_(max=cdf_BV.shape[-1] - 1)


def truncated(
    chances_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """Chances with those outside the row's top k, or past its mass of top p, set to 0.

    Top k applies first, and p is a share of what it leaves. The most likely token always stays.
    Source: Holtzman et al., arXiv:1904.09751 (nucleus); order as in Hugging Face generate.
    """
    sorted_BV, index_BV = chances_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(chances_BV.shape[-1], device=chances_BV.device)
    keep_BV = (top_k_B[:, None] <= 0) | (rank_V < top_k_B[:, None])
    sorted_BV = sorted_BV * keep_BV
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    mass_B1 = sorted_BV.sum(-1, keepdim=True)
    keep_BV &= (top_p_B[:, None] >= 1) | (before_BV < top_p_B[:, None] * mass_B1)
    keep_BV[:, 0] = True
    return chances_BV * torch.zeros_like(keep_BV).scatter_(-1, index_BV, keep_BV)
