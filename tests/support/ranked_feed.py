"""A feed whose trainer is several ranks, each a process of its own."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import FORKED
from ports import free_port
from training_feed import Feed


@dataclass
class RankedFeed(Feed):
    """As Feed; a kill at a point may meet any rank, and the exit code is rank 0's."""

    size: int = 2

    def start(self, *, kill_at: str = "", **changes: Any) -> Any:
        """Rank 0; the others end with it."""
        team = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(self.size),
        }
        environment = {**self.environment, **team}
        if kill_at:
            environment["STREAMRFT_KILL_AT"] = f"{kill_at}={self.folder / 'killed'}"
        for rank in range(1, self.size):
            own = {**environment, "RANK": str(rank)}
            args = (own, self.folder / f"rank-{rank}.log")
            FORKED.Process(target=_follow, args=args, daemon=True).start()
        before, self.environment = self.environment, {**environment, "RANK": "0"}
        try:
            return super().start(**changes)
        finally:
            self.environment = before


def _follow(environment: dict[str, str], log_to: Path) -> None:
    from streamrft.consumers.trainer import follow_trainer

    os.environ.update(environment)
    logging.basicConfig(filename=log_to, level=logging.INFO)
    try:
        follow_trainer()
    except Exception:
        logging.exception("a rank ends with an error")
        raise
