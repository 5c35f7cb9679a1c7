from __future__ import annotations

import hashlib
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_learner import group, learner, mixed, plain_logprobs, weights_of, with_logprobs
from transformers import AutoModelForCausalLM

from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.settings import FunctionSettings
from streamrft.schemas.errors import ConfigError, InvalidEvent

pytestmark = pytest.mark.usefixtures("torch_as_before")

NO_KL = FunctionSettings("none")

# rewards 1, 0, 1/2: mean 1/2, unbiased std 1/2, so advantages 1, -1, 0
MASKS = [[0, 0, 1, 1], [0, 1], [0, 0, 1, 0, 1, 0]]
REWARDS = (1.0, 0.0, 0.5)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", -1 / 5),
        ("seq-mean-token-sum", -1 / 3),
        ("seq-mean-token-mean", 0.0),
        ("seq-mean-token-sum-norm", -1 / 6),
    ],
)
def test_loss_of_a_worked_example_on_policy(tiny_model_dir: Path, mode: str, expected: float):
    """5 trained tokens in sequences of 2, 1 and 2; the ratio is 1; the longest has 2."""
    one = learner(tiny_model_dir, loss_agg_mode=mode, kl_loss_fn=NO_KL)
    metrics = one.step(with_logprobs(group(MASKS, REWARDS), one.model), step=1)
    assert metrics["actor/pg_loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_loss_of_a_worked_example_off_policy(tiny_model_dir: Path):
    """Ratio 2 under advantage 1 is clipped to 1.2; ratio 5 under -1 counts 3: (3 - 2.4) / 5."""
    one = learner(tiny_model_dir, kl_loss_fn=NO_KL)
    shifts = [math.log(2), math.log(5), 0.0]
    metrics = one.step(with_logprobs(group(MASKS, REWARDS), one.model, shifts), step=1)
    assert metrics["actor/pg_loss"] == pytest.approx(0.12, abs=1e-5)
    assert metrics["actor/logprob_gap_max"] == pytest.approx(math.log(5), abs=1e-5)


@pytest.mark.parametrize("budget", [1, 64, 8192])
def test_batched_logprobs_equal_those_of_each_sequence_alone(tiny_model_dir: Path, budget: int):
    one = learner(tiny_model_dir, max_tokens_per_microbatch=budget)
    metrics = one.step(with_logprobs(mixed(), one.model), step=1)
    assert metrics["actor/logprob_gap_max"] < 1e-5


@pytest.mark.parametrize(
    "changes", [{}, {"max_tokens_per_microbatch": 64}, {"gradient_checkpointing": True}]
)
def test_gradient_is_that_of_the_loss_written_plainly(tiny_model_dir: Path, changes: dict):
    """GRPO, token mean, k2 to the reference with coefficient 0.5, one pass a sequence."""
    kl = FunctionSettings("k2", {"kl_coef": 0.5})
    one = learner(tiny_model_dir, kl_loss_fn=kl, **changes)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    moved = {n: t + 0.01 * torch.randn_like(t) for n, t in one.state_dict().items()}
    examples = with_logprobs(mixed(), reference)
    one.load_weights(moved)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    plain.load_state_dict(moved, strict=False)
    losses: list[torch.Tensor] = []
    for e in examples:
        (s,) = e.sequences
        new, old = plain_logprobs(plain, s), torch.from_numpy(s.logprobs)
        advantage = (e.reward - np.mean(e.group_rewards)) / (np.std(e.group_rewards, ddof=1) + 1e-6)
        ratio = (new - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if advantage < 0:
            surrogate = surrogate.clamp(min=3 * advantage)
        k2 = (new - plain_logprobs(reference, s).detach()) ** 2 / 2
        is_trained = torch.from_numpy(s.loss_mask).bool() & (torch.arange(len(new)) > 0)
        losses.append((-surrogate + 0.5 * k2)[is_trained])
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf)
    metrics = one.step(examples, step=1)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["actor/kl_loss"] > 0


def test_skipping_sequences_without_advantage_changes_no_gradient(tiny_model_dir: Path):
    idle = group([[0, 1, 1]] * 3, (0.1, 0.1, 0.1), seed=9)
    norms = []
    for bonus in (0.0, 1e-12):
        entropy = FunctionSettings("default", {"entropy_coef": bonus})
        one = learner(tiny_model_dir, algorithm_type="dapo", entropy_loss_fn=entropy)
        assert one.algorithm.can_skip_zero_advantage == (bonus == 0)
        norms.append(one.step(mixed() + idle, step=1)["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param([], id="empty"),
        pytest.param(group([[1, 0, 0], [0, 0]], (1.0, 0.0)), id="all masked"),
        pytest.param(group([[0, 1], [0, 1]], (0.3, 0.3)), id="no advantage"),
        pytest.param(group([[0, 1], [0, 1]], (math.inf, 0.0)), id="not finite"),
    ],
)
def test_a_batch_without_a_usable_gradient_changes_nothing(
    tiny_model_dir: Path, examples: list[TrainingExample]
):
    one = learner(tiny_model_dir, kl_loss_fn=NO_KL)
    before = weights_of(one)
    metrics = one.step(examples, step=1)
    assert metrics["actor/skipped_updates"] == 1.0
    assert weights_of(one) == before
    assert one.optimizer_state()["state"] == {}
    assert one.step(mixed(), step=2)["actor/skipped_updates"] == 0.0
    assert all(torch.isfinite(t).all() for t in one.state_dict().values())


def test_rewarded_tokens_become_likelier_and_others_less(tiny_model_dir: Path):
    one = learner(tiny_model_dir, kl_loss_fn=NO_KL)
    good, bad = examples = group([[0, 0, 1, 1, 1]] * 2, (1.0, 0.0))

    def likelihood(example: TrainingExample) -> float:
        (s,) = example.sequences
        return (plain_logprobs(one.model, s) * torch.from_numpy(s.loss_mask)).sum().item()

    before = likelihood(good), likelihood(bad)
    for step in range(1, 6):
        one.step(with_logprobs(examples, one.model), step=step)
    assert likelihood(good) > before[0] + 0.5 and likelihood(bad) < before[1] - 0.5


@pytest.mark.parametrize("step, rate", [(1, 0.25e-3), (3, 0.75e-3), (9, 1e-3)])
def test_the_learning_rate_is_that_of_the_step(tiny_model_dir: Path, step: int, rate: float):
    """The first update of Adam moves a weight by the learning rate, whatever its gradient."""
    one = learner(tiny_model_dir, warmup=4)
    before = one.state_dict()["model.embed_tokens.weight"].clone()
    assert one.step(mixed(), step=step)["actor/lr"] == pytest.approx(rate)
    moved = (one.state_dict()["model.embed_tokens.weight"] - before).abs().max().item()
    assert moved == pytest.approx(rate, rel=0.01)


def test_sft_learns_a_tiny_set_by_heart(tiny_model_dir: Path):
    one = learner(tiny_model_dir, algorithm_type="sft", lr=1e-2)
    examples = group([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1]], (0.0, 0.0))
    losses = [one.step(examples, step=i + 1)["actor/loss"] for i in range(60)]
    assert losses[0] > 4 and losses[-1] < 0.05
    assert "actor/logprob_gap_mean" not in one.step(examples, step=61)


