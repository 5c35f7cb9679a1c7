"""Tasksets are read from any of their formats, in an order that settings and a count decide."""

from __future__ import annotations

import builtins
import json
from collections import Counter
from dataclasses import replace

import pytest

from streamrft.producers.settings import TasksetSettings
from streamrft.producers.tasksets import RowRef, Tasksets, messages_of, truth_of
from streamrft.schemas.errors import ConfigError, MissingExtra
from streamrft.streams.rows import open_rows, to_json

ROWS = [{"question": f"q{i}", "answer": f"so\n#### {i}"} for i in range(5)]


def settings(name="gsm", path="x.jsonl", **fields) -> TasksetSettings:
    return TasksetSettings(
        name=name, path=path, prompt_key="question", response_key="answer", **fields
    )


def read(path, *, split="train", subset=None) -> list[dict]:
    rows = open_rows("gsm", str(path), split=split, subset=subset)
    return [rows[i] for i in range(len(rows))]


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n\n".join(json.dumps(r) for r in rows) + "\n")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_file_gives_its_rows(tmp_path, suffix):
    write(tmp_path / f"rows{suffix}")
    assert read(tmp_path / f"rows{suffix}") == ROWS


@pytest.mark.parametrize(
    "inside",
    ["train.jsonl", "main/train-00000-of-00001.parquet", "data/main/train.json", "data/train.json"],
)
def test_folder_gives_the_rows_of_its_split_and_subset(tmp_path, inside):
    write(tmp_path / inside)
    write(tmp_path / "main" / "test-00000-of-00001.parquet", ROWS[:1])
    assert read(tmp_path, subset="main") == ROWS
    assert read(tmp_path, split="test", subset="main") == ROWS[:1]


def test_shards_follow_each_other(tmp_path):
    write(tmp_path / "train-00000-of-00002.parquet", ROWS[:2])
    write(tmp_path / "train-00001-of-00002.parquet", ROWS[2:])
    assert read(tmp_path) == ROWS


