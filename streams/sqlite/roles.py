"""Role leases of the embedded log: one holder each, under an epoch that only rises."""

from __future__ import annotations

import sqlite3
import time

from ...schemas.errors import Fenced, Timeout
from ..liveness import Identity, is_dead, this_process
from ..log import Lease
from .store import Store, machine_ms

_LOOK_INTERVAL_S = 0.05
_HOLDER = "select epoch, owner, place, pid, started, ttl_ms, renewed_ms from roles where role=?"


def is_expired(renewed_ms: int, ttl_ms: int) -> bool:
    """Whether a lease ran out. A renewal after now is one of before the machine's last start."""
    return not renewed_ms <= machine_ms() < renewed_ms + ttl_ms


class Roles:
    """free -> held by an owner -> free (released, expired or dead), the epoch one higher."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def acquire(self, role: str, *, owner: str, ttl_ms: int, timeout_ms: int) -> Lease:
        """See `Log.acquire`."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            holder = self._holder(role)
            if holder is None:
                lease = self._take(role, owner, ttl_ms)
                if lease is not None:
                    return lease
            elif time.monotonic() >= deadline:
                raise Timeout(
                    f"role {role!r}, held by {holder}",
                    timeout_ms,
                    "It ends with that process, or when it stops renewing.",
                )
            time.sleep(min(_LOOK_INTERVAL_S, max(0.0, deadline - time.monotonic())))

    def renew(self, lease: Lease) -> None:
        """See `Log.renew`."""
        with self._store.writing() as db:
            self.check(db, lease)
            db.execute("update roles set renewed_ms=? where role=?", (machine_ms(), lease.role))

    def release(self, lease: Lease) -> None:
        """See `Log.release`."""
        with self._store.writing() as db:
            db.execute(
                "update roles set owner=null where role=? and epoch=?", (lease.role, lease.epoch)
            )

    def check(self, db: sqlite3.Connection, lease: Lease) -> None:
        """Raise Fenced unless the lease is still held, seen inside the caller's transaction."""
        row = db.execute("select epoch, owner from roles where role=?", (lease.role,)).fetchone()
        if row is None or row[0] != lease.epoch or row[1] is None:
            epoch, owner = row or (0, None)
            raise Fenced(
                f"role {lease.role!r}: {lease.owner} held it under epoch {lease.epoch}, now "
                f"{owner or 'nobody'} does under {epoch}. This process must end; its successor "
                "goes on."
            )

    def _holder(self, role: str) -> str | None:
        """Who keeps the role from being taken now, in words."""
        rows = self._store.rows(_HOLDER, (role,))
        if not rows or _is_free(rows[0]):
            return None
        epoch, owner, place, pid, *_ = rows[0]
        return f"{owner} (process {pid} on {place.partition('/')[0]}, epoch {epoch})"

    def _take(self, role: str, owner: str, ttl_ms: int) -> Lease | None:
        with self._store.writing() as db:
            row = db.execute(_HOLDER, (role,)).fetchone()
            if row is not None and not _is_free(row):
                return None
            epoch = row[0] + 1 if row else 1
            db.execute(
                "insert or replace into roles values(?,?,?,?,?,?,?,?)",
                (role, epoch, owner, *this_process(), ttl_ms, machine_ms()),
            )
        return Lease(role, owner, epoch, ttl_ms)


def _is_free(row: tuple) -> bool:
    _, owner, place, pid, started, ttl_ms, renewed_ms = row
    return owner is None or is_expired(renewed_ms, ttl_ms) or is_dead(Identity(place, pid, started))
