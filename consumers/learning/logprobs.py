"""Log-probabilities of chosen tokens without keeping [tokens, vocabulary] for the backward pass.

n places, hidden size H, vocabulary V. Only places whose next token is trained come in here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# logits that may be held at once, in float32: 64 MiB
MAX_LOGITS = 2**24

Head = Callable[[Tensor], Tensor]


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
    chunk = max(1, max_logits // num_logits)
    if len(targets) <= chunk:
        return _chosen(hidden, targets, temperatures, head, with_entropy)
    parts = [
        checkpoint(
            _chosen,
            hidden[i : i + chunk],
            targets[i : i + chunk],
            None if temperatures is None else temperatures[i : i + chunk],
            head,
            with_entropy,
            use_reentrant=False,
        )
        for i in range(0, len(targets), chunk)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


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
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not with_entropy:
        return logprobs, None
    mean_logit = (torch.softmax(logits, -1) * logits).sum(-1)
    return logprobs, normaliser - mean_logit


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
    chunk = max(1, max_logits // num_logits)
    parts = [
        _statistics(
            hidden[i : i + chunk],
            targets[i : i + chunk],
            None if temperatures is None else temperatures[i : i + chunk],
            head,
        )
        for i in range(0, max(1, len(targets)), chunk)
    ]
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
