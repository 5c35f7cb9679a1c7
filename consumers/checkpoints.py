"""Checkpoints: written in an order that a kill cannot break, and only taken when they are whole.

Order of a save: weights, states and metadata; manifest.json with sizes and SHA-256 last; the folder
gets its name. Announcing it on the log is the trainer's part.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..schemas.errors import StorageUnavailable, StreamrftError
from ..streams import blobs, faults
from ..streams.blobs import join_uri, sha256_file, write_bytes
from ..streams.weights.object_storage import weights_path
from .folders import MANIFEST, Folders, open_folders
from .manifest import (
    HF_NAME,
    SHARDS_FOLDER,
    BaseModel,
    FileEntry,
    Manifest,
    Saved,
    entries,
    versions,
    write_manifest,
)

logger = logging.getLogger("streamrft")

META = "trainer_meta.json"
NUM_SERVED = 4
_NAME = re.compile(r"global_step_(\d+)(?:\.epoch_(\d+))?\Z")


class CheckpointFailed(StreamrftError):
    """A checkpoint could not be written now; training may go on and try again later."""

    retriable = True
    exit_code = 5


class CheckpointBroken(StreamrftError):
    """A checkpoint is not whole: a file is missing, or has another size or SHA-256."""


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint.

    Args:
        write_model: fills the folder of the model, or of the adapter, and returns the SHA-256 of
            its weights; None where they are saved already (`CheckpointStore.complete`).
        write_states: fills the folder with what a resume needs, None for weights only. Is told
            where others put files of theirs (`Folders.shared`), and returns those files.
        meta: trainer_meta.json, plain JSON; None for weights only.
        base: what the weights are an adapter of; None for a whole model.
    """

    write_model: Callable[[Path], str] | None
    write_states: Callable[[Path, str], Mapping[str, FileEntry]] | None = None
    meta: Mapping[str, Any] | None = None
    base: BaseModel | None = None


