"""Read the run from its log: a table, a plot, a picture, the model, and whether it learned.

Ends with 1 when the mean reward of the last 10 steps is not at least `--min-climb` above that of
the first 10: reinforcement, not the warm-up, must have made the climb.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from streamrft.deploy.plan import Run, Stage, plan
from streamrft.schemas.errors import StreamrftError
from streamrft.schemas.events import Checkpoint, Event, TrainStep
from streamrft.streams.reading import read_events
from streamrft.streams.weights.object_storage import HF_FOLDER, fetch_model_folder

E = TypeVar("E", bound=Event)
WINDOW = 10
BLOCKS = " ▁▂▃▄▅▆▇█"
HERE = Path(__file__).parent


def read_topic(run: Run, stage: Stage, topic: str, kind: type[E]) -> list[E]:
    """Every event of one kind on a topic with one partition, in order."""
    with closing(run.open_log()) as log:
        return [e for e in read_events(log, stage.topics, topic) if isinstance(e, kind)]


def steps_of(run: Run, stage: Stage) -> list[TrainStep]:
    """One a step, in order; a step that a crash made twice counts once."""
    by_step = {e.step: e for e in read_topic(run, stage, "train_steps", TrainStep)}
    return [by_step[step] for step in sorted(by_step)]


def climb(rewards: list[float]) -> float:
    """Mean of the last steps minus mean of the first."""
    window = max(1, min(WINDOW, len(rewards) // 2))
    return fmean(rewards[-window:]) - fmean(rewards[:window])


def print_table(steps: list[TrainStep]) -> None:
    """Means over ten steps a row."""
    columns = {
        "reward": "reward/mean",
        "response tokens": "response_length/mean",
        "staleness": "sample/staleness_mean",
        "largest log-prob gap": "actor/logprob_gap_max",
        "train s": "time/train_s",
        "wait s": "time/wait_s",
    }
    print("steps   " + "".join(f"{name:>{len(name) + 3}}" for name in columns))
    for start in range(0, len(steps), WINDOW):
        rows = steps[start : start + WINDOW]
        means = [fmean(s.metrics.get(key, 0.0) for s in rows) for key in columns.values()]
        cells = "".join(f"{m:>{len(n) + 3}.2g}" for n, m in zip(columns, means, strict=True))
        print(f"{rows[0].step:>3}-{rows[-1].step:<4}{cells}")


def print_plot(rewards: list[float], height: int = 8) -> None:
    """One column a step, each line an eighth of the range of 0 to 1."""
    print()
    for line in range(height - 1, -1, -1):
        label = f"{(line + 1) / height:4.2f} "
        filled = (min(max(r * height - line, 0.0), 1.0) for r in rewards)
        print(label + "".join(BLOCKS[round(f * 8)] for f in filled))
    print(f"     reward by step, 1 to {len(rewards)}")


def save_picture(rewards: list[float], path: Path) -> None:
    """Reward by step, with the running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    steps = range(1, len(rewards) + 1)
    smooth = [fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
    axes.plot(steps, rewards, color="#9ab", linewidth=1, label="mean reward of the step")
    axes.plot(steps, smooth, color="#146", linewidth=2, label=f"mean of {WINDOW} steps")
    axes.set(xlabel="optimiser step", ylabel="reward", ylim=(0, 1), title="GRPO: sort four digits")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def model_folder(run: Run, stage: Stage) -> Path:
    """The Hugging Face folder of the newest checkpoint; a copy of one on an object store."""
    newest = read_topic(run, stage, "checkpoints", Checkpoint)[-1]
    if "://" in newest.uri:
        return fetch_model_folder(newest, run.job_dir / "model")
    folder = Path(newest.uri) / HF_FOLDER
    if not folder.is_dir():
        raise StreamrftError(
            f"{folder}: gone, though {run.log_url} says that the run was trained. Put the folder "
            "back, or give the run another name and train it again."
        )
    return folder


def ask(folder: Path, question: str) -> str:
    """What the trained model answers, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def report(config: Path, min_climb: float) -> int:
    """Print everything; the exit code says whether it learned."""
    run = plan(config, (str(HERE / "plugins"),))
    stage = run.stages[-1]
    steps = steps_of(run, stage)
    if len(steps) < 2:
        print(f"{run.log_url}: {len(steps)} steps found. Run the training first.", file=sys.stderr)
        return 1
    rewards = [s.metrics["reward/mean"] for s in steps]
    print_table(steps)
    print_plot(rewards)
    picture = run.job_dir / "reward.png"
    save_picture(rewards, picture)
    folder = model_folder(run, stage)
    print(f"\npicture  {picture}\nmodel    {folder}\nevents   {run.log_url}")
    print(f"the model says: sort 4071 -> {ask(folder, 'sort 4071')}")
    return verdict(climb(rewards), min_climb)


def verdict(found: float, min_climb: float) -> int:
    """0 when the climb is enough."""
    if found >= min_climb:
        print(f"reward climbed by {found:.2f} while learning from rewards alone")
        return 0
    print(
        f"reward climbed by {found:.2f}, less than {min_climb:g}: the run did not learn. "
        "Look at the table above and at the log files beside the events.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "quickstart.yaml")
    parser.add_argument("--min-climb", type=float, default=0.15)
    arguments = parser.parse_args()
    try:
        sys.exit(report(arguments.config, arguments.min_climb))
    except StreamrftError as error:
        sys.exit(str(error))
