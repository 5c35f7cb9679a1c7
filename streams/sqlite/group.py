"""Membership of one consumer in a group: who reads which share, under leases with epochs.

A share is partition p of every subscribed topic, so that co-partitioned topics stay together.
Nobody leads: whoever sees a member come, go, die or fall silent writes down each share's
successor; an owner gives a share up in its own `poll`, and only then its successor takes it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...schemas.errors import Fenced, LogError
from ..liveness import Identity, is_dead, this_process
from .balance import balance
from .roles import is_expired
from .store import Store, machine_ms

_LOOK_INTERVAL_S = 0.2
_MEMBERS = (
    "select member_id, name, topics, place, pid, started, session_ms, renewed_ms "
    "from members where group_name=? order by name"
)
_SHARES = (
    "select share, epoch, owner, successor from shares where group_name=? and share<? "
    "order by share"
)


class Member(NamedTuple):
    """A row of `members`."""

    member_id: int
    name: str
    topics: str
    place: str
    pid: int
    started: float
    session_ms: int
    renewed_ms: int

    @property
    def is_gone(self) -> bool:
        """Whether its shares are free: dead, or silent for longer than its session."""
        return is_expired(self.renewed_ms, self.session_ms) or is_dead(
            Identity(self.place, self.pid, self.started)
        )


class Share(NamedTuple):
    """A row of `shares`."""

    share: int
    epoch: int
    owner: int | None
    successor: int | None


class Change(NamedTuple):
    """What a look at the group says to a member: shares lost, to be given up, free to take."""

    lost: list[int]
    leaving: list[int]
    is_offered: bool


class Membership:
    """outside -> joined (shares under leases) -> outside (left, or evicted while silent)."""

    def __init__(
        self,
        store: Store,
        group: str,
        name: str | None,
        topics: Sequence[str],
        num_shares: int,
        session_ms: int,
    ) -> None:
        self._store, self.group = store, group
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._topics = json.dumps(sorted(topics))
        self._num_shares, self._session_ms = num_shares, session_ms
        self._member_id: int | None = None
        self._has_joined_before = False
        self._epochs: dict[int, int] = {}
        self._generation, self._renewed_ms, self._looked_s = -1, 0, 0.0

    @property
    def shares(self) -> list[int]:
        """Shares held, sorted."""
        return sorted(self._epochs)

    def look(self) -> Change | None:
        """Join, renew and evict as is due; what to do about it, None when nothing changed."""
        now_s = time.monotonic()
        is_due = now_s - self._looked_s >= _LOOK_INTERVAL_S
        if not is_due and self._read_generation() == self._generation:
            return None
        self._looked_s = now_s
        if self._member_id is None:
            self._join()
        self._renew_if_due()
        with self._store.reading() as db:
            generation = self._read_generation()
            members = self._members(db)
            shares = self._shares(db)
        if any(m.is_gone for m in members if m.member_id != self._member_id):
            self._evict()
            return self.look()
        self._generation = generation
        if self._member_id not in {m.member_id for m in members}:
            self._member_id, self._generation, self._looked_s = None, -1, 0.0
            return Change(self._forget(self.shares), [], False)
        return self._change(shares)

    def lost(self) -> list[int]:
        """Shares that went to others unnoticed; they are no longer held after this call."""
        with self._store.reading() as db:
            return self._lose(self._shares(db))

    def _lose(self, shares: list[Share]) -> list[int]:
        held = {(s.share, s.epoch) for s in shares if s.owner == self._member_id}
        return self._forget([s for s, epoch in self._epochs.items() if (s, epoch) not in held])

    def _change(self, shares: list[Share]) -> Change:
        me = self._member_id
        lost = self._lose(shares)
        mine = {s.share: s for s in shares if s.owner == me}
        leaving = [s for s in self.shares if mine[s].successor != me]
        is_offered = any(s.owner is None and s.successor == me for s in shares)
        return Change(lost, leaving, is_offered)

    def take(self) -> list[int]:
        """Take what is free and meant for this member, each share under its next epoch."""
        with self._store.writing() as db:
            taken = db.execute(
                "update shares set owner=successor, epoch=epoch+1 where group_name=? and share<? "
                "and owner is null and successor=? returning share, epoch",
                (self.group, self._num_shares, self._member_id),
            ).fetchall()
            self._renew(db)
            self._bump(db)
        self._epochs.update(taken)
        return sorted(share for share, _ in taken)

    def give_up(self, shares: Sequence[int]) -> None:
        """Hand shares to their successors."""
        with self._store.writing() as db:
            db.executemany(
                "update shares set owner=null where group_name=? and share=? and owner=?",
                [(self.group, share, self._member_id) for share in shares],
            )
            self._bump(db)
        self._forget(shares)

    def leave(self) -> None:
        """Leave at once. No error when this member was evicted already."""
        if self._member_id is None:
            return
        with self._store.writing() as db:
            self._remove(db, [self._member_id])
        self._member_id = None
        self._forget(self.shares)

    def check(self, db: sqlite3.Connection, shares: Iterable[int]) -> None:
        """Raise Fenced unless all shares are still held; seen inside the caller's transaction.

        A member that commits is alive: its session is renewed with it.
        """
        found = {s.share: s for s in self._shares(db)}
        for share in sorted(set(shares)):
            held = self._epochs.get(share)
            now = found.get(share)
            if held is None or now is None or (now.owner, now.epoch) != (self._member_id, held):
                raise Fenced(self._fenced(db, share, held, now))
        if machine_ms() - self._renewed_ms > self._session_ms // 3:
            self._renew(db)

    def _fenced(self, db: sqlite3.Connection, share: int, held: int | None, now: Share | None):
        names = {m.member_id: m.name for m in self._members(db)}
        owner = names.get(now.owner, "nobody") if now and now.owner is not None else "nobody"
        return (
            f"group {self.group!r}, member {self.name!r}: partition {share} of its topics is not "
            f"under its lease (epoch {held or 'none'}, now {now.epoch if now else 0} of {owner}). "
            f"It gave it up, or was silent for over {self._session_ms / 1000:g} s. Throw away "
            "what was read since the last commit; poll again to go on with what is assigned then."
        )

    def _join(self) -> None:
        with self._store.writing() as db:
            members = self._members(db)
            others = {m.topics for m in members if m.name != self.name and not m.is_gone}
            if others - {self._topics}:
                raise LogError(
                    f"group {self.group!r}: reads {others.pop()}, member {self.name!r} asks for "
                    f"{self._topics}. All members of a group subscribe to the same topics."
                )
            namesake = next((m for m in members if m.name == self.name), None)
            if namesake and self._has_joined_before and not namesake.is_gone:
                raise Fenced(
                    f"group {self.group!r}: member {self.name!r} was taken over by process "
                    f"{namesake.pid}. This process must end, or use another name."
                )
            me = self._insert(db, namesake)
            gone = [m.member_id for m in members if m.is_gone]
            old = namesake.member_id if namesake else None
            self._remove(db, [*gone, *([old] if old is not None else [])], {old: me})
        self._member_id, self._has_joined_before = me, True

    def _insert(self, db: sqlite3.Connection, namesake: Member | None) -> int:
        if namesake:
            db.execute("delete from members where member_id=?", (namesake.member_id,))
        self._renewed_ms = machine_ms()
        db.executemany(
            "insert or ignore into shares values(?,?,0,null,null)",
            [(self.group, share) for share in range(self._num_shares)],
        )
        (me,) = db.execute(
            "insert into members(group_name, name, topics, place, pid, started, session_ms, "
            "renewed_ms) values(?,?,?,?,?,?,?,?) returning member_id",
            (
                self.group,
                self.name,
                self._topics,
                *this_process(),
                self._session_ms,
                self._renewed_ms,
            ),
        ).fetchone()
        return me

    def _evict(self) -> None:
        with self._store.writing() as db:
            gone = [
                m.member_id
                for m in self._members(db)
                if m.member_id != self._member_id and m.is_gone
            ]
            if gone:
                self._remove(db, gone)

    def _remove(
        self,
        db: sqlite3.Connection,
        member_ids: Sequence[int],
        heirs: Mapping[int | None, int] | None = None,
    ) -> None:
        """Free the shares of these members and name the successors of all shares."""
        gone = set(member_ids)
        db.executemany("delete from members where member_id=?", [(m,) for m in gone])
        members = [m.member_id for m in self._members(db)]
        holders: dict[int, int | None] = {}
        for share in self._shares(db):
            holder = share.owner if share.owner is not None else share.successor
            holders[share.share] = (heirs or {}).get(holder, holder)
        target = balance(holders, members) if members else {}
        db.executemany(
            "update shares set owner=null where group_name=? and owner=?",
            [(self.group, m) for m in gone],
        )
        db.executemany(
            "update shares set successor=? where group_name=? and share=?",
            [(target.get(share), self.group, share) for share in holders],
        )
        self._bump(db)

    def _renew_if_due(self) -> None:
        if self._member_id is None or machine_ms() - self._renewed_ms < self._session_ms // 3:
            return
        with self._store.writing() as db:
            self._renew(db)

    def _renew(self, db: sqlite3.Connection) -> None:
        self._renewed_ms = machine_ms()
        db.execute(
            "update members set renewed_ms=? where member_id=?",
            (self._renewed_ms, self._member_id),
        )

    def _bump(self, db: sqlite3.Connection) -> None:
        db.execute(
            "insert into groups values(?, 1) on conflict(name) do update set "
            "generation=generation+1",
            (self.group,),
        )

    def _read_generation(self) -> int:
        rows = self._store.rows("select generation from groups where name=?", (self.group,))
        return rows[0][0] if rows else 0

    def _members(self, db: sqlite3.Connection) -> list[Member]:
        return [Member(*row) for row in db.execute(_MEMBERS, (self.group,))]

    def _shares(self, db: sqlite3.Connection) -> list[Share]:
        return [Share(*row) for row in db.execute(_SHARES, (self.group, self._num_shares))]

    def _forget(self, shares: Iterable[int]) -> list[int]:
        forgotten = list(shares)
        for share in forgotten:
            self._epochs.pop(share, None)
        return forgotten
