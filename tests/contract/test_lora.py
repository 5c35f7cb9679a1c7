"""Adapters between processes: engines, resumes, stages; what does not fit is named."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_learner import learner, mixed, with_logprobs
from training_feed import Feed, ended
from transformers import AutoModelForCausalLM

from streamrft.consumers.bases import save_base
from streamrft.consumers.checkpoints import CheckpointStore, Contents
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.settings import LoraSettings
from streamrft.deploy.handover import with_model
from streamrft.deploy.plan import plan
from streamrft.producers.engines.engine import Request, Sampling, WeightsMismatch, open_engine
from streamrft.producers.engines.service import EngineService
from streamrft.producers.settings import ExplorerSettings
from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.errors import ConfigError, MissingExtra
from streamrft.streams.weights.adapters import ADAPTER_FILE
from streamrft.streams.weights.object_storage import base_of, fetch_model_folder, load_state_dict

# peft asks its own models for it, and transformers 5.24 renamed it
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.usefixtures("torch_as_before"),
]
LORA = LoraSettings(rank=4, alpha=8)
BELOW = Path("base_model", "global_step_0")


def stepped(model: Path, folder: Path, *, first: int, num: int, **changes: Any) -> Learner:
    """A learner that wrote its adapter into `folder`."""
    one = learner(model, **{"lora": LORA, "lr": 1e-2, **changes})
    for step in range(first, first + num):
        one.step(with_logprobs(mixed(step), one.model), step=step)
    one.save_hf(folder)
    return one


def requests() -> list[Request]:
    return [Request(tuple(range(20 + i, 30 + 3 * i)), Sampling(max_tokens=12), i) for i in range(4)]


def largest_gap(engine: Any, model: Any) -> float:
    """Of the log-probs that the engine gives to what it writes, to those of the model."""
    gaps = []
    for request, made in zip(requests(), engine.generate(requests()), strict=True):
        ids = torch.tensor([[*request.tokens, *made.tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(made.tokens[:, None]).long())[:, 0]
        gaps.append((chosen - torch.from_numpy(made.logprobs)).abs().max().item())
    return max(gaps)


def peft_model(model: Path, adapter: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter)).eval()


def test_an_engine_serves_what_peft_would_and_keeps_it_when_others_do_not_fit(
    tiny_model_dir: Path, tmp_path: Path
):
    stepped(tiny_model_dir, tmp_path / "1", first=1, num=1)
    stepped(tiny_model_dir, tmp_path / "3", first=1, num=3)
    stepped(tiny_model_dir, tmp_path / "wide", first=1, num=0, lora=LoraSettings(rank=8))
    engine = open_engine(
        "transformers",
        str(tiny_model_dir),
        policy_version=1,
        branch="main",
        adapter=tmp_path / "1",
    )
    first, third = (peft_model(tiny_model_dir, tmp_path / n) for n in "13")
    assert largest_gap(engine, first) < 1e-4
    engine.load_weights(load_file(tmp_path / "3" / ADAPTER_FILE), 3, "main")
    assert largest_gap(engine, third) < 1e-4 < largest_gap(engine, first)
    state = load_file(tmp_path / "wide" / ADAPTER_FILE)
    with pytest.raises(WeightsMismatch, match=r"lora_A.weight \(8, 64\) instead of \(4, 64\)"):
        engine.load_weights(state, 4, "main")
    with pytest.raises(WeightsMismatch, match="48 of 28 tensors do not fit"):
        engine.load_weights(load_file(tiny_model_dir / "model.safetensors"), 4, "main")
    assert engine.policy_version == 3 and largest_gap(engine, third) < 1e-4
    (tmp_path / "1" / ADAPTER_FILE).write_bytes((tmp_path / "wide" / ADAPTER_FILE).read_bytes())
    with pytest.raises(WeightsMismatch, match="has shape"):
        open_engine("transformers", str(tiny_model_dir), policy_version=1, branch="main",
                    adapter=tmp_path / "1")  # fmt: skip


def announced(uri: str, one: Learner, step: int) -> ev.Checkpoint:
    """Save the learner's adapter as a trainer does."""
    base = save_base(one, uri, epoch=1, before_place=lambda: None)
    assert base is not None
    contents = Contents(one.save_hf, lambda folder, into: {}, {}, base)
    saved = CheckpointStore(uri, "main").save(contents, step=step, epoch=1)
    return ev.Checkpoint(
        kind="full",
        branch="main",
        step=step,
        uri=saved.uri,
        digest=saved.manifest.digest,
        manifest_sha256=saved.manifest_sha256,
        epoch=1,
        produced_at=ev.now_ms(),
        base_uri=base.uri,
        base_digest=base.digest,
    )


