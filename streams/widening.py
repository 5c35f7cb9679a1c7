"""What a starting process may change of a topic that is there: only what keeps more.

Keeping less deletes records, and is done by `streamrft topics apply` when it is told to.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from .log import TopicSpec

logger = logging.getLogger("streamrft")


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
