"""Topics as code: what the catalogue asks for against what the log has, and the way there.

A change that would lose records, or move keys to other partitions, is refused unless it is
allowed by name; one that no log can make is refused always.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..schemas.events import now_ms
from ..streams.log import Log, Partition, TopicInfo, TopicSpec, TopicState

CREATE, ALTER, REFUSE = "create", "alter", "refuse"
_POLICY, _RETENTION, _LIMIT = "cleanup.policy", "retention.ms", "max.message.bytes"
_SIZE_RETENTION = "retention.bytes"


@dataclass(frozen=True)
class Permissions:
    """What a plan may do beyond what is harmless."""

    data_loss: bool = False
    moving_keys: bool = False


@dataclass(frozen=True)
class Change:
    """One difference. `setting` is `topic` for one that is missing, `partitions`, or Kafka's name.

    `loses` or `moves`: in words, what a permission is needed for; `cannot`: why there is no way.
    """

    topic: str
    setting: str
    found: str
    wanted: str
    loses: str = ""
    moves: str = ""
    cannot: str = ""

    def action(self, allowed: Permissions) -> str:
        """create, alter or refuse."""
        if self.cannot or (self.loses and not allowed.data_loss):
            return REFUSE
        if self.moves and not allowed.moving_keys:
            return REFUSE
        return CREATE if self.setting == "topic" else ALTER

    @property
    def why(self) -> str:
        """What stands against it, and what to do."""
        if self.cannot:
            return self.cannot
        if self.loses:
            return f"{self.loses} --allow-data-loss does it."
        return f"{self.moves} --allow-moving-keys does it." if self.moves else ""


@dataclass(frozen=True)
class TopicPlan:
    """The way from the log as it is to the catalogue.

    `strangers`: topics of the namespace that are not of the catalogue; never touched.
    """

    specs: Mapping[str, TopicSpec]
    changes: tuple[Change, ...]
    strangers: tuple[str, ...]
    allowed: Permissions

    @property
    def refused(self) -> list[Change]:
        """Changes that stand against it."""
        return [c for c in self.changes if c.action(self.allowed) == REFUSE]


def plan_topics(
    log: Log | None,
    specs: Iterable[TopicSpec],
    namespace: str,
    allowed: Permissions,
    others: Iterable[str] = (),
) -> TopicPlan:
    """Compare. Changes nothing.

    Args:
        log: None where there is none yet.
        specs: the topics as the configuration asks for them.
        namespace: of the run; what else lies in it is a stranger.
        allowed: what `refused` does not count.
        others: topics in the namespace that are not strangers, such as those of other stages.
    """
    wanted = {spec.name: spec for spec in specs}
    if log is None:
        return TopicPlan(wanted, tuple(map(_creation, wanted.values())), (), allowed)
    present = log.topic_states(prefix=f"{namespace}.")
    strangers = sorted(present.keys() - wanted.keys() - set(others))
    existing = {name: spec for name, spec in wanted.items() if name in present}
    described = log.describe(existing)
    changes = [_creation(spec) for name, spec in wanted.items() if name not in existing]
    for name, spec in existing.items():
        comparison = _Comparison(log, described[name], present[name], log.state_for(spec))
        changes += comparison.changes()
    return TopicPlan(wanted, tuple(changes), tuple(strangers), allowed)


def apply_plan(log: Log, plan: TopicPlan) -> None:
    """Make the changes of a plan that refuses nothing. May be repeated after an error.

    Raises:
        LogError: the log refused a change; those before it are made.
    """
    assert not plan.refused, "a plan with refusals is not applied"
    log.ensure_topics([plan.specs[c.topic] for c in plan.changes if c.setting == "topic"])
    for name in dict.fromkeys(c.topic for c in plan.changes if c.setting != "topic"):
        mine = {c.setting: c.wanted for c in plan.changes if c.topic == name}
        partitions = mine.pop("partitions", None)
        log.alter_topic(
            name,
            num_partitions=None if partitions is None else int(partitions),
            settings=mine,
        )


def _creation(spec: TopicSpec) -> Change:
    num = spec.num_partitions
    kept = (
        "kept for ever"
        if spec.retention_ms is None
        else f"kept {spec.retention_ms / 3_600_000:.4g} h"
    )
    how = "the last value of each key" if spec.cleanup == "compact" else kept
    return Change(spec.name, "topic", "", f"{num} partition{'s' * (num > 1)}, {how}")


class _Comparison:
    """One topic as it is and as it shall be."""

    def __init__(self, log: Log, info: TopicInfo, found: TopicState, wanted: TopicState) -> None:
        self._log, self._info, self._found, self._wanted = log, info, found, wanted
        self._name = info.spec.name
        self._was_used = any(info.end.values())
        self._has_records = info.begin != info.end

    def changes(self) -> list[Change]:
        found, wanted = self._found, self._wanted
        pairs = [("partitions", str(found.num_partitions), str(wanted.num_partitions))]
        pairs += [
            (name, found.settings.get(name, ""), value) for name, value in wanted.settings.items()
        ]
        return [
            self._judged(Change(self._name, name, before, after))
            for name, before, after in pairs
            if before != after
        ]

    def _judged(self, change: Change) -> Change:
        if change.setting == "partitions":
            return self._judged_partitions(change)
        if not self._has_records:
            return change
        if change.setting in (_POLICY, _RETENTION, _SIZE_RETENTION):
            return replace(change, loses=self._loses(change.setting))
        if change.setting == _LIMIT and int(change.wanted) < int(change.found):
            text = "larger records may lie there, which could not be replayed or sent on."
            return replace(change, loses=text)
        return change

    def _judged_partitions(self, change: Change) -> Change:
        if self._wanted.num_partitions < self._found.num_partitions:
            text = (
                "no log takes partitions away. Set event_log.partitions to what is there, give the "
                "run another name, or delete the topic with all its records and apply again."
            )
            return replace(change, cannot=text)
        if not self._was_used:
            return change
        text = (
            "a key's next records go to another partition than its last ones: groups that are "
            "open are torn. Let the run end first, and stop its processes."
        )
        return replace(change, moves=text)

    def _loses(self, setting: str) -> str:
        """What a setting of retention or cleanup deletes; empty when nothing."""
        before, after = self._found.settings, self._wanted.settings
        if _is_compacted(after) and not _is_compacted(before) and setting == _POLICY:
            return "all but the last record of each key are deleted."
        for name, unit in ((_RETENTION, "ms"), (_SIZE_RETENTION, "bytes")):
            kept = _kept(after, name)
            if setting not in (name, _POLICY) or kept >= _kept(before, name):
                continue
            if unit == "bytes":
                return f"what is beyond {int(kept):,} bytes of a partition is deleted."
            num, hours = self._num_older(int(kept)), kept / 3_600_000
            return f"{num:,} records go at once, later what grows older than {hours:.4g} h."
        return ""

    def _num_older(self, retention_ms: int) -> int:
        """Records, or their places, older than a retention."""
        places = [Partition(self._name, p) for p in self._info.begin]
        young = self._log.offsets_at(places, now_ms() - retention_ms)
        return sum(max(0, young[p] - self._info.begin[p.partition]) for p in places)


def _is_compacted(settings: Mapping[str, str]) -> bool:
    return "compact" in settings.get(_POLICY, "").split(",")


def _kept(settings: Mapping[str, str], name: str) -> float:
    """For how long, or how much, records stay; without end where nothing is deleted."""
    if "delete" not in settings.get(_POLICY, "delete").split(","):
        return math.inf
    value = int(settings.get(name, "-1"))
    return math.inf if value < 0 else value
