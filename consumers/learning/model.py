"""A causal language model as the learner uses it: loaded, run in two halves, saved.

T tokens of some sequences, hidden size H, n chosen places, vocabulary V.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
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
from ...streams.weights.object_storage import WEIGHTS_FILE
from ..settings import TrainerSettings
from .packing import Packing
from .ranks import Ranks
from .shards import whole

T = TypeVar("T")
logger = logging.getLogger("streamrft")


class PolicyModel:
    """Weights in float32; `dtype: bfloat16` computes in bfloat16 and keeps float32 weights.

    Attributes:
        network: the transformers model.
        tokenizer: with the configured chat template, if any.
        device: where the weights lie.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        """Load from `settings.model_path`, a folder or a name on the Hugging Face hub.

        Raises:
            ConfigError: an unknown dtype, a folder that is no whole model, a model whose logits
                are more than its head's, or one that mixes sequences in a row.
        """
        disable_progress_bar()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._autocast_dtype = _autocast_dtype(settings.dtype, self.device)
        self.tokenizer: Any = _loaded(AutoTokenizer, settings.model_path)
        if settings.chat_template is not None:
            self.tokenizer.chat_template = settings.chat_template
        # transformers takes scaled dot-product attention where the model has it
        network: Any = _loaded(AutoModelForCausalLM, settings.model_path, dtype=torch.float32)
        self.network = network.to(self.device).train()
        if settings.gradient_checkpointing:
            # renamed in transformers 5.24; the old name warns there
            old = self.network.gradient_checkpointing_enable
            enable = getattr(self.network, "activation_checkpointing_enable", old)
            enable({"use_reentrant": False})
        self._softcap = getattr(self.network.config, "final_logit_softcapping", None)
        self._static: dict[str, bytes] = {}
        self._ranks, self._names = Ranks(), list[str]()
        self.num_logits = int(self.network.get_output_embeddings().weight.shape[0])
        self._packing = Packing(self.network, settings.model_path)
        self._check_head(settings.model_path)

    def shard(self, ranks: Ranks) -> None:
        """Leave this rank its part of the weights, where there are several ranks."""
        if ranks.size == 1:
            return
        # FSDP renames the class, and tied weights are told apart by their memory
        self._static, self._names = self._static_files(), list(self.state_dict())
        ranks.shard(self.network)
        self._ranks = ranks

    def run(self, call: Callable[[], T], network: Any = None) -> T:
        """What `call` returns, which passes the network; all of its weights are at hand inside."""
        if self._ranks.size == 1:
            return call()
        network = self.network if network is None else network
        return network.gathered_for(call)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Measure as engines do: what a model drops at random is for its training passes."""
        self.network.eval()
        try:
            yield
        finally:
            self.network.train()

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

    def state_dict(self) -> dict[str, Tensor]:
        """Weights by the names of model.safetensors, on the CPU, a tied head left out.

        All ranks gather them; only rank 0 gets them, the others an empty dictionary.
        """
        if self._ranks.size > 1:
            return self._gathered()
        state = {n: t.detach() for n, t in self.network.state_dict().items()}
        state = remove_tied_weights_from_state_dict(state, self.network)
        return {n: t.cpu().contiguous() for n, t in state.items()}

    def named_weights(self) -> dict[str, Tensor]:
        """This rank's part of the weights, in place, by the names of `state_dict`."""
        state = {n: t.detach() for n, t in self.network.state_dict().items()}
        names = self._names or remove_tied_weights_from_state_dict(dict(state), self.network)
        return {n: state[n] for n in names}

    def _gathered(self) -> dict[str, Tensor]:
        kept = dict[str, Tensor]()
        for name, part in self.named_weights().items():
            tensor = whole(part)
            if self._ranks.rank == 0:
                kept[name] = tensor.cpu().contiguous()
        return kept

    def check_weights(self, state: Mapping[str, Tensor]) -> None:
        """Raise ConfigError for names or shapes that are not this model's."""
        own = self.network.state_dict()
        own = {n: own[n] for n in self._names} if self._names else self.state_dict()
        if wrong := sorted(own.keys() ^ state.keys()):
            raise ConfigError(
                f"weights: {len(wrong)} names differ from the model's, such as {wrong[0]!r}. Load "
                "a checkpoint of the same model.model_path."
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ConfigError(
                    f"weights: {name} has shape {tuple(state[name].shape)}, the model's is "
                    f"{tuple(tensor.shape)}. Load a checkpoint of the same model.model_path."
                )

    def load_weights(self, state: Mapping[str, Tensor] | None) -> None:
        """Replace the weights in place, on all ranks by those of rank 0; None on the others.

        Raises:
            ConfigError: names or shapes that are not this model's.
        """
        if state is not None:
            self.check_weights(state)
        if self._ranks.size == 1:
            assert state is not None
            self.network.load_state_dict(dict(state), strict=False)
            return
        own = self.network.state_dict()
        for name in self._names:
            values = self._ranks.scattered(None if state is None else state[name], own[name])
            own[name].copy_(values)

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> str:
        """Write config, tokenizer and one model.safetensors; returns the sha256 of the latter.

        `state` is written in place of the present weights; names as in `state_dict`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if not self._static:
            self._static = self._static_files()
        for name, content in self._static.items():
            (folder / name).write_bytes(content)
        weights = folder / WEIGHTS_FILE
        tensors = self.state_dict() if state is None else dict(state)
        save_file(tensors, weights, metadata={"format": "pt"})
        # safetensors writes mode 0600, which processes of another user could not read
        weights.chmod(0o644)
        return sha256_file(weights)

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
