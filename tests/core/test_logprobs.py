from __future__ import annotations

import numpy as np
import pytest
import torch

from streamrft.consumers.learning.logprobs import token_logprobs

PLACES, HIDDEN, VOCABULARY = 37, 8, 23


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(PLACES, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (PLACES,))
    return hidden, weight, targets, torch.rand(PLACES) + 0.5


def run(max_logits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropies and both gradients of a weighted sum of them."""
    hidden, weight, targets, temperatures = inputs()
    logprobs, entropies = token_logprobs(
        hidden,
        lambda h: h @ weight.T,
        targets,
        temperatures,
        num_logits=VOCABULARY,
        with_entropy=True,
        max_logits=max_logits,
    )
    assert entropies is not None
    (logprobs * torch.linspace(-1, 1, PLACES) + 0.3 * entropies).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return logprobs.detach(), entropies.detach(), hidden.grad, weight.grad


def test_logprobs_and_entropies_are_those_of_the_softmax_at_temperature():
    hidden, weight, targets, temperatures = (t.detach().double().numpy() for t in inputs())
    logits = hidden @ weight.T / temperatures[:, None]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    logprobs, entropies, _, _ = run(2**24)
    chosen = p[np.arange(PLACES), targets.astype(int)]
    np.testing.assert_allclose(logprobs, np.log(chosen), atol=1e-5)
    np.testing.assert_allclose(entropies, -(p * np.log(p)).sum(-1), atol=1e-5)


def test_gradients_are_those_of_the_plain_softmax():
    hidden, weight, targets, temperatures = inputs()
    logp = torch.log_softmax(hidden @ weight.T / temperatures[:, None], -1)
    chosen, entropies = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (chosen * torch.linspace(-1, 1, PLACES) + 0.3 * entropies).sum().backward()
    _, _, hidden_grad, weight_grad = run(2**24)
    torch.testing.assert_close(hidden_grad, hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_grad, weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 36])
def test_chunks_give_the_values_and_the_gradients_of_the_whole(chunk: int):
    for whole, chunked in zip(run(2**24), run(chunk * VOCABULARY), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def kept_sizes(max_logits: int) -> list[int]:
    """Sizes of what is saved for the backward pass."""
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    hidden, weight, targets, _ = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        token_logprobs(
            hidden,
            lambda h: h @ weight.T,
            targets,
            num_logits=VOCABULARY,
            with_entropy=True,
            max_logits=max_logits,
        )
    return saved


def test_chunked_logits_do_not_stay_for_the_backward_pass():
    assert max(kept_sizes(5 * VOCABULARY)) < PLACES * VOCABULARY


def test_whole_logits_stay_once_for_the_backward_pass():
    assert kept_sizes(2**24).count(PLACES * VOCABULARY) == 1


def test_a_second_backward_pass_over_spent_logits_is_refused():
    hidden, weight, targets, _ = inputs()
    logprobs, _ = token_logprobs(
        hidden, lambda h: h @ weight.T, targets, num_logits=VOCABULARY, with_entropy=True
    )
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="overwritten by the first backward"):
        logprobs.sum().backward()


def test_half_precision_logits_are_normalised_in_float32():
    hidden, weight, targets, _ = inputs()
    logprobs, _ = token_logprobs(
        hidden, lambda h: (h @ weight.T).bfloat16(), targets, num_logits=VOCABULARY
    )
    assert logprobs.dtype == torch.float32
