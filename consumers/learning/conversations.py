"""Conversations -> tokens, and a mask over what the assistant said.

T is the number of tokens of one conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from ...schemas.errors import InvalidEvent
from .examples import Ints, Mask

Message = dict[str, Any]
# as transformers finds the marks of a template
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def marked(messages: Sequence[Message], first: int, tokenizer: Any) -> tuple[Ints, Mask]:
    """Tokens and mask [T]: the assistant's turns from messages[first] on, each with its end token.

    Args:
        messages: {role, content}, and what else the chat template reads.
        first: the messages before it are a prompt, and not trained whoever wrote them.
        tokenizer: a transformers tokenizer. Without a chat template the contents are joined as
            plain text, the last one ended by the end-of-sequence token.

    Raises:
        InvalidEvent: no such messages, or the template cannot render them, or renders a turn
            otherwise inside the whole conversation and does not mark it.
    """
    _check(messages)
    if tokenizer.chat_template is None:
        return _plain(messages, tokenizer)
    tokens, mask = _rendered(messages, first, tokenizer)
    return np.asarray(tokens, np.int32), np.asarray(mask, np.uint8)


def whole(messages: Sequence[Message], tokenizer: Any) -> Ints:
    """Tokens [T] of a conversation. Raises as `marked`."""
    _check(messages)
    return np.asarray(_render(messages, tokenizer), np.int32)


def _check(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        content, role = message.get("content"), message.get("role")
        if not isinstance(role, str) or not isinstance(content, str | list | None):
            raise InvalidEvent(
                f"messages[{i}] has role {role!r} and a content of {type(content).__name__}; a "
                "role and a text are allowed.",
                field="messages",
            )


def _rendered(
    messages: Sequence[Message], first: int, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """By the template's generation marks, or by the prefixes that end before and after a turn."""
    if _MARKS.search(tokenizer.chat_template):
        found = _apply(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = list(found["input_ids"]), list(found["assistant_masks"])
        if any(m["role"] == "assistant" for m in messages[:first]):
            end = len(_prefix(messages, first, tokens, tokenizer))
            mask[:end] = [0] * end
        return tokens, mask
    tokens = _render(messages, tokenizer)
    mask = [0] * len(tokens)
    for i in range(first, len(messages)):
        if messages[i]["role"] == "assistant":
            start = len(_prefix(messages, i, tokens, tokenizer))
            end = _end(messages, i, tokens, tokenizer)
            end = _without_space(tokens, start, end, tokenizer)
            mask[start:end] = [1] * (end - start)
    return tokens, mask


def _prefix(
    messages: Sequence[Message], count: int, tokens: list[int], tokenizer: Any
) -> list[int]:
    """Tokens of the first messages, and of what opens the assistant's turn where one follows."""
    is_asked = count < len(messages) and messages[count]["role"] == "assistant"
    before = _render(messages[:count], tokenizer, add_generation_prompt=is_asked)
    return _begun(before, tokens, count)


def _end(messages: Sequence[Message], i: int, tokens: list[int], tokenizer: Any) -> int:
    """Where the turn of messages[i] ends; the last one may bring tokens that no other has."""
    if i + 1 == len(messages):
        return len(tokens)
    return len(_begun(_render(messages[: i + 1], tokenizer), tokens, i + 1))


def _begun(part: list[int], tokens: list[int], count: int) -> list[int]:
    if tokens[: len(part)] != part:
        raise InvalidEvent(
            f"the chat template renders messages[:{count}] otherwise inside the whole "
            "conversation, so its tokens cannot be told apart. Mark the assistant's turns in the "
            "template with {% generation %}, and give whole conversations.",
            field="messages",
        )
    return part


def _without_space(tokens: list[int], start: int, end: int, tokenizer: Any) -> int:
    """The end of a turn without the white space that a template writes behind its end token."""
    last = end
    while last > start and tokenizer.decode(tokens[last - 1 : last]).isspace():
        last -= 1
    ends_turn = last > start and tokens[last - 1] in tokenizer.added_tokens_decoder
    return last if ends_turn else end


def _render(
    messages: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool = False
) -> list[int]:
    return _apply(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )


def _apply(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except (jinja2.TemplateError, TypeError) as error:  # what templates raise about messages
        raise InvalidEvent(
            f"the chat template cannot render the messages: {error}", field="messages"
        ) from error


def _plain(messages: Sequence[Message], tokenizer: Any) -> tuple[Ints, Mask]:
    """Prompt and response as they are, with the end-of-sequence token."""
    texts = [m["content"] for m in messages]
    if not all(isinstance(text, str) for text in texts) or not texts:
        raise InvalidEvent("without a chat template only texts can be joined", field="messages")
    before = tokenizer("".join(texts[:-1]))["input_ids"]
    response = tokenizer(texts[-1], add_special_tokens=False)["input_ids"]
    response = [*response, tokenizer.eos_token_id]
    mask = [0] * len(before) + [1] * len(response)
    return np.asarray(before + response, np.int32), np.asarray(mask, np.uint8)
