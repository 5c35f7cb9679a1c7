"""Checkpoint folders on a disk and on an object store: whole or not there at all."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import fsspec
import pytest

from streamrft.consumers.checkpoints import (
    CheckpointBroken,
    CheckpointFailed,
    CheckpointStore,
    Contents,
)
from streamrft.consumers.manifest import WEIGHTS, FileEntry
from streamrft.schemas.errors import Fenced
from streamrft.schemas.events import Checkpoint
from streamrft.streams.weights.object_storage import (
    WeightsUnavailable,
    fetch_model_folder,
    load_state_dict,
)


@pytest.fixture(params=["disk", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "disk":
        yield str(tmp_path / "checkpoints")
        return
    yield f"memory://{tmp_path}/checkpoints"
    fsspec.filesystem("memory").store.clear()


def model(text: str):
    """Writes a model folder whose weights are `text`."""

    def write(folder: Path) -> str:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(text.encode())
        return hashlib.sha256(text.encode()).hexdigest()

    return write


def states(folder: Path, into: str) -> dict[str, FileEntry]:
    (folder / "actor" / "optim_world_size_1_rank_0.pt").write_bytes(b"moments")
    return {}


def full(text: str = "w") -> Contents:
    return Contents(model(text), states, {"latest_iteration": 1})


def weights(text: str = "w") -> Contents:
    return Contents(model(text))


def put(uri: str, path: str, content: bytes) -> None:
    fs, root = fsspec.core.url_to_fs(uri)
    fs.makedirs(fs._parent(f"{root}/{path}"), exist_ok=True)
    fs.pipe_file(f"{root}/{path}", content)


def test_saved_checkpoint_is_found_whole(uri: str, tmp_path: Path):
    store = CheckpointStore(uri, "main")
    saved = store.save(full("weights of 4"), step=4, epoch=2, num_threads=1)
    (found,) = CheckpointStore(uri, "main").scan()
    assert found == saved
    m = found.manifest
    assert (m.kind, m.branch, m.step, m.epoch, m.num_threads) == ("full", "main", 4, 2, 1)
    assert set(m.files) == {
        "actor/huggingface/config.json",
        WEIGHTS,
        "actor/optim_world_size_1_rank_0.pt",
        "trainer_meta.json",
    }
    assert m.digest == m.files[WEIGHTS].sha256
    folder = store.fetch(found, tmp_path)
    assert (folder / WEIGHTS).read_bytes() == b"weights of 4"
    assert json.loads((folder / "trainer_meta.json").read_text()) == {"latest_iteration": 1}


def test_latest_files_name_the_newest_of_each_kind(uri: str):
    store = CheckpointStore(uri, "main")
    store.save(full(), step=4, epoch=1)
    store.save(weights("5"), step=5, epoch=1)
    read = {
        name: fsspec.open(f"{uri}/latest_{name}_iteration.txt", "r")
        for name in ("checkpointed", "state_dict")
    }
    found = {}
    for name, opener in read.items():
        with opener as file:
            found[name] = file.read()
    assert found == {"checkpointed": "4", "state_dict": "5"}


def test_later_branches_lie_in_their_own_folder(uri: str):
    saved = CheckpointStore(uri, "main.4").save(full(), step=5, epoch=1)
    assert saved.uri.startswith(f"{uri}/main.4/global_step_5")
    assert CheckpointStore(uri, "main").scan() == []


def test_disk_folder_has_the_name_that_users_know(tmp_path: Path):
    saved = CheckpointStore(str(tmp_path), "main").save(full(), step=4, epoch=7)
    assert saved.uri == str(tmp_path / "global_step_4")


def test_folder_without_manifest_is_not_taken(uri: str):
    store = CheckpointStore(uri, "main")
    store.save(full(), step=3, epoch=1)
    put(uri, "global_step_9/actor/huggingface/model.safetensors", b"half")
    assert [s.manifest.step for s in store.scan()] == [3]


@pytest.mark.parametrize("content", [b"shorter", b"{"], ids=["size", "json"])
def test_altered_size_or_manifest_is_not_taken(uri: str, content: bytes):
    store = CheckpointStore(uri, "main")
    saved = store.save(full("some weights"), step=3, epoch=1)
    path = "manifest.json" if content == b"{" else WEIGHTS
    put(uri, f"{saved.name}/{path}", content)
    assert store.scan() == []


def test_altered_content_is_found_by_its_digest(uri: str, tmp_path: Path):
    store = CheckpointStore(uri, "main")
    saved = store.save(full("some weights"), step=3, epoch=1)
    put(uri, f"{saved.name}/{WEIGHTS}", b"else weights")
    with pytest.raises(CheckpointBroken, match="resume_from"):
        store.fetch(store.scan()[0], tmp_path)


def test_full_disk_leaves_nothing_behind(uri: str, tmp_path: Path):
    def fail(folder: Path, into: str) -> dict[str, FileEntry]:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = CheckpointStore(uri, "main")
    with pytest.raises(CheckpointFailed, match="No space left") as caught:
        store.save(Contents(model("w"), fail, {}), step=3, epoch=1)
    assert caught.value.retriable
    assert store.scan() == []
    assert not list(tmp_path.rglob("*.tmp"))
    assert store.save(full(), step=3, epoch=1).manifest.step == 3


def test_fenced_trainer_cannot_name_its_folder(uri: str):
    def fenced() -> None:
        raise Fenced("a successor holds it")

    store = CheckpointStore(uri, "main")
    with pytest.raises(Fenced):
        store.save(full(), step=3, epoch=1, before_place=fenced)
    assert store.scan() == []


def test_what_a_kill_leaves_of_a_deleted_folder_goes_with_the_next_trainer(
    uri: str, monkeypatch: pytest.MonkeyPatch
):
    store = CheckpointStore(uri, "main")
    store.save(full(), step=1, epoch=1)
    (name,) = store.folders.names()
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda _, ignore_errors=False: ignore_errors or 1 / 0)
        place = "fsspec.implementations.memory.MemoryFileSystem.rm"
        killed.setattr(place, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.folders.remove(name)
    assert store.scan() == []
    store.remove_staged()
    assert store.folders.names() == []
    fs, root = fsspec.core.url_to_fs(uri)
    assert not [f for f in fs.find(root) if "global_step_1" in f]


def test_half_written_folders_of_dead_trainers_are_removed(tmp_path: Path):
    store = CheckpointStore(str(tmp_path), "main")
    store.save(full(), step=3, epoch=1)
    (tmp_path / "global_step_4.epoch_1.tmp" / "actor").mkdir(parents=True)
    store.remove_staged()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["global_step_3"]


def test_served_weights_become_a_full_checkpoint_in_place(uri: str):
    store = CheckpointStore(uri, "main")
    served = store.save(weights("same"), step=3, epoch=1)
    saved = store.save(full("same"), step=3, epoch=1)
    assert saved.uri == served.uri
    assert [s.manifest.kind for s in store.scan()] == ["full"]


def test_full_checkpoint_is_never_made_smaller(uri: str):
    store = CheckpointStore(uri, "main")
    saved = store.save(full("same"), step=3, epoch=1)
    assert store.save(weights("same"), step=3, epoch=2) == saved


def test_other_weights_of_a_step_do_not_replace_the_first(uri: str):
    store = CheckpointStore(uri, "main")
    first = store.save(weights("one"), step=3, epoch=1)
    second = store.save(full("other"), step=3, epoch=2)
    assert second.uri.endswith("global_step_3.epoch_2")
    assert {s.uri for s in store.scan()} == {first.uri, second.uri}


def test_old_weights_are_deleted_but_full_checkpoints_stay(uri: str):
    store = CheckpointStore(uri, "main")
    store.save(full("0"), step=0, epoch=1)
    for step in range(1, 8):
        contents = full(str(step)) if step == 2 else weights(str(step))
        store.save(contents, step=step, epoch=1)
    store.retire()
    assert sorted(s.manifest.step for s in store.scan()) == [0, 2, 4, 5, 6, 7]


def test_rolling_checkpoints_go_when_newer_ones_are_there(uri: str):
    store = CheckpointStore(uri, "main")
    for step in range(8):
        is_rolling = step in (1, 2)
        contents = full(str(step)) if step < 4 else weights(str(step))
        store.save(contents, step=step, epoch=1, is_rolling=is_rolling)
    store.retire()
    assert sorted(s.manifest.step for s in store.scan()) == [0, 3, 4, 5, 6, 7]


def test_newest_full_checkpoint_stays_even_when_rolling(uri: str):
    store = CheckpointStore(uri, "main")
    store.save(full("0"), step=0, epoch=1)
    store.save(full("1"), step=1, epoch=1, is_rolling=True)
    for step in range(2, 8):
        store.save(weights(str(step)), step=step, epoch=1)
    store.retire()
    assert sorted(s.manifest.step for s in store.scan()) == [0, 1, 4, 5, 6, 7]


def test_only_as_many_full_checkpoints_as_asked_for_are_kept(uri: str):
    store = CheckpointStore(uri, "main")
    for step in range(9):
        store.save(full(str(step)), step=step, epoch=1)
    store.retire(keep_full=2)
    assert sorted(s.manifest.step for s in store.scan()) == [5, 6, 7, 8]
    store.retire(keep_full=6)
    assert sorted(s.manifest.step for s in store.scan()) == [5, 6, 7, 8]


# --- the weights of an announced checkpoint


@pytest.fixture
def announced(uri: str) -> Checkpoint:
    from safetensors.torch import save
    from torch import tensor

    content = save({"a": tensor([1.0, 2.0])})
    saved = CheckpointStore(uri, "main").save(
        Contents(lambda f: _write(f, content)), step=3, epoch=1
    )
    return Checkpoint(
        branch="main",
        step=3,
        kind="weights",
        uri=saved.uri,
        digest=saved.manifest.digest,
        manifest_sha256=saved.manifest_sha256,
        epoch=1,
        produced_at=1,
    )


def _write(folder: Path, content: bytes) -> str:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_weights_are_loaded_by_their_digest(announced: Checkpoint, tmp_path: Path):
    assert load_state_dict(announced)["a"].tolist() == [1.0, 2.0]
    folder = fetch_model_folder(announced, tmp_path / "cache")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert fetch_model_folder(announced, tmp_path / "cache") == folder


def test_missing_or_other_weights_are_refused(announced: Checkpoint, tmp_path: Path):
    put(announced.uri, "actor/huggingface/model.safetensors", b"other bytes")
    for read in (load_state_dict, lambda c: fetch_model_folder(c, tmp_path / "cache")):
        with pytest.raises(WeightsUnavailable, match="policy_version 3") as caught:
            read(announced)
        assert caught.value.retriable
    fs, path = fsspec.core.url_to_fs(announced.uri)
    fs.rm(path, recursive=True)
    for read in (load_state_dict, lambda c: fetch_model_folder(c, tmp_path / "cache")):
        with pytest.raises(WeightsUnavailable, match="cannot be read|holds no"):
            read(announced)
    assert not list((tmp_path / "cache").glob("*"))
