"""Messages to token ids by the model's own chat template, and token ids to text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schemas.errors import ConfigError
from ...schemas.events import Turn
from .workflow import RolloutFailed

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """What the engine is given: P token ids, the turns they hold, and whether the start was cut."""

    tokens: tuple[int, ...]
    turns: tuple[Turn, ...]
    is_truncated: bool = False


class Chat:
    """A tokenizer with its template and limits. Safe to use from several threads for reading."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        truncate: bool = True,
        template: str | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        """`template`: Jinja text, or the path of a file that holds it, in place of the model's."""
        self._tokenizer = tokenizer
        self._max_prompt_tokens, self._truncate = max_prompt_tokens, truncate
        self._options: dict[str, Any] = {}
        if template is not None:
            self._options["chat_template"] = _template(template)
        if enable_thinking is not None:
            self._options["enable_thinking"] = enable_thinking

    def render(self, messages: Sequence[Message], reply_prefix: str | None = None) -> Prompt:
        """The prompt that ends where the assistant begins, or after `reply_prefix`.

        A prompt over max_prompt_tokens loses its first tokens and says so.

        Raises:
            ConfigError: the model has no template, and none is given.
            RolloutFailed: too long, and truncation is off; or the template refuses the messages.
        """
        tokens = self._tokens(messages, add_generation_prompt=True)
        turns = self._turns(messages, tokens)
        if reply_prefix:
            start = len(tokens)
            tokens += self._tokenizer.encode(reply_prefix, add_special_tokens=False)
            turns.append(Turn(role="assistant", start=start, end=len(tokens), text=reply_prefix))
        return self._fitted(tokens, turns)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts without special tokens. A view only: it is never tokenised again."""
        return self._tokenizer.batch_decode(rows, skip_special_tokens=True)

    def _tokens(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        if "chat_template" not in self._options and self._tokenizer.chat_template is None:
            raise ConfigError(
                "the model has no chat template. Set model.custom_chat_template or "
                "model.chat_template_path, or the taskset's format.prompt_type: plaintext."
            )
        return list(
            self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        )

    def _turns(self, messages: Sequence[Message], tokens: list[int]) -> list[Turn]:
        """Where each message lies: the template of the first k messages begins that of all.

        Templates for which that does not hold (some drop earlier thoughts) leave boundaries out;
        their messages share the range up to the next known one.
        """
        turns: list[Turn] = []
        start = 0
        for i, message in enumerate(messages):
            end = self._end_of(messages[: i + 1], tokens) if i + 1 < len(messages) else len(tokens)
            end = start if end is None else max(start, end)
            turns.append(Turn(role=str(message["role"]), start=start, end=end, text=_text(message)))
            start = end
        return turns

    def _end_of(self, messages: Sequence[Message], tokens: list[int]) -> int | None:
        try:
            part = self._tokens(messages, add_generation_prompt=False)
        except Exception:  # a template may refuse a conversation without a user by any error
            return None
        return len(part) if tokens[: len(part)] == part else None

    def _fitted(self, tokens: list[int], turns: list[Turn]) -> Prompt:
        over = len(tokens) - self._max_prompt_tokens
        if over <= 0:
            return Prompt(tuple(tokens), tuple(turns))
        if not self._truncate:
            raise RolloutFailed(
                f"the prompt has {len(tokens)} tokens, {self._max_prompt_tokens} are allowed. "
                "Raise model.max_prompt_tokens or set model.enable_prompt_truncation."
            )
        kept = [
            Turn(role=t.role, start=max(0, t.start - over), end=t.end - over, text=t.text)
            for t in turns
            if t.end > over
        ]
        return Prompt(tuple(tokens[over:]), tuple(kept), is_truncated=True)


def _template(given: str) -> str:
    return given if "{" in given else Path(given).expanduser().read_text()


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else str(content)
