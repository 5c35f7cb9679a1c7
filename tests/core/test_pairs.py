"""Rows of preferences become pairs whose sides differ by the answer alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from streamrft.consumers.learning.preparation import whole_pairs
from streamrft.consumers.learning.supervised import examples_of_row
from streamrft.consumers.settings import SftSource
from streamrft.schemas.errors import InvalidEvent

SOURCE = SftSource(path="pairs.jsonl", is_pairs=True)
ASK = {"role": "user", "content": "2+2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "five"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"prompt": "2+2?", "chosen": "4", "rejected": "five"}, id="texts"),
        pytest.param({"prompt": [ASK], "chosen": "4", "rejected": "five"}, id="turns before"),
        pytest.param({"prompt": "2+2?", "chosen": [GOOD], "rejected": [BAD]}, id="answers"),
        pytest.param({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, id="conversations"),
    ],
)
def test_every_form_of_a_pair_gives_the_same_two_sequences(tokenizer: Any, row: dict[str, Any]):
    pair = examples_of_row(row, tokenizer, SOURCE, number=7)
    assert [e.preference for e in pair] == [1, -1]
    assert [e.trajectory_id for e in pair] == ["dpo.7:0:row", "dpo.7:1:row"]
    assert {e.group_id for e in pair} == {"dpo.7"}
    found = []
    for e in pair:
        (s,) = e.sequences
        found.append((tokenizer.decode(s.tokens), tokenizer.decode(s.tokens[s.loss_mask == 1])))
    assert found == [
        ("<|user|>2+2?<|end|><|assistant|>4<|end|>", "4<|end|>"),
        ("<|user|>2+2?<|end|><|assistant|>five<|end|>", "five<|end|>"),
    ]


def test_other_keys_are_read_where_the_format_names_them(tokenizer: Any):
    source = replace(SOURCE, prompt_key="q", chosen_key="yes", rejected_key="no")
    row = {"q": "2+2?", "yes": "4", "no": "5"}
    assert len(examples_of_row(row, tokenizer, source, number=0)) == 2


@pytest.mark.parametrize(
    "row, match",
    [
        ({"prompt": "a", "chosen": "b"}, "row 3: 'rejected' holds neither a text nor turns"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, "row 3: 'chosen' holds neither"),
        ({"chosen": "b", "rejected": "c"}, "row 3: 'prompt' holds nothing before 'chosen'"),
    ],
)
def test_a_row_without_its_keys_is_named(tokenizer: Any, row: dict[str, Any], match: str):
    with pytest.raises(InvalidEvent, match=match):
        examples_of_row(row, tokenizer, SOURCE, number=3)


def test_a_pair_of_which_a_side_is_cut_away_is_refused_and_one_in_a_batch_left_out(tokenizer: Any):
    short = examples_of_row(
        {"prompt": "a", "chosen": "b", "rejected": "c"}, tokenizer, SOURCE, number=0
    )
    long = {"prompt": "long prompt", "chosen": "b", "rejected": "c"}
    with pytest.raises(InvalidEvent, match="pairs.jsonl row 1: .*behind the first 6 tokens"):
        examples_of_row(long, tokenizer, SOURCE, number=1, max_tokens=6)
    (s,) = short[0].sequences
    masked = replace(short[0], sequences=(replace(s, loss_mask=0 * s.loss_mask),))
    assert whole_pairs([masked, short[1], *short]) == short
