"""Fixtures that several rooms share: a tiny model with a tokenizer that knows every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRun

_SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CHAT = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>' -}}"
    "{%- if m['role'] == 'assistant' -%}{% generation %}{{- m['content'] + '<|end|>' -}}"
    "{% endgeneration %}{%- else -%}{{- m['content'] + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 2 layers, hidden 64, vocabulary 263 (7 special tokens and 256 bytes)."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture
def small_run(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Callable[..., SmallRun]]:
    """Make whole runs in folders of this test; nothing of them outlives it."""
    made: list[SmallRun] = []

    def make(overrides: Mapping[str, Any] | None = None, **options: Any) -> SmallRun:
        folder = tmp_path / f"run{len(made)}"
        made.append(SmallRun(folder, tiny_model_dir, overrides or {}, **options))
        return made[-1]

    yield make
    for run in made:
        run.kill()


def save_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """Write model, generation config and tokenizer as `from_pretrained` reads them."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    ids = dict(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*_SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
    tokenizer.chat_template = _CHAT
    return tokenizer