@pytest.mark.parametrize("storage", ["disk", "memory"])
def test_an_announced_adapter_and_the_model_below_it_are_read_from_any_storage(
    storage: str, tiny_model_dir: Path, tmp_path: Path
):
    uri = str(tmp_path / "store") if storage == "disk" else f"memory://{tmp_path}/store"
    one = stepped(tiny_model_dir, tmp_path / "a", first=1, num=1)
    event, again = announced(uri, one, 1), announced(uri, one, 2)
    assert event.base_uri == again.base_uri, "the model was written twice"
    state = load_state_dict(event)
    assert all(torch.equal(state[name], t) for name, t in one.state_dict().items())
    base = base_of(event)
    assert base is not None and base_of(base) is None
    model, adapter = (fetch_model_folder(c, tmp_path / "cache") for c in (base, event))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        theirs = peft_model(model, adapter)(input_ids=ids).logits
        torch.testing.assert_close(theirs, one.model(input_ids=ids).logits, rtol=0, atol=0)


def test_an_adapter_of_another_model_of_its_shapes_is_refused_where_ours_says_so_else_told(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    event = announced(str(tmp_path / "ours"), learner(tiny_model_dir, lora=LORA), 1)
    own = Path(event.uri) / "actor" / "lora_adapter"
    other, alone = shutil.copytree(tiny_model_dir, tmp_path / "other"), tmp_path / "alone"
    shutil.copytree(own, alone)
    state = load_file(other / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})

    def base_over(model: Path, start: Path) -> Any:
        """What a run that goes on with `start` saves below."""
        one = learner(model, lora=LoraSettings(), start_adapter=str(start))
        return save_base(one, str(tmp_path / "next"), epoch=1, before_place=lambda: None)

    renamed = Path(shutil.copytree(tiny_model_dir, tmp_path / "renamed"))
    for model in (renamed, Path(event.base_uri) / "actor" / "huggingface"):
        assert base_over(model, own).digest == event.base_digest and not caplog.text
    with pytest.raises(ConfigError, match=rf"trained over {event.base_uri}, whose weights have"):
        base_over(other, own)
    assert len(list((tmp_path / "next").rglob("manifest.json"))) == 1
    assert base_over(other, alone).digest != event.base_digest
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"was made for {tiny_model_dir}, and goes on over {other}" in said


def test_an_explorer_refuses_an_adapter_of_another_model(tiny_model_dir: Path, tmp_path: Path):
    one = stepped(tiny_model_dir, tmp_path / "a", first=1, num=1)
    event = announced(str(tmp_path / "store"), one, 1)
    service = EngineService(ExplorerSettings(tasksets=()))
    try:
        service.wanted = event
        asyncio.run(service.generate(requests()))
        service.wanted = replace_event(event, step=2, digest="0" * 64, base_digest="f" * 64)
        with pytest.raises(
            WeightsMismatch, match="policy_version 2 .*SHA-256 ffffffffffff, served.* again"
        ):
            asyncio.run(service.generate(requests()))
    finally:
        service.stop()


def replace_event(event: ev.Checkpoint, **changes: Any) -> ev.Checkpoint:
    fields = {f: getattr(event, f) for f in event.__struct_fields__}
    return ev.Checkpoint(**{**fields, **changes})


