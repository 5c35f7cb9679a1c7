"""Every formula beside NumPy float64 written from its paper. N trained tokens, S sequences."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrft.consumers.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    ALGORITHMS,
    KL_LOSSES,
    POLICY_LOSSES,
)
from streamrft.consumers.algorithms.build import Algorithm, build_algorithm
from streamrft.consumers.algorithms.catalogue import awaited_source
from streamrft.consumers.algorithms.tokens import Tokens
from streamrft.consumers.settings import AlgorithmSettings, FunctionSettings
from streamrft.schemas.errors import ConfigError

N = 64


def algorithm(name: str = "grpo", **functions: object) -> Algorithm:
    return build_algorithm(AlgorithmSettings(algorithm_type=name, **functions))


def ppo(**args: Any) -> Any:
    return algorithm(policy_loss_fn=FunctionSettings("ppo", args)).policy_loss


def tokens(seed: int = 0, spread: float = 1.0) -> Tokens:
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=N)
    return Tokens(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        old_logprobs=torch.tensor(logprobs + spread * rng.normal(size=N)),
        advantages=torch.tensor(rng.normal(size=N)),
        sequence=torch.tensor(np.sort(rng.integers(0, 5, size=N))),
        num_sequences=5,
    )


def arrays(t: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return t.logprobs.detach().numpy(), t.old_logprobs.numpy(), t.advantages.numpy()


def reference_ppo(t: Tokens, low: float, high: float, c: float) -> np.ndarray:
    logprobs, old, a = arrays(t)
    ratio = np.exp(logprobs - old)
    surrogate = np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    return -np.where(a < 0, np.maximum(surrogate, c * a), surrogate)


@pytest.mark.parametrize(
    "args, low, high, c",
    [
        ({}, 0.2, 0.2, 3.0),
        ({"clip_range": 0.1}, 0.1, 0.1, 3.0),
        ({"clip_range_low": 0.2, "clip_range_high": 0.28}, 0.2, 0.28, 3.0),
        ({"clip_range": 0.3, "clip_range_high": 0.5, "clip_ratio_c": 1.5}, 0.3, 0.5, 1.5),
    ],
)
def test_ppo_loss_is_the_papers(args: dict, low: float, high: float, c: float):
    t = tokens()
    losses = ppo(**args)(t).losses
    np.testing.assert_allclose(losses.detach(), reference_ppo(t, low, high, c), rtol=1e-12)


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    t = Tokens(
        torch.zeros(1, dtype=torch.float64, requires_grad=True),
        torch.full((1,), -np.log(10.0)),
        torch.tensor([-2.0]),
        torch.zeros(1, dtype=torch.int64),
        1,
    )
    result = ppo()(t)
    assert result.losses.item() == pytest.approx(6.0)
    assert result.metrics["pg_clipfrac_lower"].item() == 1.0
    result.losses.sum().backward()
    assert t.logprobs.grad is not None and t.logprobs.grad.item() == 0.0


def test_ppo_gradient_agrees_with_finite_differences():
    t = tokens(seed=1)

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        moved = Tokens(logprobs, t.old_logprobs, t.advantages, t.sequence, t.num_sequences)
        return ppo()(moved).losses.sum()

    assert torch.autograd.gradcheck(total, (t.logprobs,), eps=1e-7)


def test_the_gradient_at_the_behaviour_policy_is_the_policy_gradient():
    t = tokens(spread=0.0)
    ppo()(t).losses.sum().backward()
    np.testing.assert_allclose(t.logprobs.grad, -t.advantages, rtol=1e-12)


def test_ppo_reports_clip_fractions_and_kl():
    t = tokens()
    logprobs, old, a = arrays(t)
    ratio = np.exp(logprobs - old)
    metrics = ppo()(t).metrics
    np.testing.assert_allclose(metrics["ppo_kl"], old - logprobs)
    is_clipped = np.where(a > 0, ratio > 1.2, ratio < 0.8)
    np.testing.assert_array_equal(metrics["pg_clipfrac"].numpy() == 1, is_clipped)


def test_sequence_masking_leaves_out_bad_tokens_of_sequences_far_from_the_behaviour():
    t = tokens()
    logprobs, old, a = arrays(t)
    mean_kl = [np.mean((old - logprobs)[t.sequence.numpy() == s]) for s in range(5)]
    is_masked = (a < 0) & (np.array(mean_kl)[t.sequence.numpy()] > 0.1)
    assert 0 < is_masked.sum() < (a < 0).sum()
    losses = ppo(enable_sequence_masking=True)(t).losses
    expected = np.where(is_masked, 0.0, reference_ppo(t, 0.2, 0.2, 3.0))
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-12)


def test_fallback_to_policy_gradient_ignores_behaviour_logprobs():
    t = tokens()
    result = ppo(fallback_to_policy_gradient=True)(t)
    result.losses.sum().backward()
    np.testing.assert_allclose(t.logprobs.grad, -t.advantages, rtol=1e-12)


def test_a_huge_ratio_stays_finite():
    t = tokens()
    far = Tokens(t.logprobs, t.old_logprobs - 1e4, t.advantages, t.sequence, 5)
    loss = ppo()(far).losses.sum()
    loss.backward()
    assert torch.isfinite(loss) and t.logprobs.grad is not None
    assert torch.isfinite(t.logprobs.grad).all()


def test_ppo_refuses_impossible_arguments():
    with pytest.raises(ConfigError, match="clip_ratio_c 1.0 must be above 1"):
        ppo(clip_ratio_c=1.0)
    with pytest.raises(ConfigError, match="clip range"):
        ppo(clip_range_low=1.5)


def test_sft_loss_is_the_negative_logprob():
    t = tokens()
    losses = algorithm("sft").policy_loss(t).losses
    np.testing.assert_array_equal(losses.detach(), -t.logprobs.detach())


KL = {
    "k1": lambda d, w: d,
    "k2": lambda d, w: d**2 / 2,
    "k3": lambda d, w: np.exp(-d) - 1 + d,
    "low_var_kl": lambda d, w: np.clip(np.exp(-np.clip(d, -20, 20)) - 1 + d, -10, 10),
    "abs": lambda d, w: np.abs(d),
    "corrected_k3": lambda d, w: np.clip(w, 0, 2) * (np.exp(-d) - 1 + d),
}


@pytest.mark.parametrize("name", sorted(KL))
def test_kl_estimators_are_schulmans(name: str):
    t = tokens()
    logprobs, old, _ = arrays(t)
    reference = logprobs + np.random.default_rng(1).normal(size=N)
    kl = algorithm(kl_loss_fn=FunctionSettings(name, {"kl_coef": 0.1})).kl
    values = kl(t.logprobs, torch.tensor(reference), t.old_logprobs)
    expected = KL[name](logprobs - reference, np.exp(logprobs - old))
    np.testing.assert_allclose(values.detach(), expected, rtol=1e-10)
    assert kl.kl_coef == 0.1


def test_without_a_coefficient_or_a_function_no_reference_is_needed():
    assert algorithm().kl.is_active and algorithm().kl.kl_coef == 0.001
    assert not algorithm(kl_loss_fn=FunctionSettings("k2", {"kl_coef": 0.0})).kl.is_active
    assert not algorithm(kl_loss_fn=FunctionSettings("none", {"kl_coef": 0.1})).kl.is_active


@pytest.mark.parametrize(
    "measured, expected",
    [(0.11, 0.2 * (1 + 0.1 * 50 / 1000)), (9.0, 0.2 * 1.01), (0.0, 0.2 * 0.99), (np.nan, 0.2)],
)
def test_an_adaptive_coefficient_is_steered_to_the_target(measured: float, expected: float):
    """Target 0.1, 50 experiences, horizon 1000; the error is clamped to +-0.2."""
    args = {"kl_coef": 0.2, "adaptive": True, "target_kl": 0.1, "horizon": 1000}
    kl = algorithm(kl_loss_fn=FunctionSettings("k2", args)).kl
    assert kl.next_coef(0.2, measured, 50) == pytest.approx(expected)
    fixed = algorithm(kl_loss_fn=FunctionSettings("k2", {"kl_coef": 0.2})).kl
    assert fixed.next_coef(0.2, measured, 50) == 0.2
    assert kl.next_coef(0.2, 0.0, 10**6) == pytest.approx(0.16), "no batch turns its sign"


def test_an_adaptive_coefficient_needs_a_target_and_a_horizon():
    with pytest.raises(ConfigError, match="adaptive with target_kl None and horizon None"):
        algorithm(kl_loss_fn=FunctionSettings("k2", {"adaptive": True}))


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", [1 / 6, 1 / 6, 1 / 6, 0]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3, 0]),
        ("seq-mean-token-mean", [1 / 9, 1 / 3, 1 / 6, 0]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30, 0]),
    ],
)
def test_aggregations_weigh_tokens_by_their_sequence(mode: str, expected: list[float]):
    """Sequences of 3, 1, 2 and 0 trained tokens; the last is not counted; horizon 10."""
    counts = np.array([3, 1, 2, 0])
    weights = algorithm(loss_agg_mode=mode).token_weights(counts, horizon=10)
    np.testing.assert_allclose(weights * (counts > 0), expected)


def test_loss_agg_mode_may_stand_in_the_policy_loss_arguments_but_its_own_key_wins():
    inside = FunctionSettings("ppo", {"loss_agg_mode": "seq-mean-token-mean"})
    assert algorithm(policy_loss_fn=inside).aggregation.__name__ == "seq_mean_token_mean"
    outside = algorithm(policy_loss_fn=inside, loss_agg_mode="token-mean")
    assert outside.aggregation.__name__ == "token_mean"


def test_algorithms_have_their_defaults():
    dapo, dr_grpo = algorithm("dapo"), algorithm("dr_grpo")
    assert (dapo.policy_loss._low, dapo.policy_loss._high) == (0.2, 0.28)
    assert not dapo.kl.is_active and not dr_grpo.kl.is_active
    assert dr_grpo.aggregation.__name__ == "seq_mean_token_sum_norm"
    assert not algorithm().entropy.is_active
    assert ALGORITHMS["dapo"].repeat_times == 16 and ALGORITHMS["grpo"].repeat_times == 2
    for name in ALGORITHMS:
        assert algorithm(name)


# Trinity-RFT 0.6.0: advantage, policy loss, KL loss, entropy loss, group size
TRINITY = """
ppo                 ppo                ppo        k2    default  1
grpo                grpo               ppo        k2    default  2
grpo_verl           grpo               ppo        k2    default  2
dapo                grpo               ppo        none  default  16
reinforceplusplus   reinforceplusplus  ppo        k2    default  2
rloo                rloo               ppo        k2    default  2
opmd                opmd               opmd       k2    default  2
asymre              asymre             opmd       none  none     2
topr                reinforce          topr       k2    default  2
cispo               grpo               cispo      k2    default  2
gspo                grpo               gspo       k2    default  2
sapo                grpo               sapo       k2    default  2
sppo                opmd               sppo       none  none     2
rec                 rec                rec        k2    default  2
raft                -                  sft        none  none     1
multi_step_grpo     step_wise_grpo     ppo        k2    default  8
gigpo               gigpo              ppo        k2    default  8
mix                 grpo               mix        k2    mix      8
mix_chord           grpo               mix_chord  k2    mix      8
on_policy_distill   on_policy_distill  ppo        none  none     8
jsd                 jsd                ppo        none  none     8
sft                 -                  sft        none  none     1
cpt                 -                  sft        none  none     1
dpo                 -                  dpo        k2    default  2
"""


@pytest.mark.parametrize("row", TRINITY.strip().splitlines())
def test_an_algorithm_is_made_of_what_trinity_makes_it_of(row: str):
    name, advantage, loss, kl, entropy, size = row.split()
    kind = ALGORITHMS[name]
    assert (kind.advantage_fn or "-", kind.policy_loss_fn) == (advantage, loss)
    assert (kind.kl_loss_fn, kind.entropy_loss_fn) == (kl, entropy)
    assert (kind.kl_penalty_fn, kind.repeat_times) == ("none", int(size))


def test_the_catalogue_is_read_without_torch():
    program = "import sys, streamrft.consumers.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=150).returncode == 0


def test_only_losses_without_other_terms_let_zero_advantages_be_skipped():
    assert algorithm("dapo").can_skip_zero_advantage
    assert not algorithm("grpo").can_skip_zero_advantage
    assert not algorithm("sft").can_skip_zero_advantage
    bonus = FunctionSettings("default", {"entropy_coef": 0.01})
    assert not algorithm("dapo", entropy_loss_fn=bonus).can_skip_zero_advantage


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="'grpoo' is unknown. Did you mean 'grpo'"):
        algorithm("grpoo")
    with pytest.raises(ConfigError, match="kl_loss_fn 'k9' is unknown.*Known: abs, corrected_k3"):
        algorithm(kl_loss_fn=FunctionSettings("k9"))
    with pytest.raises(ConfigError, match="loss_agg_mode 'token_mean' is unknown.*'token-mean'"):
        algorithm(loss_agg_mode="token_mean")
    with pytest.raises(ConfigError, match="cannot be imported"):
        algorithm(policy_loss_fn=FunctionSettings("nowhere.at.all"))


PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.mark.parametrize(
    "names",
    [ALGORITHMS, *(r.names() for r in (ADVANTAGES, POLICY_LOSSES, KL_LOSSES, AGGREGATIONS))],
)
def test_the_page_names_every_algorithm_and_function(names: Iterable[str]):
    text = PAGE.read_text()
    assert [n for n in names if f"`{n}`" not in text] == []


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_page_says_what_an_algorithm_is_made_of(name: str):
    """Its row names its group size, its policy loss, its KL and what it averages by."""
    rows = [r for r in PAGE.read_text().splitlines() if r.startswith("| `")]
    split = [r.split("|") for r in rows]
    (cells,) = [c for c in split if len(c) == 9 and f"`{name}`" in c[1]]
    kind, made = ALGORITHMS[name], algorithm(name)
    group, advantage, loss, kl, average, waits = (c.strip() for c in cells[2:8])
    assert group == ("-" if kind.schema in ("sft", "cpt") else str(kind.repeat_times))
    assert (kind.advantage_fn or "-") in advantage or advantage == "by name"
    assert kind.policy_loss_fn in loss
    assert kl == kind.kl_loss_fn
    assert made.aggregation.__name__.replace("_", "-") in average or kind.schema in ("dpo", "kto")
    assert (waits != "") == (awaited_source(kind) is not None)
