"""What rank 0 of a team is told to do."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiny_learner import group, mixed
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from streamrft.consumers.bases import save_base
from streamrft.consumers.checkpoints import CheckpointStore, Contents
from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.learning.sharded import Place
from streamrft.consumers.resume import load_newest
from streamrft.consumers.states import copied, states_of


@dataclass
class Kept:
    """What a job leaves: metrics of each step, then the checkpoint's parts.

    `optimizer` where it was asked for: by model and name, moments and what is not sharded.
    """

    metrics: list[dict[str, float]]
    weights: Mapping[str, Tensor]
    rng: Sequence[Mapping[str, Tensor]]
    optimizer: Mapping[str, Any] = field(default_factory=dict)


def batches() -> list[list[TrainingExample]]:
    """Many sequences; then one trained, so that a rank has none; none at all; and many again."""
    single = group([[0, 1, 1, 1], [0, 0]], (1.0, 0.0), seed=7)
    masked = group([[0, 0, 0], [0, 0]], (1.0, 0.0), seed=8)
    return [mixed(1), single, masked, mixed(2), mixed(4)]


def pairs() -> list[list[TrainingExample]]:
    """Three pairs, then one alone, each wanted before unwanted."""
    chosen = mixed(5)[:8]
    marked = [dataclasses.replace(e, preference=1 - 2 * (i % 2)) for i, e in enumerate(chosen)]
    return [marked[:6], marked[6:]]


def preferences(learner: Learner) -> Kept:
    """Train on pairs."""
    return kept(learner, [learner.step(b, step=1 + i) for i, b in enumerate(pairs())])


def steps(learner: Learner, chosen: Sequence[int] = range(5), first: int = 1) -> Kept:
    """Train on some of the batches."""
    every = batches()
    metrics = [learner.step(every[i], step=first + n) for n, i in enumerate(chosen)]
    return kept(learner, metrics)


def save(folder: Path, step: int, learner: Learner) -> Kept:
    """Save in full as a trainer does, with a step between copy and writing; what was saved."""
    now, states = kept_whole(learner), states_of(learner, step, copies=True)
    base = save_base(learner, str(folder), epoch=1, before_place=lambda: None)
    contents = Contents(partial(learner.save_hf, state=now.weights), states.write, {}, base)
    learner.step(batches()[3], step=step + 1)
    CheckpointStore(str(folder), "main").save(contents, step=step, epoch=1)
    return now


def fail_once(folder: Path, learner: Learner) -> str:
    """Save where rank 1 cannot write, then where it can; why it could not."""
    states = states_of(learner, 1)
    (folder / "full" / "actor" / "dcp" / "__1_0.distcp").mkdir(parents=True)
    try:
        states.write(folder / "full", "")
    except OSError as error:
        save(folder, 1, learner)
        return str(error)
    return "nothing failed"


def go_on_twice(folder: Path, learner: Learner) -> tuple[Kept, Kept, Kept]:
    """What is new, what two steps make of it, and the second when the first was loaded."""
    new = kept(learner, [])
    steps(learner, [0])
    save(folder, 1, learner)
    straight_on = kept(learner, [])
    store = CheckpointStore(str(folder), "main")
    assert load_newest(learner, [(store, saved) for saved in store.scan()]) is not None
    return new, straight_on, steps(learner, [3], 2)


def go_on_and_save(
    folder: Path, chosen: Sequence[int], first: int, learner: Learner
) -> tuple[Kept, Kept, Kept]:
    """Load the newest checkpoint: its parts, those after more steps, and what is saved of them."""
    store = CheckpointStore(str(folder), "main")
    assert load_newest(learner, [(store, saved) for saved in store.scan()]) is not None
    loaded = kept_whole(learner)
    stepped = steps(learner, chosen, first)
    return loaded, stepped, save(folder, first + len(chosen) - 1, learner)


def kept(learner: Learner, metrics: list[dict[str, float]]) -> Kept:
    """The learner's present state, in memory of its own."""
    return copy.deepcopy(Kept(metrics, learner.state_dict(), learner.rng_state()))


def kept_whole(learner: Learner) -> Kept:
    """With the optimiser; of several ranks as torch's own reader finds it in what they write."""
    now = kept(learner, [])
    if learner.num_ranks == 1:
        tensors = copied(learner._tensors())
        outlines = {name: copied(o.outline()) for name, o in learner._optimizers().items()}
    else:
        outlines = learner.capture_shards(step=0, copies=False)["optimizers"]
        with tempfile.TemporaryDirectory() as folder:
            learner.write_shards(Place(folder))
            tensors = {part: read_shards(Path(folder) / part / "dcp") for part in outlines}
    named = {part: dict(sorted(found.items())) for part, found in tensors.items()}
    return dataclasses.replace(now, optimizer={"outlines": outlines, "tensors": named})


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Every tensor that lies in shards, by its name."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        n: torch.empty(m.size) for n, m in stored.items() if isinstance(m, TensorStorageMetadata)
    }
    load({**found}, checkpoint_id=folder, no_dist=True)
    return found


def step_and_wait(marker: Path, learner: Learner, limit_s: float) -> str:
    """Train once, say so, then look after the other ranks, soon impatient, until one is lost."""
    learner.step(batches()[0], step=1)
    learner._ranks._order_limit = timedelta(seconds=limit_s)  # type: ignore[attr-defined]
    marker.touch()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        learner.check_ranks()
        time.sleep(0.05)
    raise AssertionError("no rank was lost within 120 s")
