"""From a rollout to the record of its trajectory: reward sources, deadline, size."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec

from ..schemas import arrays, codec
from ..schemas import events as ev
from ..schemas.errors import EventTooLarge, InvalidEvent, StorageUnavailable, Timeout
from ..streams.blobs import put_claim
from .engines.service import EngineService
from .settings import ExplorerSettings
from .threads import in_thread
from .workflows import Rollout

_STORAGE_RETRY_S = 1.0


class TrajectoryWriter:
    """Makes the records of one process."""

    def __init__(self, settings: ExplorerSettings, service: EngineService, producer: str) -> None:
        """`producer` names the process in its trajectories."""
        self._settings, self._service, self._producer = settings, service, producer

    def trajectory(self, task: ev.Task, slot: int, attempt: str, rollout: Rollout) -> ev.Trajectory:
        """The rollout's event; where it cannot be one, a failed trajectory that says why."""
        sources = self._sources(rollout)
        bounds = arrays.run_bounds(s.policy_versions for s in rollout.sequences)
        failure = rollout.failure or self._fault(rollout, sources, bounds)
        version = self._service.policy_version
        return ev.Trajectory(
            trajectory_id=ev.trajectory_id(task.group_id, slot, attempt),
            group_id=task.group_id,
            slot=slot,
            attempt=attempt,
            number=task.number,
            taskset=task.taskset,
            row=task.row,
            epoch=task.epoch,
            producer=self._producer,
            branch=rollout.branch or self._service.branch,
            min_policy_version=version if failure else bounds[0],
            max_policy_version=version if failure else bounds[1],
            group_size=task.group_size,
            sequences=[] if failure else rollout.sequences,
            finish_reason="failed" if failure else rollout.finish_reason,
            failure=failure,
            scores=[] if failure else rollout.scores,
            reward_sources=sources,
            reward_deadline_ms=self._deadline_ms(rollout),
            metrics=dict(rollout.metrics),
            produced_at=ev.now_ms(),
        )

    def _fault(self, rollout: Rollout, sources: dict[str, float], bounds: tuple[int, int]) -> str:
        """Why a rollout that says it went well is no trajectory; empty when it is one."""
        if not rollout.sequences or bounds == (-1, -1):
            return "the workflow gave no tokens that the policy wrote"
        if not sources:
            return (
                "nothing scores it: set default_reward_fn_type of the taskset, or name an "
                "outside source under rewards"
            )
        bad = next((s for s in rollout.scores if not math.isfinite(s.value)), None)
        return f"score {bad.source!r} is {bad.value}, not a finite number" if bad else ""

    def _sources(self, rollout: Rollout) -> dict[str, float]:
        own = {s.source: self._settings.part_weights.get(s.source, 1.0) for s in rollout.scores}
        return own | {name: s.weight for name, s in self._settings.reward_sources.items()}

    def _deadline_ms(self, rollout: Rollout) -> int | None:
        """The longest of the sources that are waited for; None when one may take for ever."""
        scored = {s.source for s in rollout.scores}
        waits = [
            s.deadline_ms for name, s in self._settings.reward_sources.items() if name not in scored
        ]
        known = [ms for ms in waits if ms is not None]
        return max(known) if known and len(known) == len(waits) else None

    async def record(self, trajectory: ev.Trajectory) -> tuple[bytes, bytes]:
        """Encoded; beside the log when it is too large, failed when it breaks its contract.

        It may take half of the limit, since an experience holds its trajectory and more.

        Raises:
            Timeout: the storage was away for as long as weights may be.
        """
        key, limit = trajectory.group_id.encode(), self._settings.max_event_bytes // 2
        try:
            return key, codec.encode(trajectory, max_bytes=limit)
        except InvalidEvent as error:
            return key, codec.encode(as_failed(trajectory, str(error)))
        except EventTooLarge as error:
            if self._settings.storage_uri is None:
                return key, codec.encode(as_failed(trajectory, f"{error} storage.uri is not set."))
        return key, codec.encode(await self._claimed(trajectory), max_bytes=limit)

    async def _claimed(self, trajectory: ev.Trajectory) -> ev.Trajectory:
        timeout_ms = self._settings.weights_timeout_ms
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                claimed = await in_thread(put_claim, self._settings.storage_uri, trajectory)
                self._service.blocker = ""
                return claimed
            except StorageUnavailable as error:
                if time.monotonic() > deadline:
                    advice = "Mend the storage (storage.uri), or raise synchronizer.sync_timeout."
                    raise Timeout(str(error), timeout_ms, advice) from error
                self._service.blocker = str(error)
                await asyncio.sleep(_STORAGE_RETRY_S)


def as_failed(trajectory: ev.Trajectory, reason: str) -> ev.Trajectory:
    """The same execution as a failed rollout."""
    return msgspec.structs.replace(
        trajectory, sequences=[], scores=[], finish_reason="failed", failure=reason
    )
