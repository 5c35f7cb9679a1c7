"""PPO's value model on the tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_learner import group, learner, mixed, weights_of, with_logprobs
from transformers import AutoModelForTokenClassification

from streamrft.consumers.checkpoints import CheckpointStore, Contents
from streamrft.consumers.convert.convert import Request, convert
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.resume import load_newest
from streamrft.consumers.settings import FunctionSettings
from streamrft.consumers.states import states_of
from streamrft.schemas.errors import ConfigError

pytestmark = pytest.mark.usefixtures("torch_as_before")

NO_KL = FunctionSettings("none")


def ppo(folder: Path, **changes: object) -> Learner:
    return learner(folder, algorithm_type="ppo", kl_loss_fn=NO_KL, **changes)


def test_a_new_critic_knows_nothing_so_the_first_step_is_that_of_the_returns(tiny_model_dir: Path):
    one = ppo(tiny_model_dir)
    other = learner(tiny_model_dir, algorithm_type="reinforceplusplus", kl_loss_fn=NO_KL)
    examples = with_logprobs(mixed(), one.model)
    first, plain = one.step(examples, step=1), other.step(examples, step=1)
    assert first["critic/vpred_mean"] == 0.0
    assert first["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-5)


def test_the_critic_learns_what_is_to_come(tiny_model_dir: Path):
    """The rewards of two members are 2 and -1; half the mean of R^2 is the first loss."""
    one = ppo(tiny_model_dir, lr=3e-3, critic_warmup=40)
    examples = with_logprobs(group([[0, 1, 1, 1], [0, 1, 1, 1]], (2.0, -1.0)), one.model)
    seen = [one.step(examples, step=i + 1) for i in range(40)]
    assert seen[0]["critic/vf_loss"] == pytest.approx((4 + 1) / 4)
    assert seen[-1]["critic/vf_loss"] < 0.3
    assert seen[0]["critic/vf_explained_var"] == 0.0 and seen[-1]["critic/vf_explained_var"] > 0.7
    assert seen[-1]["critic/vpred_mean"] == pytest.approx(0.5, abs=0.3)


def test_the_policy_waits_while_the_critic_warms_up(tiny_model_dir: Path):
    one = ppo(tiny_model_dir, critic_warmup=1)
    before = weights_of(one)
    examples = with_logprobs(mixed(), one.model)
    assert one.step(examples, step=1)["actor/skipped_updates"] == 1.0
    assert weights_of(one) == before
    assert one.step(examples, step=2)["actor/skipped_updates"] == 0.0
    assert weights_of(one) != before


def test_a_value_sees_what_stands_before_its_token_and_nothing_after(tiny_model_dir: Path):
    one = ppo(tiny_model_dir)
    examples = group([[0, 0, 1, 1, 1]], (1.0,))
    one.step(with_logprobs(examples, one.model), step=1)
    before = one._measured(examples, one.algorithm.measures)["values"]
    examples[0].sequences[0].tokens[3] += 1
    after = one._measured(examples, one.algorithm.measures)["values"]
    np.testing.assert_allclose(after[:2], before[:2], atol=1e-6)
    assert abs(after[2] - before[2]) > 1e-5


def test_a_run_goes_on_bit_for_bit_with_its_critic(tiny_model_dir: Path, tmp_path: Path):
    whole = ppo(tiny_model_dir, deterministic=True)
    for step in range(1, 4):
        whole.step(mixed(step), step=step)
    first = ppo(tiny_model_dir, deterministic=True)
    for step in range(1, 3):
        first.step(mixed(step), step=step)
    store = CheckpointStore(str(tmp_path), "main")
    states = states_of(first, 2)
    saved = store.save(Contents(first.save_hf, states.write, {}), step=2, epoch=1)
    second = ppo(tiny_model_dir, deterministic=True)
    assert load_newest(second, [(store, saved)]) is not None
    second.step(mixed(3), step=3)
    assert weights_of(second) == weights_of(whole)
    assert_same_critic(second, whole)
    found = tmp_path / "global_step_2" / "critic" / "huggingface"
    network, report = AutoModelForTokenClassification.from_pretrained(
        found, output_loading_info=True
    )
    assert not any(report.values()) and network.num_labels == 1
    outcomes = list(convert(Request(tmp_path, with_critic=True)))
    assert [(o.state, o.folder.parent.name) for o in outcomes] == [
        ("present", "actor"),
        ("present", "critic"),
    ]
    assert outcomes[1].folder == found
    # as it was when the critic lay in the policy's optimiser file
    old, critic = first.optimizer_state(), first.optimizer_state()["critic"]
    weights = dict(critic["weights"])
    earlier = {"head": weights.pop("score.weight"), "network": weights}
    third = ppo(tiny_model_dir, deterministic=True)
    third.load_optimizer_state({**old, "critic": {**earlier, "optimizer": critic["optimizer"]}})
    assert_same_critic(third, first)


def assert_same_critic(one: Learner, other: Learner) -> None:
    ours, theirs = one.optimizer_state()["critic"], other.optimizer_state()["critic"]
    assert ours["weights"].keys() == theirs["weights"].keys()
    assert all(torch.equal(t, theirs["weights"][n]) for n, t in ours["weights"].items())
    assert (ours["weights"]["score.weight"] != 0).any()


def test_a_checkpoint_without_a_critic_is_refused_by_name(tiny_model_dir: Path):
    state = learner(tiny_model_dir).optimizer_state()
    with pytest.raises(ConfigError, match="the checkpoint has no critic"):
        ppo(tiny_model_dir).load_optimizer_state(state)


def test_how_a_batch_is_cut_changes_nothing_for_the_critic(tiny_model_dir: Path):
    seen = []
    for budget in (1, 8192):
        one = ppo(tiny_model_dir, max_tokens_per_microbatch=budget)
        examples = with_logprobs(mixed(), one.model)
        one.step(examples, step=1)
        seen.append(one.step(examples, step=2))
    for key in ("critic/vf_loss", "critic/grad_norm", "actor/grad_norm"):
        assert seen[0][key] == pytest.approx(seen[1][key], rel=1e-3)
