"""A learner on several gloo ranks, each a process; rank 0 does a job, the others follow."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forked import FORKED
from ports import free_port

from streamrft.consumers.learning import ranks as ranks_module
from streamrft.consumers.learning.learner import Learner
from streamrft.consumers.learning.ranks import join_ranks
from streamrft.consumers.settings import TrainerSettings
from streamrft.consumers.trainer import follow_trainer

Job = Callable[[Learner], Any]

LIMIT_S = 180


@dataclass
class Team:
    """Processes of one team, by rank."""

    processes: list[Any]
    result_at: Path
    folder: Path

    def result(self) -> Any:
        """What rank 0's job returned; every rank ended with 0."""
        codes = self.ended()
        assert codes == [0] * len(codes), self.said()
        return torch.load(self.result_at, weights_only=False)

    def ended(self, timeout_s: float = LIMIT_S) -> list[int | None]:
        """Exit codes; what lives longer is killed and has None."""
        codes: list[int | None] = []
        for process in self.processes:
            process.join(timeout_s)
            codes.append(process.exitcode)
            if process.is_alive():
                process.kill()
                process.join(10)
        return codes

    def said(self) -> str:
        """Last words of all ranks."""
        files = sorted(self.folder.glob("rank-*.txt"))
        return "\n".join(f"{f.stem}: {f.read_text()[-3000:]}" for f in files)


def start_team(size: int, settings: TrainerSettings, job: Job, folder: Path) -> Team:
    """`job` is a function of a module that can be imported, or a partial of one."""
    folder.mkdir(parents=True, exist_ok=True)
    port, result_at = free_port(), folder / "result.pt"
    processes = [
        FORKED.Process(
            target=_rank,
            args=(rank, size, port, settings, job, result_at),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return Team(processes, result_at, folder)


def _rank(
    rank: int,
    size: int,
    port: int,
    settings: TrainerSettings,
    job: Job,
    result_at: Path,
) -> None:
    ranks_module.BEAT_S = 0.5
    said = os.open(result_at.parent / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size)
    )
    if rank > 0:
        follow_trainer()
        return
    ranks = join_ranks()
    with ranks.together("start", settings=settings, total_steps=None):
        learner = Learner(settings, total_steps=None, ranks=ranks)
    result = job(learner)
    ranks.close()
    torch.save(result, result_at)