def test_metrics_say_what_was_trained_on(tiny_model_dir: Path):
    metrics = learner(tiny_model_dir).step(group(MASKS, REWARDS), step=1)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/accuracy/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(np.std(REWARDS))
    assert metrics["response_length/mean"] == pytest.approx(5 / 3)
    assert metrics["num_groups"] == 1.0
    assert metrics["actor/lr"] == 1e-3
    assert {"actor/kl_loss", "actor/ppo_kl", "time/train_s"} <= metrics.keys()
    assert "actor/entropy_loss" not in metrics


def test_entropy_is_that_of_the_policy_and_raises_it(tiny_model_dir: Path):
    bonus = FunctionSettings("default", {"entropy_coef": 10.0})
    one = learner(tiny_model_dir, entropy_loss_fn=bonus)
    first, *_, last = [
        one.step(group(MASKS, REWARDS), step=i + 1)["actor/entropy_loss"] for i in range(5)
    ]
    assert first < last < math.log(263)


def test_training_goes_on_bit_for_bit_from_saved_state(tiny_model_dir: Path):
    whole = learner(tiny_model_dir, deterministic=True)
    for step in range(1, 5):
        whole.step(mixed(step), step=step)
    first = learner(tiny_model_dir, deterministic=True)
    for step in range(1, 3):
        first.step(mixed(step), step=step)
    buffer = io.BytesIO()
    state = (first.state_dict(), first.optimizer_state(), first.rng_state())
    torch.save(state, buffer)
    weights, optimizer, rng = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    second = learner(tiny_model_dir, deterministic=True)
    second.load_weights(weights)
    second.load_optimizer_state(optimizer)
    second.load_rng_state(rng)
    for step in range(3, 5):
        second.step(mixed(step), step=step)
    assert weights_of(second) == weights_of(whole)


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
import torch
from tiny_learner import learner, mixed, weights_of
torch.set_num_threads(1)
one = learner(Path({folder!r}), deterministic=True)
for step in range(1, 4):
    one.step(mixed(step), step=step)
