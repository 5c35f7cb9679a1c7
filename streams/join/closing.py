"""Who of a group becomes an experience when it closes, and who is dropped and why."""

from __future__ import annotations

from collections.abc import Iterable

from ...schemas.events import DropReason
from ..settings import StreamSettings
from .outcomes import Closed, Dropped, JoinedMember
from .state import FAILED, INVALID, LIVE, Group, Member, Standing

DEFAULT_REVISION = -1


def close_group(group: Group, settings: StreamSettings, *, time_ms: int) -> Closed:
    """Decide every member of an open group that is complete or whose deadline passed at `time_ms`.

    A group that waits only for refused records is complete without them. Otherwise what is
    missing makes it a deadline, and `settings.on_deadline` decides.
    """
    living = {slot: m for slot, m in sorted(group.members.items()) if m.state == LIVE}
    scored = [slot for slot, m in living.items() if not m.num_missing]
    is_short = len(scored) < len(living) or len(group.members) < group.size
    kept, why = scored, ""
    if is_short and settings.on_deadline == "default":
        for member in living.values():
            _fill_in(member, settings.default_reward)
        kept = list(living)
    elif is_short and settings.on_deadline == "drop":
        kept, why = [], "streams.on_deadline is drop"
    elif is_short and len(scored) < settings.min_group_size:
        kept, why = [], f"streams.min_group_size is {settings.min_group_size}"
    drops = [
        _expired(group, slot, member, len(scored), why, time_ms)
        for slot, member in living.items()
        if slot not in kept
    ]
    if group.withheld >= 0:
        drops.append(ended(group, group.withheld))
    members = [joined(group, slot) for slot in kept]
    return Closed(group.group_id, group.number, group.size, 0, members, drops)


def amended(group: Group, rewards: Iterable[tuple[int, str, Standing]]) -> Closed | None:
    """Apply late rewards (slot, source, reward) to a closed group that still has its members.

    Returns:
        The group again with the next revision, or None when nothing of it changed.
    """
    changed = [r for r in rewards if _improve(group.members.get(r[0]), r[1], r[2])]
    scored = [s for s, m in sorted(group.members.items()) if m.state == LIVE and not m.num_missing]
    if not changed or not scored:
        return None
    group.revision += 1
    members = [joined(group, slot) for slot in scored]
    return Closed(group.group_id, group.number, group.size, group.revision, members, [])


def joined(group: Group, slot: int) -> JoinedMember:
    """A scored member with its total: the sum of weight x value in the order of its sources."""
    member = group.members[slot]
    parts: dict[str, float] = {}
    spans: list[tuple[int, int, int, float]] = []
    total = 0.0
    for (source, weight), standing in zip(member.sources.items(), member.standings(), strict=True):
        assert standing is not None, "only scored members are joined"
        parts[source] = standing.value
        total += weight * standing.value
        if standing.spans:
            spans += [(i, start, end, weight * value) for i, start, end, value in standing.spans]
    trajectory_id = f"{group.group_id}:{slot}:{group.holders[slot]}"
    return JoinedMember(slot, trajectory_id, member.offset, total, parts, spans)


def ended(group: Group, slot: int) -> Dropped:
    """The drop of a failed or refused member."""
    member = group.members[slot]
    assert member.state in (FAILED, INVALID), "a living member ends at the close"
    reason: DropReason = "failed" if member.state == FAILED else "invalid"
    return dropped(group, slot, group.holders[slot], reason, member.detail)


def dropped(group: Group, slot: int, attempt: str, reason: DropReason, detail: str) -> Dropped:
    """The drop of any attempt of a group."""
    trajectory_id = f"{group.group_id}:{slot}:{attempt}"
    return Dropped(trajectory_id, group.group_id, slot, group.number, reason, detail)


def fits(member: Member, standing: Standing) -> bool:
    """Whether the spans lie inside the tokens; unknown lengths (a claim) accept any."""
    if not member.lengths:
        return True
    return all(
        0 <= i < len(member.lengths) and 0 <= start < end <= member.lengths[i]
        for i, start, end, _ in standing.spans
    )


def _fill_in(member: Member, value: float) -> None:
    for source in member.missing:
        member.stand(source, Standing(value, member.time_ms, DEFAULT_REVISION))


def _improve(member: Member | None, source: str, standing: Standing) -> bool:
    if member is None or member.state != LIVE or source not in member.sources:
        return False
    held = member.standing(source)
    if not fits(member, standing) or (held and standing.revision <= held.revision):
        return False
    member.stand(source, standing)
    return True


def _expired(
    group: Group, slot: int, member: Member, num_scored: int, why: str, time_ms: int
) -> Dropped:
    missing = member.missing
    wanted = f"no reward from {', '.join(missing)}" if missing else why
    detail = f"{wanted}; {num_scored} of {group.size} slots scored at stream time {time_ms}"
    return dropped(group, slot, group.holders[slot], "expired", detail)
