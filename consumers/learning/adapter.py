"""The adapter that is trained in place of a model's weights, and the policy that it began as."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

from ...schemas.errors import ConfigError
from ...streams.weights import adapters
from ...streams.weights.adapters import TRAINED, AdapterMismatch
from ..manifest import recorded_base
from ..settings import LoraSettings, TrainerSettings

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger("streamrft")

WHERE = "model.lora_configs[0]"
_START = "start"
_DEFAULT_RANK = _DEFAULT_ALPHA = 32
# what of adapter_config.json changes logits though every matrix has its shape
_MEANING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
_KEYS = {"r": "lora_rank"}


class Adapter:
    """LoRA matrices beside the weights of a network: only they require a gradient.

    B begins as 0, so the first policy is the model itself; or both are those of a folder.
    """

    def __init__(self, network: Any, settings: TrainerSettings, lora: LoraSettings) -> None:
        """Lay it on `network`, in place. A is a function of `settings.seed` alone.

        Raises:
            ConfigError: target modules or a start that do not fit the model. MissingExtra.
        """
        start = None if settings.start_adapter is None else Path(settings.start_adapter)
        self._network, self.start = network, start
        name = lora.base_model_name or settings.model_path
        try:
            config = _fresh(network, lora) if start is None else _of_start(start, lora, name)
            config.base_model_name_or_path = name
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(settings.seed)
                self._tuner = adapters.lay_on(network, config)
            if start is not None:
                adapters.fill(network, start)
        except AdapterMismatch as error:
            raise ConfigError(f"{WHERE}: {error}") from error
        self.places = adapters.places(network)
        """Name in adapter_model.safetensors -> name in the network's state_dict."""
        kind: Any = self._tuner.tuner_layer_cls
        self._layers = [m for m in network.modules() if isinstance(m, kind)]

    def keep_reference(self) -> None:
        """Remember the matrices that it began with; without a start the model itself is enough."""
        if self.start is None:
            return
        configs: dict[str, Any] = self._tuner.peft_config
        configs[_START] = copy.deepcopy(configs[TRAINED])
        self._tuner.inject_adapter(self._network, _START)
        state = self._network.state_dict()
        for key in self.places.values():
            state[key.replace(f".{TRAINED}", f".{_START}")].copy_(state[key])

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the network is the policy that training began with; for passes without gradient.

        peft's own switch also turns off that the matrices require a gradient, which shards and
        gradients that are being added up do not survive.
        """
        self._switch([] if self.start is None else [_START])
        try:
            yield
        finally:
            self._switch([TRAINED])

    def _switch(self, names: list[str]) -> None:
        for layer in self._layers:
            layer._active_adapter = names

    def check(self, folder: Path) -> None:
        """Raise ConfigError unless the adapter of a folder means what this one means."""
        own, theirs = self._tuner.peft_config[TRAINED], adapters.read_config(folder)
        for key in _MEANING:
            if getattr(own, key) != getattr(theirs, key):
                raise ConfigError(
                    f"{WHERE}: {_KEYS.get(key, key)} is {getattr(own, key)}, in the checkpoint "
                    f"{folder} it is {getattr(theirs, key)}. Set it as it was, or begin a new run."
                )
        if other := self.places.keys() ^ adapters.names(folder):
            raise ConfigError(
                f"{WHERE}.target_modules: not those of the checkpoint {folder}; {len(other)} "
                f"matrices differ, such as {min(other)}. Set target_modules and exclude_modules as "
                "they were, or begin a new run."
            )

    def config_file(self) -> bytes:
        """adapter_config.json as peft reads it, with its sets in order."""
        values = self._tuner.peft_config[TRAINED].to_dict() | {"inference_mode": True}
        return json.dumps(values, default=_plain, indent=2, sort_keys=True).encode() + b"\n"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _fresh(network: Any, lora: LoraSettings) -> LoraConfig:
    return adapters.peft().LoraConfig(
        r=_DEFAULT_RANK if lora.rank is None else lora.rank,
        lora_alpha=_DEFAULT_ALPHA if lora.alpha is None else lora.alpha,
        target_modules=_modules(lora.target_modules or "all-linear"),
        exclude_modules=_modules(lora.exclude_modules),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in network.modules()),
        task_type="CAUSAL_LM",
    )


def _modules(given: str | tuple[str, ...] | None) -> Any:
    return list(given) if isinstance(given, tuple) else given


def _of_start(folder: Path, lora: LoraSettings, model: str) -> LoraConfig:
    """The configuration of the folder, without dropout: an engine's log-probs have none either."""
    config = adapters.read_config(folder)
    made_for = config.base_model_name_or_path
    if made_for not in (None, model) and recorded_base(folder) is None:
        logger.warning(
            "%s.path: the adapter in %s was made for %s, and goes on over %s. See that both are "
            "the same model: only shapes are compared.",
            WHERE,
            folder,
            made_for,
            model,
        )
    for key, given, found in (
        ("lora_rank", lora.rank, config.r),
        ("lora_alpha", lora.alpha, config.lora_alpha),
    ):
        if given is not None and given != found:
            raise ConfigError(
                f"{WHERE}.{key}: {given} found, the adapter in {folder} has {found}. Leave it out: "
                "an adapter goes on as it is."
            )
    config.inference_mode, config.lora_dropout = False, 0.0
    config.task_type = "CAUSAL_LM"
    return config
