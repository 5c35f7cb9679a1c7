"""The loop of the trainer: recorded cuts first, then live.

Before a step its cut is on the log; so a step that was begun is trained again by whoever comes
after, on the same experiences in the same order, and weights and position are one fact.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..schemas.errors import StreamrftError, Timeout
from ..schemas.events import Cut, TrainStep, now_ms
from ..streams import faults
from ..streams.lineage import Lineage
from ..streams.process import Process
from .peers import Peers
from .recorded import History
from .saving import Saver
from .sources.source import Batch

logger = logging.getLogger("streamrft")

POLL_MS = 500
RETRY_S = 0.5


@dataclass
class TrainingLoop:
    """trains recorded cuts -> trains live -> finished (or stopped, or an error that says why).

    `step` counts the steps done; `total_steps` None trains until the source ends.
    """

    process: Process
    history: History
    lineage: Lineage
    saver: Saver
    peers: Peers
    step: int
    total_steps: int | None

    def __post_init__(self) -> None:
        # what is saved and announced is what the loop trains, reads and cuts
        self.settings, self.keeper = self.saver.settings, self.saver.keeper
        self.announcer, self.learner = self.saver.announcer, self.saver.learner
        self.source = self.saver.source

    def run(self) -> None:
        """Train until the goal; the last step's full checkpoint is written before it returns."""
        while not self._is_done:
            began = time.monotonic()
            cut = self.history.recorded_cut(self.lineage, self.step + 1)
            if cut is not None:
                batch = self._await(lambda c=cut: self.source.recorded(c), lambda: False)
            else:
                batch = self._await(self._next_batch, lambda: self.source.is_finished)
            if batch is None:
                break
            with self.keeper.working():
                self._train(batch, cut, wait_s=time.monotonic() - began)
        with self.keeper.working():
            if self.process.is_stopping and not self._is_done:
                self.saver.shorten_resume(self.step)
            else:
                self.saver.finish(self.step)
        logger.info("%s ends after step %d", self.process.name, self.step)

    def close(self) -> None:
        """Stop reading."""
        self.source.close()
        self.peers.close()

    @property
    def _is_done(self) -> bool:
        return self.total_steps is not None and self.step >= self.total_steps

    def _next_batch(self) -> Batch | None:
        batch = self.source.next_batch(self.step)
        if batch is None and not self.source.is_finished:
            self.source.poll(self.step, POLL_MS)
        return batch

    def _await(
        self, ask: Callable[[], Batch | None], is_finished: Callable[[], bool]
    ) -> Batch | None:
        """Ask until there is a batch; None when the source is finished or the process stops.

        Raises:
            Timeout: for max_read_timeout no record came and nobody who feeds was at work.
        """
        moved_at, moved = time.monotonic(), self.source.num_read
        while not self.process.is_stopping:
            self.keeper.check()
            self.learner.check_ranks()
            self.saver.settle()
            try:
                if (batch := ask()) is not None:
                    return batch
                if is_finished():
                    return None
                blocker = self.source.blocker(self.step + 1)
            except StreamrftError as error:
                if not error.retriable:
                    raise
                blocker = str(error)
                time.sleep(RETRY_S)
            blocker = self.saver.retry(self.step) or blocker
            self.process.idle(blocker)
            self.peers.look()
            if moved != self.source.num_read or self.peers.is_anyone_working():
                moved_at, moved = time.monotonic(), self.source.num_read
            elif (time.monotonic() - moved_at) * 1000 > self.settings.max_read_timeout_ms:
                raise Timeout(
                    f"{self.process.name}: {blocker}",
                    self.settings.max_read_timeout_ms,
                    f"{self.peers.describe()} Start what is missing, or raise max_read_timeout.",
                )
        return None

    def _train(self, batch: Batch, cut: Cut | None, *, wait_s: float) -> None:
        step = self.step + 1
        if cut is None and batch.members:
            self.announcer.publish("train_steps", self._cut(step, batch))
            faults.reach("trainer.cut_published", step)
        metrics = self.learner.step(batch.examples, step=step)
        faults.reach("trainer.step_done", step)
        self.source.take(batch)
        self.step = step
        metrics = {**metrics, **_staleness(batch, step), "time/wait_s": wait_s}
        if (produced := self.source.produced_length) is not None:
            metrics["response_length/produced_mean"] = produced
        self.process.alive({"step": step, **_gauges(metrics)})
        if not self.history.is_done(self.lineage, step):
            self.announcer.publish("train_steps", self._train_step(batch, metrics))
        self.saver.after_step(step, is_last=self._is_done)
        logger.info("step %d: %s", step, _in_words(metrics))

    def _cut(self, step: int, batch: Batch) -> Cut:
        parent = self.saver.newest_full
        assert parent is not None, "step 0 is saved before the first cut"
        return Cut(
            branch=self.lineage.branch,
            step=step,
            members=list(batch.members),
            parent=parent.uri,
            epoch=self.announcer.epoch,
            produced_at=now_ms(),
        )

    def _train_step(self, batch: Batch, metrics: Mapping[str, float]) -> TrainStep:
        return TrainStep(
            branch=self.lineage.branch,
            step=self.step,
            num_experiences=len(batch.experiences),
            num_tokens=sum(e.num_tokens for e in batch.experiences),
            metrics={name: float(value) for name, value in metrics.items()},
            epoch=self.announcer.epoch,
            produced_at=now_ms(),
        )


def _staleness(batch: Batch, step: int) -> dict[str, float]:
    """Steps done before this one minus the oldest policy_version of each experience."""
    if not batch.members:
        return {}
    staleness = [step - 1 - e.min_policy_version for e in batch.experiences]
    return {
        "sample/staleness_mean": float(np.mean(staleness)),
        "sample/staleness_max": float(max(staleness)),
    }


def _gauges(metrics: Mapping[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k in ("perf/tokens_per_s", "reward/mean")}


def _in_words(metrics: Mapping[str, float]) -> str:
    shown = ("reward/mean", "actor/loss", "actor/grad_norm", "time/wait_s", "time/train_s")
    return ", ".join(f"{k} {metrics[k]:.4g}" for k in shown if k in metrics)
