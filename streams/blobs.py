"""Bytes beside the log: files by URI (path, file://, s3://, memory://) and claim checks.

Source: "Claim Check", Hohpe and Woolf, Enterprise Integration Patterns.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from fsspec.core import url_to_fs

from ..schemas import codec
from ..schemas.errors import (
    ConfigError,
    MissingExtra,
    StorageCorrupt,
    StorageGone,
    StorageUnavailable,
)
from ..schemas.events import Claim, Trajectory

# below the session of a join worker, which reads objects between two polls
CLAIM_TIMEOUT_S = 5.0
# a store that is slow to say that it is away is not asked for each object of a batch
_SLOW_S, _PAUSE_S = 1.0, 2.0
_silent: dict[str, tuple[float, str]] = {}


class UnknownScheme(ConfigError):
    """A URI that no kind of storage goes by."""


def open_storage(uri: str) -> tuple[Any, str]:
    """The fsspec file system of a URI and the path on it.

    Raises:
        MissingExtra: its package is not installed. ConfigError: no such scheme, or an s3:// URI
            without keys, or with an address that is none, in the environment.
    """
    try:
        found = url_to_fs(uri)
    except ImportError as error:
        raise MissingExtra(f"the storage of {uri}", "s3") from error
    except ValueError as error:
        raise UnknownScheme(f"{uri}: {error}") from error
    if uri.startswith("s3://"):
        _check_environment()
    return found


def storage_errors() -> tuple[type[Exception], ...]:
    """What a store that is away, full or unwilling raises; clients' own errors are no OSError."""
    found: list[type[Exception]] = [OSError]
    for module, name in (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError")):
        if client := sys.modules.get(module):
            found.append(getattr(client, name))
    return tuple(found)


def join_uri(uri: str, *parts: str) -> str:
    """A URI further down, without doubled slashes."""
    return "/".join([uri.rstrip("/"), *parts])


def write_bytes(uri: str, content: bytes) -> None:
    """Write an object whole and durably; its folder is made. Readers never see half of it.

    Raises:
        StorageUnavailable: the storage refused; nothing readable was left behind.
    """
    fs, path = open_storage(uri)
    try:
        if _is_local(fs):
            _replace(Path(path), content)
        else:
            fs.pipe_file(path, content)
    except storage_errors() as error:
        raise StorageUnavailable(f"{uri}: cannot be written ({error})") from error


def read_bytes(uri: str, *, timeout_s: float | None = None) -> bytes:
    """An object's bytes. `timeout_s` bounds a remote store that does not answer.

    Raises:
        StorageGone: the store answers, and there is no such object.
        StorageUnavailable: the store is away, or refuses now.
    """
    fs, path = open_storage(uri)
    bounds = {"timeout": timeout_s} if timeout_s and getattr(fs, "async_impl", False) else {}
    try:
        return fs.cat_file(path, **bounds)
    except (*storage_errors(), ValueError) as error:
        if _says_gone(error):
            raise StorageGone(f"{uri}: there is no such object ({error})") from error
        why = str(error) or f"no answer within {timeout_s} s"
        raise StorageUnavailable(f"{uri}: cannot be read ({why})") from error


def sha256_file(path: Path) -> str:
    """SHA-256 of a local file, in hexadecimal, read in pieces. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a local file's content, or a folder's names, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_claim(storage_uri: str, trajectory: Trajectory) -> Trajectory:
    """Store a trajectory under `<storage_uri>/claims/<sha256>`; what is left of it for the log.

    Idempotent: the same trajectory is the same object.

    Raises:
        StorageUnavailable: try again; the trajectory is not stored.
    """
    content = codec.encode(trajectory)
    digest = hashlib.sha256(content).hexdigest()
    uri = join_uri(storage_uri, "claims", digest)
    write_bytes(uri, content)
    claim = Claim(uri=uri, sha256=digest, size_bytes=len(content))
    return msgspec.structs.replace(trajectory, sequences=[], claim=claim)


def resolve(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its sequences, fetched when they were stored beside the log.

    Raises:
        StorageUnavailable: the store is away; try again.
        StorageGone: the object is not there, or its URI is none.
        StorageCorrupt: its bytes are not those of the claim.
    """
    claim = trajectory.claim
    if claim is None:
        return trajectory
    content = _claimed(claim)
    found = hashlib.sha256(content).hexdigest()
    if found != claim.sha256:
        raise StorageCorrupt(
            f"{claim.uri}: {len(content):,} bytes with SHA-256 {found}; the claim of "
            f"{trajectory.trajectory_id} says {claim.size_bytes:,} bytes with {claim.sha256}. "
            "Restore the object from a copy."
        )
    stored = codec.decode(content, Trajectory)
    return msgspec.structs.replace(trajectory, sequences=stored.sequences, claim=None)


def _claimed(claim: Claim) -> bytes:
    """The object of a claim, whose URI is a record's word and no setting of ours."""
    store = "/".join(claim.uri.split("/", 3)[:3])
    until, why = _silent.get(store, (0.0, ""))
    if time.monotonic() < until:
        raise StorageUnavailable(why)
    began = time.monotonic()
    try:
        return read_bytes(claim.uri, timeout_s=CLAIM_TIMEOUT_S)
    except UnknownScheme as error:
        raise StorageGone(str(error)) from error
    except (ConfigError, MissingExtra) as error:
        # this process lacks a package or keys: others have them, and so may its successor
        raise StorageUnavailable(str(error)) from error
    except StorageUnavailable as error:
        if time.monotonic() - began > _SLOW_S:
            _silent[store] = time.monotonic() + _PAUSE_S, str(error)
        raise


def _says_gone(error: Exception) -> bool:
    """Whether waiting cannot help: no such object, or no name that an object could have."""
    gone: list[type[Exception]] = [FileNotFoundError, IsADirectoryError, NotADirectoryError]
    if botocore := sys.modules.get("botocore.exceptions"):
        gone.append(botocore.ParamValidationError)
    is_gone = isinstance(error, (ValueError, *gone))
    return is_gone or getattr(error, "errno", None) in (errno.ENAMETOOLONG, errno.ELOOP)


@cache
def _check_environment() -> None:
    """Ask botocore's whole chain once: environment, files, then the machine's role.

    A wrong address would otherwise come up with each object, as if its own name were wrong.
    """
    from botocore.session import get_session

    session = get_session()
    if session.get_credentials() is None:
        raise ConfigError(
            "no keys for S3. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, "
            "and AWS_ENDPOINT_URL for a store that is not Amazon's."
        )
    try:
        session.create_client("s3")
    except ValueError as error:
        raise ConfigError(
            f"no way to S3: {error}. AWS_ENDPOINT_URL is such as http://host:8333."
        ) from error


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
