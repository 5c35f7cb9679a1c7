"""The port of workflows: a task in, one rollout a slot out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...schemas import events as ev
from ...schemas.errors import StreamrftError
from ...streams.registry import Registry
from ..engines.engine import Generation, Request, Sampling, seed_of
from ..rewards.reward import RewardFailed, RewardFunction, RolloutView, score_all
from ..settings import TasksetSettings
from ..threads import in_thread

if TYPE_CHECKING:
    from .chat import Chat

WORKFLOWS = Registry("workflow", binds_functions=True)


class RolloutFailed(StreamrftError):
    """A rollout cannot be done; trying again would not help."""


@dataclass(frozen=True)
class Rollout:
    """What came of one slot. A `failure` says why nothing did; `is_final`: do not try again.

    `branch` of the weights is filled in by the explorer.
    """

    sequences: list[ev.Sequence] = field(default_factory=list)
    scores: list[ev.Score] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "failed"] = "stop"
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    is_final: bool = True
    branch: str = ""

    @classmethod
    def failed(cls, failure: str, *, is_final: bool = False) -> Rollout:
        """A rollout that failed; tried again unless `is_final`."""
        return cls(finish_reason="failed", failure=failure or "no reason given", is_final=is_final)


Generate = Callable[[Sequence[Request]], Awaitable[list[Generation]]]


@dataclass
class GroupTask:
    """One execution of a task: its row, its open slots, and the ways to generate and to score.

    `trajectory_ids` by slot are known before the rollout, so that a workflow can hand them to
    whoever will score it later. `abort_on_timeout`: a deterministic run lets no clock decide.
    """

    task: ev.Task
    row: dict[str, Any]
    taskset: TasksetSettings
    slots: list[int]
    trajectory_ids: dict[int, str]
    sampling: Sampling
    chat: Chat
    run_seed: int
    engine: Generate
    reward: RewardFunction | None
    reward_name: str
    abort_on_timeout: bool = False
    branches: dict[int, set[str]] = field(default_factory=dict)

    async def generate(
        self, prompts: Sequence[tuple[int, ...]], *, turn: int = 0, slots: Sequence[int] = ()
    ) -> list[Generation]:
        """Continue one prompt a slot (all open slots unless `slots` are named), in order.

        Seeds depend on the run's seed, group, slot and turn alone.
        """
        where = list(slots or self.slots)
        requests = [
            Request(tokens, self.sampling, seed_of(self.run_seed, self.task.group_id, slot, turn))
            for slot, tokens in zip(where, prompts, strict=True)
        ]
        made = await self.engine(requests)
        for slot, generation in zip(where, made, strict=True):
            self.branches.setdefault(slot, set()).add(generation.branch)
        return made

    async def score(self, views: Sequence[RolloutView]) -> list[dict[str, float] | RewardFailed]:
        """Parts of each rollout by the reward function, off the event loop; {} without one."""
        if self.reward is None:
            return [{} for _ in views]
        call = partial(score_all, self.reward, views, raise_timeout=self.abort_on_timeout)
        return await in_thread(call)


class Workflow(Protocol):
    """Made anew for every task, with the taskset's workflow_args. Many run at the same time."""

    default_reward: str
    """Reward function of tasks that name none; empty for no reward."""

    async def run(self, group: GroupTask, /) -> list[Rollout]:
        """One rollout for each of `group.slots`, in order.

        Must not block the event loop: an environment that does goes through asyncio.to_thread.
        May be cancelled at any await. What it raises is tried again within max_retry_times,
        except RolloutFailed.
        """
        ...