def test_folder_saved_by_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "disk"))
    assert read(tmp_path / "disk") == ROWS


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/nowhere/rows.jsonl", "^gsm: /now.* does not exist .*Set its path to"),
        ("./rows.parquet", "does not exist"),
        ("empty.jsonl", "no rows"),
        ("bad.json", "list of objects"),
        ("broken.json", "is no JSON"),
        ("broken.parquet", "no readable Parquet"),
        ("sheet.csv", r"(?s)^gsm: sheet.csv is not read; .jsonl .*DictReader.*> sheet.jsonl$"),
        ("my SHEET.CSV", r"(?s)< 'my SHEET.CSV' > 'my SHEET.jsonl'$"),
        ("rows", "rows is not read; .* name it .jsonl"),
        ("data/away.csv", "does not exist"),
        ("other", r"no train.jsonl.*It holds notes.txt"),
    ],
)
def test_wrong_path_says_what_was_found_and_what_to_do(tmp_path, monkeypatch, path, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.parquet").write_text("{")
    for name in ("sheet.csv", "my SHEET.CSV", "rows"):
        (tmp_path / name).write_text('{"a": 1}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=says):
        read(path)


def test_bad_line_is_named_by_its_number(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{oops\n[1]\n')
    rows = open_rows("gsm", str(tmp_path / "rows.jsonl"), split="train", subset=None)
    with pytest.raises(ConfigError, match=r"rows.jsonl:3: no JSON"):
        rows[1]
    with pytest.raises(ConfigError, match=r"rows.jsonl:4: list, not a JSON object"):
        rows[2]


def test_hub_name_without_datasets_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r'openai/gsm8k.*pip install "streamrft\[data\]"'):
        read("openai/gsm8k")


def order(tasksets: Tasksets, count: int) -> list[RowRef]:
    return [tasksets.at(i) for i in range(count)]


def test_sequential_order_repeats_each_epoch():
    tasksets = Tasksets([settings()], [ROWS])
    assert order(tasksets, 7) == [
        *(RowRef("gsm", i, 0) for i in range(5)),
        RowRef("gsm", 0, 1),
        RowRef("gsm", 1, 1),
    ]


def test_shuffle_gives_every_row_once_an_epoch_and_another_order_each():
    made = order(Tasksets([settings(selector="shuffle")], [list(range(40))]), 80)
    first, second = [r.row for r in made[:40]], [r.row for r in made[40:]]
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second and first != sorted(first)


@pytest.mark.parametrize("selector", ["sequential", "shuffle", "random"])
def test_order_is_a_function_of_settings_and_count_alone(selector):
    def fresh(seed=42):
        return Tasksets(
            [settings("a", selector=selector, selector_seed=seed), settings("b")],
            [list(range(30)), list(range(10))],
        )

    whole = order(fresh(), 100)
    restarted = fresh()
    assert [restarted.at(i) for i in (99, 3, 57)] == [whole[99], whole[3], whole[57]]
    if selector != "sequential":
        assert order(fresh(seed=1), 100) != whole


def test_order_is_the_same_in_every_version():
    made = order(Tasksets([settings(selector="shuffle")], [ROWS]), 10)
    assert [r.row for r in made] == [4, 0, 3, 1, 2, 0, 2, 1, 3, 4]


def test_tasksets_are_mixed_in_proportion():
    tasksets = Tasksets([settings("a"), settings("b")], [list(range(30)), list(range(10))])
    for start in (0, 8, 20, 40):
        counts = Counter(tasksets.at(i).taskset for i in range(start, start + 4))
        assert counts == {"a": 3, "b": 1}


def test_same_name_twice_is_refused():
    with pytest.raises(ConfigError, match="must be unique"):
        Tasksets([settings(), settings()], [ROWS, ROWS])


def test_row_may_name_its_workflow_and_reward():
    rows = [{"question": "q", "w": "multi", "r": ""}, {"question": "q"}]
    chosen = settings(workflow="math_workflow", reward_fn="math_reward")
    tasksets = Tasksets([chosen], [rows])
    assert tasksets.read(RowRef("gsm", 0, 0))[1:] == ("math_workflow", "math_reward")
    keyed = settings(
        workflow="math_workflow", reward_fn="math_reward", workflow_key="w", reward_fn_key="r"
    )
    tasksets = Tasksets([keyed], [rows])
    assert tasksets.read(RowRef("gsm", 0, 0))[1:] == ("multi", "math_reward")
    assert tasksets.read(RowRef("gsm", 1, 0))[1:] == ("math_workflow", "math_reward")
    assert json.loads(tasksets.read(RowRef("gsm", 0, 0)).content) == rows[0]


def test_content_keeps_every_script_and_turns_dates_into_text():
    import datetime

    assert to_json({"q": "你好", "d": datetime.date(2024, 1, 2)}) == (
        '{"q": "你好", "d": "2024-01-02"}'
    )


def test_messages_come_from_text_or_from_a_list():
    said = [{"role": "user", "content": "hi"}]
    assert messages_of({"question": "hi"}, settings()) == said
    assert messages_of({"question": said}, settings()) == said
    assert messages_of({"message": said, "question": "x"}, settings()) == said


def test_a_message_without_content_is_named_unless_it_says_something_else():
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    said = [{"role": "user", "content": "hi"}, called]
    assert messages_of({"message": said}, settings(), 3) == said
    for wrong, told in [
        (
            {"role": "user", "content": None},
            r"messages\[1\]\.content: null found; a text",
        ),
        ({"role": "user", "content": 3}, r"messages\[1\]\.content: int found"),
        ({"content": "hi"}, r"messages\[1\]\.role: null found"),
        ("hi", r"messages\[1\]: str found"),
    ]:
        with pytest.raises(ConfigError, match=rf"^taskset 'gsm' row 3: {told}"):
            messages_of({"message": [said[0], wrong]}, settings(), 3)


def test_system_prompt_of_the_row_wins_over_that_of_the_taskset():
    chosen = settings(system_prompt="be brief", system_prompt_key="sys")
    first = {"role": "system", "content": "be brief"}
    assert messages_of({"question": "hi"}, chosen)[0] == first
    assert messages_of({"question": "hi", "sys": "be long"}, chosen)[0]["content"] == "be long"
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    assert messages_of({"message": own}, chosen) == own


def test_a_column_of_questions_that_is_not_there_is_found_at_once(tmp_path):
    write(tmp_path / "rows.jsonl")
    fits = settings(path=str(tmp_path / "rows.jsonl"))
    Tasksets.open([fits])
    Tasksets.open([replace(fits, prompt_key="other", workflow="mine")])
    with pytest.raises(ConfigError, match="^taskset 'gsm' row 0: no prompt under 'other'"):
        Tasksets.open([replace(fits, prompt_key="other", workflow="math_workflow")])


def test_row_without_a_prompt_names_its_fields():
    with pytest.raises(ConfigError, match="no prompt under 'question'; it has text, answer"):
        messages_of({"text": "hi", "answer": 1}, settings())


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("long way\n#### 72", "72"), ("72", "72"), (72, "72"), ("a #### b #### c", "c"), (None, None)],
)
def test_truth_is_what_follows_the_last_marks(answer, truth):
    assert truth_of({"answer": answer}, settings()) == truth


def test_plaintext_rows_are_not_looked_through_for_messages():
    row = {"message": [{"role": "user", "content": "old"}], "question": "hi"}
    asked = messages_of(row, settings(prompt_type="plaintext"))
    assert asked == [{"role": "user", "content": "hi"}]
