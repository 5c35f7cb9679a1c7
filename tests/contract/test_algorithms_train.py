"""Every algorithm whose data are there takes a real step on the tiny model; the others say why."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_learner import group, learner, mixed, weights_of, with_logprobs

from streamrft.consumers.algorithms import ALGORITHMS
from streamrft.consumers.algorithms.catalogue import SOURCES, algorithm_type, awaited_source
from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.settings import FunctionSettings
from streamrft.schemas.errors import ConfigError

pytestmark = pytest.mark.usefixtures("torch_as_before")

READY = sorted(n for n, k in ALGORITHMS.items() if awaited_source(k) is None and n != "dpo")
WAITING = sorted(ALGORITHMS.keys() - set(READY) - {"dpo"})
NO_KL = FunctionSettings("none")


def stepped(one: Learner, *, shift: float = 0.1) -> dict[str, float]:
    """One step on three groups of four whose behaviour differs from the policy by `shift`."""
    examples = with_logprobs(mixed(), one.model, [shift * (i % 3 - 1) for i in range(12)])
    before = weights_of(one)
    metrics = one.step(examples, step=1)
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["actor/skipped_updates"] == 0.0 and metrics["actor/grad_norm"] > 0
    assert weights_of(one) != before
    assert all(torch.isfinite(t).all() for t in one.state_dict().values())
    return metrics


@pytest.mark.parametrize("name", READY)
def test_it_trains(tiny_model_dir: Path, name: str):
    metrics = stepped(learner(tiny_model_dir, algorithm_type=name))
    assert metrics["sample/unusable"] == 0.0
    if ALGORITHMS[name].kl_loss_fn != "none":
        assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", WAITING)
def test_it_says_in_one_error_which_source_it_waits_for(tiny_model_dir: Path, name: str):
    with pytest.raises(ConfigError, match=f"'{name}' waits for .*Its functions are here.*grpo"):
        learner(tiny_model_dir, algorithm_type=name)


def test_every_algorithm_of_trinity_is_here():
    trinity = """ppo grpo grpo_verl dapo reinforceplusplus rloo opmd asymre topr cispo gspo sapo
        sppo rec raft multi_step_grpo gigpo mix mix_chord on_policy_distill jsd sft cpt dpo"""
    assert set(trinity.split()) <= ALGORITHMS.keys()
    assert WAITING == [
        "gigpo", "jsd", "on_policy_distill", "remax",
    ]  # fmt: skip
    assert {"asymre", "cispo", "gspo", "opmd", "rec", "sapo", "sppo", "topr"} <= set(READY)


def test_a_chosen_function_waits_as_its_algorithm_does(tiny_model_dir: Path):
    with pytest.raises(ConfigError, match="'grpo' with advantage_fn remax waits for the reward"):
        learner(tiny_model_dir, advantage_fn=FunctionSettings("remax"))
    assert set(SOURCES) == {"advantage_fn"}
    assert awaited_source(algorithm_type("gigpo"), advantage_fn="grpo") is None


@pytest.mark.parametrize("name", ["clipb", "clipv"])
def test_advantages_that_read_the_policys_entropy_train(tiny_model_dir: Path, name: str):
    args = {"mu": 0.1} if name == "clipb" else {"mu": 0.1, "max_frac": 0.5}
    plain = stepped(learner(tiny_model_dir, kl_loss_fn=NO_KL))
    clipped = stepped(
        learner(tiny_model_dir, kl_loss_fn=NO_KL, advantage_fn=FunctionSettings(name, args))
    )
    assert clipped["actor/pg_loss"] != pytest.approx(plain["actor/pg_loss"], abs=1e-4)


def test_what_is_measured_before_the_step_is_the_policy_itself(tiny_model_dir: Path):
    advantage = FunctionSettings("clipv")
    one = learner(tiny_model_dir, advantage_fn=advantage, max_tokens_per_microbatch=64)
    examples = mixed()
    found = one._measured(examples, one.algorithm.measures)
    e = examples[5].sequences[0]
    skipped = sum(x.num_trained_tokens for x in examples[:5])
    ids = torch.from_numpy(e.tokens.astype(np.int64))
    logits = one.model(input_ids=ids[None]).logits[0, :-1].detach().double()
    logits = logits / e.temperature
    logp = torch.log_softmax(logits, -1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    signal = (p * p * (entropy[:, None] + logp)).sum(-1)
    chosen = logp.gather(-1, ids[1:, None])[:, 0]
    places = torch.from_numpy(np.flatnonzero(e.is_trained)) - 1
    part = slice(skipped, skipped + len(places))
    for name, expected in (
        ("current_logprobs", chosen),
        ("entropies", entropy),
        ("expected_signals", signal),
    ):
        np.testing.assert_allclose(found[name][part], expected[places], rtol=1e-4, atol=1e-6)


def test_recomputed_old_log_probs_clip_nothing_and_the_gap_stays_visible(tiny_model_dir: Path):
    recorded = stepped(learner(tiny_model_dir, kl_loss_fn=NO_KL), shift=0.5)
    assert recorded["actor/pg_clipfrac"] > 0.1
    one = learner(tiny_model_dir, kl_loss_fn=NO_KL, bypass_old_logprobs=False)
    metrics = stepped(one, shift=0.5)
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    for name in ("mean", "max", "kl", "k3"):
        key = f"actor/logprob_gap_{name}"
        assert metrics[key] == pytest.approx(recorded[key], rel=1e-3)
    assert metrics["actor/logprob_gap_max"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    "correction",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_is": "token", "rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.05},
        {"bypass_mode": True, "rollout_is": "token", "loss_type": "reinforce"},
    ],
)
def test_a_corrected_step_trains(tiny_model_dir: Path, correction: dict[str, Any]):
    one = learner(tiny_model_dir, bypass_old_logprobs=False, rollout_correction=correction)
    metrics = stepped(one, shift=0.5)
    assert metrics["rollout_corr/rollout_is_max"] > 1
    if "rollout_rs" in correction:
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] > 0.3
        assert metrics["actor/logprob_gap_max"] < 0.1


def test_the_kl_penalty_is_zero_at_the_reference_and_counts_beside_it(tiny_model_dir: Path):
    one = learner(
        tiny_model_dir, kl_loss_fn=NO_KL, kl_penalty_fn=FunctionSettings("k2", {"kl_coef": 0.5})
    )
    assert stepped(one, shift=0.0)["critic/kl"] == pytest.approx(0.0, abs=1e-9)
    examples = with_logprobs(mixed(), one.model, [0.2] * 12)
    assert one.step(examples, step=2)["critic/kl"] > 1e-3


def test_an_adaptive_coefficient_follows_the_kl_and_is_saved(tiny_model_dir: Path):
    """The policy is far from the reference, so the coefficient grows by at most 0.2 n / horizon."""
    args = {"kl_coef": 0.1, "adaptive": True, "target_kl": 1e-6, "horizon": 100}
    one = learner(tiny_model_dir, kl_loss_fn=FunctionSettings("k2", args), lr=1e-2)
    coefficients = [stepped(one)["actor/kl_coef"] for _ in range(3)]
    first = 0.1 * (1 - 0.2 * 12 / 100)
    assert coefficients == pytest.approx([0.1, first, first * (1 + 0.2 * 12 / 100)], rel=1e-4)
    buffer = io.BytesIO()
    torch.save(one.optimizer_state(), buffer)
    again = learner(tiny_model_dir, kl_loss_fn=FunctionSettings("k2", args))
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    again.load_optimizer_state(state)
    following = coefficients[-1] * (1 + 0.2 * 12 / 100)
    assert stepped(again)["actor/kl_coef"] == pytest.approx(following)


def grads_of(one: Learner, examples: list[TrainingExample]) -> float:
    return one.step(examples, step=1)["actor/grad_norm"]


@pytest.mark.parametrize("name", READY)
def test_how_a_batch_is_cut_changes_no_gradient(tiny_model_dir: Path, name: str):
    """One sequence a micro-batch against all in one."""
    one = learner(tiny_model_dir, algorithm_type=name, max_tokens_per_microbatch=1)
    whole = learner(tiny_model_dir, algorithm_type=name)
    examples = with_logprobs(mixed(), one.model, [0.1 * (i % 3 - 1) for i in range(12)])
    assert grads_of(one, examples) == pytest.approx(grads_of(whole, examples), rel=1e-4)


def with_bad(examples: list[TrainingExample]) -> list[TrainingExample]:
    """The last member's reward is NaN, in its own record and in its siblings'."""
    last = examples[-1]
    rewards = (*last.group_rewards[:-1], math.nan)
    changed = [
        dataclasses.replace(e, group_rewards=rewards) if e.group_id == last.group_id else e
        for e in examples
    ]
    changed[-1] = dataclasses.replace(changed[-1], reward=math.nan)
    return changed


@pytest.mark.parametrize("name", READY)
def test_a_nan_reward_takes_out_its_experience_and_never_the_step(tiny_model_dir: Path, name: str):
    one = learner(tiny_model_dir, algorithm_type=name)
    examples = with_logprobs(mixed(), one.model)
    metrics = one.step(with_bad(examples), step=1)
    assert metrics["sample/unusable"] == 1.0 and metrics["actor/skipped_updates"] == 0.0
    assert all(math.isfinite(v) for v in metrics.values())
    assert all(torch.isfinite(t).all() for t in one.state_dict().values())


@pytest.mark.parametrize("name", READY)
def test_a_batch_whose_tokens_are_all_masked_changes_nothing(tiny_model_dir: Path, name: str):
    one = learner(
        tiny_model_dir,
        algorithm_type=name,
        bypass_old_logprobs=False,
        rollout_correction={"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1.0},
    )
    before = weights_of(one)
    metrics = one.step(group([[1, 0, 0], [0, 0]], (1.0, 0.0)), step=1)
    assert metrics["actor/skipped_updates"] == 1.0 and weights_of(one) == before
    assert all(math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("name", READY)
def test_a_group_of_one_trains_with_its_reward(tiny_model_dir: Path, name: str):
    one = learner(tiny_model_dir, algorithm_type=name, kl_loss_fn=NO_KL)
    metrics = one.step(with_logprobs(group([[0, 1, 1, 1]], (0.7,)), one.model), step=1)
    # REINFORCE++ has only equal returns to whiten here, so nothing is better than the rest
    is_flat = name in ("ppo", "reinforceplusplus")
    assert metrics["actor/skipped_updates"] == float(is_flat)
    assert (metrics["actor/grad_norm"] > 0) != is_flat


def test_a_batch_whose_groups_are_all_left_out_changes_nothing(tiny_model_dir: Path):
    one = learner(tiny_model_dir, advantage_fn=FunctionSettings("grpo", {"std_threshold": 0.0}))
    before = weights_of(one)
    metrics = one.step(group([[0, 1, 1], [0, 1]], (0.5, 0.5)), step=1)
    assert metrics["actor/skipped_updates"] == 1.0 and weights_of(one) == before
    assert "response_length/trained_ratio" not in metrics


SAME = {"grpo", "grpo_verl", "dapo", "dr_grpo", "rloo", "multi_step_grpo", "gspo", "cispo", "sapo",
        "opmd", "sppo", "rec"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SAME))
def test_a_group_with_equal_rewards_moves_nothing_without_a_kl(tiny_model_dir: Path, name: str):
    one = learner(tiny_model_dir, algorithm_type=name, kl_loss_fn=NO_KL)
    before = weights_of(one)
    examples = with_logprobs(group([[0, 1, 1], [0, 1, 0, 1], [0, 1]], (0.1,) * 3), one.model)
    metrics = one.step(examples, step=1)
    assert metrics["actor/skipped_updates"] == 1.0 and weights_of(one) == before
