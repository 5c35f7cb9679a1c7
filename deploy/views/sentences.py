"""One line of text for each kind of event, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...schemas import events as ev

_TEXT_CHARS = 60


def sentence(event: ev.Event) -> str:
    """What an event says, in one line."""
    tell = _SENTENCES.get(type(event))
    return tell(event) if tell else type(event).__name__


def numbers(values: Mapping[str, float]) -> str:
    """`name 0.5 other 1`."""
    return " ".join(f"{name} {value:.4g}" for name, value in values.items())


def versions(low: int, high: int) -> str:
    """The policy versions that wrote the tokens."""
    return f"policy {low}" if low == high else f"policy {low}..{high}"


def _task(t: ev.Task) -> str:
    return (
        f"{t.group_id}  row {t.row} epoch {t.epoch}  for step {t.step}  {t.group_size} rollouts "
        f"of {t.workflow}  {_cut(t.content)}"
    )


def _ended(e: ev.Ended) -> str:
    return f"branch {e.branch} ended after {e.num_groups} groups"


def _trajectory(t: ev.Trajectory) -> str:
    if t.is_failed:
        return f"{t.trajectory_id}  failed: {_cut(t.failure)}"
    tokens = sum(s.num_tokens for s in t.sequences)
    size = f"{tokens} tokens" if t.claim is None else f"claim {t.claim.uri}"
    scores = numbers({s.source: s.value for s in t.scores})
    waits = sorted(set(t.reward_sources) - {s.source for s in t.scores})
    late = f"  waits for {', '.join(waits)}" if waits else ""
    policy = versions(t.min_policy_version, t.max_policy_version)
    return f"{t.trajectory_id}  {t.finish_reason}  {policy}  {size}  {scores}{late}"


def _reward(r: ev.Reward) -> str:
    revision = f" revision {r.revision}" if r.revision else ""
    span = f" tokens {r.span.start}..{r.span.end}" if r.span else ""
    return f"{r.trajectory_id}  {r.source} {r.value:g}{revision}{span}  ({r.event_id})"


def _experience(e: ev.Experience) -> str:
    revision = f" revision {e.reward_revision}" if e.reward_revision else ""
    policy = versions(e.min_policy_version, e.max_policy_version)
    parts = numbers(e.reward_parts)
    return f"{e.trajectory_id}{revision}  reward {e.reward:.4g} ({parts})  {policy}"


def _clock(c: ev.Clock) -> str:
    return f"partition {c.partition}  time {c.time_ms}"


def _drop(d: ev.Drop) -> str:
    return f"{d.trajectory_id}  {d.reason} by {d.where}: {_cut(d.detail)}"


def _cut_of(c: ev.Cut) -> str:
    groups = {ev.group_of(m.trajectory_id) for m in c.members}
    return f"cut of {_step(c.branch, c.step)}  {len(c.members)} experiences of {len(groups)} groups"


def _train_step(s: ev.TrainStep) -> str:
    reward = s.metrics.get("reward/mean")
    shown = f"  reward {reward:.4g}" if reward is not None else ""
    return f"{_step(s.branch, s.step)} done  {s.num_experiences} experiences{shown}"


def _checkpoint(c: ev.Checkpoint) -> str:
    return f"{c.kind} checkpoint of {_step(c.branch, c.step)}  {c.uri}  sha256 {c.digest[:12]}"


def _save_failed(f: ev.SaveFailed) -> str:
    return f"{f.kind} checkpoint of {_step(f.branch, f.step)} is not saved: {_cut(f.reason)}"


def _branch(b: ev.Branch) -> str:
    return f"branch {b.branch} begins at {_step(b.parent, b.step)}"


def _evaluation(e: ev.Evaluation) -> str:
    return f"{e.taskset}  policy {e.policy_version}  {numbers(e.metrics)}"


def _heartbeat(h: ev.Heartbeat) -> str:
    waits = f"  waits for {h.waiting_for}" if h.waiting_for else ""
    return f"{h.process} ({h.pid} on {h.host}) {h.state}{waits}"


def _dead_letter(d: ev.DeadLetter) -> str:
    return f"{d.topic}[{d.partition}]@{d.offset} refused by {d.reader}: {_cut(d.error)}"


def _replay(r: ev.Replay) -> str:
    return f"dead letter {r.dead_letter} was sent again to {r.topic}"


def _step(branch: str, step: int) -> str:
    return f"step {step}" if branch == "main" else f"step {step} on {branch}"


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _TEXT_CHARS else flat[: _TEXT_CHARS - 1] + "…"


_SENTENCES: dict[type[ev.Event], Callable[..., str]] = {
    ev.Task: _task,
    ev.Ended: _ended,
    ev.Trajectory: _trajectory,
    ev.Reward: _reward,
    ev.Experience: _experience,
    ev.Clock: _clock,
    ev.Drop: _drop,
    ev.Cut: _cut_of,
    ev.TrainStep: _train_step,
    ev.Checkpoint: _checkpoint,
    ev.SaveFailed: _save_failed,
    ev.Branch: _branch,
    ev.Evaluation: _evaluation,
    ev.Heartbeat: _heartbeat,
    ev.DeadLetter: _dead_letter,
    ev.Replay: _replay,
}