class CheckpointStore:
    """The checkpoints of one branch under `<uri>/` ("main") or `<uri>/<branch>/`."""

    def __init__(self, uri: str, branch: str) -> None:
        self.root, self.branch = uri, branch
        self._known: dict[str, Saved] = {}
        self.folders: Folders = open_folders(uri if branch == "main" else f"{uri}/{branch}")

    def save(
        self,
        contents: Contents,
        *,
        step: int,
        epoch: int,
        num_threads: int = 0,
        is_rolling: bool = False,
        before_place: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Write one checkpoint. `before_place` may raise, to keep the folder from its name.

        An existing whole folder of the step is never replaced: with the same weights it gets the
        states that it lacks, with others the new folder keeps its epoch in the name.

        Raises:
            CheckpointFailed: disk full, storage away; what was written is removed again.
        """
        name = f"global_step_{step}"
        with self.staged(name, epoch) as staged:
            digest, others = self._fill(staged, contents, step, epoch)
            manifest = Manifest(
                kind="weights" if contents.write_states is None else "full",
                branch=self.branch,
                step=step,
                epoch=epoch,
                files=entries(staged, {weights_path(contents.base): digest}, others),
                digest=digest,
                num_threads=num_threads,
                rolling=is_rolling,
                base=contents.base,
                versions=versions(),
            )
            write_manifest(staged, manifest)
            before_place()
            saved = self._place(staged, name, manifest)
            faults.reach("checkpoint.manifest_written", step)
            self._write_latest(saved.manifest)
            return saved

    def complete(
        self,
        served: Saved,
        contents: Contents,
        *,
        step: int,
        epoch: int,
        num_threads: int = 0,
        is_rolling: bool = False,
        before_place: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Make a full checkpoint of saved weights: their folder gets the states that it lacks.

        Raises:
            CheckpointFailed: as `save`; the weights stay as they were.
        """
        if served.manifest.kind == "full":
            return served
        with self.staged(f"global_step_{step}", epoch) as staged:
            into = self.folders.shared(staged, served.name, served.manifest.epoch) and served.uri
            others = self._fill_states(staged, contents, step, into)
            added = entries(staged, {}, others)
            manifest = msgspec.structs.replace(
                served.manifest,
                kind="full",
                epoch=epoch,
                files=served.manifest.files | added,
                num_threads=num_threads,
                rolling=is_rolling,
            )
            write_manifest(staged, manifest)
            before_place()
            saved = self.upgrade(staged, served, added)
            faults.reach("checkpoint.manifest_written", step)
            self._write_latest(saved.manifest)
            return saved

    @contextmanager
    def staged(self, name: str, epoch: int) -> Iterator[Path]:
        """A working folder that is gone afterwards; storage errors get a name."""
        staged: Path | None = None
        try:
            staged = self.folders.stage(name, epoch)
            yield staged
        except storage_errors() as error:
            raise CheckpointFailed(f"{self.folders.uri}/{name} is not written: {error}") from error
        finally:
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)

    def scan(self) -> list[Saved]:
        """Whole-looking checkpoints, newest first: manifest readable, every file has its size."""
        self._known.clear()
        return self.listed()

    def listed(self, *, without: str = "") -> list[Saved]:
        """As `scan`, but a folder that was looked at before is not looked into again.

        `without` is one that is being filled where it stands, and not whole yet.
        """
        known = {}
        for name in self.folders.names():
            if _NAME.match(name) and name != without:
                try:
                    known[name] = self._known.get(name) or self.look(name)
                except CheckpointBroken as error:
                    logger.warning("%s is left aside: %s", name, error)
        self._known = known
        found = known.values()
        return sorted(found, key=lambda s: (s.manifest.step, s.manifest.epoch), reverse=True)

    def look(self, name: str) -> Saved:
        """One checkpoint by its folder name; sizes are compared, contents are not.

        Raises:
            CheckpointBroken: no manifest, an unreadable one, or a file of another size.
        """
        try:
            text = self.folders.read(name, MANIFEST)
            manifest = msgspec.json.decode(text, type=Manifest)
            for path in filter(manifest.proves, manifest.files):
                size, wanted = self.folders.size(name, path), manifest.files[path].size
                if size != wanted:
                    raise CheckpointBroken(f"{path} has {size:,} bytes, not {wanted:,}")
        except FileNotFoundError as error:
            raise CheckpointBroken(f"a file is missing ({error})") from error
        except msgspec.DecodeError as error:
            raise CheckpointBroken(f"{MANIFEST} cannot be read ({error})") from error
        uri = f"{self.folders.uri}/{name}"
        return Saved(uri, name, manifest, hashlib.sha256(text).hexdigest())

    def fetch(self, saved: Saved, into: Path) -> Path:
        """A local folder with its files, every SHA-256 verified; of one in shards, the rest of it.

        Raises:
            CheckpointBroken: a file has other contents than the manifest says.
        """
        files = saved.manifest.files
        if saved.manifest.is_sharded:
            # each rank reads its own, and no other weights are needed
            files = {p: files[p] for p in files if not {SHARDS_FOLDER, HF_NAME} & {*p.split("/")}}
        folder = self.folders.fetch(saved.name, files, into)
        for path, entry in files.items():
            if (found := sha256_file(folder / path)) != entry.sha256:
                raise CheckpointBroken(
                    f"{saved.uri}/{path} has SHA-256 {found[:12]}, its manifest says "
                    f"{entry.sha256[:12]}. Resume from an older checkpoint (resume_from)."
                )
        return folder

    def retire(self, *, keep_full: int = 0, keep_steps: Collection[int] = ()) -> list[str]:
        """Delete what nobody needs any more; returns the names.

        Weights-only folders, and rolling full ones, go when `NUM_SERVED` newer steps are there
        and a newer full one is; other full ones only beyond the newest `keep_full` (0: all stay).
        Those of `keep_steps` stay: an explorer loads them, or a branch begins there.
        """
        found = self.listed()
        full = [s for s in found if s.manifest.kind == "full"]
        lasting = [s for s in full if not s.manifest.rolling]
        gone = [s for s in found[NUM_SERVED:] if s not in lasting and s not in full[:1]]
        if keep_full:
            gone += [s for s in lasting[keep_full:] if s not in found[:NUM_SERVED]]
        gone = [s for s in gone if s.manifest.step not in keep_steps]
        for saved in gone:
            self.folders.remove(saved.name)
        return [s.name for s in gone]

    def remove_staged(self) -> None:
        """Delete what dead trainers left half written; the caller holds the lease."""
        for name in self.folders.remove_staged():
            logger.info("removed %s/%s, which a dead trainer left half written", self.branch, name)

    def _fill(
        self, staged: Path, contents: Contents, step: int, epoch: int
    ) -> tuple[str, Mapping[str, FileEntry]]:
        assert contents.write_model is not None
        digest = contents.write_model(
            _subfolder(staged, weights_path(contents.base).rpartition("/")[0])
        )
        faults.reach("checkpoint.weights_written", step)
        if contents.write_states is None:
            return digest, {}
        into = self.folders.shared(staged, f"global_step_{step}", epoch)
        return digest, self._fill_states(staged, contents, step, into)

    def _fill_states(
        self, staged: Path, contents: Contents, step: int, into: str
    ) -> Mapping[str, FileEntry]:
        assert contents.write_states is not None
        _subfolder(staged, "actor")
        others = contents.write_states(staged, into)
        (staged / META).write_bytes(msgspec.json.encode(dict(contents.meta or {})))
        faults.reach("checkpoint.state_written", step)
        return others

    def _place(self, staged: Path, name: str, manifest: Manifest) -> Saved:
        is_apart = any(not (staged / path).exists() for path in manifest.files)
        filled = f"{name}.epoch_{manifest.epoch}" if is_apart else ""
        there = [s for s in self.listed(without=filled) if s.manifest.step == manifest.step]
        same = next((s for s in there if s.manifest.digest == manifest.digest), None)
        if same is not None and manifest.kind == "weights":
            return same
        if same is not None and same.manifest.kind == "weights" and not is_apart:
            states = [p for p in manifest.files if p not in same.manifest.files]
            return self.upgrade(staged, same, states)
        if not there and name in self.folders.names():
            self.folders.remove(name)
        uri = self.folders.place(staged, name, manifest.epoch)
        return self.look(uri.rsplit("/", 1)[-1])

    def upgrade(self, staged: Path, served: Saved, files: Iterable[str]) -> Saved:
        """Move `files` and the manifest of a working folder into a saved one."""
        # what is not here was put in its place by others
        self.folders.upgrade(staged, served.uri, [f for f in files if (staged / f).exists()])
        self.forget(served.name)
        return self.look(served.name)

    def forget(self, name: str) -> None:
        """Look into a folder anew, which was changed."""
        self._known.pop(name, None)

    def _write_latest(self, manifest: Manifest) -> None:
        names = ["latest_state_dict_iteration.txt"]
        if manifest.kind == "full":
            names.append("latest_checkpointed_iteration.txt")
        for name in names:
            write_bytes(join_uri(self.folders.uri, name), str(manifest.step).encode())


def _subfolder(folder: Path, path: str) -> Path:
    (folder / path).mkdir(parents=True, exist_ok=True)
    return folder / path


def storage_errors() -> tuple[type[Exception], ...]:
    """What a full disk or a store that is away raises; safetensors has an error of its own."""
    try:
        from safetensors import SafetensorError
    except ImportError:
        return *blobs.storage_errors(), StorageUnavailable
    return *blobs.storage_errors(), StorageUnavailable, SafetensorError
