"""Conversations -> tokens, and a mask over what the assistant said.

T is the number of tokens of one conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from ...schemas.errors import InvalidEvent
from ...streams.rows import flaw_of
from .examples import Ints, Mask

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
# as transformers finds the marks of a template
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def marked(
    messages: Sequence[Message], first: int, tokenizer: Any, tools: Tools = None
) -> tuple[Ints, Mask]:
    """Tokens and mask [T]: the assistant's turns from messages[first] on, each with its end token.

    Args:
        messages: {role, content}, and what else the chat template reads.
        first: the messages before it are a prompt, and not trained whoever wrote them.
        tokenizer: a transformers tokenizer. Without a chat template the contents are joined as
            plain text, the last one ended by the end-of-sequence token.
        tools: JSON schemas of functions, for the template.

    Raises:
        InvalidEvent: no such messages, or the template cannot render them, or renders a turn
            otherwise inside the whole conversation and does not mark it.
    """
    _check(messages)
    if tokenizer.chat_template is None:
        return _plain(messages, tokenizer)
    tokens, mask = _Rendering(tokenizer, tools).marked(messages, first)
    return np.asarray(tokens, np.int32), np.asarray(mask, np.uint8)


def whole(messages: Sequence[Message], tokenizer: Any, tools: Tools = None) -> Ints:
    """Tokens [T] of a conversation. Raises as `marked`."""
    _check(messages)
    return np.asarray(_Rendering(tokenizer, tools).tokens(messages), np.int32)


def _check(messages: Sequence[Message]) -> None:
    if flaw := flaw_of(messages):
        raise InvalidEvent(flaw, field="messages")


@dataclass(frozen=True)
class _Rendering:
    """One tokenizer's template, with the tools of one row."""

    tokenizer: Any
    tools: Tools

    def marked(self, messages: Sequence[Message], first: int) -> tuple[list[int], list[int]]:
        """By the template's generation marks, or by the prefixes before and after a turn."""
        if _MARKS.search(self.tokenizer.chat_template):
            found = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
            tokens, mask = list(found["input_ids"]), list(found["assistant_masks"])
            if any(m["role"] == "assistant" for m in messages[:first]):
                end = len(self._prefix(messages, first, tokens))
                mask[:end] = [0] * end
            return tokens, mask
        tokens = self.tokens(messages)
        mask = [0] * len(tokens)
        for i in range(first, len(messages)):
            if messages[i]["role"] == "assistant":
                start = len(self._prefix(messages, i, tokens))
                end = self._without_space(tokens, start, self._end(messages, i, tokens))
                mask[start:end] = [1] * (end - start)
        return tokens, mask

    def tokens(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> list[int]:
        return self._apply(messages, add_generation_prompt=add_generation_prompt, return_dict=False)

    def _prefix(self, messages: Sequence[Message], count: int, tokens: list[int]) -> list[int]:
        """Tokens of the first messages, and of what opens the assistant's turn if one follows."""
        is_asked = count < len(messages) and messages[count]["role"] == "assistant"
        before = self.tokens(messages[:count], add_generation_prompt=is_asked)
        return _begun(before, tokens, count)

    def _end(self, messages: Sequence[Message], i: int, tokens: list[int]) -> int:
        """Where the turn of messages[i] ends; the last one may bring tokens that no other has."""
        if i + 1 == len(messages):
            return len(tokens)
        return len(_begun(self.tokens(messages[: i + 1]), tokens, i + 1))

    def _without_space(self, tokens: list[int], start: int, end: int) -> int:
        """The end of a turn without the white space that is written behind its end token."""
        last = end
        while last > start and self.tokenizer.decode(tokens[last - 1 : last]).isspace():
            last -= 1
        ends_turn = last > start and tokens[last - 1] in self.tokenizer.added_tokens_decoder
        return last if ends_turn else end

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=self.tools, **options)
        except (jinja2.TemplateError, TypeError) as error:  # what templates raise about messages
            raise InvalidEvent(
                f"the chat template cannot render the messages: {error}", field="messages"
            ) from error


def _begun(part: list[int], tokens: list[int], count: int) -> list[int]:
    if tokens[: len(part)] != part:
        raise InvalidEvent(
            f"the chat template renders messages[:{count}] otherwise inside the whole "
            "conversation, so its tokens cannot be told apart. Mark the assistant's turns in the "
            "template with {% generation %}, and give whole conversations.",
            field="messages",
        )
    return part


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
