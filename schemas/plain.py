"""Events as plain JSON objects for people and tools: packed arrays become lists, bytes base64."""

from __future__ import annotations

import base64
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from . import codec
from . import events as ev
from .arrays import Packed
from .errors import InvalidEvent
from .validate import check

E = TypeVar("E", bound=ev.Event)
_EMBEDDED = (ev.Experience, "trajectory")


def to_plain(event: ev.Event) -> dict[str, Any]:
    """Event -> JSON-ready object. An embedded trajectory is shown decoded."""
    out: dict[str, Any] = {}
    for field, hint in _hints(type(event)).items():
        value = getattr(event, field)
        if (type(event), field) == _EMBEDDED:
            value = codec.decode(value, ev.Trajectory)
        out[field] = _show(value, hint)
    return out


def from_plain(cls: type[E], plain: dict[str, Any]) -> E:
    """JSON object -> checked event of `cls`.

    Raises:
        InvalidEvent: an unknown or missing field, a wrong type, or a broken rule; names the place.
    """
    try:
        event = msgspec.convert(_read(plain, cls), cls)
    except (ValueError, TypeError, ArithmeticError) as error:
        if isinstance(error, InvalidEvent):
            raise
        raise InvalidEvent(f"{cls.__name__}: {error}") from error
    check(event)
    return event


def _show(value: Any, hint: Any) -> Any:
    if isinstance(value, ev.Event):
        return to_plain(value)
    if isinstance(value, list):
        return [_show(v, None) for v in cast(list[Any], value)]
    if isinstance(value, bytes):
        if packed := _packed(hint):
            array = np.frombuffer(value, packed.dtype)
            return (array.reshape(-1, packed.width) if packed.width > 1 else array).tolist()
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {k: _show(v, None) for k, v in cast(dict[str, Any], value).items()}
    return value


def _read(plain: Any, cls: type[ev.Event]) -> Any:
    if not isinstance(plain, dict):
        return plain
    hints, fields = _hints(cls), cast(dict[str, Any], plain)
    for field in fields:
        if field not in hints:
            raise InvalidEvent(
                f"{cls.__name__}: unknown field {field!r}; it has {', '.join(hints)}", field=field
            )
    return {field: _read_field(cls, field, hints[field], v) for field, v in fields.items()}


def _read_field(cls: type[ev.Event], field: str, hint: Any, value: Any) -> Any:
    if (cls, field) == _EMBEDDED and isinstance(value, dict):
        return codec.encode(from_plain(ev.Trajectory, cast(dict[str, Any], value)))
    is_list = isinstance(value, list)
    if packed := _packed(hint):
        return _pack(f"{cls.__name__}: {field}", packed, value) if is_list else value
    inner = _event_type(hint)
    if inner is None:
        return value
    return [_read(v, inner) for v in cast(list[Any], value)] if is_list else _read(value, inner)


def _pack(where: str, packed: Packed, values: Any) -> bytes:
    given = np.asarray(values)
    with np.errstate(invalid="raise", over="raise"):
        array = given.astype(packed.dtype)
    is_exact = array.dtype.kind == "f" or np.array_equal(array, given)
    if given.size and (given.dtype.kind not in "biuf" or not is_exact):
        raise InvalidEvent(f"{where} holds values that do not fit {array.dtype}", field=where)
    return array.tobytes()


@cache
def _hints(cls: type[ev.Event]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _packed(hint: Any) -> Packed | None:
    for arg in (hint, *get_args(hint)):
        for meta in getattr(arg, "__metadata__", ()):
            if isinstance(meta, Packed):
                return meta
    return None


def _event_type(hint: Any) -> type[ev.Event] | None:
    candidates = get_args(hint) if get_origin(hint) in (list, Union, UnionType) else (hint,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, ev.Event):
            return candidate
    return None
