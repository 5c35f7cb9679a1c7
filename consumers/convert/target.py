"""What the converted folder must hold, told by the model's config.json, and its small files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .boxes import Shape
from .errors import ConvertFailed

CONFIG = "config.json"
_SMALL = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "*.jinja", "*.model",
    "chat_template.json", "*processor_config.json",
)  # fmt: skip
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

# buffers that older versions of transformers saved and newer ones make from config.json
_RECOMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Target:
    """A model as its config.json has it.

    Args:
        shapes: of every tensor that the folder must hold, in the model's order.
        tied: names that are another tensor's second name, and that tensor's.
        config: the file that says so.
        values: what is in it.
        architecture: name of the transformers class.
    """

    shapes: Mapping[str, Shape]
    tied: Mapping[str, str]
    config: Path
    values: Mapping[str, Any]
    architecture: str


def small_files(own: Path, base: Path | None) -> dict[str, Path]:
    """Config, tokenizer and templates by name: the checkpoint's own, the base model's for the rest.

    Raises:
        ConvertFailed: no config.json in either, or a base that is no folder.
    """
    if base is not None and not base.is_dir():
        raise ConvertFailed(
            f"{base}: is no folder. --base-model-dir takes a local Hugging Face folder."
        )
    found: dict[str, Path] = {}
    for folder in (base, own):
        if folder is not None and folder.is_dir():
            found |= {p.name: p for g in _SMALL for p in sorted(folder.glob(g)) if p.is_file()}
    if CONFIG not in found:
        where = f"{own} and {base} have" if base else f"{own} has"
        raise ConvertFailed(
            f"{own / CONFIG}: is not there ({where} none). Name the model that the training "
            "started from with --base-model-dir."
        )
    return found


def read_target(config: Path, role: str) -> Target:
    """Build the model on the meta device and list its tensors; no weights are made.

    Raises:
        ConvertFailed: config.json cannot be read, or transformers does not know the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    try:
        values = json.loads(config.read_text())
        options = {"num_labels": 1} if role == "critic" else {}
        known = AutoConfig.from_pretrained(config.parent, local_files_only=True, **options)
        kind: Any = AutoModelForTokenClassification if role == "critic" else AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(known, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a broken or unknown config
        why = " ".join(str(error).split())[:300]
        raise ConvertFailed(f"{config}: no model can be made from it ({why}).") from error
    return _target(model, config, values)


def _target(model: Any, config: Path, values: Mapping[str, Any]) -> Target:
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    state = model.state_dict()
    shapes = {n: tuple(t.shape) for n, t in state.items() if n not in tied}
    return Target(shapes, tied, config, values, type(model).__name__)


def matched(names: Iterable[str], target: Target, where: Path) -> dict[str, str]:
    """The checkpoint's names and the target's that they mean; what is not the model's is left out.

    A saved program may have put the model under a name of its own (`app.model.`), and wrappers put
    theirs in between.

    Raises:
        ConvertFailed: a tensor of the target is missing, one of the model is not the target's, or
            they belong to an adapter.
    """
    clean = {_clean(n): n for n in names if not n.endswith(_RECOMPUTED)}
    if adapted := next((n for n in clean if ".lora_A." in n), None):
        raise ConvertFailed(
            f"{where}: {adapted} belongs to an adapter; whole models are allowed. Merge the "
            "adapter into its model before the save (peft: merge_and_unload)."
        )
    wanted = {*target.shapes, *target.tied}
    prefix = _prefix(clean, target, where)
    found = {n.removeprefix(prefix): raw for n, raw in clean.items() if n.startswith(prefix)}
    _complete(found, target)
    parts = tuple({f"{n.split('.')[0]}." for n in wanted})
    if extra := sorted(n for n in found if n.startswith(parts) and n not in wanted):
        raise ConvertFailed(
            f"{where}: {len(extra)} tensors, such as {extra[0]}, are not in the model of "
            f"{target.config}. Name the model that was trained with --base-model-dir."
        )
    if missing := sorted(set(target.shapes) - set(found)):
        raise ConvertFailed(
            f"{where}: {len(missing)} tensors of the model of {target.config} are missing, such "
            f"as {missing[0]}. Name the model that was trained with --base-model-dir."
        )
    return {raw: name for name, raw in found.items() if name in wanted}


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _complete(found: dict[str, str], target: Target) -> None:
    """A tied tensor that is there only under its second name is taken by that."""
    for alias, name in target.tied.items():
        if name not in found and alias in found:
            found[name] = found.pop(alias)


def _prefix(names: Mapping[str, str], target: Target, where: Path) -> str:
    """What stands before the target's names; the candidate that leads to most of them."""
    wanted = {*target.shapes, *target.tied}
    anchor = next(iter(target.shapes))
    candidates = {n.removesuffix(anchor) for n in names if n.endswith(anchor)}
    scores = {
        p: sum(p + n in names for n in wanted) for p in candidates if p in ("",) or p[-1] == "."
    }
    best = [p for p, score in scores.items() if score == max(scores.values())]
    for usual in ("", "model.", "app.model."):
        if usual in best:
            return usual
    if len(best) > 1:
        raise ConvertFailed(
            f"{where}: holds several models, under {', '.join(sorted(best))}. Convert a checkpoint "
            "that was saved with one."
        )
    return best[0] if best else ""
