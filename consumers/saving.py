"""When checkpoints are saved and how they are announced; a save that fails is tried again."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schemas.events import Checkpoint, now_ms
from ..streams import faults
from ..streams.weights.object_storage import WeightsUnavailable, load_state_dict
from .announcer import Announcer
from .checkpoints import CheckpointFailed, CheckpointStore, Contents, Saved, storage_errors
from .lease import LeaseKeeper
from .settings import TrainerSettings
from .sources.source import Source

if TYPE_CHECKING:
    from .learning.learner import Learner

logger = logging.getLogger("streamrft")

RETRY_S = 5.0
OPTIMIZER_FILE = "optim_world_size_1_rank_0.pt"
EXTRA_FILE = "extra_state_world_size_1_rank_0.pt"


@dataclass
class _Owed:
    """A save that failed and is tried again."""

    is_full: bool
    why: str
    next_try: float


@dataclass
class Saver:
    """Saves and announces what a step made. `announced`: version -> its first announcement.

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
    newest_full: Saved | None = None
    _owed: _Owed | None = None
    _last_full: float = field(default_factory=time.monotonic)

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Save what this step asks for; a failure is logged and owed, but not at the last step."""
        if step in self.announced:
            self._stand_by(self.announced[step])
        every = self.settings.save_interval
        is_planned = is_last or step == 0 or bool(every and step % every == 0)
        is_rolling = not is_planned and self._is_resume_point_old()
        is_served = self.settings.sft is None and step % self.settings.sync_interval == 0
        owes_full = self._owed is not None and self._owed.is_full
        if is_planned or is_rolling or owes_full:
            self._try(step, is_full=True, is_rolling=is_rolling, must=is_last or step == 0)
        elif (is_served or self._owed is not None) and step not in self.announced:
            self._try(step, is_full=False, is_rolling=False, must=False)

    def go_on_from(self, saved: Saved) -> None:
        """Announce again what training goes on from: a kill may have come before the first time."""
        self.newest_full = saved
        if self.stands(saved.manifest.step, saved.manifest.digest):
            self.announce(saved, self.store.branch)

    def retry(self, step: int) -> str | None:
        """Try an owed save again, at most every 5 s; what is owed still, in words."""
        if self._owed is not None and time.monotonic() >= self._owed.next_try:
            self._try(step, is_full=self._owed.is_full, is_rolling=False, must=False)
        return f"the storage of checkpoints: {self._owed.why}" if self._owed else None

    def finish(self, step: int) -> None:
        """The last full checkpoint. Raises CheckpointFailed when it cannot be written."""
        if not self._is_full(step) or self._owed is not None:
            self._try(step, is_full=True, is_rolling=False, must=True)

    def shorten_resume(self, step: int) -> None:
        """A full checkpoint before an early end, if steps were done since the last one."""
        if not self._is_full(step):
            self._try(step, is_full=True, is_rolling=True, must=False)

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
        )
        self.announcer.publish("checkpoints", event)
        self.announced.setdefault(event.step, event)

    def _is_full(self, step: int) -> bool:
        return self.newest_full is not None and self.newest_full.manifest.step == step

    def _is_resume_point_old(self) -> bool:
        return time.monotonic() - self._last_full >= self.settings.resume_minutes * 60

    def _try(self, step: int, *, is_full: bool, is_rolling: bool, must: bool) -> None:
        try:
            self._save(step, is_full=is_full, is_rolling=is_rolling)
            self._owed = None
        except CheckpointFailed as error:
            if must:
                raise
            logger.error("%s; training goes on, the next save tries again", error)
            self._owed = _Owed(is_full, str(error), time.monotonic() + RETRY_S)

    def _save(self, step: int, *, is_full: bool, is_rolling: bool) -> None:
        position = self.source.position()
        saved = self.store.save(
            self._contents(step, position, is_full=is_full),
            step=step,
            epoch=self.announcer.epoch,
            num_threads=_num_threads(),
            is_rolling=is_rolling,
            before_place=self.keeper.prove,
        )
        if is_full:
            self._last_full, self.newest_full = time.monotonic(), saved
        if self.stands(step, saved.manifest.digest):
            self.announce(saved, self.store.branch)
        faults.reach("checkpoint.published", step)
        self.source.commit(position)
        faults.reach("checkpoint.committed", step)
        self._retire()

    def _contents(self, step: int, position: dict[str, Any], *, is_full: bool) -> Contents:
        if not is_full:
            return Contents(self.learner.save_hf)
        meta = {"latest_iteration": step, "branch": self.store.branch, "position": position}
        return Contents(self.learner.save_hf, self._write_states, meta)

    def _write_states(self, folder: Path) -> None:
        import torch

        try:
            torch.save(self.learner.optimizer_state(), folder / OPTIMIZER_FILE)
            torch.save({"rng": self.learner.rng_state()}, folder / EXTRA_FILE)
        except RuntimeError as error:  # torch's own file writer says so when the disk is full
            raise OSError(f"{folder}: {error}") from error

    def _stand_by(self, first: Checkpoint) -> None:
        """A version that was announced is made again: its bytes should be the same, and stand."""
        try:
            with tempfile.TemporaryDirectory(prefix="streamrft.") as folder:
                digest = self.learner.save_hf(Path(folder))
            if not self.stands(first.step, digest):
                self.learner.load_weights(load_state_dict(first))
        except (WeightsUnavailable, *storage_errors()) as error:
            logger.warning("policy_version %d is trained on as it is: %s", first.step, error)

    def _retire(self) -> None:
        try:
            gone = self.store.retire(keep_full=self.settings.max_checkpoints_to_keep)
        except storage_errors() as error:
            logger.warning("old checkpoints are not deleted: %s", error)
            return
        if gone:
            logger.info("deleted old checkpoints: %s", ", ".join(gone))


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()
