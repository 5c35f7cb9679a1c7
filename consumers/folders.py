"""Where checkpoint folders lie: a local disk with atomic renames, or any fsspec URL without."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..schemas.errors import StorageUnavailable
from ..streams.blobs import open_storage, storage_errors, sync

logger = logging.getLogger("streamrft")

MANIFEST = "manifest.json"


class Folders(Protocol):
    """The folders of one branch. The manifest of a folder appears after everything else in it."""

    uri: str

    def stage(self, name: str, epoch: int) -> Path:
        """A new, empty local folder to fill; what a dead process left under the name is removed."""
        ...

    def place(self, staged: Path, name: str, epoch: int) -> str:
        """Make the filled folder appear durably; returns its URI, the name `name` when free."""
        ...

    def upgrade(self, staged: Path, uri: str, files: Iterable[str]) -> None:
        """Move `files`, then the manifest, into the folder at `uri`; the rest of it stays."""
        ...

    def shared(self, staged: Path, name: str, epoch: int) -> str:
        """Where others put files of theirs for `staged`: a URI, or empty for the folder itself."""
        ...

    def names(self) -> list[str]:
        """Folders here; empty when nothing was ever saved."""
        ...

    def read(self, name: str, path: str) -> bytes:
        """One file of a folder. Raises FileNotFoundError."""
        ...

    def size(self, name: str, path: str) -> int:
        """Size of one file. Raises FileNotFoundError."""
        ...

    def fetch(self, name: str, paths: Iterable[str], into: Path) -> Path:
        """A local folder that holds these files: the folder itself, or copies under `into`."""
        ...

    def delete(self, name: str, paths: Iterable[str]) -> None:
        """Delete files of a folder; no error for what is gone."""
        ...

    def remove(self, name: str) -> None:
        """Delete a folder, in an order in which nobody takes the rest for whole."""
        ...

    def remove_staged(self) -> list[str]:
        """Delete the working folders that dead processes left; returns their names."""
        ...


def open_folders(uri: str) -> Folders:
    """Local paths and file:// give LocalFolders, every other scheme goes through fsspec."""
    if uri.startswith("file://"):
        return LocalFolders(Path(uri.removeprefix("file://")))
    return RemoteFolders(uri) if "://" in uri else LocalFolders(Path(uri))


