"""Algorithms that read more than rewards train as soon as a batch brings what they read."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_learner import group, learner, mixed, plain_logprobs, weights_of, with_logprobs

from streamrft.consumers.algorithms import catalogue
from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.learning.mismatched import mismatched
from streamrft.consumers.settings import FunctionSettings, LoraSettings
from streamrft.schemas.errors import ConfigError, InvalidEvent

pytestmark = pytest.mark.usefixtures("torch_as_before")

Examples = list[TrainingExample]


@pytest.fixture
def everything_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "SOURCES", {})


def with_teacher(examples: Examples) -> Examples:
    rng = np.random.default_rng(1)
    return [
        dataclasses.replace(
            e,
            sequences=tuple(
                dataclasses.replace(
                    s, teacher_logprobs=-rng.exponential(size=len(s.tokens)).astype(np.float32)
                )
                for s in e.sequences
            ),
        )
        for e in examples
    ]


def with_states(examples: Examples) -> Examples:
    return [dataclasses.replace(e, step_rewards=(e.reward,), state_hashes=("s",)) for e in examples]


def with_baseline(examples: Examples) -> Examples:
    return [dataclasses.replace(e, baseline_reward=0.1) for e in examples]


def with_experts(examples: Examples) -> Examples:
    return [dataclasses.replace(e, is_expert=i % 4 == 3) for i, e in enumerate(examples)]


def with_preferences(examples: Examples) -> Examples:
    return [
        dataclasses.replace(e, preference=1 if i % 2 == 0 else -1) for i, e in enumerate(examples)
    ]


def with_verdicts(examples: Examples) -> Examples:
    """Unpaired: three of four are wanted."""
    return [
        dataclasses.replace(e, preference=-1 if i % 4 == 1 else 1) for i, e in enumerate(examples)
    ]


DATA: dict[str, Callable[[Examples], Examples]] = {
    "remax": with_baseline,
    "gigpo": with_states,
    "mix": with_experts,
    "mix_chord": with_experts,
    "on_policy_distill": with_teacher,
    "jsd": with_teacher,
    "dpo": with_preferences,
    "kto": with_verdicts,
}


def test_the_table_above_has_all_that_wait_and_those_that_read_more_than_rewards():
    waiting = {n for n, kind in catalogue.ALGORITHMS.items() if catalogue.awaited_source(kind)}
    assert DATA.keys() == waiting | {"dpo", "kto", "mix", "mix_chord"}


def batch(one: Learner, name: str) -> Examples:
    """Twelve sequences of 4 to 40 tokens, none without a trained one, and what `name` reads."""
    return DATA[name](with_logprobs(mixed(), one.model))


@pytest.mark.usefixtures("everything_delivered")
@pytest.mark.parametrize("name", sorted(DATA))
def test_it_trains_however_the_batch_is_cut(tiny_model_dir: Path, name: str):
    norms = []
    for budget in (1, 8192):
        one = learner(tiny_model_dir, algorithm_type=name, max_tokens_per_microbatch=budget)
        before = weights_of(one)
        metrics = one.step(batch(one, name), step=1)
        assert all(math.isfinite(v) for v in metrics.values())
        assert metrics["actor/skipped_updates"] == 0.0 and weights_of(one) != before
        norms.append(metrics["actor/grad_norm"])
    assert norms[0] > 0 and norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.usefixtures("everything_delivered")
def test_dpo_moves_the_policy_to_what_was_preferred(tiny_model_dir: Path):
    """At the reference every h is 0: the loss is ln 2 and nothing is right yet."""
    one = learner(tiny_model_dir, algorithm_type="dpo")
    pairs = with_preferences(group([[0, 0, 1, 1], [0, 0, 1, 1, 1]] * 2, (0.0,) * 4))
    seen = [one.step(pairs, step=i + 1) for i in range(8)]
    assert seen[0]["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert seen[0]["actor/reward_accuracy"] == 0.0
    assert seen[-1]["actor/pg_loss"] < 0.6 and seen[-1]["actor/reward_accuracy"] > 0.999
    assert seen[-1]["actor/chosen_reward"] > seen[-1]["actor/rejected_reward"]
    assert seen[-1]["actor/reward_margin"] == pytest.approx(
        seen[-1]["actor/chosen_reward"] - seen[-1]["actor/rejected_reward"], abs=1e-4
    )


def test_dpo_reads_its_reference_without_any_kl(tiny_model_dir: Path):
    one = learner(tiny_model_dir, algorithm_type="dpo", kl_loss_fn=FunctionSettings("none"))
    pairs = with_preferences(group([[0, 0, 1, 1], [0, 0, 1, 1, 1]], (0.0,) * 2))
    first = one.step(pairs, step=1)
    assert first["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert "actor/kl_loss" not in first
    assert one.step(pairs, step=2)["actor/pg_loss"] < math.log(2)


@pytest.mark.usefixtures("everything_delivered")
def test_mu_follows_the_step_that_is_trained(tiny_model_dir: Path):
    loss = FunctionSettings("mix_chord", {"mu_warmup_steps": 10, "mu_peak": 0.5})
    one = learner(tiny_model_dir, algorithm_type="mix_chord", policy_loss_fn=loss)
    for step in (2, 5):
        metrics = one.step(batch(one, "mix_chord"), step=step)
        assert metrics["actor/mu"] == pytest.approx(0.05 * step)


@pytest.mark.usefixtures("everything_delivered")
def test_distillation_draws_the_policy_to_its_teacher(tiny_model_dir: Path):
    """The teacher likes what slot 0 wrote and dislikes what slot 1 wrote."""
    one = learner(tiny_model_dir, algorithm_type="on_policy_distill", lr=3e-3)
    examples = group([[0, 1, 1, 1], [0, 1, 1, 1]], (0.0, 0.0))

    def taught() -> Examples:
        logged = with_logprobs(examples, one.model)
        return [
            dataclasses.replace(
                e,
                sequences=tuple(
                    dataclasses.replace(s, teacher_logprobs=np.full(4, (-1.0, -9.0)[i], np.float32))
                    for s in e.sequences
                ),
            )
            for i, e in enumerate(logged)
        ]

    def means() -> list[float]:
        logged = with_logprobs(examples, one.model)
        return [float(e.sequences[0].logprobs[1:].mean()) for e in logged]

    before = means()
    for step in range(1, 6):
        one.step(taught(), step=step)
    after = means()
    assert after[0] > before[0] + 0.1 and after[1] < before[1] - 0.1


@pytest.mark.parametrize("name, loss", [("grpo", "dpo"), ("grpo", "kto"), ("dpo", "sft")])
def test_a_loss_of_preferences_belongs_to_the_algorithm_of_its_name(name: str, loss: str):
    with pytest.raises(ConfigError, match=f"{loss!r} found with algorithm_type {name!r}"):
        catalogue.check_sources(name, policy_loss_fn=loss)


def test_kto_takes_its_baseline_from_other_prompts_answers(tiny_model_dir: Path):
    """The policy likes every answer 1 nat more than its reference: z is that of the answers."""
    one = learner(tiny_model_dir, algorithm_type="kto", lr=1e-2)
    reference, examples = copy.deepcopy(one.model), with_logprobs(mixed(), one.model)
    first = one.step(examples, step=1)
    assert first["actor/kl_to_reference"] == 0.0
    assert first["actor/pg_loss"] == pytest.approx(0.5, abs=1e-6)
    others = mismatched(examples)
    before, after = (
        [plain_logprobs(model, e.sequences[0]).detach().double().numpy() for e in others]
        for model in (reference, one.model)
    )
    masks = [e.sequences[0].is_trained for e in others]
    sums = [(a - b)[m].sum() for a, b, m in zip(after, before, masks, strict=True)]
    d = [
        sum((plain_logprobs(m, s).detach().double().numpy() * s.is_trained).sum() * sign
            for m, sign in ((one.model, 1), (reference, -1)))
        for e in examples for s in e.sequences
    ]  # fmt: skip
    second = one.step(examples, step=2)
    z = max(0.0, float(np.mean(sums)))
    assert z > 0 and second["actor/kl_to_reference"] == pytest.approx(z, rel=1e-3)
    signs = np.array([1 if e.reward > 0.5 else -1 for e in examples])
    value = 1 / (1 + np.exp(-0.1 * signs * (np.array(d) - z)))
    assert second["actor/pg_loss"] == pytest.approx(float(np.mean(1 - value)), rel=1e-4)


def test_rollouts_above_the_threshold_are_wanted_and_rows_say_it_themselves(tiny_model_dir: Path):
    """The wanted become likelier than the others, from whichever side they are named."""
    examples = group([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]], (0.3, 0.1))
    told = [dataclasses.replace(e, preference=p) for e, p in zip(examples, (-1, 1), strict=True)]
    for batch_of, wanted in ((examples, 0), (told, 1)):
        loss = FunctionSettings("kto", {"reward_threshold": 0.2})
        one = learner(tiny_model_dir, algorithm_type="kto", policy_loss_fn=loss)
        reference, sums = copy.deepcopy(one.model), []
        for step in (1, 2, 3):
            one.step(batch_of, step=step)
        for e in examples:
            s = e.sequences[0]
            now, then = (plain_logprobs(m, s).detach() for m in (one.model, reference))
            sums.append(float((now - then)[2:].sum()))
        assert sums[wanted] > 0 > sums[1 - wanted]


@pytest.mark.parametrize("name, first", [("dpo", math.log(2)), ("kto", 0.5)])
def test_preferences_train_an_adapter_against_the_model_below_it(
    tiny_model_dir: Path, name: str, first: float
):
    one = learner(tiny_model_dir, algorithm_type=name, lora=LoraSettings(rank=4), lr=1e-2)
    examples = group([[0, 0, 1, 1], [0, 0, 1, 1, 1]] * 2, (1.0, 0.0) * 2)
    losses = [one.step(examples, step=i + 1)["actor/pg_loss"] for i in range(4)]
    assert losses[0] == pytest.approx(first, abs=1e-6) and losses[3] < first - 1e-3


def test_mismatched_answers_follow_prompts_of_other_groups():
    groups = [group([[0, 0, 1, 1]] * 2, (0.0, 1.0), seed=n) for n in range(3)]
    examples = [e for g in groups for e in g]
    made = mismatched(examples, max_tokens=3)
    assert [e.group_id for e in made] == [e.group_id for e in examples]
    for i, e in enumerate(made):
        (s,), other = e.sequences, examples[i - 2].sequences[0]
        asked = examples[i].sequences[0]
        assert s.tokens.tolist() == [*asked.tokens[:2], other.tokens[2]]
        assert s.loss_mask.tolist() == [0, 0, 1] and s.temperature == other.temperature
    assert mismatched(groups[0]) == []


def test_a_pair_with_a_side_that_is_no_number_is_left_out_as_a_whole(tiny_model_dir: Path):
    one = learner(tiny_model_dir, algorithm_type="dpo")
    pairs = group([[0, 0, 1, 1]] * 4, (0.0, math.nan, 1.0, 0.0))
    metrics = one.step(pairs, step=1)
    assert metrics["sample/unusable"] == 2.0 and metrics["actor/skipped_updates"] == 0.0
    assert metrics["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_rollout_of_several_sequences_is_no_side_of_a_pair(tiny_model_dir: Path):
    one = learner(tiny_model_dir, algorithm_type="dpo")
    (example,) = group([[0, 0, 1, 1]], (1.0,))
    one.check(example)
    with pytest.raises(InvalidEvent, match="2 sequences; a side of a pair is one"):
        one.check(dataclasses.replace(example, sequences=example.sequences * 2))
