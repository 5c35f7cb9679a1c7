"""When checkpoints are saved and how they are announced; a save that fails is tried again.

Weights for explorers are written before training goes on, since they wait for them; the states of
a full checkpoint are copied, and written while training goes on (trainer.async_save).
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schemas.errors import LogUnavailable, Timeout
from ..schemas.events import Checkpoint, SaveFailed, now_ms
from ..streams import faults
from ..streams.weights.object_storage import WeightsUnavailable, load_state_dict
from .announcer import Announcer
from .background import BackgroundSave
from .bases import save_base
from .checkpoints import (
    NUM_SERVED,
    CheckpointFailed,
    CheckpointStore,
    Contents,
    storage_errors,
)
from .copies import drop_copies
from .lease import LeaseKeeper
from .manifest import BaseModel, Saved
from .settings import TrainerSettings
from .sources.source import Source
from .states import ShardedStates, States, copied, states_of

if TYPE_CHECKING:
    from .learning.learner import Learner

logger = logging.getLogger("streamrft")

RETRY_S = 5.0
STOP_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True)
class _Due:
    """A save that is to be made."""

    is_full: bool
    is_rolling: bool = False


@dataclass
class _Owed:
    """A save of a step that failed and is tried again."""

    step: int
    due: _Due
    why: str
    next_try: float


@dataclass
class Saver:
    """Saves and announces what a step made. `announced`: version -> its first announcement.

    `base` is the model below the adapter, where one is trained.

    A version that was announced keeps its bytes: made again after a crash it is compared; another
    digest is reported, and training goes on from the announced weights, which explorers serve.
    """

    settings: TrainerSettings
    store: CheckpointStore
    announcer: Announcer
    keeper: LeaseKeeper
    learner: Learner
    source: Source
    announced: dict[int, Checkpoint]
    steps_in_use: Callable[[], Collection[int]] = tuple
    newest_full: Saved | None = None
    base: BaseModel | None = None
    _owed: _Owed | None = None
    _writing: BackgroundSave | None = None
    _begun: _Due = _Due(True)
    _last_full: float = field(default_factory=time.monotonic)

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Save what this step asks for; a failure is owed, but at the first and last step.

        Raises:
            CheckpointFailed: that of step 0, or of the last, could not be written in time.
        """
        self.settle()
        if step in self.announced:
            self._stand_by(self.announced[step])
        if self._due(step, is_last) is None or not self._land():
            return
        # what was landed may have failed, and is owed by this save
        if (due := self._due(step, is_last)) is None:
            return
        if is_last or step == 0:
            self._insist(step, due)
        else:
            self._try(step, due)

    def go_on_from(self, saved: Saved) -> None:
        """Announce again what training goes on from: a kill may have come before the first time."""
        self.newest_full = saved
        if self.stands(saved.manifest.step, saved.manifest.digest):
            self.announce(saved, self.store.branch)

    def settle(self) -> None:
        """Announce the save in the background if it is whole by now; does not wait for it."""
        if self._writing is None or not self._writing.is_done:
            return
        done, self._writing = self._writing, None
        try:
            saved = done.result()
        except CheckpointFailed as error:
            self._owe(done.step, error, self._begun)
            return
        self._owed = None
        self._publish(done.step, saved, done.position)

    def retry(self, step: int) -> str | None:
        """Try an owed save again, at most every 5 s; what is owed still, in words."""
        self.settle()
        owed = self._owed
        if owed and self._writing is None and time.monotonic() >= owed.next_try:
            self._try(step, owed.due)
        return f"the storage of checkpoints: {self._owed.why}" if self._owed else None

    def finish(self, step: int) -> None:
        """The last full checkpoint. Raises CheckpointFailed when it cannot be written in time."""
        if not self._land():
            raise CheckpointFailed(
                f"step {step} is not saved: the save before it does not end, and the trainer is "
                "asked to stop. Start it again: it trains the steps since its last full "
                "checkpoint from their cuts."
            )
        if not self._is_full(step) or self._owed is not None:
            self._insist(step, _Due(True))
        self._retire(spared_copies=1 if self.settings.save_hf_checkpoint == "last" else 0)

    def shorten_resume(self, step: int) -> None:
        """A full checkpoint before an early end, if steps were done since the last one."""
        if self._land() and not self._is_full(step):
            self._try(step, _Due(True, is_rolling=True), waits=True)

    def stands(self, step: int, digest: str) -> bool:
        """Whether `digest` may be announced for the version."""
        first = self.announced.get(step)
        if first is None or first.digest == digest:
            return True
        logger.warning(
            "policy_version %d of branch %s was announced with digest %s, training it again gave "
            "%s; what was announced stands and is trained on. Was the number of threads, the "
            "device or a library changed?",
            step,
            self.store.branch,
            first.digest,
            digest,
        )
        return False

    def announce(self, saved: Saved, branch: str) -> None:
        """Publish the Checkpoint event of a whole folder on `branch`; readers take repeats."""
        event = Checkpoint(
            branch=branch,
            step=saved.manifest.step,
            kind=saved.manifest.kind,
            uri=saved.uri,
            digest=saved.manifest.digest,
            manifest_sha256=saved.manifest_sha256,
            epoch=self.announcer.epoch,
            produced_at=now_ms(),
            base_uri=self.base.uri if self.base else "",
            base_digest=self.base.digest if self.base else "",
        )
        self.announcer.publish("checkpoints", event)
        self.announced.setdefault(event.step, event)

    def _is_full(self, step: int) -> bool:
        return self.newest_full is not None and self.newest_full.manifest.step == step

    def _is_resume_point_old(self) -> bool:
        return time.monotonic() - self._last_full >= self.settings.resume_minutes * 60

    def _due(self, step: int, is_last: bool) -> _Due | None:
        every = self.settings.save_interval
        if is_last or step == 0 or (every and step % every == 0):
            return _Due(True)
        if self._owed is not None and self._owed.due.is_full:
            return self._owed.due
        if self._is_resume_point_old():
            return _Due(True, is_rolling=True)
        if (self._is_served(step) or self._owed is not None) and step not in self.announced:
            return _Due(False)
        return None

    def _is_served(self, step: int) -> bool:
        return self.settings.sft is None and step % self.settings.sync_interval == 0

    def _try(self, step: int, due: _Due, *, waits: bool = False) -> None:
        try:
            if due.is_full and self.settings.async_save and not waits:
                self._begin(step, due)
            else:
                self._save(step, due)
                self._owed = None
        except CheckpointFailed as error:
            self._owe(step, error, due)

    def _insist(self, step: int, due: _Due) -> None:
        """Save while training waits, again and again; what it waits for is said meanwhile.

        Raises:
            CheckpointFailed: not within max_read_timeout, or soon after the process shall stop.
        """
        began, limit_s = time.monotonic(), self.settings.max_read_timeout_ms / 1000
        while True:
            self._try(step, due, waits=True)
            if self._owed is None:
                return
            with self.keeper.waiting():
                while time.monotonic() < self._owed.next_try:
                    waited_s = time.monotonic() - began
                    if waited_s > (STOP_S if self.keeper.is_stopping else limit_s):
                        raise CheckpointFailed(
                            f"step {step} is not saved after {waited_s:.0f} s: {self._owed.why}. "
                            "Make room or bring the storage back, and start the trainer again: it "
                            "trains the steps since its last full checkpoint from their cuts."
                        )
                    self.keeper.say(f"the storage of checkpoints: {self._owed.why}")
                    self.learner.check_ranks()
                    time.sleep(_POLL_S)

    def _owe(self, step: int, error: CheckpointFailed, due: _Due) -> None:
        """Try again later; the log is told once for each save that fails."""
        before = self._owed
        self._owed = _Owed(step, due, str(error), time.monotonic() + RETRY_S)
        if before is not None and (before.step, before.due.is_full) == (step, due.is_full):
            return
        logger.error("%s; it is tried again", error)
        event = SaveFailed(
            branch=self.store.branch,
            step=step,
            kind="full" if due.is_full else "weights",
            uri=self.store.folders.uri,
            reason=str(error),
            epoch=self.announcer.epoch,
            produced_at=now_ms(),
        )
        self.announcer.publish("checkpoints", event)

    def _save(self, step: int, due: _Due) -> Saved:
        """Write and announce while training waits; at first also the model below an adapter."""
        if self.base is None:
            epoch, prove = self.announcer.epoch, self.keeper.prove
            uri = self.settings.checkpoint_uri
            self.base = save_base(self.learner, uri, epoch=epoch, before_place=prove)
        position = self.source.position()
        states = states_of(self.learner, step) if due.is_full else None
        contents = self._contents(self.learner.save_hf, states, step, position)
        saved = self.store.save(contents, **self._terms(step, due), before_place=self.keeper.prove)
        self._publish(step, saved, position)
        return saved

    def _begin(self, step: int, due: _Due) -> None:
        """Serve the weights, copy the rest, and leave the writing to a thread."""
        served = None
        if self._is_served(step) and step not in self.announced:
            served = self._save(step, _Due(False))
        position, states = self.source.position(), states_of(self.learner, step, copies=True)
        if served is None:
            weights = copied(self.learner.state_dict())
            save_model = partial(self.learner.save_hf, state=weights)
            contents = self._contents(save_model, states, step, position)
            write = partial(self.store.save, contents, **self._terms(step, due))
        else:
            contents = self._contents(None, states, step, position)
            write = partial(self.store.complete, served, contents, **self._terms(step, due))
        write = partial(write, before_place=self._prove_apart)
        self._last_full, self._begun = time.monotonic(), due
        self._writing = BackgroundSave(step, position, write)

    def _prove_apart(self) -> None:
        try:
            self.keeper.prove_apart()
        except LogUnavailable as error:
            raise CheckpointFailed(f"a checkpoint is not placed: {error}") from error

    def _land(self) -> bool:
        """Wait for the save in the background; whether none is left. Bounded once asked to stop.

        Raises:
            Timeout: it did not end within max_read_timeout.
        """
        began, limit_ms = time.monotonic(), self.settings.max_read_timeout_ms
        with self.keeper.waiting():
            while (writing := self._writing) is not None and not writing.wait(_POLL_S):
                blocker = f"the save of step {writing.step} to {self.store.folders.uri}"
                waited_s = time.monotonic() - began
                if self.keeper.is_stopping and waited_s > STOP_S:
                    logger.error("%s is given up after %.0f s: asked to stop", blocker, waited_s)
                    return False
                if waited_s * 1000 > limit_ms:
                    raise Timeout(blocker, limit_ms, "See whether the storage answers.")
                self.keeper.say(blocker)
        self.settle()
        return True

    def _publish(self, step: int, saved: Saved, position: Mapping[str, Any]) -> None:
        """Announce and commit what is whole, on the thread that the log belongs to."""
        if saved.manifest.kind == "full":
            self._last_full, self.newest_full = time.monotonic(), saved
        if self.stands(step, saved.manifest.digest):
            self.announce(saved, self.store.branch)
        faults.reach("checkpoint.published", step)
        self.source.commit(position)
        faults.reach("checkpoint.committed", step)
        self._retire()

    def _contents(
        self,
        save_model: Callable[[Path], str] | None,
        states: States | ShardedStates | None,
        step: int,
        position: Mapping[str, Any],
    ) -> Contents:
        if states is None:
            return Contents(save_model, base=self.base)
        meta = {"latest_iteration": step, "branch": self.store.branch, "position": position}
        return Contents(save_model, states.write, meta, self.base)

    def _terms(self, step: int, due: _Due) -> dict[str, Any]:
        return {
            "step": step,
            "epoch": self.announcer.epoch,
            "num_threads": _num_threads(),
            "is_rolling": due.is_rolling,
        }

    def _stand_by(self, first: Checkpoint) -> None:
        """A version that was announced is made again: its bytes should be the same, and stand."""
        try:
            with tempfile.TemporaryDirectory(prefix="streamrft.") as folder:
                digest = self.learner.save_hf(Path(folder))
            if not self.stands(first.step, digest):
                self.learner.load_weights(load_state_dict(first))
        except (WeightsUnavailable, *storage_errors()) as error:
            logger.warning("policy_version %d is trained on as it is: %s", first.step, error)

    def _retire(self, *, spared_copies: int = NUM_SERVED) -> None:
        """Delete what nobody needs; copies of weights are spared where explorers may want them."""
        in_use = self.steps_in_use()
        try:
            gone = self.store.retire(
                keep_full=self.settings.max_checkpoints_to_keep, keep_steps=in_use
            )
            if self.settings.save_hf_checkpoint != "always":
                drop_copies(self.store, spare=spared_copies, but=in_use)
        except storage_errors() as error:
            logger.warning("old checkpoints are not deleted: %s", error)
            return
        if gone:
            logger.info("deleted old checkpoints: %s", ", ".join(gone))


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()
