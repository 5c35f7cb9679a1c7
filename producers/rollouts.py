"""From one task to its rollouts: attempts, time-outs, and a reason for whatever fails."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import uuid
from dataclasses import dataclass
from typing import Any

from ..schemas import events as ev
from ..schemas.errors import ConfigError, InvalidEvent, Timeout
from .engines.engine import EngineError, PromptTooLong, Sampling
from .engines.service import EngineService
from .rewards.reward import REWARDS, RewardFunction
from .settings import ExplorerSettings, TasksetSettings
from .trajectories import TrajectoryWriter
from .workflows import WORKFLOWS, Chat, GroupTask, Rollout, RolloutFailed, Workflow

logger = logging.getLogger("streamrft")


@dataclass(frozen=True)
class Rolled:
    """The records of one group, ready for the log: (key, value) each."""

    records: list[tuple[bytes, bytes]]
    num_failed: int
    failure: str = ""


class GroupRunner:
    """Rolls groups out. Belongs to the event loop; many groups run in it at the same time."""

    def __init__(self, settings: ExplorerSettings, service: EngineService, producer: str) -> None:
        """`producer` names the process in its trajectories."""
        self._settings, self._service = settings, service
        self._writer = TrajectoryWriter(settings, service, producer)
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
            self._writer.trajectory(task, slot, ids[slot], rollout)
            for slot, rollout in sorted(rollouts.items())
        ]
        records = [await self._writer.record(t) for t in trajectories]
        failures = [t.failure for t in trajectories if t.is_failed]
        return Rolled(records, len(failures), failures[-1] if failures else "")

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
        except (RolloutFailed, PromptTooLong, ConfigError) as error:
            return [Rollout.failed(str(error), is_final=True)] * len(slots)
        except EngineError:
            raise
        except (Exception, SystemExit) as error:  # a user's workflow may raise anything
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
