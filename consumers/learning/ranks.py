"""The processes that train one model together: rank 0 leads, the others follow its orders.

Rank 0 alone knows log, storage and lease. It tells the others what to do, and everybody does the
same then on its own share: so batch, weights and metrics are one process's but for rounding.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ...schemas.errors import StreamrftError
from . import shards
from .batches import Indices, plan
from .shares import shares

logger = logging.getLogger("streamrft")

BEAT_S = 5.0
# a rank that waits for the next order hears from rank 0 every BEAT_S
ORDER_LIMIT_S = 60.0
# one rank's load, or its part between two exchanges of a step
WORK_LIMIT_S = 600.0

Order = tuple[str, dict[str, Any]]


class RanksLost(StreamrftError):
    """A rank of the trainer ended or does not answer; all end, and the trainer starts again."""


class Ranks:
    """One process that trains alone. Every method is called by all ranks, in the same order."""

    rank, size = 0, 1

    @contextmanager
    def together(self, name: str, **arguments: Any) -> Iterator[None]:
        """Do something that needs all ranks: rank 0 tells the others first.

        Raises:
            RanksLost: a rank ended, or did not answer in time.
        """
        yield

    def check(self) -> None:
        """Raise RanksLost when a rank is known to be gone. Cheap."""

    def next_order(self) -> Order | None:
        """On ranks above 0: what rank 0 does together now; None when it ends."""
        return None

    def plan(self, lengths: Indices, budget: int) -> list[Indices]:
        """This rank's micro-batches; some may be empty."""
        return plan(lengths, budget)

    def gathered(self, value: Any) -> list[Any]:
        """Plain values of all ranks, by rank."""
        return [value]

    def shard(self, network: Any) -> None:
        """Leave this rank its part of a model."""

    def scattered(self, values: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's tensor as `like` lies on the ranks."""
        assert values is not None
        return values

    def close(self) -> None:
        """Let the others end."""


class SeveralRanks(Ranks):
    """rendezvous -> telling or following orders -> closed | lost.

    While rank 0 has nothing to order, a thread of its own meets the others every few seconds: so
    a rank that is gone is known on all ranks, and nobody waits without a limit.
    """

    def __init__(self, rank: int, size: int, *, order_limit_s: float) -> None:
        """Meet the other ranks at MASTER_ADDR and MASTER_PORT. Raises RanksLost when they fail."""
        self.rank, self.size = rank, size
        self._order_limit = timedelta(seconds=order_limit_s)
        self._beat_s = min(BEAT_S, order_limit_s / 3)
        self._lock, self._done = threading.Lock(), threading.Event()
        self._lost: RanksLost | None = None
        work_limit = timedelta(seconds=WORK_LIMIT_S)
        with self._named("the rendezvous"):
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=work_limit)
            else:
                dist.init_process_group("gloo", timeout=work_limit)
            self._orders: Any = dist.new_group(backend="gloo", timeout=self._order_limit)
            self._values: Any = dist.new_group(backend="gloo", timeout=work_limit)
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            self._mesh = init_device_mesh(kind, (size,))
        self._heart = threading.Thread(target=self._beat, name="ranks", daemon=True)
        if rank == 0:
            self._heart.start()
        logger.info("rank %d of %d is there", rank, size)

    @contextmanager
    def together(self, name: str, **arguments: Any) -> Iterator[None]:
        """Rank 0: tell the others, then do it; others: do what was told."""
        if self.rank > 0:
            with self._named(name):
                yield
            return
        with self._lock:
            self.check()
            with self._named(name):
                self._tell((name, arguments))
                yield

    def check(self) -> None:
        """Raise RanksLost when the other ranks were found gone, or were let go."""
        if self._lost is not None:
            raise self._lost
        if self._done.is_set():
            raise RanksLost(f"rank {self.rank} of {self.size}: the ranks have parted.")

    def next_order(self) -> Order | None:
        """Wait for rank 0's next order; raises RanksLost when it is not heard any more."""
        while True:
            with self._named("waiting for rank 0"):
                self._meet()
                box: list[Any] = [None]
                dist.broadcast_object_list(box, src=0, group=self._orders)
            order: Order | None = box[0]
            if order is None or order[0] != "wait":
                return order

    def plan(self, lengths: Indices, budget: int) -> list[Indices]:
        """This rank's share, cut into as many micro-batches as every other's."""
        return shares(lengths, budget, self.size)[self.rank]

    def gathered(self, value: Any) -> list[Any]:
        """Plain values of all ranks, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._values)
        return values

    def shard(self, network: Any) -> None:
        """Shard the model over all ranks."""
        shards.shard(network, self._mesh)

    def scattered(self, values: Tensor | None, like: Tensor) -> Tensor:
        """Send every rank its shard of rank 0's tensor."""
        return shards.scattered(values, like)

    def close(self) -> None:
        """Rank 0 lets the others end; after a failure nobody is waited for."""
        self._done.set()
        if self.rank == 0:
            self._heart.join(timeout=2 * self._order_limit.total_seconds())
            with self._lock:  # a save may be under way in a thread of its own
                if self._lost is None:
                    with self._named("the end"):
                        self._tell(None)
        if self._lost is None:
            dist.destroy_process_group()

    def _tell(self, order: Order | None) -> None:
        self._meet()
        dist.broadcast_object_list([order], src=0, group=self._orders)

    def _meet(self) -> None:
        """Wait until every rank is here; on rank 0 an error names the one that is not."""
        dist.monitored_barrier(group=self._orders, timeout=self._order_limit)

    def _beat(self) -> None:
        while not self._done.wait(self._beat_s):
            with self._lock:
                if self._lost is not None:
                    return
                try:
                    with self._named("waiting"):
                        self._tell(("wait", {}))
                except RanksLost as error:
                    logger.error("%s", error)
                    return

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Give torch's errors of a lost connection their name; whatever fails ends the team."""
        try:
            yield
        except Exception as error:
            self._lost = _lost(self.rank, self.size, what, error)
            if isinstance(error, StreamrftError) or not _is_lost(error):
                raise
            raise self._lost from error


def seed_of(seed: int, rank: int) -> int:
    """A run's seed for one rank; rank 0 has the run's own."""
    if rank == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=7).digest())


def join_ranks() -> Ranks:
    """The ranks that torchrun or the parent's environment speak of; alone without any.

    Raises:
        RanksLost: the others did not come.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    return SeveralRanks(int(os.environ["RANK"]), size, order_limit_s=ORDER_LIMIT_S)


def _is_lost(error: Exception) -> bool:
    """Whether a connection failed: gloo's errors are plain RuntimeErrors."""
    words = ("gloo", "Connection", "monitoredBarrier", "Timed out", "NCCL")
    is_named = isinstance(error, RuntimeError) and any(w in str(error) for w in words)
    return is_named or isinstance(error, dist.DistError)


def _lost(rank: int, size: int, what: str, error: Exception) -> RanksLost:
    why = " ".join(str(error).split())[:300]
    return RanksLost(
        f"rank {rank} of {size}, {what}: the ranks are not together any more ({why}). Look for the "
        "first error of the other ranks; the trainer starts again with all of them."
    )
