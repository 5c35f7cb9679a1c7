"""The trainer: takes its lease, chooses the branch, goes on from the newest checkpoint, trains."""

from __future__ import annotations

from contextlib import ExitStack

from ..schemas.events import Branch, now_ms
from ..streams.lineage import Lineage
from ..streams.process import Process
from .announcer import Announcer
from .checkpoints import CheckpointStore
from .copies import with_copy
from .inputs import Inputs, num_steps, open_rows_of
from .learning.learner import Learner
from .learning.ranks import Ranks, join_ranks
from .lease import LeaseKeeper
from .loop import TrainingLoop
from .peers import Peers
from .recorded import History, choose_branch, read_history
from .resume import Base, check_fork, check_log, full_checkpoints, load_newest
from .saving import Saver
from .settings import TrainerSettings


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
    rows = open_rows_of(settings)
    total_steps = settings.total_steps or num_steps(settings, rows)
    with ranks.together("start", settings=settings, total_steps=total_steps):
        learner = Learner(settings, total_steps=total_steps, ranks=ranks)
    base = load_newest(learner, candidates)
    position = base.meta["position"] if base else None
    announcer = Announcer(process.log, process.topics, keeper.lease)
    source = Inputs(process, settings, announcer, learner).open(lineage, rows, position)
    store = CheckpointStore(settings.checkpoint_uri, lineage.branch)
    peers = Peers(process.log, process.topics)
    saver = Saver(settings, store, announcer, keeper, learner, source, history.announced(lineage))
    saver.steps_in_use = lambda: history.forks_of(lineage.branch) | peers.loading()
    _announce(saver, fork, base)
    step = base.saved.manifest.step if base else 0
    return TrainingLoop(process, history, lineage, saver, peers, step, total_steps)


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
    if base is not None:
        saver.base = base.below
        # explorers of a fork begin with these weights
        saver.go_on_from(with_copy(base.store, base.saved, saver.learner.save_hf))
        return
    saver.after_step(0, is_last=False)
