"""The file of the embedded log: one SQLite connection, its tables, its errors in our words."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...schemas.errors import LogError, LogUnavailable

APPLICATION_ID = 0x53524654  # "SRFT" in the header of the file
SCHEMA_VERSION = 1
DEFAULT_BUSY_TIMEOUT_MS = 10_000

# records_at carries the timestamp so that a search by time reads the index alone; offsets are
# unique because they are only ever taken from `partitions` inside a write transaction.
SCHEMA = """
create table topics(
    topic_id integer primary key autoincrement, name text unique,
    num_partitions integer not null, cleanup text not null, retention_ms integer,
    max_event_bytes integer not null);
create table partitions(
    topic_id integer not null, partition integer not null, first_offset integer not null,
    next_offset integer not null, compacted_to integer not null,
    primary key(topic_id, partition)) without rowid;
create table records(
    id integer primary key, topic_id integer not null, partition integer not null,
    offset integer not null, timestamp_ms integer not null, key blob, value blob, headers blob);
create unique index records_at on records(topic_id, partition, offset, timestamp_ms);
create table latest(
    topic_id integer not null, partition integer not null, key blob not null,
    offset integer not null, tombstone_ms integer,
    primary key(topic_id, partition, key)) without rowid;
create index tombstones on latest(topic_id, tombstone_ms) where tombstone_ms is not null;
create table committed(
    group_name text not null, topic_id integer not null, partition integer not null,
    offset integer not null, primary key(group_name, topic_id, partition)) without rowid;
create table groups(name text primary key, generation integer not null) without rowid;
create table members(
    member_id integer primary key autoincrement, group_name text not null, name text not null,
    topics text not null, place text not null, pid integer not null, started real not null,
    session_ms integer not null, renewed_ms integer not null, unique(group_name, name));
create table shares(
    group_name text not null, share integer not null, epoch integer not null, owner integer,
    successor integer, primary key(group_name, share)) without rowid;
create table roles(
    role text primary key, epoch integer not null, owner text, place text not null,
    pid integer not null, started real not null, ttl_ms integer not null,
    renewed_ms integer not null) without rowid;
"""

_FORBIDDEN = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_RETRIABLE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL}


def machine_ms() -> int:
    """Milliseconds on the clock that all processes of this machine share and nobody can set."""
    return time.monotonic_ns() // 1_000_000


class Store:
    """One connection. Belongs to the thread that opened it, as everything built on it."""

    def __init__(self, path: Path, busy_timeout_ms: int = DEFAULT_BUSY_TIMEOUT_MS) -> None:
        """Open or create the file.

        Raises:
            LogError: the file is no streamrft log, of another version, or cannot be opened.
        """
        self.path, self._default_busy_ms = path, busy_timeout_ms
        self._num_writes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=busy_timeout_ms / 1000, isolation_level=None
            )
        except (OSError, sqlite3.Error) as error:
            raise LogError(
                f"{path}: cannot be opened ({error}). Look at the rights of the file and its folder"
            ) from error
        self._busy_ms = busy_timeout_ms
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        deadline = time.monotonic() + self._default_busy_ms / 1000
        while True:
            try:
                self._check_or_create()
                return
            except LogUnavailable:
                # the switch to WAL mode by another process ignores our busy timeout
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _check_or_create(self) -> None:
        try:
            with self.reading():
                found = self.rows("pragma application_id")[0][0]
                is_new = not found and not self.rows("select 1 from sqlite_master limit 1")
        except LogUnavailable:
            raise
        except LogError as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
                advice = "Look whether its disk is full or gone."
                raise LogError(f"{self.path}: {error.__cause__}. {advice}") from error
            raise LogError(f"{self.path}: is no streamrft log ({error.__cause__})") from error
        if not is_new and found != APPLICATION_ID:
            raise LogError(f"{self.path}: is another program's SQLite file, no streamrft log")
        if is_new:
            self.rows("pragma page_size=8192")
        for pragma in (
            "journal_mode=wal",
            "synchronous=full",
            "wal_autocheckpoint=2000",
            f"journal_size_limit={64 * 2**20}",
        ):
            self.rows(f"pragma {pragma}")
        if is_new:
            self._create()
        version = self.rows("pragma user_version")[0][0]
        if version != SCHEMA_VERSION:
            raise LogError(
                f"{self.path}: log format {version}, this streamrft reads {SCHEMA_VERSION}. "
                "Open it with the version that wrote it."
            )

    def _create(self) -> None:
        with self.writing() as db:
            if db.execute("pragma application_id").fetchone()[0]:
                return
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"pragma application_id={APPLICATION_ID}")
            db.execute(f"pragma user_version={SCHEMA_VERSION}")

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """All rows of one statement, committed before this call."""
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def version(self) -> tuple[int, int]:
        """Differs from before exactly when somebody, this connection included, has committed."""
        return self.rows("pragma data_version")[0][0], self._num_writes

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One view of the file for several statements."""
        with self._transaction("begin") as db:
            yield db

    @contextmanager
    def writing(self, timeout_ms: int | None = None) -> Iterator[sqlite3.Connection]:
        """The write lock of the file; durable when left, undone by an exception.

        Raises:
            LogUnavailable: the lock was not free for `timeout_ms`, or the disk is full.
        """
        busy_ms = self._default_busy_ms if timeout_ms is None else timeout_ms
        if busy_ms != self._busy_ms:
            self.rows(f"pragma busy_timeout={busy_ms:d}")
            self._busy_ms = busy_ms
        with self._transaction("begin immediate") as db:
            yield db
        self._num_writes += 1

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        db = self._connection
        try:
            db.execute(begin)
            yield db
            db.execute("commit")
        except BaseException as error:
            if db.in_transaction:
                db.execute("rollback")
            if isinstance(error, sqlite3.Error):
                raise self._translated(error) from error
            raise

    def close(self) -> None:
        """Release the file; an open transaction is undone."""
        self._connection.close()

    def _translated(self, error: sqlite3.Error) -> LogError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return LogUnavailable(f"{self.path}: the disk is full; free space, then try again")
        if code in _RETRIABLE:
            return LogUnavailable(
                f"{self.path}: locked by another process for over {self._busy_ms / 1000:g} s"
            )
        advice = ". Look at the rights of the file and its folder" if code in _FORBIDDEN else ""
        return LogError(f"{self.path}: {error}{advice}")
