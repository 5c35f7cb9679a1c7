"""Rows of preferences -> two training examples a row, the wanted one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...schemas.errors import ConfigError
from ...streams.rows import conversation
from ..settings import SftSource
from .examples import TrainingExample
from .supervised import Message, examples_from_rows

_TURNS = "turns of the pair"


def pair_from_row(
    row: Mapping[str, Any],
    tokenizer: Any,
    source: SftSource,
    *,
    number: int,
    max_tokens: int | None = None,
) -> list[TrainingExample]:
    """The chosen and the rejected conversation of one row, with ids dpo.<number>.

    Args:
        row: with chosen_key and rejected_key: texts or turns of the assistant, to which
            prompt_key holds the prompt or the turns before; or whole conversations.
        tokenizer: a transformers tokenizer. See `examples_from_rows`.
        source: names the keys and the system prompt.
        number: of the row in the file.
        max_tokens: longer conversations are cut at the end.

    Raises:
        ConfigError: the row lacks its keys. InvalidEvent: see `examples_from_rows`.
    """
    examples: list[TrainingExample] = []
    plain = dataclasses.replace(source, prompt_type="messages", messages_key=_TURNS)
    for slot, key in enumerate((source.chosen_key, source.rejected_key)):
        turns = _turns(row, key, source, number)
        (example,) = examples_from_rows(
            [{**row, _TURNS: turns}], tokenizer, plain, first_row=number, max_tokens=max_tokens
        )
        examples.append(
            dataclasses.replace(
                example,
                trajectory_id=f"dpo.{number}:{slot}:row",
                group_id=f"dpo.{number}",
                slot=slot,
                preference=-1 if slot else 1,
            )
        )
    return examples


def _turns(row: Mapping[str, Any], key: str, source: SftSource, number: int) -> list[Message]:
    """The whole conversation of one side."""
    answer = row.get(key)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not answer:
        raise ConfigError(
            f"{source.path} row {number}: {key!r} holds neither a text nor turns; it has "
            f"{', '.join(sorted(row))}. Set format.chosen_key and format.rejected_key."
        )
    if answer[0].get("role") != "assistant":
        return answer
    if source.prompt_key not in row:
        raise ConfigError(
            f"{source.path} row {number}: no {source.prompt_key!r} before {key!r} among "
            f"{', '.join(sorted(row))}. Set format.prompt_key."
        )
    return [*conversation(dict(row), row[source.prompt_key], source), *answer]
