"""Plain YAML values into frozen dataclasses; errors name the path, what was found and allowed.

Nothing here knows a key of the configuration: types and defaults come from the dataclasses.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ...schemas.errors import ConfigError

T = TypeVar("T")
DurationMs = Annotated[int, "duration"]
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SHOWN_KEYS = 4
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*\Z")


def read(cls: type[T], plain: Any, path: str = "") -> tuple[T, frozenset[str]]:
    """Mapping -> instance of `cls`, and the dotted paths that the mapping gave.

    Raises:
        ConfigError: an unknown key (with the nearest known name), or a value of another type.
    """
    reading = _Reading(cls, set())
    return _section(cls, plain, path, reading), frozenset(reading.given)


def duration_ms(value: Any, path: str) -> int:
    """`3d`, `2h`, `15m`, `90s`, `250ms`, or a number of milliseconds."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise _wrong(path, value, "a duration such as 3d, 2h, 15m, 90s, 250ms or milliseconds")
    return round(float(match[1]) * _UNITS_MS[match[2] or "ms"])


def known_paths(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys of a section."""
    for name, hint in _hints(cls).items():
        yield prefix + name
        inner = _inner_section(hint)
        if inner is not None:
            yield from known_paths(inner, f"{prefix}{name}.")


@dataclass
class _Reading:
    root: type
    given: set[str]


def _section(cls: type[T], plain: Any, path: str, reading: _Reading) -> T:
    if plain is None:
        plain = {}
    if not isinstance(plain, Mapping):
        keys = list(_hints(cls))
        listed = ", ".join(keys[:_SHOWN_KEYS]) + (", ..." if len(keys) > _SHOWN_KEYS else "")
        raise _wrong(path or "the file", plain, f"a mapping of keys to values, with {listed}")
    hints, values = _hints(cls), {}
    for key, value in plain.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise ConfigError(_unknown(cls, str(key), where, reading.root))
        reading.given.add(where)
        values[key] = _value(hints[key], value, where, reading)
    return cls(**values)


def _value(hint: Any, value: Any, path: str, reading: _Reading) -> Any:
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (h for h in get_args(hint) if h is not type(None))
        return _value(hint, value, path, reading)
    if origin is Annotated:
        return duration_ms(value, path)
    if origin is Literal:
        return _choice(get_args(hint), value, path)
    if origin is tuple:
        return _list(get_args(hint)[0], value, path, reading)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _section(hint, value, path, reading)
    if origin is not None:
        return _mapping(get_args(hint)[1], value, path, reading)
    return _scalar(hint, value, path)


def _choice(allowed: tuple[Any, ...], value: Any, path: str) -> Any:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), [str(a) for a in allowed], 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        names = ", ".join(str(a) for a in allowed)
        raise ConfigError(f"{path}: {value!r} found; allowed are {names}.{hint}")
    return value


def _list(hint: Any, value: Any, path: str, reading: _Reading) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong(path, value, "a list")
    return tuple(_value(hint, v, f"{path}[{i}]", reading) for i, v in enumerate(value))


def _mapping(hint: Any, value: Any, path: str, reading: _Reading) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(path, value, "a mapping of names to values")
    for key in value:
        reading.given.add(f"{path}.{key}")
    return {str(k): _value(hint, v, f"{path}.{k}", reading) for k, v in value.items()}


def _scalar(kind: type, value: Any, path: str) -> Any:
    """A bool, int, float or str. Text that reads as a number counts: the environment is text."""
    if kind is str:
        if isinstance(value, str):
            return value
        raise _wrong(path, value, "text (put it in quotes)")
    if kind is bool:
        words = {"true": True, "false": False}
        found = words.get(value.lower()) if isinstance(value, str) else value
        if isinstance(found, bool):
            return found
        raise _wrong(path, value, "true or false")
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            number = float(value)
        except ValueError:
            raise _wrong(path, value, _NUMBERS[kind]) from None
        if kind is float and math.isfinite(number):
            return number
        if kind is int and number.is_integer():
            return int(value) if isinstance(value, int) else int(number)
    raise _wrong(path, value, _NUMBERS[kind])


_NUMBERS: dict[type, str] = {int: "a whole number", float: "a number"}
_KINDS: dict[type, str] = {
    bool: "true/false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def _wrong(path: str, value: Any, allowed: str) -> ConfigError:
    if value is None:
        return ConfigError(f"{path}: nothing (null) found; allowed is {allowed}.")
    kind = _KINDS.get(type(value), type(value).__name__)
    return ConfigError(f"{path}: {value!r} ({kind}) found; allowed is {allowed}.")


def _unknown(cls: type, key: str, where: str, root: type) -> str:
    siblings = list(_hints(cls))
    near = difflib.get_close_matches(key, siblings, 1, 0.6)
    prefix = where.removesuffix(key)
    if near:
        return f"{where}: unknown key. Did you mean {prefix}{near[0]}?"
    elsewhere = [p for p in known_paths(root) if p.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"{where}: unknown key. Did you mean {elsewhere[0]}?"
    return f"{where}: unknown key. Known here: {', '.join(siblings)}."


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


def _inner_section(hint: Any) -> type | None:
    for candidate in (hint, *get_args(hint)):
        if is_dataclass(candidate) and isinstance(candidate, type):
            return candidate
    return None
