"""`model.lora_configs`: the adapter that is trained, checked before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...consumers.settings import LoraSettings
from ...schemas.errors import ConfigError, MissingExtra
from ...streams.weights.adapters import CONFIG_FILE
from .schema import Config, StageConfig

_WHERE = "model.lora_configs[0]"
_DTYPES = ("auto", "float32")


def check_adapters(config: Config) -> None:
    """Raise ConfigError for several adapters, or for one that cannot be."""
    found = config.model.lora_configs
    if len(found) > 1:
        raise ConfigError(
            f"model.lora_configs: {len(found)} adapters found; one is trained in a run. Leave the "
            "others out, or give each a run of its own."
        )
    for lora in found:
        for key, value in (("lora_rank", lora.lora_rank), ("lora_alpha", lora.lora_alpha)):
            if value < 1:
                raise ConfigError(f"{_WHERE}.{key}: {value} found; at least 1 is allowed.")
        if lora.lora_dtype not in _DTYPES:
            raise ConfigError(
                f"{_WHERE}.lora_dtype: {lora.lora_dtype!r} found; {' and '.join(_DTYPES)} are "
                "allowed: the adapter is trained and saved in float32, and an engine computes in "
                "explorer.rollout_model.dtype."
            )
        if not _modules(lora.target_modules, "target_modules"):
            raise ConfigError(f"{_WHERE}.target_modules: empty; name modules, or all-linear.")
        _modules(lora.exclude_modules, "exclude_modules")


def check_peft(config: Config) -> None:
    """Raise MissingExtra where an adapter is asked for and peft is not here."""
    if config.model.lora_configs and find_spec("peft") is None:
        raise MissingExtra("peft, which model.lora_configs needs,", "lora")


def adapter_settings(stage: StageConfig) -> dict[str, Any]:
    """What a trainer is told of it: `lora` and `start_adapter` of its settings."""
    return {"lora": _lora(stage), "start_adapter": _start(stage.config)}


def _lora(stage: StageConfig) -> LoraSettings | None:
    """The adapter to train; None trains the whole model.

    A rank that the file does not say is None: an adapter that goes on has its own.
    """
    for lora in stage.config.model.lora_configs:
        return LoraSettings(
            rank=lora.lora_rank if stage.gives(f"{_WHERE}.lora_rank") else None,
            alpha=lora.lora_alpha if stage.gives(f"{_WHERE}.lora_alpha") else None,
            target_modules=_modules(lora.target_modules, "target_modules"),
            exclude_modules=_modules(lora.exclude_modules, "exclude_modules"),
            base_model_name=lora.base_model_name or stage.config.model.model_path,
        )
    return None


def _start(config: Config) -> str | None:
    """The folder of the adapter to go on from, absolute.

    Raises:
        ConfigError: it is no folder that peft saved.
    """
    for lora in config.model.lora_configs:
        if lora.path:
            folder = Path(lora.path).expanduser().resolve()
            if not (folder / CONFIG_FILE).is_file():
                raise ConfigError(
                    f"{_WHERE}.path: {lora.path} holds no {CONFIG_FILE} (seen from {Path.cwd()}). "
                    "Name a local folder that peft saved, or leave it out for a new adapter."
                )
            return str(folder)
    return None


def _modules(given: Any, key: str) -> str | tuple[str, ...] | None:
    """As peft takes them: one text, or several names. Raises ConfigError for anything else."""
    if given is None or isinstance(given, str):
        return given or None
    if isinstance(given, list | tuple) and all(isinstance(n, str) for n in given):
        return tuple(given) or None
    raise ConfigError(
        f"{_WHERE}.{key}: {given!r} found; a text (all-linear, or a regular expression) or a list "
        "of module names is allowed."
    )
