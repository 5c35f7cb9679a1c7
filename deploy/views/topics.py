"""`topics plan | apply | describe`: a run's topics as its configuration asks for them.

Exit codes of `plan`: 0 nothing to do, 3 there are changes, 4 `apply` would refuse some of them.
`apply` makes all changes or none: 0 the log is as it shall be, 4 nothing was done.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from ...schemas.errors import LogError
from ...schemas.topics import CATALOGUE
from ...streams.log import Log, TopicInfo, TopicSize, TopicState
from ..plan import Run, Stage, plan, sqlite_path
from ..topics import REFUSE, Change, Permissions, TopicPlan, apply_plan, plan_topics
from .place import current_stage, opened

NOTHING_TO_DO, CHANGES, REFUSED = 0, 3, 4
_FOREVER = "-1"
_UNITS_MS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))


def plan_command(args: argparse.Namespace) -> int:
    """`streamrft topics plan`: show the difference, change nothing."""
    run = plan(args.config)
    path = sqlite_path(run.log_url)
    if path is not None and not path.exists():
        found = _plan(None, run, _stage(None, run, args.stage), args)
    else:
        with closing(run.open_log()) as log:
            found = _plan(log, run, _stage(log, run, args.stage), args)
    _show(found, run, args.json)
    if found.refused:
        return REFUSED
    return CHANGES if found.changes else NOTHING_TO_DO


def apply_command(args: argparse.Namespace) -> int:
    """`streamrft topics apply`: show the difference, then make it so."""
    run = plan(args.config)
    with closing(run.open_log()) as log:
        stage = _stage(log, run, args.stage)
        found = _plan(log, run, stage, args)
        _show(found, run, args.json)
        if found.refused:
            return REFUSED
        apply_plan(log, found)
        left = _plan(log, run, stage, args).changes
    if left:
        told = "; ".join(_line(change, found.allowed).strip() for change in left)
        raise LogError(f"the log took the changes and still asks for: {told}")
    if found.changes and not args.json:
        print(f"done: {_changes(found)} made")
    return 0


def describe_command(args: argparse.Namespace) -> int:
    """`streamrft topics describe`: partitions, settings, offsets and sizes as the log has them."""
    with opened(args.config, args.stage) as place:
        stage, log = place.stage, place.log
        others = _topics_of_other_stages(place.run, stage)
        found = log.topic_states(prefix=f"{stage.namespace}.")
        states = {name: state for name, state in found.items() if name not in others}
        described, sizes = log.describe(states), log.topic_sizes(states)
    catalogue = {stage.topics.name(name) for name in CATALOGUE}
    for name, state in states.items():
        described_here = (name, state, described[name], sizes.get(name), name in catalogue)
        if args.json:
            print(json.dumps(_plain_topic(*described_here)))
        else:
            print("\n".join(_topic_lines(*described_here)))
    return 0


def _stage(log: Log | None, run: Run, name: str | None) -> Stage:
    if name is not None:
        return run.stage(name)
    return run.stages[0] if log is None else current_stage(log, run)


def _plan(log: Log | None, run: Run, stage: Stage, args: argparse.Namespace) -> TopicPlan:
    allowed = Permissions(args.allow_data_loss, args.allow_moving_keys)
    others = _topics_of_other_stages(run, stage)
    return plan_topics(log, run.topic_specs(stage), stage.namespace, allowed, others)


def _topics_of_other_stages(run: Run, stage: Stage) -> set[str]:
    return {s.topics.name(name) for s in run.stages if s is not stage for name in CATALOGUE}


def _show(found: TopicPlan, run: Run, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_plain_plan(found)))
        return
    print(f"{len(found.specs)} topics on {run.log_url}")
    width = max(map(len, (*(c.topic for c in found.changes), *found.strangers)), default=0)
    for change in found.changes:
        print(_line(change, found.allowed, width))
        if change.action(found.allowed) == REFUSE:
            print(f"           {change.why}")
    for name in found.strangers:
        print(f"  {'leave':<8} {name:<{width}}  not of the catalogue")
    print(_summary(found))


def _line(change: Change, allowed: Permissions, width: int = 0) -> str:
    action = change.action(allowed)
    begin = f"  {action:<8} {change.topic:<{width}}"
    if change.setting == "topic":
        return f"{begin}  {change.wanted}"
    before, after = (_told(change.setting, v) for v in (change.found, change.wanted))
    return f"{begin}  {change.setting}: {before} -> {after}"


def _summary(found: TopicPlan) -> str:
    if not found.changes:
        return "nothing to do: every topic is as the configuration asks"
    refused = len(found.refused)
    told = _changes(found)
    return f"{told}, {refused} refused: nothing is done" if refused else told


def _changes(found: TopicPlan) -> str:
    num = len(found.changes)
    return f"{num} change{'s' * (num != 1)}"


def _told(setting: str, value: str) -> str:
    """A setting's value with what it means."""
    if not value:
        return "unset"
    if setting.endswith((".ms", ".bytes")) and value == _FOREVER:
        return "-1 (no limit)"
    if setting.endswith(".ms") and (told := _duration(int(value))):
        return f"{value} ({told})"
    if setting.endswith(".bytes") and (told := _size(int(value))):
        return f"{value} ({told})"
    return value


def _duration(ms: int) -> str:
    return next((f"{ms / one:.4g} {unit}" for unit, one in _UNITS_MS if ms >= one), "")


def _size(size_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.4g} {unit}"
    return ""


def _topic_lines(
    name: str, state: TopicState, info: TopicInfo, size: TopicSize | None, is_known: bool
) -> Iterator[str]:
    copies = f", replication {state.replication}" if state.replication else ""
    note = "" if is_known else "  (not of the catalogue)"
    num = state.num_partitions
    yield f"{name}  {num} partition{'s' * (num > 1)}{copies}{note}"
    for setting, value in state.settings.items():
        yield f"    {setting:<26} {_told(setting, value)}"
    yield f"    {'records':<26} {_records(info, size)}"
    ranges = [f"[{p}] {info.begin[p]}..{end}" for p, end in info.end.items() if end]
    yield f"    {'offsets':<26} {'  '.join(ranges) or 'no record yet'}"


def _records(info: TopicInfo, size: TopicSize | None) -> str:
    if size is not None:
        told = _size(size.size_bytes) or f"{size.size_bytes} bytes"
        return f"{size.num_records:,}, {told}"
    num = sum(end - info.begin[p] for p, end in info.end.items())
    return f"at most {num:,}: the markers of transactions count too"


def _plain_plan(found: TopicPlan) -> dict[str, Any]:
    changes = [
        {
            "action": change.action(found.allowed),
            "topic": change.topic,
            "setting": change.setting,
            "found": change.found,
            "wanted": change.wanted,
            "why": change.why,
        }
        for change in found.changes
    ]
    return {
        "topics": len(found.specs),
        "changes": changes,
        "refused": len(found.refused),
        "strangers": list(found.strangers),
    }


def _plain_topic(
    name: str, state: TopicState, info: TopicInfo, size: TopicSize | None, is_known: bool
) -> dict[str, Any]:
    return {
        "topic": name,
        "in_catalogue": is_known,
        **asdict(state),
        "offsets": [[info.begin[p], end] for p, end in sorted(info.end.items())],
        "num_records": size.num_records if size else None,
        "size_bytes": size.size_bytes if size else None,
    }
