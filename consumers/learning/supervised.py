"""Rows of text to imitate -> training examples.

The loss covers the assistant's words only, or with `whole_text` every word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...schemas.errors import ConfigError, InvalidEvent
from ...streams.rows import conversation
from ..settings import SftSource
from .examples import Ints, Mask, TrainingExample, TrainingSequence

Message = dict[str, Any]


def examples_from_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    source: SftSource,
    *,
    first_row: int = 0,
    max_tokens: int | None = None,
) -> list[TrainingExample]:
    """One example a row, in order, with ids sft.<row>.

    Args:
        rows: with prompt_key and response_key, or with messages_key a list of {role, content}.
        tokenizer: a transformers tokenizer; without a chat template only prompt and response
            can be read, and are joined as plain text ended by the end-of-sequence token. Of
            whole_text, prompt_key holds the text, or messages_key a conversation.
        source: names the keys and the system prompt.
        first_row: number of rows[0] in the file, for ids and messages.
        max_tokens: longer rows are cut at the end.

    Raises:
        ConfigError: a row lacks its keys.
        InvalidEvent: a row's messages cannot be rendered by the chat template.
    """
    return [
        _example(row, tokenizer, source, first_row + i, max_tokens) for i, row in enumerate(rows)
    ]


def _example(
    row: Mapping[str, Any], tokenizer: Any, source: SftSource, number: int, limit: int | None
) -> TrainingExample:
    tokens, mask = _marked(row, tokenizer, source, number)
    tokens, mask = tokens[:limit], mask[:limit]
    return TrainingExample(
        trajectory_id=f"sft.{number}:0:row",
        group_id=f"sft.{number}",
        slot=0,
        number=number,
        sequences=(TrainingSequence(tokens, mask, np.zeros(len(tokens), np.float32)),),
    )


def _marked(
    row: Mapping[str, Any], tokenizer: Any, source: SftSource, number: int
) -> tuple[Ints, Mask]:
    """Tokens and mask [T] of one row."""
    if source.whole_text:
        return _whole(row, tokenizer, source, number)
    messages = _messages(row, source, number)
    if tokenizer.chat_template is None:
        return _plain(messages, tokenizer)
    return _rendered(messages, tokenizer, number)


def _whole(
    row: Mapping[str, Any], tokenizer: Any, source: SftSource, number: int
) -> tuple[Ints, Mask]:
    """A text and the end-of-sequence token, or a conversation; all of it is trained."""
    if source.prompt_type == "messages" and row.get(source.messages_key):
        messages = conversation(dict(row), row[source.messages_key], source)
        tokens = _render(messages, tokenizer)
    elif isinstance(row.get(source.prompt_key), str):
        tokens = [*tokenizer(row[source.prompt_key])["input_ids"], tokenizer.eos_token_id]
    else:
        raise ConfigError(
            f"{source.path} row {number}: {source.prompt_key!r} holds no text; it has "
            f"{', '.join(sorted(row))}. Set format.prompt_key to the key of the text."
        )
    return np.asarray(tokens, np.int32), np.ones(len(tokens), np.uint8)


def _messages(row: Mapping[str, Any], source: SftSource, number: int) -> list[Message]:
    if row.get(source.messages_key) and source.prompt_type == "messages":
        return conversation(dict(row), row[source.messages_key], source)
    for key in (source.prompt_key, source.response_key):
        if key not in row:
            raise ConfigError(
                f"{source.path} row {number}: no {key!r} among {', '.join(sorted(row))}. Set "
                "format.prompt_key and format.response_key, or format.messages_key for rows of "
                "messages."
            )
    return [
        *conversation(dict(row), row[source.prompt_key], source),
        {"role": "assistant", "content": str(row[source.response_key])},
    ]


def _rendered(messages: list[Message], tokenizer: Any, number: int) -> tuple[Ints, Mask]:
    """Tokens and mask [T] of the chat template, by its generation marks or by prefixes."""
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        marked = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = np.asarray(marked["assistant_masks"], np.uint8)
        return np.asarray(marked["input_ids"], np.int32), mask
    tokens = _render(messages, tokenizer)
    mask = np.zeros(len(tokens), np.uint8)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:i], tokenizer, add_generation_prompt=True)
        after = _render(messages[: i + 1], tokenizer)
        # a template may end the conversation with tokens that no turn inside it has
        after = after if i + 1 < len(messages) else tokens
        if tokens[: len(before)] != before or tokens[: len(after)] != after:
            raise InvalidEvent(
                f"row {number}: the chat template renders messages[:{i}] otherwise inside the "
                "whole conversation, so its tokens cannot be told apart. Mark them in the "
                "template with {% generation %}.",
                field="messages",
            )
        mask[len(before) : len(after)] = 1
    return np.asarray(tokens, np.int32), mask


def _render(
    messages: list[Message], tokenizer: Any, *, add_generation_prompt: bool = False
) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )


def _plain(messages: list[Message], tokenizer: Any) -> tuple[Ints, Mask]:
    """Prompt and response as they are, with the end-of-sequence token."""
    prompt = "".join(m["content"] for m in messages[:-1])
    before = tokenizer(prompt)["input_ids"]
    response = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    response = [*response, tokenizer.eos_token_id]
    mask = [0] * len(before) + [1] * len(response)
    return np.asarray(before + response, np.int32), np.asarray(mask, np.uint8)
