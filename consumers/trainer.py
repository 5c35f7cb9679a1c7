"""The trainer: takes its lease, chooses the branch, goes on from the newest checkpoint, trains."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ..schemas.events import Branch, now_ms
from ..streams.lineage import Lineage
from ..streams.log import Record
from ..streams.process import Process
from ..streams.rows import Row, Rows, open_rows, to_json
from .announcer import Announcer
from .checkpoints import CheckpointStore
from .copies import with_copy
from .learning.examples import TrainingExample
from .learning.learner import Learner
from .learning.ranks import Ranks, join_ranks
from .learning.supervised import examples_of_row
from .lease import LeaseKeeper
from .loop import TrainingLoop
from .peers import Peers
from .recorded import History, choose_branch, read_history
from .resume import Base, check_fork, check_log, full_checkpoints, load_newest
from .saving import Saver
from .settings import SftSource, TrainerSettings
from .sources.members import BatchRules
from .sources.online import OnlineSource
from .sources.rows import RowSource
from .sources.source import Source


def run_trainer(process: Process, settings: TrainerSettings) -> None:
    """Train until the goal is reached or the process is asked to stop.

    Raises:
        Fenced: another trainer took the lease. RanksLost: another rank ended. Timeout: nothing
            came for max_read_timeout, or a living trainer holds the lease. CheckpointFailed:
            step 0 or the last checkpoint could not be written. ConfigError: names the key.
    """
    lease = process.acquire("trainer", settings.lease_ms)
    if lease is None:
        return
    with LeaseKeeper(process, lease) as keeper, ExitStack() as closed:
        with keeper.working():
            ranks = join_ranks()
            closed.callback(ranks.close)
            loop = open_loop(process, settings, keeper, ranks)
            closed.callback(loop.close)
        loop.run()


def follow_trainer() -> None:
    """A rank above 0: train its share of what rank 0 reads, until that ends. Opens no log.

    Raises:
        RanksLost: rank 0 or another rank ended before its time.
    """
    ranks = join_ranks()
    if (order := ranks.next_order()) is not None:
        _, arguments = order
        Learner(**arguments, ranks=ranks).follow()
    ranks.close()


def open_loop(
    process: Process, settings: TrainerSettings, keeper: LeaseKeeper, ranks: Ranks
) -> TrainingLoop:
    """Choose the branch, load its newest checkpoint or save that of step 0, announce it.

    Raises:
        ConfigError: a fork without its checkpoint, or a log and a folder that do not belong
            together. CheckpointFailed: step 0 could not be written.
    """
    history = read_history(process.log, process.topics)
    lineage, fork = _choose_lineage(history, settings)
    candidates = full_checkpoints(settings.checkpoint_uri, lineage)
    if settings.sft is None:
        check_log(history, lineage, candidates, settings.checkpoint_uri)
    rows = None if settings.sft is None else _open_rows(settings.sft)
    total_steps = settings.total_steps or _num_steps(settings, rows)
    with ranks.together("start", settings=settings, total_steps=total_steps):
        learner = Learner(settings, total_steps=total_steps, ranks=ranks)
    base = load_newest(learner, candidates)
    position = base.meta["position"] if base else None
    announcer = Announcer(process.log, process.topics, keeper.lease)
    source: Source = (
        _online_source(process, settings, announcer, lineage, learner, position)
        if rows is None
        else _row_source(process, settings, announcer, rows, learner, position)
    )
    store = CheckpointStore(settings.checkpoint_uri, lineage.branch)
    peers = Peers(process.log, process.topics)
    saver = Saver(settings, store, announcer, keeper, learner, source, history.announced(lineage))
    saver.steps_in_use = lambda: history.forks_of(lineage.branch) | peers.loading()
    _announce(saver, fork, base)
    return TrainingLoop(
        process=process,
        settings=settings,
        keeper=keeper,
        announcer=announcer,
        history=history,
        lineage=lineage,
        learner=learner,
        source=source,
        saver=saver,
        peers=peers,
        step=base.saved.manifest.step if base else 0,
        total_steps=total_steps,
    )


def _choose_lineage(history: History, settings: TrainerSettings) -> tuple[Lineage, Branch | None]:
    """The lineage to train, and the Branch event that is to be published for it."""
    place = choose_branch(history, settings.resume_from, settings.branch, now_ms())
    if place.fork is not None:
        if place.branch not in {b.branch for b in history.branches}:
            check_fork(place.fork, settings.checkpoint_uri, history)
        history.add(place.fork)
    return history.lineage(place.branch), place.fork


def _announce(saver: Saver, fork: Branch | None, base: Base | None) -> None:
    """Say where training goes on, now that everything could be loaded."""
    saver.store.remove_staged()
    if fork is not None:
        saver.announcer.publish("checkpoints", fork)
    if base is None:
        saver.after_step(0, is_last=False)
    else:
        # explorers of a fork begin with these weights
        saver.go_on_from(with_copy(base.store, base.saved, saver.learner.save_hf))


def _online_source(
    process: Process,
    settings: TrainerSettings,
    announcer: Announcer,
    lineage: Lineage,
    learner: Learner,
    position: Mapping[str, Any] | None,
) -> OnlineSource:
    rules = BatchRules(
        batch_groups=settings.batch_groups,
        max_staleness=settings.max_staleness,
        source_max_staleness=settings.source_max_staleness,
        in_number_order=settings.deterministic,
        ends_by_steps=settings.total_steps is not None,
        in_pairs=settings.algorithm.algorithm_type == "dpo",
    )
    source = OnlineSource(
        process.log,
        process.topics,
        announcer,
        rules,
        lineage,
        lineage.branch,
        position=position,
        reader=process.name,
        check=learner.check,
    )
    source.catch_up()
    return source


def _open_rows(sft: SftSource) -> Rows:
    return open_rows("sft", sft.path, split=sft.split, subset=sft.subset_name)


def _num_steps(settings: TrainerSettings, rows: Rows | None) -> int | None:
    """Steps of all epochs of supervised rows; None online, where the scheduler decides."""
    if rows is None or settings.sft is None:
        return None
    return -(-settings.sft.total_epochs * len(rows) // settings.train_batch_size)


def _row_source(
    process: Process,
    settings: TrainerSettings,
    announcer: Announcer,
    rows: Rows,
    learner: Learner,
    position: Mapping[str, Any] | None,
) -> RowSource:
    sft, limit = settings.sft, settings.max_sequence_tokens
    assert sft is not None

    def to_examples(row: Row, number: int) -> list[TrainingExample]:
        made = examples_of_row(row, learner.tokenizer, sft, number=number, max_tokens=limit)
        for example in made:
            learner.check(example)
        return made

    def on_refused(number: int, row: Row | None, why: str) -> None:
        value = None if row is None else to_json(row).encode()
        record = Record(sft.path, 0, number, now_ms(), None, value, ())
        announcer.dead_letter(record, why, process.name)

    return RowSource(
        rows,
        to_examples,
        on_refused,
        batch_rows=settings.train_batch_size,
        total_epochs=None if settings.total_steps else sft.total_epochs,
        seed=settings.seed,
        shuffle=sft.shuffle,
        position=position,
    )
