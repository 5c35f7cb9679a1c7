"""Columns of a row -> the conversations that are learned from it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import InvalidEvent
from ...streams.rows import conversation
from ..settings import SftSource
from .conversations import Message, Tools

# TRL's names of columns whose Trinity name is the default; either is read
_ALSO = {"message": "messages", "response": "completion", "prompt": "text"}


@dataclass(frozen=True)
class Side:
    """One conversation: `first` is the first message that may be trained, `preference` 1 or -1."""

    messages: list[Message]
    first: int = 0
    preference: int = 0


def cell(row: Mapping[str, Any], key: str) -> Any:
    """What a column holds; None where the row has none of the name."""
    return row[key] if key in row else row.get(_ALSO.get(key, key))


def sides(row: Mapping[str, Any], source: SftSource) -> list[Side]:
    """One of a row to imitate or to judge, two of a pair, the chosen one first.

    Raises:
        InvalidEvent: the row lacks its columns, or they hold something else.
    """
    if source.is_pairs:
        return _pair(row, source)
    side = _answered(row, source)
    if source.label_key is None:
        return [side]
    label = row.get(source.label_key)
    if label not in (True, False):  # 1 and 0 are equal to them
        raise InvalidEvent(
            f"{source.label_key!r} holds {label!r}; true or false is allowed. Set "
            "format.label_key to the column of the verdict.",
            field=source.label_key,
        )
    return [Side(side.messages, side.first, 1 if label else -1)]


def turns(row: Mapping[str, Any], given: Any, source: SftSource) -> list[Message]:
    """A text of the user or a list of messages, behind the row's system prompt."""
    return conversation(dict(row), _messages(given), source)


def tools_of(row: Mapping[str, Any], source: SftSource) -> Tools:
    """Schemas of the functions that the row's assistant may call, as a list or as JSON text."""
    given = row.get(source.tools_key)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise InvalidEvent(
                f"{source.tools_key!r} is no JSON: {error}", field="tools"
            ) from error
    if given is not None and not isinstance(given, list):
        raise InvalidEvent(f"{source.tools_key!r} holds no list of functions", field="tools")
    return given or None


def lacks(row: Mapping[str, Any], key: str, what: str, advice: str) -> InvalidEvent:
    """The error of a column that is not there, or is null under one of its two names."""
    columns, other = ", ".join(sorted(row)), _ALSO.get(key, key)
    named = other if key not in row and other in row and row[other] is None else key
    return InvalidEvent(f"{named!r} holds {what}; the row has {columns}. Set {advice}.", field=key)


def _answered(row: Mapping[str, Any], source: SftSource) -> Side:
    """A whole conversation, or a prompt and what answers it."""
    given = cell(row, source.messages_key) if source.prompt_type == "messages" else None
    if given and isinstance(given, list):
        return Side(turns(row, given, source))
    advice = "format.prompt_key and format.response_key, or format.messages_key"
    prompt, answer = row.get(source.prompt_key), cell(row, source.response_key)
    if given is not None and prompt is None:
        what = "an empty list" if given == [] else f"a {type(given).__name__}"
        key = source.messages_key if source.messages_key in row else _ALSO[source.messages_key]
        raise lacks(row, key, f"{what}, not a list of messages", advice)
    for key, value in ((source.prompt_key, prompt), (source.response_key, answer)):
        if value is None:
            raise lacks(row, key, "nothing", advice)
    before = turns(row, prompt, source)
    return Side([*before, *_answer(answer)], len(before))


def _answer(answer: Any) -> list[Message]:
    if isinstance(answer, list):
        return _messages(answer)
    return [{"role": "assistant", "content": str(answer)}]


def _messages(given: Any) -> Any:
    if isinstance(given, list) and not all(isinstance(m, Mapping) for m in given):
        raise InvalidEvent("a list of messages holds what is no message", field="messages")
    return given


def _pair(row: Mapping[str, Any], source: SftSource) -> list[Side]:
    """Two answers after a prompt, or two conversations, of which the common beginning is one."""
    found = [_conversation(row, key, source) for key in (source.chosen_key, source.rejected_key)]
    equal = [a == b for a, b in zip(*found, strict=False)]
    first = equal.index(False) if False in equal else len(equal)
    if found[0] == found[1]:
        raise InvalidEvent(
            f"{source.chosen_key!r} and {source.rejected_key!r} are the same", field="chosen"
        )
    return [
        Side(messages, first, preference)
        for messages, preference in zip(found, (1, -1), strict=True)
    ]


def _conversation(row: Mapping[str, Any], key: str, source: SftSource) -> list[Message]:
    """The whole conversation of one side of a pair."""
    answer = row.get(key)
    if not isinstance(answer, str | list) or not answer:
        raise lacks(
            row, key, "neither a text nor turns", "format.chosen_key and format.rejected_key"
        )
    own = _answer(answer)
    if own and own[0].get("role") != "assistant":
        return turns(row, answer, source)
    prompt = row.get(source.prompt_key)
    if prompt is None:
        raise lacks(row, source.prompt_key, f"nothing before {key!r}", "format.prompt_key")
    return [*turns(row, prompt, source), *own]
