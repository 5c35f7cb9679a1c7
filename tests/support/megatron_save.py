"""Saves small models with Megatron-core itself: `python megatron_save.py FOLDER`, on any CPU.

Made tests/data/megatron, which is read without Megatron; needs `pip install --no-deps
megatron-core` (0.16.1 was used). Each folder has `dist_ckpt/`, `huggingface/config.json`, and the
logits that one rank of Megatron computes after it loaded `dist_ckpt` again.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

VOCABULARY, PADDED, HIDDEN, FEED_FORWARD, LAYERS, HEADS, GROUPS = 37, 48, 16, 24, 2, 4, 2
CASES: dict[str, dict[str, Any]] = {
    "qwen2-untied-tp2-pp2": {"bias": True, "tied": False, "tp": 2, "pp": 2, "numbered": False},
    "llama-tied-tp2": {"bias": False, "tied": True, "tp": 2, "pp": 1, "numbered": True},
}


def without_cuda() -> None:
    """Megatron asks for a device where a CPU needs none."""
    any_torch: Any = torch
    any_torch.cuda.synchronize = lambda *_: None
    any_torch.cuda.current_device = lambda: "cpu"
    tracker = SimpleNamespace(fork=nullcontext)
    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = lambda: tracker


def make_model(case: dict[str, Any], tp: int, pp: int) -> Any:
    parallel_state.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FEED_FORWARD,
        num_attention_heads=HEADS, num_query_groups=GROUPS, use_cpu_initialization=True,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        add_qkv_bias=case["bias"], normalization="RMSNorm", layernorm_epsilon=1e-6,
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32, init_method_std=0.3,
        bias_activation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )  # fmt: skip
    return GPTModel(
        config, gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED, max_sequence_length=64, position_embedding_type="rope",
        share_embeddings_and_output_weights=case["tied"], parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


def sharded(model: Any, case: dict[str, Any]) -> Any:
    return model.sharded_state_dict(metadata={"non_homogeneous_layers": case["numbered"]})


def save(rank: int, case: dict[str, Any], folder: Path) -> None:
    without_cuda()
    tp, pp = case["tp"], case["pp"]
    store = dist.FileStore(str(folder.parent / f"{folder.name}.store"), tp * pp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp * pp)
    torch.manual_seed(7)
    model = make_model(case, tp, pp)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data.copy_(noise + ("norm" in name))
    dist_checkpointing.save(sharded(model, case), str(folder / "dist_ckpt"))
    dist.destroy_process_group()


def score(_: int, case: dict[str, Any], folder: Path) -> None:
    """One rank loads what the others saved and computes the logits of every id in turn."""
    without_cuda()
    store = dist.FileStore(str(folder.parent / f"{folder.name}.one"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = make_model(case, 1, 1)
    loaded = dist_checkpointing.load(sharded(model, case), str(folder / "dist_ckpt"))
    model.load_state_dict(loaded, strict=False)
    ids = torch.arange(VOCABULARY)[None]
    hidden = torch.ones(VOCABULARY, VOCABULARY, dtype=torch.bool).triu(1)[None, None]
    logits = model(ids, ids, hidden)[..., :VOCABULARY]
    save_file({"logits": logits.detach().contiguous()}, folder / "logits.safetensors")


def config(case: dict[str, Any]) -> dict[str, Any]:
    """The same model in the words of Hugging Face."""
    kind = "Qwen2" if case["bias"] else "Llama"
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
        "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": case["tied"], "dtype": "float32",
    }  # fmt: skip


def main(folder: Path) -> None:
    for name, case in CASES.items():
        place = folder / name
        for inner in ("dist_ckpt", "huggingface"):
            (place / inner).mkdir(parents=True)
        (place / "huggingface" / "config.json").write_text(json.dumps(config(case), indent=2))
        for work, num in ((save, case["tp"] * case["pp"]), (score, 1)):
            mp.start_processes(work, (case, place), nprocs=num, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
