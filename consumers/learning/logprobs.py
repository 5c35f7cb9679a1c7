"""Log-probabilities of chosen tokens without keeping [tokens, vocabulary] for the backward pass.

n places, hidden size H, vocabulary V. Only places whose next token is trained come in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# logits that may be held at once, in float32: 128 MiB
MAX_LOGITS = 2**25
# of them at once in the passes over logits, on a CPU: 8 MiB
BLOCK_LOGITS = 2**21

Head = Callable[[Tensor], Tensor]
# hidden states [n, H], targets [n], temperatures [n]
Places = tuple[Tensor, Tensor, Tensor | None]


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperatures: Tensor | None = None,
    *,
    num_logits: int,
    with_entropy: bool = False,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax of head(hidden) / temperature at the targets, in float32.

    Where n * V passes `max_logits`, the places are done in chunks whose logits are computed
    again in the backward pass, so that only one chunk's logits exist at a time.

    Args:
        hidden: [n, H] final hidden states.
        head: [n, H] -> logits [n, V].
        targets: int64 [n].
        temperatures: float32 [n], None for 1.
        num_logits: V.
        max_logits: how many logits may exist at once.
        with_entropy: also the entropy of the distribution at each place.

    Returns:
        log-probs [n] and entropies [n] or None.
    """
    chunks = _chunks((hidden, targets, temperatures), max_logits // num_logits)
    if len(chunks) == 1:
        return _chosen(*chunks[0], head, with_entropy)
    parts = [checkpoint(_chosen, *c, head, with_entropy, use_reentrant=False) for c in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _chunks(places: Places, size: int) -> list[Places]:
    """`size` places at a time, but at least one; without places one chunk that is empty."""
    hidden, targets, temperatures = places
    size = max(1, size)
    cuts = [slice(i, i + size) for i in range(0, max(1, len(targets)), size)]
    return [
        (hidden[c], targets[c], None if temperatures is None else temperatures[c]) for c in cuts
    ]


def _chosen(
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    head: Head,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden).float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs, entropies = _Chosen.apply(logits, targets, with_entropy)
    return logprobs, entropies if with_entropy else None


class _Chosen(Function):
    """Log-probs and entropies [n] of logits [n, V], which become their own gradient.

    Autograd's own would make four more arrays [n, V] while all activations are alive. Rows are
    done a few at a time, so that they stay in a CPU's cache.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        chosen = logits.gather(-1, targets[:, None])[:, 0]
        normaliser, entropies = torch.empty_like(chosen), torch.zeros_like(chosen)
        for rows in _blocks(logits):
            normaliser[rows] = logits[rows].logsumexp(-1)
            if with_entropy:
                p = (logits[rows] - normaliser[rows, None]).exp_()
                entropies[rows] = normaliser[rows] - p.mul_(logits[rows]).sum(-1)
        ctx.save_for_backward(logits, targets, normaliser, entropies)
        ctx.with_entropy, ctx.is_spent = with_entropy, False
        return chosen - normaliser, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        """By a logit: 1[target] - p of the log-prob, -p (log p + H) of the entropy."""
        grad_logprobs, grad_entropies = gradients
        assert not ctx.is_spent, "the logits were overwritten by the first backward pass"
        ctx.is_spent = True
        logits, targets, normaliser, entropies = ctx.saved_tensors
        for rows in _blocks(logits):
            z = logits[rows].sub_(normaliser[rows, None])
            scale = -grad_logprobs[rows, None]
            if ctx.with_entropy:
                slope = (z + entropies[rows, None]).mul_(-grad_entropies[rows, None])
                z.exp_().mul_(slope.add_(scale))
            else:
                z.exp_().mul_(scale)
        logits.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
        return logits, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = max(1, BLOCK_LOGITS // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    return (slice(i, i + size) for i in range(0, len(logits), max(1, size)))


@torch.no_grad()
def token_statistics(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperatures: Tensor | None = None,
    *,
    num_logits: int,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies H, and the mean over the vocabulary of p (H + log p), [n] each.

    Arguments as of `token_logprobs`; nothing is kept for a backward pass.
    """
    chunks = _chunks((hidden, targets, temperatures), max_logits // num_logits)
    parts = [_statistics(*chunk, head) for chunk in chunks]
    logprobs, entropies, signals = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(signals)


def _statistics(
    hidden: Tensor, targets: Tensor, temperatures: Tensor | None, head: Head
) -> tuple[Tensor, Tensor, Tensor]:
    logits = head(hidden).float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logp = torch.log_softmax(logits, -1)
    p = logp.exp()
    entropies = -(p * logp).sum(-1)
    signals = (p.square() * (entropies[:, None] + logp)).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropies, signals
