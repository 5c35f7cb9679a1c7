"""One optimiser step after another on a causal language model: the torch half of the trainer."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import InvalidEvent
from ..algorithms.advantages import CriticAdvantage
from ..algorithms.build import build_algorithm
from ..algorithms.catalogue import check_sources
from ..algorithms.kl import KlLoss
from ..algorithms.losses.preference import kto_baseline
from ..settings import AlgorithmSettings, TrainerSettings
from . import schedules
from .batches import Indices, assemble, flatten
from .critic import Critic
from .device import DeviceBatch, token_budget
from .examples import TrainingExample
from .logprobs import token_logprobs, token_statistics
from .mismatched import mismatched, sequence_sums
from .model import PolicyModel
from .objective import (
    MicroTerms,
    Objective,
    Totals,
    batch_metrics,
    length_bias,
    micro_loss,
    prepare,
)
from .optimizer import ScheduledAdamW
from .preparation import chosen_for, corrected, penalised, with_measured
from .ranks import Ranks, seed_of
from .reproducible import prepare_torch
from .savable import Savable


class Learner(Savable):
    """Model, optimiser and algorithm of one trainer process, or of one rank of several.

    `step` may be called with any batch at any step number: the learning rate is a function of
    the step, so that weights, `optimizer_state` and `rng_state` are all there is to save.
    The reference model of a KL term is the policy that training began with: the model as loaded
    from `settings.model_path`, with the adapter of `settings.start_adapter` if there is one.
    """

    def __init__(
        self, settings: TrainerSettings, *, total_steps: int | None, ranks: Ranks | None = None
    ) -> None:
        """Load model and tokenizer from `settings.model_path`; every rank does, then shards it.

        Sets torch's seed, its number of threads where settings name one, and in deterministic
        mode its deterministic algorithms, for the whole process.

        Raises:
            ConfigError: an unknown algorithm, function or argument, one that waits for a source
                of data, or a schedule that needs total_steps without it.
        """
        self._settings = settings
        self._ranks = ranks or Ranks()
        self.algorithm = build_algorithm(settings.algorithm)
        _check_sources(settings.algorithm)
        schedules.check(settings.algorithm.optimizer, total_steps)
        prepare_torch(settings)
        self._policy = PolicyModel(settings)
        if self.algorithm.needs_reference:
            self._policy.keep_reference()
        self._policy.shard(self._ranks)
        self._optimizer = ScheduledAdamW(
            "policy",
            {n: p for n, p in self.model.named_parameters() if p.requires_grad},
            settings.algorithm.optimizer,
            total_steps=total_steps,
            ranks=self._ranks,
        )
        needs_critic = isinstance(self.algorithm.advantage, CriticAdvantage)
        self._critic = (
            Critic(settings, total_steps=total_steps, ranks=self._ranks) if needs_critic else None
        )
        width = int(self.model.get_input_embeddings().weight.shape[1])
        self._budget = token_budget(settings.max_tokens_per_microbatch, self._policy.device, width)
        # nobody takes part before all have loaded
        self._ranks.gathered(None)
        if self._ranks.rank > 0:
            # drop-out masks are the rank's own
            torch.manual_seed(seed_of(settings.seed, self._ranks.rank))

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._policy.network

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, with the configured chat template."""
        return self._policy.tokenizer

    def check(self, example: TrainingExample) -> None:
        """Raise InvalidEvent for what the model or the loss cannot take. Cheap; before a cut."""
        num_sequences = len(example.sequences)
        if num_sequences != 1 and getattr(self.algorithm.policy_loss, "is_paired", False):
            raise InvalidEvent(
                f"{example.trajectory_id}: {num_sequences} sequences; a side of a pair is one.",
                field="sequences",
            )
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

        Raises:
            RanksLost: another rank ended or does not answer.
        """
        with self._ranks.together("step", examples=examples, step=step):
            return self._step(examples, step)

    def _step(self, examples: Sequence[TrainingExample], step: int) -> dict[str, float]:
        began = time.perf_counter()
        self._optimizer.zero_grad()
        chosen = chosen_for(self.algorithm.policy_loss, examples)
        ready, metrics = self._prepared(chosen)
        objective = prepare(ready, self.algorithm, max_tokens=self._settings.max_sequence_tokens)
        if getattr(self.algorithm.policy_loss, "needs_kl_baseline", False):
            objective = dataclasses.replace(objective, kl_baseline=self._kl_baseline(chosen))
        totals, cuts = Totals(), objective.cuts(self._budget, self._ranks.plan)
        if self._critic is not None and step <= self._settings.critic_warmup:
            cuts = []
        for rows in cuts:
            self._backward(objective, rows, totals, step)
        totals = Totals.of(self._ranks.gathered(totals.plain()))
        metrics |= {"actor/loss": 0.0, "actor/pg_loss": 0.0} | totals.metrics()
        metrics |= self._update(step, has_loss=len(cuts) > 0)
        metrics |= self._taught(objective, ready, step)
        metrics |= self._steered("kl_coef", self.algorithm.kl, metrics, len(chosen))
        metrics |= batch_metrics(chosen) | length_bias(chosen, objective)
        metrics["sample/unusable"] = float(len(examples) - len(chosen))
        seconds = time.perf_counter() - began
        num_tokens = sum(e.num_tokens for e in examples)
        return metrics | {"time/train_s": seconds, "perf/tokens_per_s": num_tokens / seconds}

    def _taught(
        self, objective: Objective, examples: Sequence[TrainingExample], step: int
    ) -> dict[str, float]:
        """Let the critic learn from the same batch, where there is one."""
        if self._critic is None:
            return {}
        advantage = self.algorithm.advantage
        assert isinstance(advantage, CriticAdvantage)
        return self._critic.learn(
            objective.flat, examples, advantage, budget=self._budget, step=step
        )

    def _prepared(
        self, examples: Sequence[TrainingExample]
    ) -> tuple[Sequence[TrainingExample], dict[str, float]]:
        """The batch measured, penalised and corrected, as far as the algorithm asks."""
        algorithm, metrics = self.algorithm, dict[str, float]()
        if algorithm.measures:
            examples = with_measured(examples, self._measured(examples, algorithm.measures))
        if algorithm.kl_penalty.is_active:
            coef = self._coefficient("kl_penalty_coef", algorithm.kl_penalty)
            examples, metrics = penalised(examples, algorithm.kl_penalty, coef)
            kl = {"actor/kl_loss": metrics.get("critic/kl", math.nan)}
            self._steered("kl_penalty_coef", algorithm.kl_penalty, kl, len(examples))
        if algorithm.correction is not None:
            examples, weighed = corrected(examples, algorithm.correction)
            metrics |= weighed
        return examples, metrics

    def _kl_baseline(self, examples: Sequence[TrainingExample]) -> float:
        others = mismatched(examples, max_tokens=self._settings.max_sequence_tokens)
        found = self._measured(others, frozenset({"current_logprobs", "ref_logprobs"}))
        change = found["current_logprobs"] - found["ref_logprobs"]
        return kto_baseline(sequence_sums(others, change))

    @torch.no_grad()
    def _measured(
        self, examples: Sequence[TrainingExample], wanted: frozenset[str]
    ) -> dict[str, Any]:
        """Fields of TrainingSequence as the models give them before the step, float32 [N] each."""
        flat = flatten([s for e in examples for s in e.sequences if s.is_trained.any()])
        fields = {n: np.zeros(len(flat.trained), np.float32) for n in wanted}
        models = [self._policy] if self._critic is None else [self._policy, self._critic.backbone]
        with ExitStack() as measuring:
            for model in models:
                measuring.enter_context(model.without_dropout())
            for rows in self._ranks.plan(flat.lengths, self._budget):
                micro = assemble(flat, rows)
                batch = DeviceBatch(micro, flat, self._policy.device)
                for name, values in self._pass(batch, wanted).items():
                    fields[name][micro.trained] = values.float().cpu().numpy()
        parts = self._ranks.gathered(fields)
        return {name: functools.reduce(np.add, [p[name] for p in parts]) for name in fields}

    def _pass(self, batch: DeviceBatch, wanted: frozenset[str]) -> dict[str, Tensor]:
        """The wanted fields at one micro-batch's trained tokens, [n] each."""
        found = dict[str, Tensor]()
        with self._policy.autocast():
            if "ref_logprobs" in wanted:
                found["ref_logprobs"] = self._ref_logprobs(batch)
            if self._critic is not None:
                found["values"] = self._critic.values(batch)
            if "entropies" in wanted:
                logprobs, entropies, signals = self._statistics(batch)
                found |= {"entropies": entropies, "expected_signals": signals}
                found["current_logprobs"] = logprobs
            elif "current_logprobs" in wanted:
                found["current_logprobs"], _ = self._logprobs(batch, self.model)
        return {name: values for name, values in found.items() if name in wanted}

    def _statistics(self, batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor]:
        return self._policy.run(
            lambda: token_statistics(
                self._policy.hidden(batch.input_ids, batch.lengths)[batch.predictors],
                self._policy.head,
                batch.targets,
                batch.temperatures,
                num_logits=self._policy.num_logits,
            )
        )

    def _backward(self, objective: Objective, rows: Indices, totals: Totals, step: int) -> None:
        """Forward and backward pass of one micro-batch; gradients add up."""
        micro = assemble(objective.flat, rows)
        batch = DeviceBatch(micro, objective.flat, self._policy.device)
        with self._policy.autocast():
            ref_logprobs = None
            if self.algorithm.reads_reference:
                ref_logprobs = self._ref_logprobs(batch)
            logprobs, entropies = self._logprobs(
                batch, self.model, with_entropy=self.algorithm.entropy.is_active
            )
        if not len(rows):  # other ranks have a micro-batch now, and need this one's shards
            logprobs.sum().backward()
            return
        tokens = batch.tokens(objective, rows, logprobs, ref_logprobs, step)
        terms = MicroTerms(
            weights=batch.moved(objective.weights),
            shared_weights=batch.moved(objective.shared_weights),
            behaviour_logprobs=batch.moved(objective.flat.behaviour_logprobs),
            correction=batch.moved(objective.flat.correction),
            entropies=entropies,
            kl_coef=self._coefficient("kl_coef", self.algorithm.kl),
        )
        loss, metrics = micro_loss(self.algorithm, tokens, terms)
        loss.backward()
        totals.add(metrics, len(tokens.own(tokens.sequence)))

    @torch.no_grad()
    def _ref_logprobs(self, batch: DeviceBatch) -> Tensor:
        with self._policy.reference() as network:
            return self._logprobs(batch, network)[0]

    def _logprobs(
        self, batch: DeviceBatch, network: Any, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return self._policy.run(
            lambda: token_logprobs(
                self._policy.hidden(batch.input_ids, batch.lengths, network)[batch.predictors],
                lambda h: self._policy.head(h, network),
                batch.targets,
                batch.temperatures,
                num_logits=self._policy.num_logits,
                with_entropy=with_entropy,
            ),
            network,
        )

    def _update(self, step: int, *, has_loss: bool) -> dict[str, float]:
        update = self._optimizer.update(step, has_loss=has_loss)
        return {
            "actor/grad_norm": update.grad_norm,
            "actor/lr": update.lr,
            "actor/skipped_updates": 0.0 if update.is_applied else 1.0,
        }

    def _coefficient(self, name: str, kl: KlLoss) -> float:
        """The coefficient in force; an adaptive one lies with the optimiser, so it is saved."""
        return self._optimizer.kept.get(name, kl.kl_coef)

    def _steered(
        self, name: str, kl: KlLoss, metrics: Mapping[str, float], num_examples: int
    ) -> dict[str, float]:
        """Set the next step's coefficient by this step's KL; nothing where it is fixed."""
        if kl.target_kl is None:
            return {}
        coef = self._coefficient(name, kl)
        measured = metrics.get("actor/kl_loss", math.nan)
        self._optimizer.kept[name] = kl.next_coef(coef, measured, num_examples)
        return {f"actor/{name}": coef}

    def check_ranks(self) -> None:
        """Raise RanksLost when another rank is known to be gone. Cheap."""
        self._ranks.check()

    def follow(self) -> None:
        """On ranks above 0: do what rank 0 does, until it ends. Raises RanksLost."""
        while (order := self._ranks.next_order()) is not None:
            name, arguments = order
            getattr(self, name)(**arguments)


def _check_sources(settings: AlgorithmSettings) -> None:
    advantage, policy = settings.advantage_fn, settings.policy_loss_fn
    check_sources(
        settings.algorithm_type,
        advantage_fn=advantage.name if advantage else None,
        policy_loss_fn=policy.name if policy else None,
    )
