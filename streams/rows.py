"""Rows of a file, whatever holds them: JSONL, JSON, Parquet, a folder, or a hub data set."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..schemas.errors import ConfigError, MissingExtra

_SUFFIXES = (".jsonl", ".json", ".parquet")
_CONTENT = "a text is allowed, or null beside tool_calls."
_OTHERS = (".csv", ".tsv", ".txt")
_READ = ".jsonl (a JSON object a line), .json (a list of objects) and .parquet"
_FROM_CSV = """\
python -c 'import csv, json, sys
for row in csv.DictReader(sys.stdin): print(json.dumps(row))' < {} > {}"""
Row = dict[str, Any]


class Rows(Protocol):
    """A fixed number of rows, each an object."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def open_rows(name: str, path: str, *, split: str, subset: str | None) -> Rows:
    """Open what `path` names: a file, a folder with files of the split, or a name on the hub.

    `name` is what errors call it, such as `taskset 'gsm'`.

    Raises:
        ConfigError: nothing there, or not readable; says what was looked for and what to do.
        MissingExtra: a hub name, and `datasets` is not installed.
    """
    check_place(name, path)
    place = Path(path).expanduser()
    if place.is_file():
        rows = _open_file(name, place)
    elif place.is_dir():
        rows = _open_folder(name, place, split, subset)
    else:
        rows = _open_hub(name, path, split, subset)
    if not len(rows):
        raise ConfigError(f"{name}: {path} has no rows; give a file with at least one")
    return rows


def check_place(name: str, path: str) -> None:
    """Raise ConfigError for a path that cannot hold rows; nothing is read, a hub name passes."""
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in _SUFFIXES:
            raise ConfigError(f"{name}: {path} is not read; {_READ} are. {_as_jsonl(place)}")
        if not os.access(place, os.R_OK):
            raise ConfigError(f"{name}: {path} cannot be read here: its rights do not allow it.")
    elif not place.is_dir() and _is_local(path):
        raise ConfigError(
            f"{name}: {path} does not exist (seen from {Path.cwd()}). Set its path "
            "to a .jsonl, .json or .parquet file, a folder of them, or a hub name."
        )


def _as_jsonl(place: Path) -> str:
    """How to make a file of another format readable."""
    if place.suffix.lower() == ".csv":
        files = (shlex.quote(str(p)) for p in (place, place.with_suffix(".jsonl")))
        return f"Convert it, every value as text:\n{_FROM_CSV.format(*files)}"
    return "If it has a JSON object a line, name it .jsonl; else convert it to one of these."


def _is_local(path: str) -> bool:
    return (
        path.startswith((".", "/", "~"))
        or path.endswith(_SUFFIXES + _OTHERS)
        or path.count("/") > 1
    )


def _open_file(name: str, place: Path) -> Rows:
    if place.suffix == ".parquet":
        return ParquetRows([place])
    if place.suffix == ".json":
        return _json_rows(name, place)
    return JsonlRows(place)


def _open_folder(name: str, place: Path, split: str, subset: str | None) -> Rows:
    """Files `<split>.*` or `<split>-*.parquet`, in the subset's folder or the folder itself."""
    folders = [place / subset, place / "data" / subset] if subset else []
    for folder in (*folders, place, place / "data"):
        for suffix in _SUFFIXES:
            if (file := folder / f"{split}{suffix}").is_file():
                return _open_file(name, file)
        if shards := sorted(folder.glob(f"{split}-*.parquet")):
            return ParquetRows(shards)
    if any(place.rglob("*.arrow")) or (place / "dataset_info.json").exists():
        return _open_hub(name, str(place), split, subset)
    found = sorted(p.name for p in place.iterdir())[:8]
    raise ConfigError(
        f"{name}: {place} holds no rows of split {split!r}: no {split}.jsonl, "
        f"{split}.json, {split}.parquet or {split}-*.parquet. It holds {', '.join(found) or '-'}. "
        "Name the file itself, or set split and subset_name."
    )


def _open_hub(name: str, path: str, split: str, subset: str | None) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(f"{name} names {path!r} on the hub, and datasets", "data") from (error)
    try:
        if (Path(path) / "state.json").exists() or (Path(path) / "dataset_dict.json").exists():
            rows: Any = datasets.load_from_disk(path)
            return rows[split] if isinstance(rows, datasets.DatasetDict) else rows
        return datasets.load_dataset(path, subset, split=split)  # type: ignore[return-value]
    except Exception as error:  # the hub's client raises many kinds: offline, unknown, no split
        raise ConfigError(
            f"{name}: data set {path!r} (subset {subset}, split {split!r}) cannot be "
            f"loaded: {type(error).__name__}: {error}. Check the name, the split and the network, "
            "or give a local .jsonl, .json or .parquet file."
        ) from error


class JsonlRows:
    """One JSON object a line; blank lines do not count. Lines are decoded when asked for."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._lines = [
            (number, line)
            for number, line in enumerate(place.read_bytes().splitlines(), 1)
            if line.strip()
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        number, line = self._lines[index]
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{self._place}:{number}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{self._place}:{number}: {type(row).__name__}, not a JSON object")
        return row


class ParquetRows:
    """Rows of Parquet files, one after the other."""

    def __init__(self, files: Sequence[Path]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingExtra("reading Parquet needs pyarrow, which", "train") from error
        try:
            parts = [pyarrow.parquet.read_table(str(f)) for f in files]
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{files[0].parent}: no readable Parquet ({error})") from error
        self._table = pyarrow.concat_tables(parts)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]


def _json_rows(name: str, place: Path) -> list[Row]:
    try:
        rows = json.loads(place.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"{name}: {place} is no JSON ({error}); name it .jsonl if it has an object a line"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{name}: {place} must hold a list of objects")
    return rows


class Columns(Protocol):
    """Which columns of a row make its conversation; tasksets and rows to imitate name them."""

    @property
    def system_prompt(self) -> str | None:
        """The same for all rows."""
        ...

    @property
    def system_prompt_key(self) -> str | None:
        """The column with a row's own system prompt, which goes first."""
        ...


def conversation(row: Row, given: Any, columns: Columns) -> list[dict[str, Any]]:
    """`given`, a text or a list of messages of the row, behind its system prompt if it has one."""
    messages = (
        [dict(m) for m in given]
        if isinstance(given, list)
        else [{"role": "user", "content": str(given)}]
    )
    system = row.get(columns.system_prompt_key) if columns.system_prompt_key else None
    system = system or columns.system_prompt
    if system and not (messages and messages[0].get("role") == "system"):
        messages.insert(0, {"role": "system", "content": str(system)})
    return messages


def flaw_of(messages: Sequence[Any]) -> str:
    """Why a list is no conversation: the place, what was found and is allowed; empty if it is one.

    A content may be null where a message says something else, as one with tool_calls does.
    """
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            return f"{where}: {_told(message)} found; {{role, content}} is allowed."
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            return f"{where}.role: {_told(role)} found; a text such as user is allowed."
        says_more = any(v for k, v in message.items() if k not in ("role", "content", "name"))
        if not isinstance(content, str | list) and not (content is None and says_more):
            return f"{where}.content: {_told(content)} found; {_CONTENT}"
    return ""


def _told(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def to_json(row: Row, fallback: Callable[[Any], Any] = str) -> str:
    """A row as the JSON object that a task carries; what JSON has no word for becomes text."""
    return json.dumps(row, ensure_ascii=False, default=fallback)
