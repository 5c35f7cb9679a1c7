from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from streamrft.consumers.learning.examples import TrainingExample
from streamrft.consumers.learning.supervised import examples_of_row
from streamrft.consumers.settings import SftSource
from streamrft.schemas.errors import InvalidEvent

SOURCE = SftSource(path="rows.jsonl", prompt_key="question", response_key="answer")
ROW = {"question": "2+2?", "answer": "4"}
TURNS = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def unmarked(tiny_model_dir: Path) -> Any:
    """The same template without generation marks, as most models ship it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    template = tokenizer.chat_template.replace("{% generation %}", "")
    tokenizer.chat_template = template.replace("{% endgeneration %}", "")
    return tokenizer


def texts(example: TrainingExample, tokenizer: Any) -> tuple[str, str]:
    """The whole text, and what of it is trained."""
    (s,) = example.sequences
    return tokenizer.decode(s.tokens), tokenizer.decode(s.tokens[s.loss_mask == 1])


def test_only_the_response_and_its_end_are_trained(tokenizer: Any):
    (example,) = examples_of_row(ROW, tokenizer, SOURCE, number=0)
    whole = "<|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert texts(example, tokenizer) == (whole, "4<|end|>")


def test_every_assistant_turn_is_trained(tokenizer: Any):
    (example,) = examples_of_row(TURNS, tokenizer, SOURCE, number=0)
    assert texts(example, tokenizer)[1] == "yo<|end|>4<|end|>"


@pytest.mark.parametrize("row", [ROW, TURNS])
def test_a_template_without_marks_gives_the_same_masks(tokenizer: Any, unmarked: Any, row: dict):
    (marked,) = examples_of_row(row, tokenizer, SOURCE, number=0)
    (plain,) = examples_of_row(row, unmarked, SOURCE, number=0)
    (a,), (b,) = marked.sequences, plain.sequences
    assert a.tokens.tolist() == b.tokens.tolist() and a.loss_mask.tolist() == b.loss_mask.tolist()


def test_a_template_that_rewrites_history_is_refused_by_row(unmarked: Any):
    unmarked.chat_template = (
        "{{- messages | length ~ ':' -}}"
        "{%- for m in messages -%}{{- m['role'] + m['content'] -}}{%- endfor -%}"
    )
    with pytest.raises(InvalidEvent, match="rows.jsonl row 7: the chat template renders"):
        examples_of_row(TURNS, unmarked, SOURCE, number=7)


def test_a_system_prompt_stands_first(tokenizer: Any):
    source = SftSource(
        path="x", prompt_key="question", response_key="answer", system_prompt="Be brief."
    )
    (example,) = examples_of_row(ROW, tokenizer, source, number=0)
    assert texts(example, tokenizer)[0].startswith("<|system|>Be brief.<|end|><|user|>")


def test_rows_are_numbered_and_cut_at_the_limit(tokenizer: Any):
    (cut,) = examples_of_row(ROW, tokenizer, SOURCE, number=5, max_tokens=8)
    (whole,) = examples_of_row(ROW, tokenizer, SOURCE, number=6, max_tokens=9)
    assert (cut.trajectory_id, whole.number) == ("sft.5:0:row", 6)
    assert cut.num_tokens == 8 and cut.group_slot_index == -1
    assert [e.sequences[0].is_truncated for e in (cut, whole)] == [True, False]


@pytest.mark.parametrize("limit", [1, 6, 7])
def test_a_row_of_which_nothing_trained_is_left_says_so(tokenizer: Any, limit: int):
    with pytest.raises(InvalidEvent, match=f"row 2: .*behind the first {limit} tokens"):
        examples_of_row(ROW, tokenizer, SOURCE, number=2, max_tokens=limit)


def test_without_a_template_prompt_and_response_are_joined(tiny_model_dir: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = None
    (example,) = examples_of_row(ROW, tokenizer, SOURCE, number=0)
    assert texts(example, tokenizer) == ("2+2?4<|end|>", "4<|end|>")


def test_a_row_without_its_keys_names_them(tokenizer: Any):
    with pytest.raises(InvalidEvent, match="row 3: 'answer' holds nothing; the row has question"):
        examples_of_row({"question": "?"}, tokenizer, SOURCE, number=3)


def test_a_row_brings_its_own_system_prompt_before_text_and_messages(tokenizer: Any):
    source = SftSource(
        path="x",
        prompt_key="question",
        response_key="answer",
        system_prompt="Be brief.",
        system_prompt_key="rules",
    )
    for row in (ROW, TURNS):
        (example,) = examples_of_row(row | {"rules": "Be kind."}, tokenizer, source, number=0)
        whole, trained = texts(example, tokenizer)
        assert whole.startswith("<|system|>Be kind.<|end|>") and "Be kind" not in trained


TEXTS = replace(SOURCE, prompt_key="text", whole_text=True)


def test_continued_pre_training_trains_every_token_of_a_text(tokenizer: Any):
    """All but the first, which nothing predicts; the end-of-sequence token too."""
    (example,) = examples_of_row({"text": "2+2=4"}, tokenizer, TEXTS, number=0)
    assert texts(example, tokenizer)[1] == "2+2=4" + tokenizer.eos_token
    assert example.num_trained_tokens == len("2+2=4")


def test_continued_pre_training_reads_conversations_too(tokenizer: Any):
    (example,) = examples_of_row(TURNS, tokenizer, TEXTS, number=0)
    whole, trained = texts(example, tokenizer)
    assert whole == trained and whole.startswith("<|user|>hi")


def test_a_row_without_text_names_the_key_that_is_missing(tokenizer: Any):
    with pytest.raises(
        InvalidEvent, match="rows.jsonl row 3: 'text' holds no text; the row has answer"
    ):
        examples_of_row(ROW, tokenizer, TEXTS, number=3)
