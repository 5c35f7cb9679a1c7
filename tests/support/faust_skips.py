"""`streamrft` with a Faust that skips records: python faust_skips.py TOLD join --config ...

TOLD is JSON. `middle`: so many records that this process would get next after its 1,000th are not
delivered, as stock Faust does on some rebalances. `end`: records whose key begins with this are not
delivered either, each once: with nothing behind them, nothing shows that they were skipped.
`positions`: whether the shell's own positions make good for that; without, Faust is trusted.
"""

from __future__ import annotations

import json
import sys

from streamrft.deploy.cli import main
from streamrft.streams.faust.consumer import FaustConsumer, _Reading
from streamrft.streams.faust.exchange import Exchange
from streamrft.streams.log import Record

BEGIN = 1_000


def skip(middle: int, end: str) -> None:
    """Lose records between Faust and the shell."""
    usual = Exchange.put
    num, skipped = 0, set()

    def put(self: Exchange, record: Record) -> None:
        nonlocal num
        num += 1
        is_last = bool(end) and (record.key or b"").startswith(end.encode())
        if record.position not in skipped and (BEGIN < num <= BEGIN + middle or is_last):
            if not skipped:
                print("begins to skip", flush=True)
            skipped.add(record.position)
            return
        usual(self, record)

    Exchange.put = put


def trust() -> None:
    """Take what Faust delivers for what the log has."""
    _Reading.has_gap = property(lambda self: False)
    FaustConsumer._look_at_ends = lambda self: None


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    skip(told["middle"], told["end"])
    if not told["positions"]:
        trust()
    sys.exit(main(sys.argv[2:]))
