"""LoRA adapters in peft's format: read, laid on a model, filled, merged into it.

Trainer, explorer and conversion lay an adapter on a model with these functions, so its logits are
the same in all of them. Source: LoRA, arXiv:2106.09685; h = W x + (alpha / r) B A x.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.errors import MissingExtra, StreamrftError

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, LoraModel

ADAPTER_FOLDER = "actor/lora_adapter"
ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
TRAINED = "default"
"""Peft's name of the adapter that is trained and served; files do not have it."""
# what a plain adapter may say; other keys mean a kind of adapter that is more than A and B
_PLAIN_KEYS = frozenset(
    "r lora_alpha target_modules exclude_modules lora_dropout use_rslora rank_pattern "
    "alpha_pattern fan_in_fan_out layers_to_transform layers_pattern task_type auto_mapping "
    "base_model_name_or_path revision inference_mode peft_version peft_type megatron_core".split()
)
_PLAIN_STARTS = (True, False, "gaussian")


class AdapterMismatch(StreamrftError, ValueError):
    """An adapter is not one that can be laid on this model."""


def peft() -> Any:
    """The library. Raises MissingExtra."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft, which LoRA needs,", "lora") from error
    return peft


def read_config(folder: Path) -> LoraConfig:
    """What adapter_config.json of a folder says.

    Raises:
        AdapterMismatch: it is missing, or says more than a plain LoRA adapter. MissingExtra.
    """
    path, library = folder / CONFIG_FILE, peft()
    if not path.is_file():
        raise AdapterMismatch(f"{path}: is not there. Name a folder that peft saved.")
    try:
        kind = json.loads(path.read_bytes()).get("peft_type")
        if kind != "LORA":
            raise AdapterMismatch(f"{path}: peft_type is {kind}; LORA is allowed.")
        config = library.LoraConfig.from_pretrained(str(folder))
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise AdapterMismatch(f"{path}: cannot be read ({error}). Save it again.") from error
    if config.init_lora_weights not in _PLAIN_STARTS:
        # PiSSA and its kind change the model's own weights when they begin
        raise _more(path, "init_lora_weights", config.init_lora_weights)
    plain = library.LoraConfig().to_dict()
    for key, value in config.to_dict().items():
        if key not in _PLAIN_KEYS | {"init_lora_weights"} and (value or None) != (
            plain.get(key) or None
        ):
            raise _more(path, key, value)
    return config


def _more(path: Path, key: str, value: object) -> AdapterMismatch:
    return AdapterMismatch(
        f"{path}: {key} is {value!r}, which is more than plain LoRA. Merge the adapter with peft "
        "(merge_and_unload), and name the merged model as model.model_path."
    )


def lay_on(network: Any, config: LoraConfig) -> LoraModel:
    """Put the matrices of an adapter beside the weights of a network, in place.

    From then on only they require a gradient; the network's weights keep their values.

    Raises:
        AdapterMismatch: no module is as the configuration says, or it is tied to another.
    """
    library = peft()
    try:
        tuner = library.LoraModel(network, config, TRAINED)
    except ValueError as error:
        raise AdapterMismatch(
            f"target_modules: {' '.join(str(error).split())[:300]} Name modules of "
            f"{type(network).__name__}, or all-linear."
        ) from error
    tied = getattr(network.config, "tie_word_embeddings", False)
    for layer in (network.get_input_embeddings(), network.get_output_embeddings()):
        if tied and isinstance(layer, tuner.tuner_layer_cls):
            raise AdapterMismatch(
                "target_modules: hold the embeddings or the head, which this model ties to each "
                "other, so the adapter could not be merged. Leave them out."
            )
    return tuner


def places(network: Any) -> dict[str, str]:
    """Name in adapter_model.safetensors -> name in the state_dict of a network with an adapter."""
    keys = {key: key for key in network.state_dict()}
    # it renames and filters by the keys alone
    found = peft().get_peft_model_state_dict(
        network, state_dict=keys, adapter_name=TRAINED, save_embedding_layers=False
    )
    return {f"base_model.model.{name}": key for name, key in found.items()}


def names(folder: Path) -> set[str]:
    """Names of the matrices of a folder. Raises AdapterMismatch: it has no file of them."""
    from safetensors import SafetensorError, safe_open

    path = folder / ADAPTER_FILE
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise AdapterMismatch(f"{path}: cannot be read ({error}). Save it again.") from error


def fill(network: Any, folder: Path) -> None:
    """Copy the matrices of a folder into the adapter of a network.

    Raises:
        AdapterMismatch: no file, or names or shapes that are not this model's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_FILE
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterMismatch(f"{path}: cannot be read ({error}). Save it again.") from error
    state = network.state_dict()
    own = {name: state[key] for name, key in places(network).items()}
    if wrong := _difference(own, found):
        raise AdapterMismatch(
            f"{path}: {wrong}. The adapter belongs to another model: name that one."
        )
    for name, tensor in own.items():
        tensor.copy_(found[name])


def _difference(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str:
    """The first name or shape that does not fit; empty when all do."""
    for name in sorted(own.keys() | found.keys()):
        if name not in found or name not in own:
            return f"{name} is {'not there' if name in own else 'not of this model'}"
        if own[name].shape != found[name].shape:
            shapes = tuple(found[name].shape), tuple(own[name].shape)
            return f"{name} has shape {shapes[0]}, this model's is {shapes[1]}"
    return ""


def merge(network: Any, folder: Path) -> Any:
    """The network with an adapter added to its weights: W + (alpha / r) B A. Changes it in place.

    Raises:
        AdapterMismatch: as `read_config`, `lay_on` and `fill`; or the sum is not finite.
    """
    tuner = lay_on(network, read_config(folder))
    fill(network, folder)
    try:
        merged = tuner.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise AdapterMismatch(f"{folder}: cannot be merged ({error}).") from error
    return merged.requires_grad_(True)
