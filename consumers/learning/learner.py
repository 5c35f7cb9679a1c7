"""One optimiser step after another on a causal language model: the torch half of the trainer."""

from __future__ import annotations

import copy
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schemas.errors import InvalidEvent
from ..algorithms.build import build_algorithm
from ..algorithms.tokens import Tokens
from ..settings import TrainerSettings
from . import schedules
from .batches import Indices, MicroBatch, assemble, plan
from .examples import TrainingExample
from .logprobs import token_logprobs
from .model import PolicyModel
from .objective import Objective, Totals, batch_metrics, micro_loss, prepare

logger = logging.getLogger("streamrft")

# larger micro-batches leave a CPU's cache: 8192 tokens took 1.3 times as long as 2048
CPU_MICROBATCH_TOKENS = 2048


class Learner:
    """Model, optimiser and algorithm of one trainer process.

    `step` may be called with any batch at any step number: the learning rate is a function of
    the step, so that weights, `optimizer_state` and `rng_state` are all there is to save.
    The reference model of a KL term is the model as loaded from `settings.model_path`.
    """

    def __init__(self, settings: TrainerSettings, *, total_steps: int | None) -> None:
        """Load model and tokenizer from `settings.model_path`.

        Sets torch's seed, its number of threads where settings name one, and in deterministic
        mode its deterministic algorithms, for the whole process.

        Raises:
            ConfigError: an unknown algorithm, function or argument, or a schedule that needs
                total_steps without it.
        """
        self._settings, self._total_steps = settings, total_steps
        self._optimizer_settings = settings.algorithm.optimizer
        self.algorithm = build_algorithm(settings.algorithm)
        schedules.check(self._optimizer_settings, total_steps)
        _prepare_torch(settings)
        self._policy = PolicyModel(settings)
        self._reference = self._frozen_copy() if self.algorithm.kl.is_active else None
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._optimizer_settings.lr,
            betas=self._optimizer_settings.betas,
            weight_decay=self._optimizer_settings.weight_decay,
            fused=True,
        )
        on_cpu = self._policy.device.type == "cpu"
        budget = settings.max_tokens_per_microbatch
        self._budget = min(budget, CPU_MICROBATCH_TOKENS) if on_cpu else budget

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._policy.network

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, with the configured chat template."""
        return self._policy.tokenizer

    def check(self, example: TrainingExample) -> None:
        """Raise InvalidEvent for tokens that the model does not know. Cheap; before a cut."""
        limit = self.model.get_input_embeddings().weight.shape[0]
        for i, sequence in enumerate(example.sequences):
            low, high = int(sequence.tokens.min()), int(sequence.tokens.max())
            if low < 0 or high >= limit:
                raise InvalidEvent(
                    f"{example.trajectory_id}: sequences[{i}].tokens holds "
                    f"{low if low < 0 else high}, the model knows ids 0 to {limit - 1}. Was it "
                    "written with another tokenizer?",
                    field="tokens",
                )

    def step(self, examples: Sequence[TrainingExample], *, step: int) -> dict[str, float]:
        """Train on one batch; `step` is 1 for the first optimiser step. Returns metrics.

        The metrics are the contract's actor/*, reward/*, response_length/mean, num_groups,
        time/train_s and perf/tokens_per_s. A batch in which no token has a loss (none is
        trained, or all advantages are 0 and nothing else counts), or whose gradient is not
        finite, leaves weights and optimiser as they were: actor/skipped_updates is 1.
        """
        began = time.perf_counter()
        objective = prepare(examples, self.algorithm, max_tokens=self._settings.max_sequence_tokens)
        self._optimizer.zero_grad(set_to_none=True)
        totals = Totals()
        lengths = objective.flat.lengths[objective.active]
        for rows in plan(lengths, self._budget):
            self._backward(objective, objective.active[rows], totals)
        metrics = {"actor/loss": 0.0, "actor/pg_loss": 0.0} | totals.metrics()
        metrics |= self._update(step, has_loss=len(lengths) > 0)
        metrics |= batch_metrics(examples)
        seconds = time.perf_counter() - began
        num_tokens = sum(e.num_tokens for e in examples)
        return metrics | {"time/train_s": seconds, "perf/tokens_per_s": num_tokens / seconds}

    def _backward(self, objective: Objective, rows: Indices, totals: Totals) -> None:
        """Forward and backward pass of one micro-batch; gradients add up."""
        micro = assemble(objective.flat, rows)
        batch = _Tensors(micro, objective, self._policy.device)
        with self._policy.autocast():
            ref_logprobs = None
            if self._reference is not None:
                with torch.no_grad():
                    ref_logprobs, _ = self._logprobs(batch, self._reference)
            logprobs, entropies = self._logprobs(
                batch, self.model, with_entropy=self.algorithm.entropy.is_active
            )
        tokens = Tokens(
            logprobs, batch.old_logprobs, batch.advantages, batch.sequence, len(micro.input_ids)
        )
        loss, metrics = micro_loss(
            self.algorithm,
            tokens,
            batch.weights,
            entropies=entropies,
            ref_logprobs=ref_logprobs,
        )
        loss.backward()
        totals.add(metrics, len(micro.targets))

    def _logprobs(
        self, batch: _Tensors, network: Any, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self._policy.hidden(batch.input_ids, network)
        return token_logprobs(
            hidden.flatten(0, 1)[batch.predictors],
            lambda h: self._policy.head(h, network),
            batch.targets,
            batch.temperatures,
            num_logits=self._policy.num_logits,
            with_entropy=with_entropy,
        )

    def _update(self, step: int, *, has_loss: bool) -> dict[str, float]:
        """Clip and apply the gradient, unless there is none or it is not finite."""
        lr = schedules.learning_rate(self._optimizer_settings, step, self._total_steps)
        clip = self._optimizer_settings.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, clip if clip > 0 else math.inf)
        grad_norm = float(norm)
        is_applied = has_loss and math.isfinite(grad_norm)
        if is_applied:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        elif has_loss:
            logger.warning("step %d: gradient norm is %s, the update is skipped", step, grad_norm)
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "actor/grad_norm": grad_norm,
            "actor/lr": lr,
            "actor/skipped_updates": 0.0 if is_applied else 1.0,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Weights as model.safetensors holds them: on the CPU, a tied head left out."""
        return self._policy.state_dict()

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Replace the weights in place; names as in `state_dict`, else ConfigError."""
        self._policy.load_weights(state)

    def save_hf(self, folder: Path) -> str:
        """Write the Hugging Face folder; returns the sha256 of model.safetensors.

        config.json, generation_config.json, tokenizer files, chat_template.jinja and one
        model.safetensors, whose bytes are a function of the weights alone.
        """
        return self._policy.save(folder)

    def optimizer_state(self) -> dict[str, Any]:
        """For torch.save; loads with weights_only=True."""
        return self._optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Undo `optimizer_state`."""
        self._optimizer.load_state_dict(dict(state))

    def rng_state(self) -> dict[str, Tensor]:
        """Random generators of torch, for torch.save."""
        states = {"cpu": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_rng_state(self, state: Mapping[str, Tensor]) -> None:
        """Undo `rng_state`."""
        torch.set_rng_state(state["cpu"].cpu())
        if "cuda" in state and self._policy.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu())

    def _frozen_copy(self) -> Any:
        return copy.deepcopy(self.model).eval().requires_grad_(False)


class _Tensors:
    """One micro-batch on the device. Shapes as in MicroBatch; the rest float32 [n]."""

    def __init__(self, micro: MicroBatch, objective: Objective, device: torch.device) -> None:
        def move(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.input_ids = move(micro.input_ids)
        self.predictors, self.targets = move(micro.predictors), move(micro.targets)
        self.sequence = move(micro.sequence)
        self.temperatures = None if micro.temperatures is None else move(micro.temperatures)
        self.old_logprobs = move(objective.flat.old_logprobs[micro.trained])
        self.advantages = move(objective.advantages[micro.trained])
        self.weights = move(objective.weights[micro.trained])


def _prepare_torch(settings: TrainerSettings) -> None:
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    torch.manual_seed(settings.seed)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # filling every new tensor with NaN is a debugging aid that costs time
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False
