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
def test_sequences_in_a_row_have_the_logits_that_each_has_alone(
    kind: str, changes: dict, tiny_model_dir: Path, tmp_path: Path
):
    policy = load(kind, tiny_model_dir, tmp_path, **changes)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 263, (n,), generator=generator) for n in (13, 9, 2)]
    lengths = [len(row) for row in rows]
    with torch.no_grad():
        together = policy.head(policy.hidden(torch.cat(rows), lengths))
        for row, logits in zip(rows, together.split(lengths), strict=True):
            alone = policy.network(input_ids=row[None]).logits[0]
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


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


def rows_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 263, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("kind, changes", [("llama", {}), ("mistral", {"sliding_window": 4})])
def test_sequences_in_a_row_have_the_gradients_that_they_have_alone(
    kind: str, changes: dict, tiny_model_dir: Path, tmp_path: Path
):
    policy, rows = load(kind, tiny_model_dir, tmp_path, **changes), rows_of(13, 9, 2)
    policy.head(policy.hidden(torch.cat(rows), [13, 9, 2])).logsumexp(-1).sum().backward()
    together = {n: p.grad.clone() for n, p in policy.network.named_parameters()}
    policy.network.zero_grad()
    for row in rows:
        policy.network(input_ids=row[None]).logits.logsumexp(-1).sum().backward()
    for name, parameter in policy.network.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-3, atol=1e-3)


def test_a_sequence_in_a_row_is_not_touched_by_a_bit_through_its_neighbours(
    tiny_model_dir: Path, tmp_path: Path
):
    policy, (one, two, three) = load("llama", tiny_model_dir, tmp_path), rows_of(13, 9, 2)
    with torch.no_grad():
        first = policy.hidden(torch.cat([one, two, three]), [13, 9, 2])
        second = policy.hidden(torch.cat([one.flip(0), two, three.flip(0)]), [13, 9, 2])
    assert torch.equal(first[13:22], second[13:22])
    assert not torch.equal(first[:13], second[:13])


@pytest.mark.parametrize(
    "kind, changes, is_cut",
    [
        ("llama", {}, True),
        ("gpt2", {}, True),
        ("qwen3", {}, True),
        ("mistral", {"sliding_window": None}, True),
        ("mistral", {"sliding_window": 4}, False),
        ("gemma2", {"sliding_window": 4}, False),
    ],
)
def test_attention_cuts_the_row_unless_a_layer_sees_a_window_only(
    kind: str, changes: dict, is_cut: bool, tiny_model_dir: Path, tmp_path: Path
):
    policy = load(kind, tiny_model_dir, tmp_path, **changes)
    assert policy._packing.is_cut == is_cut


def test_a_model_that_carries_a_state_along_the_row_is_refused(
    tiny_model_dir: Path, tmp_path: Path
):
    changes = {"state_size": 4, "expand": 2, "conv_kernel": 2, "time_step_rank": 2}
    with pytest.raises(ConfigError, match=r"model_path: .* \(mamba\) mixes sequences"):
        load("mamba", tiny_model_dir, tmp_path, **changes)


def test_the_network_still_takes_rows_with_a_mask(tiny_model_dir: Path, tmp_path: Path):
    network, (row,) = load("llama", tiny_model_dir, tmp_path).network, rows_of(9)
    padded = torch.cat([torch.zeros(4, dtype=torch.int64), row])[None]
    mask = torch.tensor([[0] * 4 + [1] * 9])
    with torch.no_grad():
        logits = network(input_ids=padded, attention_mask=mask).logits[0, 4:]
        torch.testing.assert_close(logits, network(input_ids=row[None]).logits[0])
