"""The child of `verifier`: pairs of (truth, answer) as JSON lines in, true or false out."""

from __future__ import annotations

import json
import logging
import sys

_PARSE_TIMEOUT_S = 3
_VERIFY_TIMEOUT_S = 5


def main() -> None:
    """Answer until the parent closes the pipe, so the child ends with it however it ends."""
    logging.disable(logging.WARNING)
    for line in sys.stdin.buffer:
        truth, answer = json.loads(line)
        sys.stdout.write(json.dumps(_is_equal(truth, answer)) + "\n")
        sys.stdout.flush()


def _is_equal(truth: str, answer: str) -> bool:
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=_PARSE_TIMEOUT_S)
    found = parse(answer, parsing_timeout=_PARSE_TIMEOUT_S)
    return bool(gold and found and verify(gold, found, timeout_seconds=_VERIFY_TIMEOUT_S))


if __name__ == "__main__":
    main()
