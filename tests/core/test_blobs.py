import socket
import time

import msgspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from streamrft.schemas import arrays, codec
from streamrft.schemas.errors import (
    ConfigError,
    MissingExtra,
    StorageCorrupt,
    StorageGone,
    StorageUnavailable,
)
from streamrft.schemas.events import Claim, Sequence, Trajectory, Turn
from streamrft.streams import blobs


def long_trajectory(num_tokens: int = 5_000) -> Trajectory:
    sequence = Sequence(
        tokens=arrays.pack_ints(np.arange(num_tokens)),
        loss_mask=arrays.pack_mask(np.ones(num_tokens)),
        logprobs=arrays.pack_floats(np.zeros(num_tokens)),
        policy_versions=arrays.pack_runs([3] * num_tokens),
        turns=[Turn(role="assistant", start=0, end=num_tokens, text="forty-two")],
    )
    return Trajectory(
        trajectory_id="g.0:0:a",
        group_id="g.0",
        slot=0,
        attempt="a",
        producer="explorer-0",
        branch="main",
        min_policy_version=3,
        max_policy_version=3,
        group_size=1,
        sequences=[sequence],
        finish_reason="stop",
        reward_sources={"accuracy": 1.0},
        produced_at=1,
    )


def test_claim_leaves_a_small_event_and_resolves_to_the_whole_trajectory(tmp_path):
    whole = long_trajectory()
    left = blobs.put_claim(str(tmp_path), whole)
    assert len(codec.encode(left)) < 1_000
    assert left.claim is not None
    assert left.claim.uri == f"{tmp_path}/claims/{left.claim.sha256}"
    assert left.claim.size_bytes == len(blobs.read_bytes(left.claim.uri))
    assert blobs.resolve(codec.decode(codec.encode(left), Trajectory)) == whole


def test_claim_of_the_same_trajectory_is_the_same_object(tmp_path):
    first = blobs.put_claim(str(tmp_path), long_trajectory())
    assert blobs.put_claim(str(tmp_path), long_trajectory()) == first
    assert len(list((tmp_path / "claims").iterdir())) == 1


def test_trajectory_without_claim_resolves_to_itself():
    whole = long_trajectory(4)
    assert blobs.resolve(whole) is whole


def test_altered_object_is_refused_by_its_digest(tmp_path):
    left = blobs.put_claim(str(tmp_path), long_trajectory())
    assert left.claim is not None
    blobs.write_bytes(left.claim.uri, b"other bytes")
    with pytest.raises(StorageCorrupt, match=r"g\.0:0:a says .* bytes with " + left.claim.sha256):
        blobs.resolve(left)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_missing_object_is_gone_and_named(tmp_path, scheme):
    left = blobs.put_claim(f"{scheme}{tmp_path}", long_trajectory())
    assert left.claim is not None
    fs, path = blobs.open_storage(left.claim.uri)
    fs.rm(path)
    with pytest.raises(StorageGone, match=left.claim.sha256) as caught:
        blobs.resolve(left)
    assert not caught.value.retriable


@pytest.mark.parametrize(
    "uri", ["", "gopher://host/x", "/", "x" * 5_000, "nul\0", "http://[", "file:///dev/null/x"]
)
def test_claim_that_names_no_object_is_gone(tmp_path, uri):
    left = blobs.put_claim(str(tmp_path), long_trajectory())
    claim = msgspec.structs.replace(left.claim, uri=uri)
    with pytest.raises(StorageGone):
        blobs.resolve(msgspec.structs.replace(left, claim=claim))


@pytest.mark.parametrize("error", [PermissionError("not yours"), ConnectionResetError("reset")])
def test_store_that_refuses_is_away(tmp_path, monkeypatch, error):
    left = blobs.put_claim(str(tmp_path), long_trajectory())

    def refuse(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(LocalFileSystem, "cat_file", refuse)
    with pytest.raises(StorageUnavailable, match=str(error)) as caught:
        blobs.resolve(left)
    assert caught.value.retriable


def test_store_that_takes_connections_and_never_answers_is_away_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "CLAIM_TIMEOUT_S", 1.2)
    left = blobs.put_claim(str(tmp_path), long_trajectory())
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}/claims/x"
        claim = msgspec.structs.replace(left.claim, uri=uri)
        asked = msgspec.structs.replace(left, claim=claim)
        first, *later = [seconds_to_fail(asked) for _ in range(4)]
    assert first < 30 and min(later) < 0.5, "those after it are not asked for at once"


