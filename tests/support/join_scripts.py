"""Scripts for the join: events built from few words, random scripts, and how to run one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from join_reference import Result, Step, Tick

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.schemas.arrays import pack_floats, pack_ints, pack_mask, pack_runs
from streamrft.streams.join.join import RewardJoin
from streamrft.streams.join.outcomes import Closed, Dropped, Outcome
from streamrft.streams.log import Position
from streamrft.streams.payloads import Payload
from streamrft.streams.pipeline import Pipeline, drop_event
from streamrft.streams.settings import StreamSettings

HORIZON_MS = 1_000
SETTINGS = StreamSettings(grace_ms=10, late_horizon_ms=HORIZON_MS)


def sequence(num_tokens: int = 4, *, num_prompt: int = 1, truncated: bool = False) -> ev.Sequence:
    written = num_tokens - num_prompt
    return ev.Sequence(
        tokens=pack_ints(range(num_tokens)),
        loss_mask=pack_mask([0] * num_prompt + [1] * written),
        logprobs=pack_floats([0.0] * num_prompt + [-0.5] * written),
        policy_versions=pack_runs([3] * written),
        truncated=truncated,
    )


def traj(name: str = "g:0:a", *, size: int = 1, at: int = 0, **fields) -> ev.Trajectory:
    """A trajectory named `<group>:<slot>:<attempt>`; judged by `judge` alone unless told."""
    group_id, slot, attempt = name.rsplit(":", 2)
    known = dict(
        trajectory_id=name,
        group_id=group_id,
        slot=int(slot),
        attempt=attempt,
        number=7,
        producer="explorer-0",
        branch="main",
        min_policy_version=3,
        max_policy_version=3,
        group_size=size,
        sequences=[sequence()],
        finish_reason="stop",
        reward_sources={"judge": 1.0},
        produced_at=at,
    )
    return ev.Trajectory(**(known | fields))


def failed(name: str, *, size: int = 1, at: int = 0, **fields) -> ev.Trajectory:
    gone = dict(sequences=[], finish_reason="failed", failure="the environment broke")
    return traj(name, size=size, at=at, **(gone | fields))


def scored(name: str, value: float, *, size: int = 1, at: int = 0, **fields) -> ev.Trajectory:
    return traj(name, size=size, at=at, scores=[ev.Score(source="judge", value=value)], **fields)


def rew(name: str = "g:0:a", value: float = 1.0, *, at: int = 0, **fields) -> ev.Reward:
    event_id = f"{name}.{fields.get('source', 'judge')}.{fields.get('revision', 0)}"
    known = dict(event_id=event_id, source="judge")
    return ev.Reward(trajectory_id=name, value=value, produced_at=at, **(known | fields))


class Runner:
    """Feeds a join step by step and keeps what comes out, as a transactional shell would."""

    def __init__(
        self, settings: StreamSettings = SETTINGS, make: Callable[..., RewardJoin] = RewardJoin
    ) -> None:
        self.settings, self._make = settings, make
        self.join = make(settings)
        self._pipeline = Pipeline(settings)
        self._payloads: dict[int, Payload] = {}
        self._kept: dict[str, bytes] = {}
        self._offset = 0
        self.experiences: list[ev.Experience] = []
        self.drops: list[ev.Drop] = []

    def feed(self, *steps: Step) -> list[Outcome]:
        """Apply steps; what the join said, in order."""
        outcomes: list[Outcome] = []
        for step in steps:
            said = self._apply(step)
            for outcome in said:
                self._settle(outcome)
            outcomes += said
        return outcomes

    def crash(self) -> None:
        """Go on in a new join, restored from what a worker would have made durable."""
        for group_id, state in self.join.take_changes().items():
            if state is None:
                self._kept.pop(group_id, None)
            else:
                self._kept[group_id] = state
        fresh = self._make(self.settings)
        fresh.restore(self._kept.values(), counts=dict(self.join.counts), time_ms=self.join.time_ms)
        assert fresh.gauges() == self.join.gauges()
        self.join = fresh

    def result(self) -> Result:
        """What came out, in the terms of the reference."""
        result = result_of(self.experiences, self.drops)
        names = ("applied", "duplicate", "late", "orphan", "superseded", "refused")
        result.counts = Counter({n: c for n in names if (c := self.join.counts[n])})
        if early := self.join.gauges()["early"]:
            result.counts["early"] = early
        return result

    def _apply(self, step: Step) -> list[Outcome]:
        if isinstance(step, Tick):
            return self.join.on_time(step.at)
        if isinstance(step, ev.Reward):
            return self.join.on_reward(step)
        self._offset += 1
        if not step.is_failed:
            self._payloads[self._offset] = Payload.of(codec.encode(step), step)
        return self.join.on_trajectory(step, Position("trajectories", 0, self._offset))

    def _settle(self, outcome: Outcome) -> None:
        if isinstance(outcome, Closed):
            payloads = {m.slot: self._payloads[m.offset] for m in outcome.members}
            made = self._pipeline.run(outcome, payloads, partition=0, now_ms=0)
            self.experiences += made.experiences
            self.drops += made.drops
        elif isinstance(outcome, Dropped):
            self.drops.append(drop_event(outcome, 0))


def result_of(experiences: Iterable[ev.Experience], drops: Iterable[ev.Drop]) -> Result:
    """First closes and drops in the terms of the reference, without the counts of rewards."""
    result = Result()
    for e in experiences:
        assert e.trajectory_id not in result.experiences, f"{e.trajectory_id} came twice"
        group = tuple((m.slot, m.trajectory_id, m.reward) for m in e.group)
        parts = tuple(sorted(e.reward_parts.items()))
        result.experiences[e.trajectory_id] = e.reward, parts, group, e.group_experiences
    result.drops = Counter((d.trajectory_id, d.reason, d.group_experiences) for d in drops)
    return result


def run(
    steps: Iterable[Step],
    settings: StreamSettings = SETTINGS,
    *,
    make: Callable[..., RewardJoin] = RewardJoin,
    crashes: Iterable[int] = (),
) -> Runner:
    """Run a whole script, going down and up again before the steps in `crashes`."""
    runner, points = Runner(settings, make), set(crashes)
    for i, step in enumerate(steps):
        if i in points:
            runner.crash()
        runner.feed(step)
    return runner


def random_events(rng: random.Random, *, corrections: bool = True) -> list[Step]:
    """Trajectories and rewards of three or four groups, with everything that can go wrong."""
    events: list[Step] = []
    for g in range(rng.choice((3, 3, 4))):
        size = rng.choice((1, 2, 2, 3))
        sources = rng.choice(({"judge": 1.0}, {"judge": 1.0, "style": 0.5}))
        deadline, fill = rng.choice((None, 50, 400)), rng.choice((None, None, 80, 500))
        for slot in range(size):
            for attempt in "ab"[: rng.choice((0, 1, 1, 1, 1, 2))]:
                name = f"g{g}:{slot}:{attempt}"
                at = rng.randrange(0, 900)
                t = traj(
                    name,
                    size=size,
                    at=at,
                    reward_sources=sources,
                    reward_deadline_ms=deadline,
                    group_deadline_ms=fill,
                    scores=[ev.Score(source="judge", value=0.25)] if rng.random() < 0.4 else [],
                )
                if rng.random() < 0.2:
                    t = failed(name, size=size, at=at)
                events += [t] * rng.choice((1, 1, 1, 2))
                events += _random_rewards(rng, t, sources, corrections)
        if rng.random() < 0.3:
            events.append(rew(f"g{g}:0:never", at=rng.randrange(0, 900)))
    return events


def _random_rewards(
    rng: random.Random, t: ev.Trajectory, sources: dict[str, float], corrections: bool
) -> list[Step]:
    rewards: list[Step] = []
    for source in [*sources, "unknown"]:
        if rng.random() < (0.1 if source == "unknown" else 0.75):
            for revision in range(rng.choice((1, 1, 2, 3)) if corrections else 1):
                r = rew(
                    t.trajectory_id,
                    rng.choice((0.0, 1.0, 0.1 * revision)),
                    source=source,
                    revision=revision,
                    at=t.produced_at + rng.choice((0, 20, 50, 51, 300, 1_200)),
                )
                rewards += [r] * rng.choice((1, 1, 1, 2))
    return rewards


def with_ticks(rng: random.Random, events: Sequence[Step]) -> list[Step]:
    """The events with clock events between them; a script always ends with its last tick."""
    steps: list[Step] = []
    now = 0
    for event in events:
        if rng.random() < 0.15:
            now += rng.choice((30, 100, 400, 1_500))
            steps.append(Tick(now))
        steps.append(event)
    return [*steps, Tick(now + rng.choice((1, 200, 700, 5_000)))]


@st.composite
def scripts(draw, *, corrections: bool = True) -> list[Step]:
    """Any order of the events of some groups, with clock events between them."""
    rng = draw(st.randoms(use_true_random=False))
    events = random_events(rng, corrections=corrections)
    rng.shuffle(events)
    return with_ticks(rng, events)


@st.composite
def settings(draw) -> StreamSettings:
    """Every policy for deadlines."""
    return replace(
        SETTINGS,
        on_deadline=draw(st.sampled_from(("partial", "default", "drop"))),
        min_group_size=draw(st.sampled_from((1, 2))),
        default_reward=draw(st.sampled_from((0.0, -1.0))),
        grace_ms=draw(st.sampled_from((0, 10, 200))),
    )
