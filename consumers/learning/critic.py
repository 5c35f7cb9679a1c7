"""The value model of PPO: what reward is still to come, before each token is chosen.

N trained tokens of a batch, n of them in a micro-batch, H hidden size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from ...schemas.errors import ConfigError
from ..algorithms.advantages import CriticAdvantage
from ..algorithms.advantages.advantage import trained
from ..algorithms.losses.critic import value_losses
from ..settings import TrainerSettings
from .batches import FlatBatch, assemble
from .device import DeviceBatch
from .examples import TrainingExample
from .model import PolicyModel
from .optimizer import ScheduledAdamW
from .ranks import Ranks

# the output layer's names in transformers' token classifiers; ours has no bias
HEAD, BIAS = "score.weight", "score.bias"


class Critic:
    """A network of the policy's kind with one output, and its own AdamW of the same settings.

    The output begins as 0, so the first advantages are returns. Source: PPO, arXiv:1707.06347,
    eq. 9; the clipped loss is in algorithms/losses/critic.py.
    """

    def __init__(
        self, settings: TrainerSettings, *, total_steps: int | None, ranks: Ranks | None = None
    ) -> None:
        """Load from `settings.critic_model_path`, or else from `settings.model_path`."""
        own = settings.critic_model_path
        whole = dataclasses.replace(
            settings,
            model_path=own or settings.model_path,
            lora=None,
            start_adapter=None if own else settings.start_adapter,
        )
        self.backbone = PolicyModel(whole)
        self._ranks = ranks or Ranks()
        network = self.backbone.network
        size = int(network.get_output_embeddings().weight.shape[1])
        self._head = torch.nn.Linear(size, 1, bias=False, device=self.backbone.device)
        torch.nn.init.zeros_(self._head.weight)
        self.backbone.shard(self._ranks)
        self._ranks.shard(self._head)
        self.optimizer = ScheduledAdamW(
            "critic",
            dict(self._named_parameters()),
            settings.algorithm.optimizer,
            total_steps=total_steps,
            ranks=self._ranks,
        )

    def values(self, batch: DeviceBatch) -> Tensor:
        """V before each trained token of a micro-batch, float32 [n]."""
        hidden = self.backbone.run(
            lambda: self.backbone.hidden(batch.input_ids, batch.lengths)[batch.predictors]
        )
        return self._head(hidden)[:, 0].float()

    def learn(
        self,
        flat: FlatBatch,
        examples: Sequence[TrainingExample],
        advantage: CriticAdvantage,
        *,
        budget: int,
        step: int,
    ) -> dict[str, float]:
        """One optimiser step towards the returns, the mean over trained tokens. Gives metrics.

        `examples` are those of `flat` in order, with the values that their advantages were made
        of.
        """
        num_tokens = len(flat.trained)
        if not num_tokens:
            return {}
        old = np.concatenate([trained(e, "values") for e in examples]).astype(np.float32)
        returns = old + np.concatenate([advantage.raw(e) for e in examples]).astype(np.float32)
        self.optimizer.zero_grad()
        total = 0.0
        for rows in self._ranks.plan(flat.lengths, budget):
            batch = DeviceBatch(assemble(flat, rows), flat, self.backbone.device)
            with self.backbone.autocast():
                values = self.values(batch)
            losses = value_losses(values, batch.moved(old), batch.moved(returns))
            loss = losses.sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
        total = sum(self._ranks.gathered(total))
        return {
            "critic/vf_loss": total,
            "critic/grad_norm": self.optimizer.update(step).grad_norm,
            "critic/vpred_mean": float(old.mean()),
            "critic/vf_explained_var": _explained(returns, old),
        }

    def state(self) -> dict[str, Any]:
        """Of one process: weights by the names of a token classifier, and optimiser.

        Loads with weights_only=True.
        """
        weights = {name: tensor.cpu().clone() for name, tensor in self.named_weights().items()}
        return {"weights": weights, "optimizer": self.optimizer.state()}

    def config(self) -> bytes:
        """config.json of the Hugging Face folder that the weights make up."""
        config = copy.deepcopy(self.backbone.network.config)
        config.dtype, config.num_labels = "float32", 1
        kind: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
        if kind is not None:
            config.architectures = [kind.__name__]
        return config.to_json_string().encode()

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        network = self.backbone.network
        prefix = network.base_model_prefix
        yield from network.base_model.named_parameters(prefix=prefix)
        yield HEAD, self._head.weight

    def named_weights(self) -> dict[str, Tensor]:
        """This rank's part of the weights, in place, named as in a token classifier."""
        prefix = f"{self.backbone.network.base_model_prefix}."
        names = self.backbone.named_weights()
        weights = {n: t for n, t in names.items() if n.startswith(prefix)}
        return {**weights, HEAD: self._head.weight.detach(), BIAS: torch.zeros(1)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Undo `state`; None on ranks above 0, which are sent their shards.

        Raises:
            ConfigError: it is another model's.
        """
        own = self.named_weights()
        weights = None if state is None else _weights(state)
        if weights is not None and (wrong := sorted(n for n in own if n not in weights)):
            raise ConfigError(
                f"critic: the checkpoint has no {wrong[0]}. Load one of the same "
                "model.critic_model_path."
            )
        for name, tensor in own.items():
            if name != BIAS:
                found = None if weights is None else weights[name]
                tensor.copy_(self._ranks.scattered(found, tensor))
        self.optimizer.load_state(None if state is None else state["optimizer"])


def _weights(state: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Of a state as it is, or as it was when the critic lay in the policy's optimiser file."""
    if "weights" in state:
        return state["weights"]
    return {**state["network"], HEAD: state["head"], BIAS: torch.zeros(1)}


def _explained(returns: np.ndarray, values: np.ndarray) -> float:
    """1 - var(R - V) / var(R); 0 where all returns are equal."""
    spread = float(returns.var())
    return 1 - float((returns - values).var()) / spread if spread > 0 else 0.0
