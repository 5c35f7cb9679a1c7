"""A trainer on files of every kind: bad rows are dead letters, and a killed one goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from training_feed import Feed

from streamrft.consumers.settings import AlgorithmSettings, OptimizerSettings, SftSource
from streamrft.schemas import events as ev

FAST = OptimizerSettings(lr=1e-3)
ASKED = {"role": "user", "content": "2+2?"}
TALK = [ASKED, {"role": "assistant", "content": "4"}]
FILES: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "sft": ({}, [{"messages": TALK}, {"messages": [ASKED]}, {"messages": TALK * 2}]),
    "cpt": ({"whole_text": True, "prompt_key": "text"}, [{"text": t} for t in ("ab", "", "c")]),
    "dpo": (
        {"is_pairs": True},
        [{"prompt": "a", "chosen": c, "rejected": "d"} for c in ("b", "d", "e")],
    ),
    "kto": (
        {"label_key": "label"},
        [{"prompt": "a", "response": "b", "label": label} for label in (True, None, False)],
    ),
}


@pytest.fixture
def feed_on(tmp_path: Path, tiny_model_dir: Path):
    made: list[Feed] = []

    def make(name: str, path: Path, kind: str, **source: Any) -> Feed:
        (tmp_path / name).mkdir()
        settings = {
            "algorithm": AlgorithmSettings(kind, optimizer=FAST),
            "sft": SftSource(str(path), total_epochs=3, **source),
            "train_batch_size": 2,
        }
        made.append(Feed(tmp_path / name, tiny_model_dir, settings))
        return made[-1]

    yield make
    for feed in made:
        feed.close()


@pytest.mark.parametrize("kind", FILES)
def test_rows_around_a_bad_one_are_trained_and_it_is_a_dead_letter(
    feed_on, tmp_path: Path, kind: str
):
    source, rows = FILES[kind]
    lines, table = tmp_path / f"{kind}.jsonl", tmp_path / f"{kind}.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    digests = []
    for path in (lines, table):
        feed = feed_on(f"{path.suffix[1:]}-feed", path, kind, **source)
        assert feed.train() == 0, feed.said
        steps = feed.read("train_steps", ev.TrainStep)
        per_row = 2 if kind == "dpo" else 1
        assert [s.num_experiences for s in steps] == [2 * per_row] * 3
        assert all(s.metrics["actor/skipped_updates"] == 0 for s in steps)
        digests.append(feed.digests["main", 3])
        (letter,) = feed.read("dead_letters", ev.DeadLetter)
        assert (letter.topic, letter.offset, letter.reader) == (str(path), 1, "trainer")
        assert letter.error.startswith(f"{path} row 1: ")
        assert letter.value and json.loads(letter.value) == rows[1]
    assert digests[0] == digests[1]


def test_a_killed_trainer_goes_on_with_the_next_row_and_tells_no_bad_one_twice(
    feed_on, tmp_path: Path
):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"{i}?", "response": str(i)}) for i in range(6)]
    path.write_text("\n".join([*rows, "no row", *rows]))
    quiet, killed = (feed_on(name, path, "sft", shuffle=False) for name in ("quiet", "killed"))
    assert quiet.train(save_interval=1) == 0
    assert killed.train(save_interval=1, kill_at="trainer.step_done@8") == -9
    assert killed.train(save_interval=1) == 0
    assert killed.digests == quiet.digests and len(quiet.digests) == 19
    for feed in (quiet, killed):
        (letter,) = feed.read("dead_letters", ev.DeadLetter)
        assert letter.offset == 6 and f"{path}:7: no JSON" in letter.error


def test_a_file_of_which_no_row_can_be_read_ends_the_run_with_the_reason(feed_on, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n' * 3)
    feed = feed_on("wrong", path, "sft")
    assert feed.train() == 1
    assert "nothing can be made of any of the first 3 rows" in feed.said
    assert (
        "'prompt' holds nothing; the row has answer, question. Set format.prompt_key" in feed.said
    )
