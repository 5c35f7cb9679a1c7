"""How far ahead a run goes: staleness is bounded, and nothing filtered or late stalls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from small_run import SmallRun

from streamrft.schemas import codec
from streamrft.schemas import events as ev
from streamrft.streams.log import open_log
from streamrft.streams.reading import begins

Make = Callable[..., SmallRun]
ASYNC: dict[str, Any] = {
    "deterministic": False,
    "synchronizer": {"sync_style": "fully_async", "max_staleness": 2},
}
HALF = """
from streamrft.streams.filters import FILTERS, Rejection

@FILTERS.register("every_other_group")
class EveryOtherGroup:
    def apply(self, group):
        if group.number % 2:
            return []
        return [Rejection(m.slot, "even number") for m in group.members]
"""


def steps_of(run: SmallRun) -> list[ev.TrainStep]:
    return sorted(run.events("train_steps", ev.TrainStep), key=lambda s: s.step)


def num_filtered(run: SmallRun) -> int:
    """Groups of which the filter dropped all members."""
    return len({d.group_id for d in run.events("drops", ev.Drop) if d.reason == "filtered"})


def filtered_run(small_run: Make, over: dict[str, Any], **options: Any) -> SmallRun:
    """A run to its end, of which the join drops every other group."""
    run = small_run(over | {"streams": {"filters": [{"name": "every_other_group"}]}}, **options)
    (run.folder / "plugins" / "half.py").write_text(HALF)
    run.finish()
    run.check_whole()
    return run


def test_asynchronous_pacing_keeps_its_bound_and_wastes_little_while_half_is_filtered(
    small_run: Make,
) -> None:
    run = filtered_run(small_run, ASYNC, steps=20, num_rows=200)
    assert {len(c.members) for c in run.cuts()} == {16}
    assert num_filtered(run) >= run.steps * 4 * 0.8
    assert max(s.metrics["sample/staleness_max"] for s in steps_of(run)) <= 2
    stale = [d for d in run.events("drops", ev.Drop) if d.reason == "stale"]
    assert len(stale) < 0.05 * sum(len(c.members) for c in run.cuts())
    # a bound that nothing ever used would prove nothing
    assert max(s.metrics["sample/staleness_max"] for s in steps_of(run)) >= 1


def test_the_last_short_batch_trains_while_half_is_filtered(small_run: Make) -> None:
    over = {"buffer": {"total_steps": None, "total_epochs": 1}}
    run = filtered_run(small_run, over, steps=3, num_rows=20)
    assert [len(c.members) for c in run.cuts()] == [16, 16, 8]
    assert num_filtered(run) == 10


def test_rewards_slower_than_the_window_do_not_halt_the_run(small_run: Make) -> None:
    over = {
        "deterministic": False,  # which would train in the order of publication
        "rewards": {"human": {"weight": 1.0, "max_staleness": None}},
        "synchronizer": {"reward_wait": "500ms", "max_open_groups": 100},
    }
    run = small_run(over)
    stop = threading.Event()
    scorer = threading.Thread(target=score_every_other_group_late, args=(run, stop))
    scorer.start()
    try:
        run.finish()
    finally:
        stop.set()
        scorer.join(30)
    late = [s for s in steps_of(run) if s.metrics["sample/staleness_max"] > 0]
    assert late, "no group with a slow reward was trained"
    assert len(run.cuts()) == run.steps


def score_every_other_group_late(run: SmallRun, stop: threading.Event) -> None:
    """An external reward producer: half of the groups at once, the others after the next cut."""
    run.wait_for(lambda: bool(run.records("trajectories")), "trajectory")
    log = open_log(f"sqlite:///{run.job / 'log.db'}")
    producer, consumer = log.producer(), log.consumer()
    consumer.assign(begins(log, *(run.topics.name(t) for t in ("trajectories", "train_steps"))))
    waiting: list[ev.Trajectory] = []
    last_cut = 0
    while not stop.is_set():
        for record in consumer.poll(500, 50):
            found = codec.decode(record.value or b"", ev.Trajectory, ev.Cut, ev.TrainStep)
            if isinstance(found, ev.Trajectory):
                waiting.append(found)
            else:
                last_cut = max(last_cut, found.step)
        due = [t for t in waiting if t.number % 2 == 0 or t.min_policy_version < last_cut]
        waiting = [t for t in waiting if t not in due]
        for t in due:
            reward = ev.Reward(
                event_id=f"human-{t.trajectory_id}",
                trajectory_id=t.trajectory_id,
                source="human",
                value=1.0,
            )
            producer.send(run.topics.name("rewards"), codec.encode(reward), key=t.group_id.encode())
        producer.flush()
    log.close()