def test_a_trainer_goes_on_with_the_same_adapter_over_the_same_model_or_says_why_not(
    tmp_path: Path, tiny_model_dir: Path
):
    feed = Feed(tmp_path, tiny_model_dir, {"lora": LORA, "save_interval": 1})
    feed.write_groups(range(4))
    feed.write(ended(6), topic="tasks")
    assert feed.train(kill_at="trainer.step_done@2") == -9
    assert feed.train(lora=None) == 1
    assert "holds a LoRA adapter, the configuration trains the whole model" in feed.said
    assert feed.train(lora=replace(LORA, alpha=16)) == 1
    assert "lora_configs[0]: lora_alpha is 16" in feed.said
    weights = next((tmp_path / "checkpoints" / "base_model").rglob("model.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(bytes(len(content)))
    assert feed.train() == 1
    assert "the model below the adapter" in feed.said and "Restore the folder" in feed.said
    weights.write_bytes(content)
    feed.write_groups(range(4, 6))
    before = len(feed.read("checkpoints", ev.Checkpoint))
    moved = (tmp_path / "checkpoints").rename(tmp_path / "moved")
    assert feed.train(checkpoint_uri=str(moved)) == 0, feed.said
    fork = {"resume_from": "global_step_2", "branch": "again", "total_steps": 2}
    assert feed.train(checkpoint_uri=str(moved), **fork) == 0, feed.said
    found = feed.read("checkpoints", ev.Checkpoint)
    assert {c.branch for c in found} == {"main", "again"}
    bases = [Path(c.base_uri) for c in found]
    assert {b.relative_to(tmp_path / "checkpoints") for b in bases[:before]} == {BELOW}
    assert {b.relative_to(moved) for b in bases[before:]} == {BELOW}, "the model moved with them"
    away = (moved / BELOW).rename(tmp_path / "away")
    manifest = moved / "global_step_1" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace(str(tmp_path / "checkpoints" / BELOW), str(away))
    )
    fork = {"resume_from": "global_step_1", "branch": "third", "total_steps": 1}
    assert feed.train(checkpoint_uri=str(moved), **fork) == 0, feed.said
    last = feed.read("checkpoints", ev.Checkpoint)[-1]
    assert (last.branch, last.base_uri) == ("third", str(away)), "outside it stays where it is"
    feed.close()


def test_a_stage_goes_on_from_an_adapter_as_it_trains(tmp_path: Path, tiny_model_dir: Path):
    """LoRA goes on; whole weights begin with it merged; LoRA after whole weights is a new one."""
    lora = {"model": {"model_path": str(tiny_model_dir), "lora_configs": [{"lora_rank": 4}]}}
    whole = {"model": {"model_path": str(tiny_model_dir), "lora_configs": []}}
    rows = {"path": "rows.jsonl", "storage_type": "file"}
    config = {
        "checkpoint_root_dir": str(tmp_path),
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"train_batch_size": 1, "trainer_input": {"experience_buffer": rows}},
        "stages": [
            {"stage_name": "first", **lora},
            {"stage_name": "on", **lora},
            {"stage_name": "merged", **whole},
            {"stage_name": "new", **lora},
        ],
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    run = plan(path)
    first, on, merged, new = run.stages
    one = stepped(tiny_model_dir, tmp_path / "a", first=1, num=1)
    assert first.trainer and merged.trainer
    log = run.open_log()
    for stage in run.stages:
        log.ensure_topics(run.topic_specs(stage))
    producer = log.producer()
    event = announced(first.trainer.checkpoint_uri, one, 1)
    whole_event = replace_event(event, uri=event.base_uri, base_uri="", base_digest="")
    for stage, found in ((first, event), (on, event), (merged, whole_event)):
        name = stage.topics.name("checkpoints")
        producer.send(name, codec.encode(found), key=b"k")
    producer.flush()
    told = [with_model(log, stage).trainer for stage in (on, merged, new)]
    log.close()
    adapter, base = f"{event.uri}/actor/lora_adapter", f"{event.base_uri}/actor/huggingface"
    assert [(t.model_path, t.start_adapter, t.lora is not None) for t in told if t] == [
        (base, adapter, True),
        (base, adapter, False),
        (base, None, True),
    ]
    names = [t.lora.base_model_name for t in told if t and t.lora]
    assert names == [str(tiny_model_dir), base]


def test_peft_that_is_missing_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from streamrft.deploy.config import adapters
    from streamrft.deploy.config.schema import Config, LoraSection, ModelSection

    config = Config(model=ModelSection(lora_configs=(LoraSection(),)))
    adapters.check_peft(config)
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    adapters.check_peft(Config())
    with pytest.raises(MissingExtra, match=r'pip install "streamrft\[lora\]"'):
        adapters.check_peft(config)
