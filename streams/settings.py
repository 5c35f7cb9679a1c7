"""What the join and its pipeline are told; deploy/config fills it from the YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class OperatorSettings:
    """A filter or priority function: a registered name or a dotted path, and its arguments."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamSettings:
    """Join, filters and priority of one run. `engine`: see `shell`.

    `skip_lost`: read on behind what retention deleted unjoined, instead of ending with an error.
    """

    engine: Literal["native", "faust"] = "native"
    on_deadline: Literal["partial", "default", "drop"] = "partial"
    default_reward: float = 0.0
    min_group_size: int = 1
    grace_ms: int = 1_000
    late: Literal["ignore", "amend"] = "ignore"
    late_horizon_ms: int = 3_600_000
    time: Literal["wall", "event"] = "wall"
    max_skew_ms: int = 60_000
    filters: tuple[OperatorSettings, ...] = ()
    priority: OperatorSettings | None = None
    batch_records: int = 1_000
    cache_bytes: int = 256 * 2**20
    max_event_bytes: int = 8 * 2**20
    skip_lost: bool = False
