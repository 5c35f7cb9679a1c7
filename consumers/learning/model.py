"""A causal language model as the learner uses it: loaded, run in two halves, saved.

T tokens of some sequences, hidden size H, n chosen places, vocabulary V.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils.logging import disable_progress_bar

from ...schemas.errors import ConfigError
from ...streams.blobs import sha256_file
from ...streams.weights import adapters
from ...streams.weights.object_storage import WEIGHTS_FILE
from ..settings import TrainerSettings
from .adapter import WHERE, Adapter
from .packing import Packing
from .ranks import Ranks
from .shards import whole

T = TypeVar("T")
logger = logging.getLogger("streamrft")


class PolicyModel:
    """Weights in float32; `dtype: bfloat16` computes in bfloat16 and keeps float32 weights.

    With `settings.lora` the weights that are trained, saved and loaded are an adapter's.

    Attributes:
        network: the transformers model.
        tokenizer: with the configured chat template, if any.
        device: where the weights lie.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        """Load from `settings.model_path`, a folder or a name on the Hugging Face hub.

        Raises:
            ConfigError: an unknown dtype, a folder that is no whole model, a model whose logits
                are more than its head's, one that mixes sequences in a row, or an adapter that does
                not fit it.
        """
        disable_progress_bar()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._autocast_dtype = _autocast_dtype(settings.dtype, self.device)
        self.tokenizer: Any = _loaded(AutoTokenizer, settings.model_path)
        if settings.chat_template is not None:
            self.tokenizer.chat_template = settings.chat_template
        # transformers takes scaled dot-product attention where the model has it
        network: Any = _loaded(AutoModelForCausalLM, settings.model_path, dtype=torch.float32)
        network = _without_adapter(network, settings)
        names = list(remove_tied_weights_from_state_dict(dict(network.state_dict()), network))
        lora = settings.lora
        self._adapter = None if lora is None else Adapter(network, settings, lora)
        self._base = _base_places(names, network)
        self._trained = self._base if self._adapter is None else self._adapter.places
        self._reference: Any = None
        self.network = network.to(self.device).train()
        if settings.gradient_checkpointing:
            # renamed in transformers 5.24; the old name warns there
            old = self.network.gradient_checkpointing_enable
            enable = getattr(self.network, "activation_checkpointing_enable", old)
            enable({"use_reentrant": False})
        self._softcap = getattr(self.network.config, "final_logit_softcapping", None)
        self._static: dict[str, bytes] = {}
        self._ranks = Ranks()
        self.num_logits = int(self.network.get_output_embeddings().weight.shape[0])
        self._packing = Packing(self.network, settings.model_path)
        self._check_head(settings.model_path)

    def shard(self, ranks: Ranks) -> None:
        """Leave this rank its part of the weights, where there are several ranks."""
        if ranks.size == 1:
            return
        self._static = self._static_files()  # FSDP renames the class
        for network in filter(None, (self.network, self._reference)):
            ranks.shard(network)
        self._ranks = ranks

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the model's own weights stay as they are."""
        return self._adapter is not None

    @property
    def start_adapter(self) -> Path | None:
        """The folder that the adapter began with; None for a new one, or none."""
        return None if self._adapter is None else self._adapter.start

    def keep_reference(self) -> None:
        """Keep the present policy for `reference`; before `shard`. An adapter needs no copy."""
        if self._adapter is None:
            self._reference = copy.deepcopy(self.network).eval().requires_grad_(False)
        else:
            self._adapter.keep_reference()

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """The network of the policy that was kept; passes through it end inside."""
        if self._adapter is None:
            yield self._reference
            return
        with self._adapter.reference(), self.without_dropout():
            yield self.network

    def run(self, call: Callable[[], T], network: Any = None) -> T:
        """What `call` returns, which passes the network; all of its weights are at hand inside."""
        if self._ranks.size == 1:
            return call()
        network = self.network if network is None else network
        return network.gathered_for(call)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Measure as engines do: what a model drops at random is for its training passes."""
        was_training = self.network.training
        self.network.eval()
        try:
            yield
        finally:
            self.network.train(was_training)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward passes."""
        enabled = self._autocast_dtype is not None
        return torch.autocast(self.device.type, self._autocast_dtype, enabled=enabled)

    def hidden(self, input_ids: Tensor, lengths: list[int], network: Any = None) -> Tensor:
        """Final hidden states [T, H] of sequences that lie end to end in `input_ids` [T].

        Each comes out as it does alone. `network` defaults to its own.
        """
        network = self.network if network is None else network
        options = self._packing.options(lengths, input_ids.device)
        found = network.base_model(input_ids=input_ids[None], use_cache=False, **options)
        return found.last_hidden_state[0]

    def head(self, hidden: Tensor, network: Any = None) -> Tensor:
        """Logits [n, V] of hidden states [n, H]."""
        network = self.network if network is None else network
        logits = network.get_output_embeddings()(hidden)
        if self._softcap is None:
            return logits
        return self._softcap * torch.tanh(logits / self._softcap)

    def state_dict(self, *, is_base: bool = False) -> dict[str, Tensor]:
        """What is trained, by the names of its file, on the CPU; a tied head is left out.

        `is_base` gives the model below an adapter, by the names of model.safetensors. All ranks
        gather it; only rank 0 gets it, the others an empty dictionary.
        """
        kept = dict[str, Tensor]()
        for name, part in self.named_weights(is_base=is_base).items():
            tensor = whole(part)
            if self._ranks.rank == 0:
                kept[name] = tensor.cpu().contiguous()
        return kept

    def named_weights(self, *, is_base: bool = False) -> dict[str, Tensor]:
        """This rank's part of what is trained, in place, by the names of `state_dict`."""
        state = self.network.state_dict()
        places = self._base if is_base else self._trained
        return {name: state[key].detach() for name, key in places.items()}

    def check_weights(self, state: Mapping[str, Tensor], *, is_base: bool = False) -> None:
        """Raise ConfigError for names or shapes that are not this model's."""
        own = self.named_weights(is_base=is_base)
        keys = "model.model_path" if is_base or not self.has_adapter else WHERE
        advice = f"Load a checkpoint of the same {keys}."
        if wrong := sorted(own.keys() ^ state.keys()):
            raise ConfigError(
                f"weights: {len(wrong)} names differ from the model's, such as {wrong[0]!r}. "
                f"{advice}"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ConfigError(
                    f"weights: {name} has shape {tuple(state[name].shape)}, the model's is "
                    f"{tuple(tensor.shape)}. {advice}"
                )

    def check_adapter(self, folder: Path) -> None:
        """Raise ConfigError unless an adapter's folder means what this one means."""
        assert self._adapter is not None
        self._adapter.check(folder)

    def load_weights(self, state: Mapping[str, Tensor] | None, *, is_base: bool = False) -> None:
        """Replace what is trained, on all ranks by that of rank 0; None on the others.

        `is_base` replaces the weights below the adapter.

        Raises:
            ConfigError: names or shapes that are not this model's.
        """
        if state is not None:
            self.check_weights(state, is_base=is_base)
        for name, own in self.named_weights(is_base=is_base).items():
            own.copy_(self._ranks.scattered(None if state is None else state[name], own))

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> str:
        """Write what is trained: the model's folder, or peft's; returns the sha256 of its weights.

        `state` is written in place of the present weights; names as in `state_dict`.
        """
        if self._adapter is None:
            return self.save_base(folder, state)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / adapters.CONFIG_FILE).write_bytes(self._adapter.config_file())
        tensors = self.state_dict() if state is None else state
        return _written(tensors, folder / adapters.ADAPTER_FILE)

    def save_base(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> str:
        """Write the model without adapter: config, tokenizer and one model.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self._static:
            self._static = self._static_files()
        for name, content in self._static.items():
            (folder / name).write_bytes(content)
        tensors = self.state_dict(is_base=True) if state is None else state
        return _written(tensors, folder / WEIGHTS_FILE)

    def _static_files(self) -> dict[str, bytes]:
        """What does not change in training: config, generation config, tokenizer, template."""
        config = self.network.config
        config.dtype = "float32"
        config.architectures = [type(self.network).__name__]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.network.generation_config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}

    @torch.no_grad()
    def _check_head(self, path: str) -> None:
        """Refuse models that scale logits in a way that `head` does not know."""
        ids = torch.arange(8, device=self.device) % self.num_logits
        self.network.eval()
        whole = self.network(input_ids=ids[None], use_cache=False).logits[0]
        halves = self.head(self.hidden(ids, [8]))
        self.network.train()
        if not torch.allclose(whole, halves, rtol=1e-3, atol=1e-3):
            raise ConfigError(
                f"model.model_path: {path} ({self.network.config.model_type}) changes its logits "
                "after the output layer in a way that is not supported; use another model."
            )


def _without_adapter(network: Any, settings: TrainerSettings) -> Any:
    """The network, with the adapter that a stage before left merged into it."""
    if settings.start_adapter is None or settings.lora is not None:
        return network
    try:
        return adapters.merge(network, Path(settings.start_adapter))
    except adapters.AdapterMismatch as error:
        raise ConfigError(f"model.model_path: {error}") from error


def _base_places(names: Iterable[str], network: Any) -> dict[str, str]:
    """Name in model.safetensors -> name in the network's state_dict, below an adapter or not."""
    present, places = network.state_dict().keys(), dict[str, str]()
    for name in names:
        module, _, parameter = name.rpartition(".")
        places[name] = name if name in present else f"{module}.base_layer.{parameter}"
    return places


def _written(tensors: Mapping[str, Tensor], path: Path) -> str:
    save_file(dict(tensors), path, metadata={"format": "pt"})
    # safetensors writes mode 0600, which processes of another user could not read
    path.chmod(0o644)
    return sha256_file(path)


def _loaded(kind: Any, path: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(path, **options)
    except Exception as error:  # transformers raises many kinds for a broken folder
        what = " ".join(str(error).split())
        raise ConfigError(
            f"model.model_path: {path} holds no whole model: {type(error).__name__}: {what} "
            "Name a folder with config.json, tokenizer.json and model.safetensors, or a model of "
            "the hub."
        ) from error


def _autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name == "float32":
        return None
    if name != "bfloat16":
        raise ConfigError(f"trainer dtype: {name!r} is neither float32 nor bfloat16.")
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported()
    else:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not supported:
        logger.warning("This device has no bfloat16 arithmetic: the learner computes in float32.")
        return None
    return torch.bfloat16