class LocalFolders:
    """Folders on a disk: filled under a working name, synced, then renamed."""

    def __init__(self, root: Path) -> None:
        self.root, self.uri = root, str(root)

    def stage(self, name: str, epoch: int) -> Path:
        """`<name>.epoch_<epoch>.tmp` beside the folders, on the same disk."""
        staged = self.root / f"{name}.epoch_{epoch}.tmp"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        return staged

    def place(self, staged: Path, name: str, epoch: int) -> str:
        """Rename; a folder that is there already is never replaced, the new one keeps its epoch."""
        _sync_tree(staged)
        target = self.root / name
        try:
            os.rename(staged, target)
        except OSError:
            if not target.exists():
                raise
            target = self.root / f"{name}.epoch_{epoch}"
            shutil.rmtree(target, ignore_errors=True)
            os.rename(staged, target)
        sync(self.root)
        return str(target)

    def upgrade(self, staged: Path, uri: str, files: Iterable[str]) -> None:
        """One rename a file; the folder is whole before and after each."""
        _sync_tree(staged)
        for path in [*files, MANIFEST]:
            target = Path(uri) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged / path, target)
            sync(target.parent)

    def shared(self, staged: Path, name: str, epoch: int) -> str:
        """The working folder, on a disk that all see."""
        return ""

    def names(self) -> list[str]:
        """Folders here, working folders left out."""
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and p.suffix != ".tmp")

    def read(self, name: str, path: str) -> bytes:
        """One file."""
        return (self.root / name / path).read_bytes()

    def size(self, name: str, path: str) -> int:
        """Its size."""
        return (self.root / name / path).stat().st_size

    def fetch(self, name: str, paths: Iterable[str], into: Path) -> Path:
        """The folder itself."""
        return self.root / name

    def delete(self, name: str, paths: Iterable[str]) -> None:
        """One by one."""
        for path in paths:
            (self.root / name / path).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Renamed first: what a kill leaves is a working folder, which the next trainer deletes."""
        gone = self.root / f"{name}.removed.tmp"
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self.root / name, gone)
        shutil.rmtree(gone)

    def remove_staged(self) -> list[str]:
        """Whatever ends in .tmp: the caller holds the lease, so no living process fills it."""
        left = sorted(self.root.glob("*.tmp")) if self.root.is_dir() else []
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        return [folder.name for folder in left]


class RemoteFolders:
    """Folders on an object store: no rename, so they keep the epoch; the manifest goes up last.

    Everything raises StorageUnavailable when the store does not answer or refuses.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._fs, self._root = open_storage(self.uri)

    def stage(self, name: str, epoch: int) -> Path:
        """A folder in the system's temporary directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}.epoch_{epoch}."))

    def place(self, staged: Path, name: str, epoch: int) -> str:
        """Upload as `<name>.epoch_<epoch>`."""
        uri = self.shared(staged, name, epoch)
        self.upgrade(staged, uri, _files(staged))
        return uri

    def upgrade(self, staged: Path, uri: str, files: Iterable[str]) -> None:
        """Upload `files`, then the manifest."""
        upload(staged, uri, [*files, MANIFEST])

    def shared(self, staged: Path, name: str, epoch: int) -> str:
        """Where `place` uploads to."""
        return f"{self.uri}/{name}.epoch_{epoch}"

    def names(self) -> list[str]:
        """Folders here."""
        with _answering(self.uri):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._root):
                return []
            found = self._fs.ls(self._root, detail=True)
        return sorted(e["name"].rsplit("/", 1)[-1] for e in found if e["type"] == "directory")

    def read(self, name: str, path: str) -> bytes:
        """One object."""
        with _answering(self.uri):
            return self._fs.cat_file(f"{self._root}/{name}/{path}")

    def size(self, name: str, path: str) -> int:
        """Its size."""
        with _answering(self.uri):
            return int(self._fs.size(f"{self._root}/{name}/{path}"))

    def fetch(self, name: str, paths: Iterable[str], into: Path) -> Path:
        """Copies under `into/<name>`."""
        for path in paths:
            target = into / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with _answering(self.uri):
                self._fs.get_file(f"{self._root}/{name}/{path}", str(target))
        return into / name

    def delete(self, name: str, paths: Iterable[str]) -> None:
        """One by one."""
        with _answering(self.uri):
            for path in paths:
                if self._fs.exists(place := f"{self._root}/{name}/{path}"):
                    self._fs.rm_file(place)

    def remove(self, name: str) -> None:
        """Manifest first."""
        manifest = f"{self._root}/{name}/{MANIFEST}"
        with _answering(self.uri):
            if self._fs.exists(manifest):
                self._fs.rm_file(manifest)
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def remove_staged(self) -> list[str]:
        """Folders without a manifest: the caller holds the lease, so nobody fills them."""
        found = [name for name in self.names() if name.startswith("global_step_")]
        with _answering(self.uri):
            left = [n for n in found if not self._fs.exists(f"{self._root}/{n}/{MANIFEST}")]
            for name in left:
                self._fs.rm(f"{self._root}/{name}", recursive=True)
        self._abort_uploads()
        return left

    def _abort_uploads(self) -> None:
        """Free the parts of large files whose upload was killed; nobody else sees or pays them.

        Only in checkpoints: other processes upload beside them. Rights for it may be missing.
        """
        if not hasattr(self._fs, "call_s3"):
            return
        bucket, key, _ = self._fs.split_path(f"{self._root}/global_step_")
        try:
            found = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
            # not every store looks at the prefix
            left = [u for u in found.get("Uploads") or () if u["Key"].startswith(key)]
            for upload in left:
                named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._fs.call_s3("abort_multipart_upload", Bucket=bucket, **named)
                logger.info("aborted the upload of %s, which a dead trainer left", named["Key"])
        except storage_errors() as error:
            logger.warning("%s: uploads of dead trainers are not aborted: %s", self.uri, error)


def upload(folder: Path, uri: str, paths: Iterable[str]) -> None:
    """Put files of a local folder under a URI, one after the other. Raises StorageUnavailable."""
    fs, root = open_storage(uri)
    with _answering(uri):
        for path in paths:
            fs.put_file(str(folder / path), f"{root}/{path}")


@contextmanager
def _answering(uri: str) -> Iterator[None]:
    """A missing file is an answer; what else a store raises gets a name."""
    try:
        yield
    except FileNotFoundError:
        raise
    except storage_errors() as error:
        raise StorageUnavailable(
            f"{uri}: the store does not answer, or refuses: {error}"
        ) from error


def _files(folder: Path) -> list[str]:
    paths = (p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file())
    return [p for p in paths if p != MANIFEST]


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
