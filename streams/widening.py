"""What a starting process may change of a topic that is there: only what keeps more.

Keeping less deletes records, and is done by `streamrft topics apply` when it is told to. Partitions
and cleanup stay.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..schemas.errors import ConfigError, LogError
from .log import TopicSpec

logger = logging.getLogger("streamrft")


class TopicDiffers(LogError):
    """A topic exists with what no topic can change; the configuration has to say the same."""

    exit_code = ConfigError.exit_code


def demand_same(found: TopicSpec, wanted: TopicSpec) -> None:
    """Raise TopicDiffers where partitions or cleanup are others than asked for."""
    if (found.num_partitions, found.cleanup) != (wanted.num_partitions, wanted.cleanup):
        raise TopicDiffers(
            f"{wanted.name}: exists with {found.num_partitions} partitions, cleanup "
            f"{found.cleanup!r}; asked for {wanted.num_partitions}, {wanted.cleanup!r}. Both are "
            "fixed when a topic is created: set event_log.partitions to what is there, or give "
            "the run another name."
        )


def widened(found: TopicSpec, wanted: TopicSpec) -> TopicSpec:
    """The wanted topic, but with no shorter retention and no smaller limit than it has.

    Says so, once a call, where the configuration asks for less.
    """
    ends = (found.retention_ms, wanted.retention_ms)
    kept = None if None in ends else max(ms for ms in ends if ms is not None)
    wide = replace(
        wanted,
        retention_ms=kept,
        max_event_bytes=max(found.max_event_bytes, wanted.max_event_bytes),
    )
    if wide != wanted:
        logger.warning(
            "%s: keeps more than the configuration asks for (retention_ms %s, max_event_bytes %d; "
            "asked for %s, %d), and is left so. `streamrft topics apply --allow-data-loss` "
            "changes it.",
            wanted.name,
            found.retention_ms,
            found.max_event_bytes,
            wanted.retention_ms,
            wanted.max_event_bytes,
        )
    return wide
