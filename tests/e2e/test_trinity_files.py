"""Files with Trinity-RFT's keys train as they are: rows, pairs, and stages killed one by one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import SmallRun

from streamrft.deploy.cli import main
from streamrft.schemas import events as ev

FILES = Path(__file__).parents[1] / "data" / "trinity"
STAGES = ("sft_warmup", "rft", "preferences")


@pytest.fixture
def trinity(
    small_run: Callable[..., SmallRun],
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], SmallRun]:
    """A run of one of the files, with the variables that Trinity's users set."""
    asked = [{"role": "user", "content": f"{i}+1?"} for i in range(6)]
    chats = [[m, {"role": "assistant", "content": str(i + 1)}] for i, m in enumerate(asked)]
    rows = {
        "chats": [{"messages": chat} for chat in chats],
        "pairs": [{"prompt": f"{i}?", "chosen": str(i), "rejected": "x"} for i in range(8)],
        "tasks": [{"question": f"{i:03d}?", "answer": str(i)} for i in range(40)],
    }
    for name, listed in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in [*listed, {"of": "no use"}])
        (tmp_path / f"{name}.jsonl").write_text(lines)
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(tiny_model_dir))
    monkeypatch.setenv("TRINITY_TASKSET_PATH", str(tmp_path))

    def make(name: str) -> SmallRun:
        run = small_run()
        monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(run.folder / "runs"))
        shutil.copy(FILES / f"{name}.yaml", run.config)
        return run

    return make


def losses(run: SmallRun) -> list[float]:
    steps = sorted(run.events("train_steps", ev.TrainStep), key=lambda s: s.step)
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    return [s.metrics["actor/pg_loss"] for s in steps]


def saved(run: SmallRun) -> dict[int, str]:
    """Digests by step; a version has one, however often it was announced."""
    found: dict[int, str] = {}
    for c in run.events("checkpoints", ev.Checkpoint):
        assert found.setdefault(c.step, c.digest) == c.digest
    return found


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_file_of_rows_trains_as_it_is(trinity: Callable[[str], SmallRun], name: str) -> None:
    run = trinity(name)
    run.finish()
    letters, again = run.tool("dead-letters", "list"), run.tool("dead-letters", "replay", "--all")
    assert letters.stdout.count("the row has of. Set format.") == 1, letters.stdout
    assert (again.returncode, again.stderr) == (1, "0 replayed, 1 refused\n")
    found = losses(run)
    assert len(found) == {"sft": 3, "dpo": 6}[name] and found[-1] < found[0]


def test_stages_hand_their_weights_on_and_a_kill_in_each_goes_on_in_that_stage(
    trinity: Callable[[str], SmallRun],
) -> None:
    """The trainer of the first stage, and then everything in the second and in the third."""
    run = trinity("stages")
    for stage in STAGES[1:]:
        run.stage = stage
        kill_at = f"trainer.step_done@2={run.folder / 'killed'}"
        process = run.start(hold_at="trainer.step_done@3", STREAMRFT_KILL_AT=kill_at)
        run.wait_for(lambda: run.events("train_steps", ev.TrainStep), f"step of {stage}", 480)
        run.kill_supervisor(process)
    run.finish()
    assert (run.folder / "killed").exists()
    before = ""
    for stage, num_steps in zip(STAGES, (3, 3, 3), strict=True):
        run.stage = stage
        assert len(losses(run)) == num_steps
        digests = saved(run)
        assert before in ("", digests[0]), f"{stage} does not begin with the weights before it"
        before = digests[num_steps]
        assert run.tool("status", "--stage", stage).returncode == 0
    folder, base = str(run.job / "preferences"), os.environ["TRINITY_MODEL_PATH"]
    words = ["convert", "--checkpoint-dir", folder, "--base-model-dir", base, "--step", "3"]
    assert main(words) == 0
    said = (run.folder / "run.log").read_text()
    assert said.count("stage sft_warmup: reached its goal before") == 2
    assert said.count("stage rft: reached its goal before") == 1
    assert said.splitlines()[-1].startswith("stage preferences: done, step 3")
