"""Which tasks of a partition are done: only what all before it are may be committed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..schemas.events import Task
from ..streams.log import Partition


@dataclass(eq=False)
class Ticket:
    """One record taken from a partition. taken -> done | given up (the partition was lost)."""

    partition: Partition
    offset: int
    task: Task | None = None
    is_done: bool = False
    is_given_up: bool = False


class Progress:
    """The records taken and not yet committed, by partition in offset order."""

    def __init__(self) -> None:
        self._taken: dict[Partition, deque[Ticket]] = {}

    def take(self, ticket: Ticket) -> None:
        """Note a record read; offsets of a partition rise."""
        self._taken.setdefault(ticket.partition, deque()).append(ticket)

    def finish(self, reached: Mapping[Partition, int] | None = None) -> dict[Partition, int]:
        """Next offsets to commit, by partition: past the done records that begin each.

        Where none is left open, `reached` says how far was read, past holes behind the last too.
        """
        positions: dict[Partition, int] = {}
        for partition, tickets in self._taken.items():
            while tickets and tickets[0].is_done:
                positions[partition] = tickets.popleft().offset + 1
            if not tickets:
                positions[partition] = max(positions[partition], (reached or {}).get(partition, 0))
        self._taken = {p: tickets for p, tickets in self._taken.items() if tickets}
        return positions

    def give_up(self, partitions: Iterable[Partition]) -> list[Ticket]:
        """Forget lost partitions; their tickets, marked so that nothing more comes of them."""
        lost = [t for p in partitions for t in self._taken.pop(p, ())]
        for ticket in lost:
            ticket.is_given_up = True
        return lost