def seconds_to_fail(claimed: Trajectory) -> float:
    began = time.monotonic()
    with pytest.raises(StorageUnavailable, match=r"no answer within 1\.2 s"):
        blobs.resolve(claimed)
    return time.monotonic() - began


def test_claim_that_this_process_lacks_a_package_for_is_away(tmp_path, monkeypatch):
    left = blobs.put_claim(str(tmp_path), long_trajectory())

    def refuse(uri: str):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(blobs, "url_to_fs", refuse)
    with pytest.raises(StorageUnavailable, match="pip install"):
        blobs.resolve(left)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_written_bytes_are_read_back(tmp_path, scheme):
    uri = f"{scheme}{tmp_path}/deep/er/object"
    blobs.write_bytes(uri, b"first")
    blobs.write_bytes(uri, b"second")
    assert blobs.read_bytes(uri) == b"second"


def test_writing_leaves_no_partial_file(tmp_path):
    blobs.write_bytes(f"{tmp_path}/object", b"bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


def test_writing_below_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageUnavailable, match="file/object"):
        blobs.write_bytes(f"{tmp_path}/file/object", b"bytes")


def test_unknown_scheme_is_a_configuration_error():
    with pytest.raises(ConfigError, match="gopher"):
        blobs.write_bytes("gopher://host/object", b"")


def test_missing_s3_package_names_the_extra(monkeypatch):
    def refuse(uri: str):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(blobs, "url_to_fs", refuse)
    with pytest.raises(MissingExtra, match=r"streamrft\[s3\]"):
        blobs.read_bytes("s3://bucket/object")


def test_claim_survives_a_change_of_other_fields(tmp_path):
    left = blobs.put_claim(str(tmp_path), long_trajectory())
    moved = msgspec.structs.replace(left, branch="main.3")
    assert blobs.resolve(moved).branch == "main.3"


@pytest.fixture
def s3(monkeypatch):
    """Keys and an address at which nobody is, told to a process that has not looked yet."""
    s3fs = pytest.importorskip("s3fs")
    blobs._check_environment.cache_clear()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    yield
    blobs._check_environment.cache_clear()
    # its address would be asked by the next test, too
    s3fs.S3FileSystem.clear_instance_cache()


def test_s3_without_keys_says_which_to_set(s3, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match="^no keys for S3.*AWS_ACCESS_KEY_ID.*AWS_ENDPO"):
        blobs.read_bytes("s3://bucket/a")


def test_s3_whose_address_is_none_is_no_reason_to_give_an_object_up(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "s3.local:9000")
    with pytest.raises(ConfigError, match=r"Invalid endpoint: s3\.local:9000.*AWS_ENDPOINT_URL"):
        blobs.read_bytes("s3://b/a")
    claim = Claim(uri="s3://b/a", sha256="0" * 64, size_bytes=1)
    claimed = msgspec.structs.replace(long_trajectory(), sequences=[], claim=claim)
    with pytest.raises(StorageUnavailable, match="Invalid endpoint"):
        blobs.resolve(claimed)


def test_s3_is_asked_for_its_keys_once_and_not_for_each_object(s3):
    for i in range(3):
        blobs.open_storage(f"s3://b/claims/{i}")
    assert blobs._check_environment.cache_info().misses == 1


def test_s3_that_is_away_is_a_retriable_error_with_the_address(s3):
    for call in (lambda: blobs.read_bytes("s3://b/a"), lambda: blobs.write_bytes("s3://b/a", b"")):
        with pytest.raises(StorageUnavailable, match="s3://b/a: cannot be .*127.0.0.1:1") as caught:
            call()
        assert caught.value.retriable