print(weights_of(one))
"""


def test_the_same_examples_give_the_same_weights_in_every_process(tiny_model_dir: Path):
    program = PROGRAM.format(
        here=str(Path(__file__).parent.parent / "support"), folder=str(tiny_model_dir)
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    one = learner(tiny_model_dir, deterministic=True)
    for step in range(1, 4):
        one.step(mixed(step), step=step)
    assert other.stdout.strip() == weights_of(one)


def test_saved_folder_is_what_transformers_would_write(tiny_model_dir: Path, tmp_path: Path):
    one = learner(tiny_model_dir)
    one.step(mixed(), step=1)
    digest = one.save_hf(tmp_path / "ours")
    one.model.save_pretrained(tmp_path / "theirs")
    ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs" / "model.safetensors").read_bytes()
    assert digest == hashlib.sha256(ours).hexdigest() == one.save_hf(tmp_path / "again")
    names = {p.name for p in (tmp_path / "ours").iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json"}
    assert "chat_template.jinja" in names
    again = learner(tmp_path / "ours")
    assert weights_of(again) == weights_of(one)


def test_a_configured_chat_template_is_saved(tiny_model_dir: Path, tmp_path: Path):
    one = learner(tiny_model_dir, chat_template="{{ messages[0]['content'] }}")
    one.save_hf(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_weights_of_another_model_are_refused(tiny_model_dir: Path):
    one = learner(tiny_model_dir)
    state = one.state_dict()
    with pytest.raises(ConfigError, match="1 names differ.*'model.norm.weight'"):
        one.load_weights({n: t for n, t in state.items() if n != "model.norm.weight"})
    with pytest.raises(ConfigError, match="model.norm.weight has shape"):
        one.load_weights({**state, "model.norm.weight": torch.zeros(3)})


def test_tokens_that_the_model_does_not_know_are_refused_by_name(tiny_model_dir: Path):
    one = learner(tiny_model_dir)
    (good,) = group([[0, 1]], (1.0,))
    one.check(good)
    good.sequences[0].tokens[1] = 263
    with pytest.raises(InvalidEvent, match="g.0:0:a.*holds 263, the model knows ids 0 to 262"):
        one.check(good)


def test_bfloat16_computes_roughly_the_same_and_keeps_float32_weights(tiny_model_dir: Path):
    exact, rough = learner(tiny_model_dir), learner(tiny_model_dir, dtype="bfloat16")
    examples = with_logprobs(mixed(), exact.model)
    norms = [one.step(examples, step=1)["actor/grad_norm"] for one in (exact, rough)]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
    assert {t.dtype for t in rough.state_dict().values()} == {torch.float32}


def test_without_bfloat16_arithmetic_the_learner_says_so_and_computes_in_float32(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    exact, fallen = learner(tiny_model_dir), learner(tiny_model_dir, dtype="bfloat16")
    assert "no bfloat16 arithmetic: the learner computes in float32" in caplog.text
    for one in (exact, fallen):
        one.step(mixed(), step=1)
    assert weights_of(exact) == weights_of(fallen)


def test_an_unknown_dtype_or_algorithm_is_an_error_at_load(tiny_model_dir: Path):
    with pytest.raises(ConfigError, match="'float16' is neither float32 nor bfloat16"):
        learner(tiny_model_dir, dtype="float16")
    with pytest.raises(ConfigError, match="algorithm_type"):
        learner(tiny_model_dir, algorithm_type="gpro")
