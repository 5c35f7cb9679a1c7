"""Make what the quickstart needs, from nothing: a tiny model, rows to imitate and tasks.

The task is to sort four digits: "sort 4071" -> "0147". Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>' -}}"
    "{%- if m['role'] == 'assistant' -%}{% generation %}{{- m['content'] + '<|end|>' -}}"
    "{% endgeneration %}{%- else -%}{{- m['content'] + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
NUM_SFT_ROWS = 45 * 128
NUM_TASKS = 64 * 64


def build(folder: Path, *, seed: int) -> None:
    """Fill `folder`, unless an earlier call did."""
    if (folder / "tasks.jsonl").exists():
        print(f"{folder} is already there: the run goes on. Remove it to begin anew.")
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", seed=seed)
    write_rows(folder / "sft.jsonl", NUM_SFT_ROWS, random.Random(f"sft {seed}"))
    write_rows(folder / "tasks.jsonl", NUM_TASKS, random.Random(f"tasks {seed}"))
    print(f"{folder}: a random model of 0.4 million parameters, rows to imitate and tasks")


def write_rows(path: Path, count: int, rng: random.Random) -> None:
    """JSON lines with `question` and `answer`."""
    with path.open("w") as out:
        for _ in range(count):
            digits = "".join(rng.choices("0123456789", k=4))
            row = {"question": f"sort {digits}", "answer": "".join(sorted(digits))}
            out.write(json.dumps(row) + "\n")


def save_model(folder: Path, *, seed: int, hidden: int = 128, heads: int = 4) -> None:
    """Write a Llama of 2 layers with random weights and its tokenizer, as Hugging Face folder."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = byte_tokenizer()
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        intermediate_size=3 * hidden,
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


def byte_tokenizer():
    """Seven special tokens and 256 bytes, so that any text comes back as it was."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    build(arguments.folder, seed=arguments.seed)
