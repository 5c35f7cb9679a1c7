"""From one task to its trajectories: attempts, time-outs, reward sources, records for the log."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import math
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from ..schemas import arrays, codec
from ..schemas import events as ev
from ..schemas.errors import ConfigError, EventTooLarge, InvalidEvent, Timeout
from ..streams.blobs import StorageUnavailable, put_claim
from .engines.engine import EngineError, PromptTooLong, Sampling
from .engines.service import EngineService
from .rewards.reward import REWARDS, RewardFunction
from .settings import ExplorerSettings, TasksetSettings
from .threads import in_thread
from .workflows import WORKFLOWS, Chat, GroupTask, Rollout, RolloutFailed, Workflow

logger = logging.getLogger("streamrft")

_STORAGE_RETRY_S = 1.0


@dataclass(frozen=True)
class Rolled:
    """The records of one group, ready for the log: (key, value) each."""

    records: list[tuple[bytes, bytes]]
    num_failed: int


class GroupRunner:
    """Rolls groups out. Belongs to the event loop; many groups run in it at the same time."""

    def __init__(self, settings: ExplorerSettings, service: EngineService, producer: str) -> None:
        """`producer` names the process in its trajectories."""
        self._settings, self._service, self._producer = settings, service, producer
        self._tasksets = {t.name: t for t in settings.tasksets}
        self._process_token = uuid.uuid4().hex[:12]
        self._executions = itertools.count()

    async def run(self, task: ev.Task, min_version: int) -> Rolled:
        """Every slot's trajectory; what failed for good is a failed trajectory with its reason.

        Raises:
            EngineError, Timeout: the process cannot go on; the task stays unacknowledged.
        """
        attempt = self._attempt()
        chat = await self._service.chat()
        try:
            group, workflow = self._prepared(task, min_version, chat)
        except (ConfigError, InvalidEvent) as error:
            failed = Rollout.failed(str(error), is_final=True)
            rollouts = dict.fromkeys(range(task.group_size), failed)
            ids = dict.fromkeys(range(task.group_size), attempt)
        else:
            rollouts, ids = await self._attempts(group, workflow)
        trajectories = [
            self._trajectory(task, slot, ids[slot], rollout)
            for slot, rollout in sorted(rollouts.items())
        ]
        records = [await self._record(t) for t in trajectories]
        return Rolled(records, sum(r.finish_reason == "failed" for r in rollouts.values()))

    def _attempt(self) -> str:
        return f"{self._process_token}{next(self._executions):x}"

    def _prepared(self, task: ev.Task, min_version: int, chat: Chat) -> tuple[GroupTask, Workflow]:
        taskset = self._tasksets.get(task.taskset)
        if taskset is None:
            raise ConfigError(
                f"task {task.group_id}: taskset {task.taskset!r} is not in this explorer's "
                f"configuration, which has {', '.join(self._tasksets) or 'none'}"
            )
        row = _row(task)
        workflow, reward_name, reward = workflow_and_reward(taskset, task.workflow, task.reward_fn)

        async def generate(requests: Any) -> Any:
            return await self._service.generate(requests, min_version)

        group = GroupTask(
            task=task,
            row=row,
            taskset=taskset,
            slots=[],
            trajectory_ids={},
            sampling=self._sampling(taskset),
            chat=chat,
            run_seed=self._settings.seed,
            engine=generate,
            reward=reward,
            reward_name=reward_name,
            abort_on_timeout=self._settings.deterministic,
        )
        return group, workflow

    async def _attempts(
        self, group: GroupTask, workflow: Workflow
    ) -> tuple[dict[int, Rollout], dict[int, str]]:
        """Roll out the open slots until each has ended or was tried often enough."""
        rollouts: dict[int, Rollout] = {}
        ids: dict[int, str] = {}
        open_slots = list(range(group.task.group_size))
        for again in range(self._settings.max_retry_times + 1):
            attempt = self._attempt()
            group.slots = open_slots
            group.branches = {}
            group.trajectory_ids = {
                s: ev.trajectory_id(group.task.group_id, s, attempt) for s in open_slots
            }
            made = await self._once(group, workflow)
            rollouts |= dict(zip(open_slots, made, strict=True))
            ids |= dict.fromkeys(open_slots, attempt)
            open_slots = [s for s in open_slots if rollouts[s].failure and not rollouts[s].is_final]
            if not open_slots:
                break
            logger.warning(
                "%s: %d of %d rollouts failed (try %d of %d): %s",
                group.task.group_id,
                len(open_slots),
                group.task.group_size,
                again + 1,
                self._settings.max_retry_times + 1,
                rollouts[open_slots[0]].failure,
            )
        return rollouts, ids

    async def _once(self, group: GroupTask, workflow: Workflow) -> list[Rollout]:
        slots = list(group.slots)
        seconds = self._settings.max_timeout_ms / 1000
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                made = await workflow.run(group)
        except TimeoutError as error:
            if isinstance(error, Timeout):
                raise
            if limit.expired():
                self._refuse_to_decide(group, error)
                reason = f"took over {seconds:g} s (explorer.max_timeout)"
            else:
                reason = f"{type(error).__name__}: {error}"
            return [Rollout.failed(reason)] * len(slots)
        except (RolloutFailed, PromptTooLong) as error:
            return [Rollout.failed(str(error), is_final=True)] * len(slots)
        except EngineError:
            raise
        except Exception as error:  # a user's workflow may raise anything
            return [Rollout.failed(f"{type(error).__name__}: {error}")] * len(slots)
        if len(made) != len(slots):
            reason = f"workflow {group.task.workflow} gave {len(made)} rollouts of {len(slots)}"
            return [Rollout.failed(reason, is_final=True)] * len(slots)
        return [_of_one_branch(r, group.branches.get(s)) for s, r in zip(slots, made, strict=True)]

    def _refuse_to_decide(self, group: GroupTask, error: TimeoutError) -> None:
        """A clock fails no rollout of a deterministic run, nor one that waited for weights."""
        if self._service.blocker:
            raise Timeout(self._service.blocker, self._settings.max_timeout_ms) from error
        if self._settings.deterministic:
            raise Timeout(
                f"the rollout of {group.task.group_id}",
                self._settings.max_timeout_ms,
                "A deterministic run lets no clock decide; raise explorer.max_timeout.",
            ) from error

    def _sampling(self, taskset: TasksetSettings) -> Sampling:
        s, args = self._settings, taskset.rollout_args
        most = s.max_response_tokens
        return Sampling(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_tokens=most if args.max_tokens is None else min(most, args.max_tokens),
            min_tokens=s.min_response_tokens,
        )

    # --- records

    def _trajectory(
        self, task: ev.Task, slot: int, attempt: str, rollout: Rollout
    ) -> ev.Trajectory:
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

    async def _record(self, trajectory: ev.Trajectory) -> tuple[bytes, bytes]:
        """Encoded; beside the log when it is too large, failed when it breaks its contract."""
        key = trajectory.group_id.encode()
        try:
            return key, codec.encode(trajectory, max_bytes=self._settings.max_event_bytes)
        except InvalidEvent as error:
            return key, codec.encode(as_failed(trajectory, str(error)))
        except EventTooLarge as error:
            if self._settings.storage_uri is None:
                return key, codec.encode(as_failed(trajectory, f"{error} storage.uri is not set."))
        while True:
            try:
                claimed = await in_thread(put_claim, self._settings.storage_uri, trajectory)
                return key, codec.encode(claimed, max_bytes=self._settings.max_event_bytes)
            except StorageUnavailable as error:
                logger.warning("%s: %s", trajectory.trajectory_id, error)
                await asyncio.sleep(_STORAGE_RETRY_S)


def workflow_and_reward(
    taskset: TasksetSettings, workflow_name: str, reward_name: str
) -> tuple[Workflow, str, RewardFunction | None]:
    """A new workflow, the name of its reward function, and the function.

    Raises:
        ConfigError: a name is unknown, or its arguments do not fit.
    """
    made: Any = WORKFLOWS.create(workflow_name, taskset.workflow_args)
    if not asyncio.iscoroutinefunction(getattr(made, "run", None)):
        raise ConfigError(
            f"workflow {workflow_name!r}: needs `async def run(self, group)`; see "
            "producers/workflows/workflow.py"
        )
    name = reward_name or str(getattr(made, "default_reward", ""))
    return made, name, REWARDS.create(name, taskset.reward_fn_args) if name else None


def as_failed(trajectory: ev.Trajectory, reason: str) -> ev.Trajectory:
    """The same execution as a failed rollout."""
    return msgspec.structs.replace(
        trajectory, sequences=[], scores=[], finish_reason="failed", failure=reason
    )


def _row(task: ev.Task) -> dict[str, Any]:
    try:
        row = json.loads(task.content)
    except ValueError as error:
        raise InvalidEvent(f"task {task.group_id}: content is no JSON ({error})") from error
    if not isinstance(row, dict):
        raise InvalidEvent(f"task {task.group_id}: content is no JSON object")
    return row


def _of_one_branch(rollout: Rollout, branches: set[str] | None) -> Rollout:
    """With the branch of the weights that wrote it; a fork in the middle fails it."""
    if rollout.failure or not branches:
        return rollout
    if len(branches) > 1:
        return Rollout.failed(f"the branch changed while it ran: {', '.join(sorted(branches))}")
    return dataclasses.replace(rollout, branch=next(iter(branches)))
