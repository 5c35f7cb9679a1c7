"""The learner's two halves of a model, over architectures that differ in what surrounds them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from streamrft.consumers.learning.model import PolicyModel
from streamrft.consumers.settings import AlgorithmSettings, TrainerSettings
from streamrft.schemas.errors import ConfigError

SMALL = dict(
    vocab_size=263,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=64,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(
    vocab_size=263,
    n_embd=32,
    n_layer=2,
    n_head=2,
    n_positions=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def load(kind: str, tiny_model_dir: Path, folder: Path, **changes: Any) -> PolicyModel:
    """A model of another architecture with the tiny tokenizer; any scale is far from 1."""
    config = AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SMALL | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    settings = TrainerSettings(str(folder), "unused", AlgorithmSettings())
    return PolicyModel(settings)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"final_logit_softcapping": 2.0, "sliding_window": 4}),
        ("gpt2", {}),
    ],
)
def test_padded_rows_give_each_sequence_the_logits_that_it_has_alone(
    kind: str, changes: dict, tiny_model_dir: Path, tmp_path: Path
):
    policy = load(kind, tiny_model_dir, tmp_path, **changes)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 263, (n,), generator=generator) for n in (13, 9, 2)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        together = policy.head(policy.hidden(padded))
        for row, logits in zip(rows, together, strict=True):
            alone = policy.network(input_ids=row[None]).logits[0]
            torch.testing.assert_close(logits[: len(row)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_weights_and_their_names_survive_a_round_trip(
    kind: str, tiny_model_dir: Path, tmp_path: Path
):
    policy = load(kind, tiny_model_dir, tmp_path / "a")
    policy.save(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    for name, tensor in policy.network.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)
    changed = {n: t + 1 for n, t in policy.state_dict().items()}
    policy.load_weights(changed)
    embedding = policy.network.get_output_embeddings().weight
    assert torch.equal(embedding.detach(), again.get_output_embeddings().weight.detach() + 1)


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_whole_model_is_named(gone: str, tiny_model_dir: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    (folder / gone).unlink()
    with pytest.raises(
        ConfigError, match=f"model_path: {folder} holds no whole model.*Name a"
    ) as e:
        PolicyModel(TrainerSettings(str(folder), "unused", AlgorithmSettings()))
    assert len(str(e.value).splitlines()) == 1


def test_a_model_that_scales_its_logits_is_refused_by_name(tiny_model_dir: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="granite.*changes its logits"):
        load("granite", tiny_model_dir, tmp_path, logits_scaling=8.0)
