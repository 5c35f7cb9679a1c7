"""Which tokens of a conversation are trained, by their literal ids, with every kind of template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from streamrft.consumers.learning.columns import sides
from streamrft.consumers.learning.conversations import marked
from streamrft.consumers.learning.supervised import examples_of_row
from streamrft.consumers.settings import SftSource
from streamrft.schemas.errors import InvalidEvent

# as most instruct models write it: the end token, then a new line that no model should learn
CHATML = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
MARKED = (
    "{%- for m in messages -%}{{- '<|' + m['role'] + '|>\n' -}}"
    "{%- if m['role'] == 'assistant' -%}"
    "{%- generation -%}{{- m['content'] + '<|end|>' -}}{%- endgeneration -%}{{- '\n' -}}"
    "{%- else -%}{{- m['content'] + '<|end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
USER, ASSISTANT, END = 4, 5, 2
A, B, C, D, NL = 71, 72, 73, 74, 205


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
TOKENS = [USER, NL, A, END, NL, ASSISTANT, NL, B, END, NL,
          USER, NL, C, END, NL, ASSISTANT, NL, D, END, NL]  # fmt: skip
EVERY_TURN = [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
LAST_TURN = [0] * 17 + [1, 1, 0]


@pytest.fixture(scope="module", params=[CHATML, MARKED], ids=["chatml", "generation marks"])
def tokenizer(tiny_model_dir: Path, request: pytest.FixtureRequest) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = request.param
    return tokenizer


@pytest.mark.parametrize("first, mask", [(0, EVERY_TURN), (2, LAST_TURN), (3, LAST_TURN)])
def test_the_assistants_tokens_and_their_end_are_trained_and_no_prompt(tokenizer, first, mask):
    tokens, found = marked(TALK, first, tokenizer)
    assert tokens.tolist() == TOKENS and found.tolist() == mask


def test_white_space_that_was_said_is_trained(tokenizer: Any):
    tokens, mask = marked([turn("user", "a"), turn("assistant", "b\n")], 0, tokenizer)
    assert tokens[mask == 1].tolist() == [B, NL, END]


ROWS = {
    "conversation": ({"messages": TALK}, EVERY_TURN),
    "Trinity's column": ({"message": TALK}, EVERY_TURN),
    "prompt and completion": ({"prompt": TALK[:3], "completion": TALK[3:]}, LAST_TURN),
    "prompt and response": ({"prompt": TALK[:3], "response": "d"}, LAST_TURN),
}


@pytest.mark.parametrize("name", ROWS)
def test_columns_of_trinity_and_trl_are_read(tokenizer: Any, name: str):
    row, mask = ROWS[name]
    source = SftSource(path="rows", messages_key="message", response_key="response")
    (example,) = examples_of_row(row, tokenizer, source, number=0)
    (s,) = example.sequences
    assert s.tokens.tolist() == TOKENS and s.loss_mask.tolist() == mask


@pytest.mark.parametrize("label", [True, False, 1, 0])
def test_a_row_says_whether_its_answer_is_wanted(tokenizer: Any, label: Any):
    source = SftSource(path="rows", label_key="label", response_key="response")
    row = {"prompt": TALK[:3], "completion": TALK[3:], "label": label}
    (example,) = examples_of_row(row, tokenizer, source, number=4)
    assert (example.preference, example.group_id) == (1 if label else -1, "kto.4")
    assert example.sequences[0].loss_mask.tolist() == LAST_TURN


def test_of_a_pair_only_what_differs_is_trained(tokenizer: Any):
    """The first turn of the assistant is the same on both sides, so it is a prompt."""
    source = SftSource(path="rows", is_pairs=True)
    row = {"chosen": TALK, "rejected": [*TALK[:3], turn("assistant", "a")]}
    chosen, rejected = examples_of_row(row, tokenizer, source, number=0)
    assert chosen.sequences[0].loss_mask.tolist() == LAST_TURN
    assert rejected.sequences[0].tokens.tolist() == [*TOKENS[:17], A, END, NL]
    assert rejected.sequences[0].loss_mask.tolist() == LAST_TURN


PLAIN = SftSource(path="rows.jsonl")
JUDGED = SftSource(path="rows.jsonl", label_key="label")
PAIRS = SftSource(path="rows.jsonl", is_pairs=True)
BAD: dict[str, tuple[dict[str, Any], SftSource, str]] = {
    "no columns": ({"x": 1}, PLAIN, "'prompt' holds nothing; the row has x. Set format.prompt_key"),
    "null": ({"prompt": None, "response": "b"}, PLAIN, "'prompt' holds nothing"),
    "null of TRL": ({"prompt": "a", "completion": None}, PLAIN, "'completion' holds nothing; the"),
    "no messages": ({"messages": []}, PLAIN, "'messages' holds an empty list, not a list of mess"),
    "a text": ({"messages": "a"}, PLAIN, "'messages' holds a str, not a list of messages; the row"),
    "text for messages": ({"messages": ["a"]}, PLAIN, "a list of messages holds what is no"),
    "tools as a word": ({"messages": TALK, "tools": "add"}, PLAIN, "'tools' is no JSON"),
    "a tool alone": ({"messages": TALK, "tools": {}}, PLAIN, "'tools' holds no list"),
    "no role": ({"messages": [{"content": "a"}]}, PLAIN, r"messages\[0\]\.role: null found"),
    "a number said": (
        {"messages": [turn("user", "a") | {"content": 3}]},
        PLAIN,
        "content: int found",
    ),
    "nothing said": (
        {"messages": [{"role": "user", "content": None}]},
        PLAIN,
        "content: null found; a text",
    ),
    "no assistant": ({"messages": TALK[:1]}, PLAIN, "no token to train"),
    "no verdict": ({"prompt": "a", "response": "b"}, JUDGED, "'label' holds None; true or false"),
    "a word": ({"prompt": "a", "response": "b", "label": "yes"}, JUDGED, "'label' holds 'yes'"),
    "equal sides": ({"prompt": "a", "chosen": "b", "rejected": "b"}, PAIRS, "are the same"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_with_its_file_its_number_and_why(tokenizer: Any, name: str):
    row, source, why = BAD[name]
    with pytest.raises(InvalidEvent, match=rf"^rows\.jsonl row 11: .*{why}"):
        examples_of_row(row, tokenizer, source, number=11)


def test_a_prompt_that_the_template_rewrites_later_cannot_be_told_apart(tiny_model_dir: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    for template in (CHATML, MARKED):
        tokenizer.chat_template = "{{- messages | length ~ ' ' -}}" + template
        with pytest.raises(InvalidEvent, match=re.escape("messages[:3] otherwise inside")):
            marked(TALK, 3, tokenizer)


TOOLS = (
    "{%- if tools -%}{{- '<|system|>' + tools[0]['function']['name'] + '<|end|>' -}}{%- endif -%}"
)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_template_is_given_the_tools_of_the_row(tiny_model_dir: Path, as_json: bool):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"messages": TALK, "tools": json.dumps(tools) if as_json else tools}
    for template in (CHATML, MARKED):
        tokenizer.chat_template = TOOLS + template
        (example,) = examples_of_row(row, tokenizer, PLAIN, number=0)
        (s,) = example.sequences
        assert tokenizer.decode(s.tokens[:5]) == "<|system|>add<|end|>"
        assert s.loss_mask.tolist() == [0] * 5 + EVERY_TURN


def test_sides_are_plain_data():
    (side,) = sides({"prompt": "a", "response": "b"}, PLAIN)
    assert (side.messages, side.first, side.preference) == (TALK[:2], 1, 0)
