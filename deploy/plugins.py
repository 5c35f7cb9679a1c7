"""Plug-in folders: files of a user's that register workflows, rewards and filters."""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..schemas.errors import ConfigError


def plugin_files(folders: Iterable[str]) -> Iterator[Path]:
    """The Python files of the folders, those of a folder by name.

    Raises:
        ConfigError: a folder is missing, or may not be read.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"--plugin-dir: {folder} is no folder.")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(f"--plugin-dir: {folder} cannot be read: its rights forbid it.")
        # hidden ones are an editor's locks and copies, not the user's
        yield from sorted(f for f in Path(folder).glob("*.py") if not f.name.startswith("."))


def load_plugins(folders: Iterable[str]) -> None:
    """Import every Python file of the folders, so that it registers what it defines.

    Raises:
        ConfigError: a folder is missing, or a file cannot be imported.
    """
    for path in plugin_files(folders):
        _import_file(path)


def _import_file(path: Path) -> None:
    # the folder is part of the name: two folders may hold files of one name
    name = f"streamrft_plugin_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything: it ends the role
        del sys.modules[name]
        raise ConfigError(f"--plugin-dir: {path}: {type(error).__name__}: {error}") from error
