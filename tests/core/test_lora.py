"""A learner of an adapter: peft's own training, over weights that stay as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_learner import learner, mixed, plain_logprobs, with_logprobs
from transformers import AutoModelForCausalLM

from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.settings import FunctionSettings, LoraSettings
from streamrft.schemas.errors import ConfigError
from streamrft.streams.weights.adapters import ADAPTER_FILE, CONFIG_FILE, AdapterMismatch, merge

# peft asks its own models for it, and transformers 5.24 renamed it
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.usefixtures("torch_as_before"),
]
LORA = LoraSettings(rank=4, alpha=8, target_modules="all-linear")
KL = FunctionSettings("k2", {"kl_coef": 0.5})
IDS = torch.arange(3, 40)[None]


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        return network(input_ids=IDS).logits


def trained(folder: Path, into: Path, steps: int = 3, **changes: Any) -> Learner:
    """A learner some steps on, and its adapter in a folder."""
    one = learner(folder, **{"lora": LORA, "kl_loss_fn": KL, "lr": 1e-2, **changes})
    for step in range(1, steps + 1):
        one.step(with_logprobs(mixed(step), one.model), step=step)
    one.save_hf(into)
    return one


def test_a_new_adapter_is_the_model_and_training_leaves_the_model_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path
):
    model = plain(tiny_model_dir)
    new = learner(tiny_model_dir, lora=LORA)
    assert torch.equal(logits(new.model), logits(model))
    one = trained(tiny_model_dir, tmp_path / "adapter")
    base = one.state_dict(is_base=True)
    assert base.keys() | {"lm_head.weight"} == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in base.items())
    assert (logits(one.model) - logits(model)).abs().max() > 1e-2
    num_trained = sum(t.numel() for t in one.state_dict().values())
    moments = [s["exp_avg"] for s in one.optimizer_state()["state"].values()]
    # rank 4, 2 layers: in + out of q and o, k and v, gate, up and down
    expected = 4 * 2 * (2 * 128 + 2 * 96 + 3 * 256)
    assert sum(m.numel() for m in moments) == num_trained == expected


def test_peft_reads_what_is_saved_and_two_saves_have_the_same_bytes(
    tiny_model_dir: Path, tmp_path: Path
):
    one = trained(tiny_model_dir, tmp_path / "adapter")
    again = PeftModel.from_pretrained(plain(tiny_model_dir), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(again), logits(one.model), rtol=0, atol=0)
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    trained(tiny_model_dir, tmp_path / "same")
    for name in (CONFIG_FILE, ADAPTER_FILE):
        assert (tmp_path / "same" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}])
def test_steps_are_those_of_pefts_model_in_a_plain_loop(
    tiny_model_dir: Path, tmp_path: Path, changes: dict[str, Any]
):
    """Log-likelihood of trained tokens, AdamW with the defaults of the learner, three steps."""
    settings = {"lora": LORA, "algorithm_type": "sft", "lr": 1e-2, **changes}
    one = learner(tiny_model_dir, **settings)
    one.save_hf(tmp_path / "first")
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    peft_model = get_peft_model(plain(tiny_model_dir), config)
    peft_model.load_adapter(str(tmp_path / "first"), "default", is_trainable=True)
    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)
    for step in range(1, 4):
        sequences = [s for e in mixed(step) for s in e.sequences]
        terms = [plain_logprobs(peft_model, s)[s.is_trained] for s in sequences]
        adamw.zero_grad()
        (-torch.cat(terms).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()
        metrics = one.step(mixed(step), step=step)
        assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    one.save_hf(tmp_path / "last")
    peft_model.save_pretrained(str(tmp_path / "theirs"))
    theirs, ours = (load_file(tmp_path / f / ADAPTER_FILE) for f in ("theirs", "last"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_started", [False, True])
def test_the_reference_is_the_policy_that_training_began_with(
    tiny_model_dir: Path, tmp_path: Path, is_started: bool
):
    """The model without adapter, or with the one of the start; the loss is measured against it."""
    trained(tiny_model_dir, tmp_path / "start", kl_loss_fn=FunctionSettings("none"))
    start = str(tmp_path / "start") if is_started else None
    lora = LoraSettings() if is_started else LORA
    one = trained(tiny_model_dir, tmp_path / "end", lora=lora, start_adapter=start)
    reference = plain(tiny_model_dir).eval()
    if start:
        reference = PeftModel.from_pretrained(reference, start).eval()
    policy = PeftModel.from_pretrained(plain(tiny_model_dir), str(tmp_path / "end")).eval()
    examples = with_logprobs(mixed(7), one.model)
    differences = []
    with torch.no_grad():
        for s in (s for e in examples for s in e.sequences):
            gap = plain_logprobs(policy, s) - plain_logprobs(reference, s)
            differences.append(gap[s.is_trained & (torch.arange(len(gap)) > 0).numpy()])
    expected = (torch.cat(differences) ** 2 / 2).mean().item()
    assert expected > 1e-4
    assert one.step(examples, step=9)["actor/kl_loss"] == pytest.approx(expected, rel=1e-3)


def test_a_start_goes_on_or_is_merged_and_both_are_the_same_policy(
    tiny_model_dir: Path, tmp_path: Path
):
    expected = logits(trained(tiny_model_dir, tmp_path / "a").model)
    start = str(tmp_path / "a")
    on = learner(tiny_model_dir, lora=LoraSettings(), start_adapter=start)
    torch.testing.assert_close(logits(on.model), expected, rtol=0, atol=0)
    whole = learner(tiny_model_dir, start_adapter=start, kl_loss_fn=KL)
    torch.testing.assert_close(logits(whole.model), expected, rtol=1e-4, atol=1e-4)
    assert all(p.requires_grad for p in whole.model.parameters())
    metrics = whole.step(with_logprobs(mixed(), whole.model), step=1)
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    whole.save_hf(tmp_path / "whole")
    torch.testing.assert_close(logits(plain(tmp_path / "whole")), logits(whole.model))


def test_a_critic_of_an_adapters_policy_is_whole_and_begins_as_it(
    tiny_model_dir: Path, tmp_path: Path
):
    trained(tiny_model_dir, tmp_path / "a")
    ppo = learner(
        tiny_model_dir, lora=LORA, start_adapter=str(tmp_path / "a"), algorithm_type="ppo"
    )
    critic = ppo.optimizer_state()["critic"]["weights"]
    merged = merge(plain(tiny_model_dir), tmp_path / "a").state_dict()
    backbone = {name: t for name, t in critic.items() if name.startswith("model.")}
    assert backbone.keys() | {"lm_head.weight"} == merged.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in backbone.items())


def test_only_named_modules_are_adapted(tiny_model_dir: Path):
    lora = LoraSettings(rank=2, target_modules=("q_proj", "up_proj"), exclude_modules=("up_proj",))
    names = learner(tiny_model_dir, lora=lora).state_dict()
    assert len(names) == 4 and all(".q_proj.lora_" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ("nothing",)}, "target_modules.*nothing"),
        ({"target_modules": ("embed_tokens",)}, "ties to each other"),
        ({"start": True, "rank": 8}, "lora_rank: 8 found, the adapter in .* has 4"),
        ({"start": True, "alpha": 9}, "lora_alpha: 9 found"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings")
def test_an_adapter_that_does_not_fit_is_refused_by_its_key(
    tiny_model_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
):
    start = None
    if changes.pop("start", False):
        trained(tiny_model_dir, tmp_path / "a", steps=0)
        start = str(tmp_path / "a")
    with pytest.raises(ConfigError, match=rf"model.lora_configs\[0\].*{message}"):
        learner(tiny_model_dir, lora=LoraSettings(**changes), start_adapter=start)


def broken(folder: Path, fault: str) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    if fault == "shape":
        state = load_file(folder / ADAPTER_FILE)
        save_file({n: t[:1].clone() for n, t in state.items()}, folder / ADAPTER_FILE)
    elif fault == "names":
        config["target_modules"] = config["target_modules"][1:]
    elif fault == "kind":
        config["peft_type"] = "IA3"
    elif fault == "cut":
        (folder / ADAPTER_FILE).write_bytes(b"cut")
    else:
        config["modules_to_save"] = ["lm_head"]
    (folder / CONFIG_FILE).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shape", "has shape"),
        ("names", "is not of this model"),
        ("kind", "IA3"),
        ("more", "modules_to_save"),
        ("cut", "cannot be read"),
    ],
)
def test_a_folder_that_is_no_adapter_of_this_model_is_named(
    tiny_model_dir: Path, tmp_path: Path, fault: str, message: str
):
    trained(tiny_model_dir, tmp_path / "a", steps=0)
    broken(folder := Path(shutil.copytree(tmp_path / "a", tmp_path / "b")), fault)
    with pytest.raises(AdapterMismatch, match=f"{folder}.*{message}"):
        merge(plain(tiny_model_dir), folder)
    with pytest.raises(ConfigError, match=f"lora_configs.*{folder}.*{message}"):
        learner(tiny_model_dir, lora=LoraSettings(), start_adapter=str(folder))


def test_a_checkpoint_of_another_adapter_is_refused(tiny_model_dir: Path, tmp_path: Path):
    trained(tiny_model_dir, tmp_path / "a", steps=0)
    other = learner(tiny_model_dir, lora=LoraSettings(rank=4, alpha=16))
    with pytest.raises(ConfigError, match="lora_alpha is 16, in the checkpoint .* it is 8"):
        other.policy.check_adapter(tmp_path / "a")
    for changed, why in (
        (LoraSettings(rank=8, alpha=8), "lora_rank is 8, in the checkpoint .* it is 4"),
        (LoraSettings(rank=4, alpha=8, target_modules=("q_proj",)), "target_modules.*24 matrices"),
    ):
        with pytest.raises(ConfigError, match=rf"lora_configs.*{why}"):
            learner(tiny_model_dir, lora=changed).policy.check_adapter(tmp_path / "a")
    with pytest.raises(ConfigError, match="names differ.*lora_configs"):
        other.load_weights(other.state_dict(is_base=True))
