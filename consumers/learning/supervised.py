"""Rows of a file -> training examples: to imitate, to judge, in pairs, or whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...schemas.errors import InvalidEvent
from ..settings import SftSource
from .columns import cell, lacks, sides, tools_of, turns
from .conversations import marked, whole
from .examples import Ints, Mask, TrainingExample, TrainingSequence

Part = tuple[Ints, Mask, int]
"""Tokens, mask and preference of one conversation."""


def examples_of_row(
    row: Mapping[str, Any],
    tokenizer: Any,
    source: SftSource,
    *,
    number: int,
    max_tokens: int | None = None,
) -> list[TrainingExample]:
    """One example, or the two of a pair, the chosen one first; ids are sft., kto. or dpo.<number>.

    Args:
        row: see docs/files.md for the columns.
        tokenizer: a transformers tokenizer. See `conversations.marked`.
        source: names the columns and the system prompt.
        number: of the row in the file, from 0.
        max_tokens: longer conversations are cut at the end.

    Raises:
        InvalidEvent: nothing can be learned from this row; names the file, the row and why.
    """
    kind = "dpo" if source.is_pairs else "sft" if source.label_key is None else "kto"
    try:
        return [
            TrainingExample(
                trajectory_id=f"{kind}.{number}:{slot}:row",
                group_id=f"{kind}.{number}",
                slot=slot,
                number=number,
                sequences=(_cut(tokens, mask, max_tokens),),
                preference=preference,
            )
            for slot, (tokens, mask, preference) in enumerate(_parts(row, tokenizer, source))
        ]
    except InvalidEvent as error:
        raise InvalidEvent(f"{source.path} row {number}: {error}", field=error.field) from error


def _parts(row: Mapping[str, Any], tokenizer: Any, source: SftSource) -> list[Part]:
    if source.whole_text:
        tokens = _text(row, tokenizer, source)
        return [(tokens, np.ones(len(tokens), np.uint8), 0)]
    tools = tools_of(row, source)
    return [
        (*marked(side.messages, side.first, tokenizer, tools), side.preference)
        for side in sides(row, source)
    ]


def _cut(tokens: Ints, mask: Mask, limit: int | None) -> TrainingSequence:
    is_cut = limit is not None and len(tokens) > limit
    if not mask[1:].any():
        raise InvalidEvent(
            "no token to train: it is empty, or not the assistant's", field="messages"
        )
    tokens, mask = tokens[:limit], mask[:limit]
    if not mask[1:].any():
        raise InvalidEvent(
            f"what is trained begins behind the first {limit} tokens. Raise model.max_model_len.",
            field="messages",
        )
    return TrainingSequence(tokens, mask, np.zeros(len(tokens), np.float32), is_truncated=is_cut)


def _text(row: Mapping[str, Any], tokenizer: Any, source: SftSource) -> Ints:
    """A text and the end-of-sequence token, or a conversation; all of it is trained."""
    given = cell(row, source.messages_key)
    if source.prompt_type == "messages" and given:
        return whole(turns(row, given, source), tokenizer, tools_of(row, source))
    text = cell(row, source.prompt_key)
    if not isinstance(text, str):
        raise lacks(row, source.prompt_key, "no text", "format.prompt_key to the key of the text")
    return np.asarray([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
