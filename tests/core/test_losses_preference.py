"""DPO, cDPO, IPO and KTO beside NumPy float64, and the critic's loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from loss_cases import agrees_with_autograd, algorithm, policy_loss, tokens, whole_loss, worked

from streamrft.consumers.algorithms.build import Algorithm
from streamrft.consumers.algorithms.losses.critic import value_losses
from streamrft.consumers.algorithms.losses.preference import kto_baseline
from streamrft.consumers.algorithms.tokens import Tokens
from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.learning.objective import prepare
from streamrft.consumers.settings import FunctionSettings
from streamrft.schemas.errors import ConfigError

NO_KL = FunctionSettings("none")


def softplus(x: np.ndarray) -> np.ndarray:
    """-log sigmoid(-x)."""
    return np.logaddexp(0, x)


def preferences(num_sequences: int) -> torch.Tensor:
    return torch.tensor([1, -1]).repeat(num_sequences // 2)


def pairs_of(t: Tokens, reference: torch.Tensor) -> Tokens:
    """Six sequences as three pairs against `reference`."""
    sequence = torch.tensor(np.sort(np.random.default_rng(5).integers(0, 6, len(t.logprobs))))
    return dataclasses.replace(
        t,
        sequence=sequence,
        num_sequences=6,
        ref_logprobs=reference,
        preferences=preferences(6),
        pairs=torch.arange(6) // 2,
    )


def random_pairs() -> tuple[Tokens, np.ndarray]:
    """Tokens of three pairs, and h = d(chosen) - d(rejected) of each."""
    t = tokens()
    reference = t.logprobs.detach() + 0.5 * torch.randn(64, dtype=torch.float64)
    t = pairs_of(t, reference)
    d = (t.logprobs - reference).detach().numpy()
    sums = np.array([d[t.sequence.numpy() == s].sum() for s in range(6)])
    return t, sums[0::2] - sums[1::2]


@pytest.mark.parametrize("beta, smoothing", [(0.1, 0.0), (0.5, 0.0), (0.3, 0.2)])
def test_dpo_is_the_papers_for_every_pair(beta: float, smoothing: float):
    t, h = random_pairs()
    loss = policy_loss("dpo", beta=beta, label_smoothing=smoothing)
    expected = (1 - smoothing) * softplus(-beta * h) + smoothing * softplus(beta * h)
    result = loss(t)
    np.testing.assert_allclose(result.losses.detach(), expected[t.sequence.numpy() // 2])
    assert agrees_with_autograd(loss, t)


def test_ipo_is_the_papers_for_every_pair():
    t, h = random_pairs()
    loss = policy_loss("dpo", beta=0.2, loss_type="ipo")
    expected = (h - 1 / 0.4) ** 2
    np.testing.assert_allclose(loss(t).losses.detach(), expected[t.sequence.numpy() // 2])
    assert agrees_with_autograd(loss, t)


def dpo(**args: Any) -> Algorithm:
    return algorithm("dpo", kl_loss_fn=NO_KL, policy_loss_fn=FunctionSettings("dpo", args))


def four_pairs() -> tuple[list[TrainingExample], list[list[float]], list[list[float]]]:
    """Each sequence has a prompt token and two trained ones, but the first has a hole as well.

    Only the second trained token of a chosen sequence moved: its probability went from 1/2 to
    1/2 of e^x. So h is 2, 1, 1/2 and -1, and beta h with beta 1 the same.
    """
    masks, then, now = [], [], []
    for i, h in enumerate((2.0, 1.0, 0.5, -1.0)):
        hole = [0] if i == 0 else []
        masks += [[0, 1, *hole, 1], [0, 1]]
        then += [[0.5, 0.02, *[0.9] * len(hole), 0.05], [0.5, 0.3]]
        now += [[0.1, 0.02, *[0.1] * len(hole), 0.05 * np.exp(h)], [0.9, 0.3]]
    examples = [
        dataclasses.replace(e, preference=1 if i % 2 == 0 else -1)
        for i, e in enumerate(worked(masks, then, (0.0,) * 8))
    ]
    return examples, then, now


def test_four_pairs_in_one_micro_batch_give_the_mean_of_four_logits():
    """-log sigmoid of 2, 1, 1/2, -1: 0.1269280, 0.3132617, 0.4740770, 1.3132617; mean 0.5568821.

    One sigmoid of their sum would give 0.0788, and an accuracy of 1 instead of 3/4.
    """
    examples, then, now = four_pairs()
    loss, metrics = whole_loss(dpo(beta=1.0), examples, now, reference=then)
    assert loss == pytest.approx(0.5568821, abs=1e-6)
    assert metrics["loss/reward_accuracy"] == pytest.approx(0.75)
    assert metrics["loss/reward_margin"] == pytest.approx(2.5 / 4, abs=1e-6)
    assert metrics["loss/chosen_reward"] == pytest.approx(2.5 / 4, abs=1e-6)
    assert metrics["loss/rejected_reward"] == pytest.approx(0.0, abs=1e-6)


def test_label_smoothing_by_hand():
    """0.9 of the losses above, 0.1 of those of -h: 2.1269280, 1.3132617, 0.9740770, 0.3132617."""
    examples, then, now = four_pairs()
    loss, _ = whole_loss(dpo(beta=1.0, label_smoothing=0.1), examples, now, reference=then)
    assert loss == pytest.approx(0.9 * 0.5568821 + 0.1 * 1.1818821, abs=1e-6)


def test_ipo_by_hand():
    """(h - 1/2)^2 at 2, 1, 1/2, -1: 2.25, 0.25, 0, 2.25."""
    examples, then, now = four_pairs()
    loss, _ = whole_loss(dpo(beta=1.0, loss_type="ipo"), examples, now, reference=then)
    assert loss == pytest.approx(4.75 / 4, abs=1e-5)


@pytest.mark.parametrize("budget", [1, 10, 16, 4096])
def test_partners_of_a_pair_share_a_micro_batch(budget: int):
    examples, _, _ = four_pairs()
    cuts = prepare(examples, dpo()).cuts(budget)
    assert sorted(np.concatenate(cuts).tolist()) == list(range(8))
    for rows in cuts:
        assert (rows[0::2] % 2 == 0).all() and (rows[1::2] == rows[0::2] + 1).all()
    assert len(cuts) == {1: 4, 10: 3, 16: 2, 4096: 1}[budget]


def test_a_preference_loss_has_one_averaging():
    with pytest.raises(ConfigError, match="loss_agg_mode: 'token-mean' found.*whole sequences"):
        algorithm("dpo", loss_agg_mode="token-mean")
    assert dpo().aggregation.__name__ == "seq_mean_token_mean"


def test_preferences_need_the_reference_though_nothing_else_does():
    assert dpo().needs_reference and dpo().reads_reference and not dpo().kl.is_active
    assert algorithm("dpo").kl.is_active


def test_kto_is_the_papers():
    t = tokens()
    reference = t.logprobs.detach() + 0.5 * torch.randn(64, dtype=torch.float64)
    t = dataclasses.replace(
        t,
        ref_logprobs=reference,
        preferences=torch.tensor([1, -1, -1, 1, -1]),
        kl_baseline=0.3,
    )
    d = (t.logprobs - reference).detach().numpy()
    expected = np.zeros(5)
    for s, sign in enumerate([1, -1, -1, 1, -1]):
        value = 1 / (1 + np.exp(-sign * 0.2 * (d[t.sequence.numpy() == s].sum() - 0.3)))
        expected[s] = (1.5 if sign > 0 else 0.5) * (1 - value)
    loss = policy_loss("kto", beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    np.testing.assert_allclose(loss(t).losses.detach(), expected[t.sequence.numpy()])
    assert agrees_with_autograd(loss, t)


def test_kto_by_hand():
    """d is 2 of a wanted and -1 of an unwanted sequence, z 0: 1 - sigmoid(2), 1 - sigmoid(1)."""
    t = dataclasses.replace(
        tokens(),
        logprobs=torch.tensor([-1.0, -1.0, -2.0]),
        old_logprobs=torch.zeros(3),
        sequence=torch.tensor([0, 0, 1]),
        num_sequences=2,
        ref_logprobs=torch.tensor([-2.5, -1.5, -1.0]),
        preferences=torch.tensor([1, -1]),
    )
    losses = policy_loss("kto", beta=1.0)(t).losses
    np.testing.assert_allclose(losses, [0.1192029, 0.1192029, 0.2689414], atol=1e-6)
    assert kto_baseline(np.array([0.5, -0.1])) == pytest.approx(0.2)
    assert kto_baseline(np.array([-0.5, -0.1])) == 0.0


@pytest.mark.parametrize(
    "name, args, match",
    [
        ("dpo", {"beta": 0.0}, "beta 0.0 must be above 0"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing 0.5"),
        ("dpo", {"loss_type": "hinge"}, "loss_type 'hinge'"),
        ("kto", {"beta": -1.0}, "beta -1.0 must be above 0"),
    ],
)
def test_impossible_arguments_are_refused(name: str, args: dict, match: str):
    with pytest.raises(ConfigError, match=match):
        policy_loss(name, **args)


def test_the_critics_loss_is_the_larger_of_plain_and_clipped():
    """Values 1, 2, 0 that were 0, 2, 0, returns 2, 1, 3, clip 1/2: (2 - 0.5)^2, 1, 9, halved."""
    values = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)
    returns = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
    losses = value_losses(values, old, returns)
    np.testing.assert_allclose(losses.detach(), [1.125, 0.5, 4.5])
    assert torch.autograd.gradcheck(lambda v: value_losses(v, old, returns), (values,))
