"""The rules of events that a schema cannot say: equal lengths, finite numbers, honest times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from . import arrays
from . import events as ev
from .errors import InvalidEvent


def check(event: ev.Event) -> None:
    """Raise InvalidEvent, naming the event and the place, when the event breaks its contract."""
    rule = _RULES.get(type(event))
    if rule is not None:
        rule(event)


def check_time(event_time_ms: int, log_time_ms: int, max_skew_ms: int) -> None:
    """Refuse an event time that would push stream time on.

    Raises:
        InvalidEvent: the event's time lies more than `max_skew_ms` after the log's timestamp.
    """
    ahead = event_time_ms - log_time_ms
    if ahead > max_skew_ms:
        raise InvalidEvent(
            f"produced_at lies {ahead / 1000:,.1f} s after the log's own time; at most "
            f"{max_skew_ms / 1000:g} s are allowed. Set the producer's clock, or raise "
            "streams.max_skew_ms.",
            field="produced_at",
        )


def _trajectory(t: ev.Trajectory) -> None:
    where = t.trajectory_id
    _ids(where, ("trajectory_id", t.trajectory_id), ("group_id", t.group_id))
    if t.trajectory_id != ev.trajectory_id(t.group_id, t.slot, t.attempt):
        _refuse(where, "trajectory_id", "is not <group_id>:<slot>:<attempt> of its own fields")
    if not t.attempt or ":" in t.attempt:
        _refuse(where, "attempt", f"{t.attempt!r} must be a token without ':', never reused")
    if not 0 <= t.slot < t.group_size:
        _refuse(where, "slot", f"{t.slot} lies outside the group's 0..{t.group_size - 1}")
    if not t.reward_sources and not t.is_failed:
        _refuse(where, "reward_sources", "is empty, so nothing could ever score it; name a source")
    _finite(where, "reward_sources", t.reward_sources.values())
    if t.is_failed != bool(t.failure):
        _refuse(where, "failure", "goes with finish_reason 'failed', and only with it")
    if t.is_failed:
        return
    if not t.sequences and t.claim is None:
        _refuse(where, "sequences", "is empty; a rollout without tokens is finish_reason 'failed'")
    for i, sequence in enumerate(t.sequences):
        _sequence(where, f"sequences[{i}]", sequence)
    _versions(where, t)
    for i, score in enumerate(t.scores):
        _finite(where, f"scores[{i}].value", (score.value,))
        if score.source not in t.reward_sources:
            _refuse(where, f"scores[{i}].source", f"{score.source!r} is not in reward_sources")
        _span(where, f"scores[{i}].span", score.span, t)


def _versions(where: str, t: ev.Trajectory) -> None:
    """Staleness is judged by these two fields, so they must say what the tokens say."""
    found = arrays.run_bounds(s.policy_versions for s in t.sequences)
    stated = (t.min_policy_version, t.max_policy_version)
    if found not in ((-1, -1), stated):
        _refuse(
            where,
            "min_policy_version, max_policy_version",
            f"say {stated[0]} to {stated[1]}, its tokens {found[0]} to {found[1]}",
        )


def _sequence(where: str, field: str, s: ev.Sequence) -> None:
    length = len(s.loss_mask)
    if len(s.tokens) != 4 * length or len(s.logprobs) != 4 * length:
        _refuse(
            where,
            field,
            f"arrays disagree in length: tokens {len(s.tokens) / 4:g}, loss_mask {length}, "
            f"logprobs {len(s.logprobs) / 4:g}",
        )
    if not length:
        _refuse(where, field, "has no tokens")
    if s.loss_mask.translate(None, b"\x00\x01"):
        _refuse(where, f"{field}.loss_mask", "holds values other than 0 and 1")
    _runs(where, f"{field}.policy_versions", s)
    if not arrays.all_finite(s.logprobs):
        _refuse(where, f"{field}.logprobs", "holds a value that is not finite")
    if not (s.temperature > 0 and math.isfinite(s.temperature)):
        _refuse(where, f"{field}.temperature", f"{s.temperature} is no positive number")
    for i, turn in enumerate(s.turns):
        if not 0 <= turn.start <= turn.end <= length:
            _refuse(
                where,
                f"{field}.turns[{i}]",
                f"[{turn.start}, {turn.end}) lies outside its {length} tokens",
            )


def _runs(where: str, field: str, s: ev.Sequence) -> None:
    covered = 0
    for _, count in arrays.run_pairs(s.policy_versions):
        if count < 1:
            _refuse(where, field, f"has a run of {count} tokens")
        covered += count
    if covered != (written := s.loss_mask.count(1)):
        _refuse(where, field, f"covers {covered} tokens, loss_mask marks {written}")


def _span(where: str, field: str, span: ev.Span | None, t: ev.Trajectory) -> None:
    if span is None or t.claim is not None:
        return
    if not 0 <= span.sequence < len(t.sequences):
        _refuse(where, field, f"names sequence {span.sequence} of {len(t.sequences)}")
    length = t.sequences[span.sequence].num_tokens
    if not 0 <= span.start < span.end <= length:
        _refuse(where, field, f"[{span.start}, {span.end}) lies outside its {length} tokens")


def _reward(r: ev.Reward) -> None:
    where = f"reward {r.event_id!r}"
    _ids(where, ("event_id", r.event_id), ("trajectory_id", r.trajectory_id))
    if ev.group_of(r.trajectory_id) == r.trajectory_id:
        _refuse(where, "trajectory_id", f"{r.trajectory_id!r} is not <group_id>:<slot>:<attempt>")
    if not r.source:
        _refuse(where, "source", "is empty; name who scored")
    _finite(where, "value", (r.value,))
    if r.revision < 0:
        _refuse(where, "revision", f"{r.revision} is negative")
    if r.span is not None and not (r.span.sequence >= 0 and 0 <= r.span.start < r.span.end):
        _refuse(where, "span", f"[{r.span.start}, {r.span.end}) is no range of tokens")


def _task(t: ev.Task) -> None:
    _ids(f"task {t.group_id!r}", ("group_id", t.group_id))
    if t.group_size < 1:
        _refuse(f"task {t.group_id!r}", "group_size", f"{t.group_size} is below 1")


def _experience(e: ev.Experience) -> None:
    _finite(f"experience {e.trajectory_id}", "reward", (e.reward, e.priority))


def _ids(where: str, *fields: tuple[str, str]) -> None:
    for field, text in fields:
        if not ev.is_id(text):
            _refuse(where, field, f"{text!r} is no id; use only letters, digits and . _ : -")


def _finite(where: str, field: str, values: Iterable[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            _refuse(where, field, f"{value} is not a finite number")


def _refuse(where: str, field: str, what: str) -> None:
    raise InvalidEvent(f"{where}: {field} {what}.", field=field)


_RULES: dict[type[ev.Event], Callable[..., None]] = {
    ev.Trajectory: _trajectory,
    ev.Reward: _reward,
    ev.Task: _task,
    ev.Experience: _experience,
}
