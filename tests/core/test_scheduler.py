"""The window publishes as far ahead as the pacing allows, and loses and doubles no row."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrft.producers.settings import Pacing, SchedulerSettings
from streamrft.producers.tasksets import RowRef
from streamrft.producers.window import Publication, Window
from streamrft.schemas import events as ev
from streamrft.streams.lineage import Lineage

B, G = 4, 2
MAIN = Lineage.of("main", [])


@dataclass
class Rows:
    rows_per_epoch: int = 10

    def at(self, index: int) -> RowRef:
        epoch, row = divmod(index, self.rows_per_epoch)
        return RowRef("t", row, epoch)


def settings(**fields) -> SchedulerSettings:
    return SchedulerSettings(
        **{
            "tasksets": (),
            "batch_size": B,
            "group_size": G,
            "pacing": Pacing(),
            "total_steps": 5,
            "reward_wait_ms": 1000,
            **fields,
        }
    )


def window(lineage: Lineage = MAIN, rows: int = 10, **fields) -> Window:
    return Window(settings(**fields), Rows(rows), lineage)


def task(p: Publication, branch: str = "main") -> ev.Task:
    return ev.Task(
        group_id=f"t.{p.number}",
        number=p.number,
        taskset=p.ref.taskset,
        row=p.ref.row,
        epoch=p.ref.epoch,
        branch=branch,
        step=p.step,
        min_policy_version=p.min_policy_version,
        group_size=G,
        workflow="w",
        replaces=p.replaces,
        content="{}",
        produced_at=0,
    )


def publish(w: Window, now_ms: int = 0, limit: int = 500) -> list[Publication]:
    due = w.plan(now_ms, limit)
    for p in due:
        w.on_task(task(p, w.branch))
    return due


def checkpoint(step: int, branch: str = "main") -> ev.Checkpoint:
    return ev.Checkpoint(
        branch=branch,
        step=step,
        kind="weights",
        uri="u",
        digest="d",
        manifest_sha256="m",
        epoch=1,
        produced_at=0,
    )


def cut(step: int, numbers, branch: str = "main") -> ev.Cut:
    members = [
        ev.CutMember(trajectory_id=f"t.{n}:0:a", reward_revision=0, partition=0, offset=n)
        for n in numbers
    ]
    return ev.Cut(branch=branch, step=step, members=members, parent="", epoch=1, produced_at=0)


def drop(number: int, reason="filtered", slot=0, e: int | None = 0, **fields) -> ev.Drop:
    return ev.Drop(
        trajectory_id=f"t.{number}:{slot}:a",
        group_id=f"t.{number}",
        slot=slot,
        number=number,
        reason=reason,
        detail="",
        group_experiences=e,
        produced_at=0,
        **{"where": "join", **fields},
    )


def by_trainer(number: int, slot: int, reason="stale", e=2, branch="main", step=1) -> ev.Drop:
    return drop(number, reason, slot, e, where="trainer", branch=branch, step=step)


def trajectory(
    number: int, slot: int, version: int = 0, branch: str = "main", scored: bool = True
) -> ev.Trajectory:
    return ev.Trajectory(
        trajectory_id=f"t.{number}:{slot}:a",
        group_id=f"t.{number}",
        slot=slot,
        attempt="a",
        number=number,
        producer="e",
        branch=branch,
        min_policy_version=version,
        max_policy_version=version,
        group_size=G,
        sequences=[],
        finish_reason="stop",
        scores=[ev.Score(source="accuracy", value=1.0)] if scored else [],
        reward_sources={"accuracy": 1.0},
        produced_at=0,
    )


def numbers(due: list[Publication]) -> list[int]:
    return [p.number for p in due]


# --- pacing


def test_nothing_comes_before_the_first_weights():
    w = window()
    assert publish(w) == [] and "first checkpoint" in w.blocker()


def test_on_policy_publishes_a_batch_after_each_checkpoint():
    w = window()
    w.on_checkpoint(checkpoint(0))
    first = publish(w)
    assert [(p.step, p.min_policy_version) for p in first] == [(1, 0)] * B
    w.on_cut(cut(1, range(B)))
    assert publish(w) == [] and "cut of step 2 or a checkpoint after step 0" in w.blocker()
    w.on_checkpoint(checkpoint(1))
    assert [(p.step, p.min_policy_version) for p in publish(w)] == [(2, 1)] * B


@pytest.mark.parametrize(
    ("pacing", "ahead"),
    [
        (Pacing(sync_offset=1), 2),
        (Pacing(sync_interval=3), 3),
        (Pacing(sync_interval=2, sync_offset=1), 3),
        (Pacing(style="fully_async", max_staleness=3), 4),
    ],
)
def test_tasks_of_a_step_come_once_its_oldest_allowed_version_exists(pacing, ahead):
    w = window(pacing=pacing, total_steps=None, total_epochs=9)
    w.on_checkpoint(checkpoint(0))
    steps = [(p.step, p.min_policy_version) for p in publish(w)]
    assert steps == [(s, 0) for s in range(1, ahead + 1) for _ in range(B)]
    w.on_cut(cut(1, range(B)))
    w.on_checkpoint(checkpoint(1))
    assert [(p.step, p.min_policy_version) for p in publish(w)] == [(ahead + 1, 1)] * B


def test_last_step_gets_no_more_than_its_batch():
    w = window(pacing=Pacing(style="fully_async", max_staleness=9), total_steps=2)
    w.on_checkpoint(checkpoint(0))
    assert len(publish(w)) == 2 * B
    w.on_cut(cut(1, range(B)))
    assert publish(w) == []


def test_limit_cuts_a_plan_and_the_next_goes_on():
    w = window()
    w.on_checkpoint(checkpoint(0))
    assert numbers(publish(w, limit=3)) == [0, 1, 2]
    assert numbers(publish(w)) == [3]


def test_dead_groups_slide_the_window_at_once():
    w = window()
    w.on_checkpoint(checkpoint(0))
    publish(w)
    w.on_drop(drop(1))
    w.on_drop(drop(3, "expired"))
    due = publish(w)
    assert [(p.number, p.ref.row, p.step) for p in due] == [(4, 4, 1), (5, 5, 1)]


def test_members_dropped_one_by_one_leave_their_group_alive():
    w = window()
    w.on_checkpoint(checkpoint(0))
    publish(w)
    w.on_drop(drop(0, "filtered", 0, None))
    w.on_drop(drop(0, "filtered", 1, 1))
    w.on_drop(by_trainer(1, 0))
    w.on_drop(by_trainer(1, 0))
    assert publish(w) == []
    w.on_drop(by_trainer(1, 1))
    assert numbers(publish(w)) == [4]


# --- rewards that take long


def rolled_out(w: Window, number: int, at_ms: int, scored: bool) -> None:
    for slot in range(G):
        w.on_trajectory(trajectory(number, slot, scored=scored), at_ms)


def test_group_without_a_reward_is_parked_after_the_wait_and_counts_against_the_bound():
    w = window(max_open_groups=B + 1)
    w.on_checkpoint(checkpoint(0))
    publish(w)
    for n in range(3):
        rolled_out(w, n, 100, scored=False)
    assert w.awaits_rewards
    assert publish(w, now_ms=1099) == []
    assert numbers(publish(w, now_ms=1100)) == [4]
    assert w.num_parked == 3 and "max_open_groups is 5" in w.blocker()


def test_without_a_wait_no_clock_takes_a_group_out_of_the_window():
    w = window(reward_wait_ms=None)
    w.on_checkpoint(checkpoint(0))
    publish(w)
    for n in range(B):
        rolled_out(w, n, 0, scored=False)
    assert publish(w, now_ms=10**12) == [] and w.num_outstanding == B


def test_half_rolled_out_or_scored_groups_are_not_parked():
    w = window()
    w.on_checkpoint(checkpoint(0))
    publish(w)
    w.on_trajectory(trajectory(0, 0, scored=False), 0)
    rolled_out(w, 1, 0, scored=True)
    rolled_out(w, 2, 0, scored=False)
    w.on_experience("t.2")
    assert publish(w, now_ms=10_000) == []


def test_reward_brings_a_parked_group_back():
    w = window()
    w.on_checkpoint(checkpoint(0))
    publish(w)
    rolled_out(w, 0, 0, scored=False)
    assert len(publish(w, now_ms=5_000)) == 1
    w.on_experience("t.0")
    assert (w.num_parked, w.num_outstanding) == (0, B + 1)


# --- the end


def test_epochs_end_when_every_row_is_published():
    w = window(total_steps=None, total_epochs=2, rows=3)
    w.on_checkpoint(checkpoint(0))
    publish(w)
    w.on_cut(cut(1, range(B)))
    w.on_checkpoint(checkpoint(1))
    assert w.end(0) is None
    assert numbers(publish(w)) == [4, 5]
    ended = w.end(7)
    assert ended == ev.Ended(branch="main", num_groups=6, produced_at=7)
    w.on_ended(ended)
    assert w.end(8) is None and not w.is_done
    w.on_cut(cut(2, [4]))
    w.on_drop(drop(5))
    assert w.is_done


def test_steps_end_with_the_cut_of_the_last():
    w = window(total_steps=1)
    w.on_checkpoint(checkpoint(0))
    publish(w)
    w.on_drop(drop(2))
    publish(w)
    w.on_cut(cut(1, [0, 1, 3, 4]))
    ended = w.end(0)
    assert ended is not None and ended.num_groups == 5
    w.on_ended(ended)
    assert w.is_done


def test_longer_run_goes_on_after_an_end_that_was_said():
    w = window(total_steps=2)
    w.on_ended(ev.Ended(branch="main", num_groups=4, produced_at=0))
    w.on_checkpoint(checkpoint(0))
    publish(w)
    w.on_cut(cut(1, range(B)))
    assert not w.is_over and w.end(0) is None


# --- forks


def forked(step: int, name: str = "main.1", before=()) -> tuple[Lineage, list[ev.Branch]]:
    branches = [*before, ev.Branch(branch=name, parent="main", step=step, produced_at=0)]
    return Lineage.of(name, branches), branches


def test_fork_publishes_the_rows_of_abandoned_groups_first():
    lineage, _ = forked(1)
    w = window(lineage, rows=100)
    for n in range(12):
        w.on_task(task(Publication(n, RowRef("t", n, 0), -1, 1, 0)))
    w.on_checkpoint(checkpoint(1))
    w.on_checkpoint(checkpoint(3))
    w.on_cut(cut(1, range(4)))
    w.on_cut(cut(2, range(4, 8)))
    for n, version in [(4, 1), (5, 2), (6, 2), (7, 1), (8, 3)]:
        w.on_trajectory(trajectory(n, 0, version), 0)
    # in lineage and open: 4 and 7 (no token after the fork), 9 to 11 (not executed)
    assert (w.num_outstanding, w.num_in_lineage) == (5, 9)
    w.on_cut(cut(2, [4, 7, 9, 10], branch="main.1"))
    w.on_checkpoint(checkpoint(2, "main.1"))
    assert [(p.ref.row, p.replaces, p.step) for p in publish(w)] == [
        (5, 5, 3),
        (6, 6, 3),
        (8, 8, 3),
    ]
    assert w.num_in_lineage == 12


def test_what_an_abandoned_trainer_dropped_after_the_fork_is_open_again():
    lineage, _ = forked(1)
    w = window(lineage)
    w.on_checkpoint(checkpoint(1))
    for n in range(2):
        w.on_task(task(Publication(n, RowRef("t", n, 0), -1, 1, 0)))
    for slot in range(G):
        w.on_drop(by_trainer(0, slot, step=2))
        w.on_drop(by_trainer(1, slot, step=1))
    assert w.num_outstanding == 1


def test_off_lineage_drops_of_the_trainer_bring_the_row_again():
    lineage, _ = forked(1)
    w = window(lineage)
    w.on_checkpoint(checkpoint(1))
    w.on_task(task(Publication(0, RowRef("t", 0, 0), -1, 1, 0)))
    w.on_drop(by_trainer(0, 0, "off_lineage", branch="main.1"))
    assert publish(w)[0] == Publication(1, RowRef("t", 0, 0), 0, 2, 1)


def test_group_that_the_join_closed_stays_closed_on_every_branch():
    lineage, _ = forked(1)
    for events in ([trajectory(0, 0, 2), drop(0)], [drop(0), trajectory(0, 0, 2)]):
        w = window(lineage)
        w.on_task(task(Publication(0, RowRef("t", 0, 0), -1, 1, 0)))
        for event in events:
            fold(w, event)
        assert (w.num_in_lineage, w.num_outstanding, w.plan(0, 9)) == (1, 0, [])


def test_a_failed_slot_takes_no_group_off_lineage():
    """The trainer sees only the others of its group, and trains on them."""
    lineage, _ = forked(1)
    w = window(lineage)
    w.on_task(task(Publication(0, RowRef("t", 0, 0), -1, 1, 0)))
    w.on_trajectory(trajectory(0, 0, 1), 0)
    failed = msgspec.structs.replace(trajectory(0, 1, 2), finish_reason="failed", failure="env")
    w.on_trajectory(failed, 0)
    assert (w.num_in_lineage, w.num_outstanding) == (1, 1)


def test_row_is_not_published_a_third_time_when_its_second_is_in_lineage():
    lineage, branches = forked(1)
    w = window(lineage)
    w.on_checkpoint(checkpoint(1))
    w.on_task(task(Publication(0, RowRef("t", 0, 0), -1, 1, 0)))
    w.on_task(task(Publication(1, RowRef("t", 0, 0), 0, 1, 0)))
    w.on_trajectory(trajectory(0, 0, 2), 0)
    assert all(p.replaces == -1 for p in publish(w))
    w.on_trajectory(trajectory(1, 0, 2), 0)
    w.on_cut(cut(2, range(2, 6), "main.1"))
    w.on_checkpoint(checkpoint(2, "main.1"))
    assert [(p.ref.row, p.replaces) for p in publish(w)][0] == (0, 1)


# --- whatever happens


def fold(w: Window, event: ev.Event) -> None:
    if isinstance(event, ev.Task):
        w.on_task(event)
    elif isinstance(event, ev.Trajectory):
        w.on_trajectory(event, 0)
    elif isinstance(event, ev.Drop):
        w.on_drop(event)
    elif isinstance(event, ev.Cut):
        w.on_cut(event)
    elif isinstance(event, ev.Checkpoint):
        w.on_checkpoint(event)


@given(data=st.data(), staleness=st.integers(0, 3))
def test_restart_anywhere_publishes_the_same_rows_in_the_same_order(data, staleness):
    """A run with dead groups; at every step a successor may take over from the log alone."""
    pacing = Pacing(style="fully_async", max_staleness=staleness)
    fields = {"pacing": pacing, "total_steps": None, "total_epochs": 3, "rows": 9}
    w, log, published = window(**fields), [checkpoint(0)], []
    fold(w, log[0])
    open_groups: list[int] = []
    step = 0
    for _ in range(200):
        if data.draw(st.booleans()):
            events = data.draw(st.permutations([e for e in log if not isinstance(e, ev.Task)]))
            w = window(**fields)
            for event in [*(e for e in log if isinstance(e, ev.Task)), *events]:
                fold(w, event)
        due = w.plan(0, 500)
        assert w.num_outstanding + len(due) <= B * (staleness + 1)
        tasks = [task(p) for p in due]
        published += [(p.ref.epoch, p.ref.row) for p in due]
        open_groups += [p.number for p in due]
        some = st.lists(st.sampled_from(open_groups or [0]), unique=True, max_size=3)
        dead = [n for n in data.draw(some) if n in open_groups]
        trained = [n for n in open_groups if n not in dead][:B]
        happened: list[ev.Event] = [*tasks, *(drop(n) for n in dead)]
        if len(trained) == B or (trained and w.is_over):
            step += 1
            happened += [cut(step, trained), checkpoint(step)]
            open_groups = [n for n in open_groups if n not in trained]
        open_groups = [n for n in open_groups if n not in dead]
        for event in happened:
            fold(w, event)
        log += happened
        if w.is_over and not open_groups:
            break
    assert published == [(e, r) for e in range(3) for r in range(9)]
    ended = w.end(0)
    assert ended is not None and ended.num_groups == 27
