"""Find the final answer in a text and compare plain numbers exactly, without a parser."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\$?\.\d+"
_PLAIN = re.compile(rf"({_NUMBER})(?:/(\d+(?:\.\d+)?))?")
_LAST_NUMBER = re.compile(rf"(?<![\w.])((?:{_NUMBER})(?:/\d+)?)(?!\w)")
_WITH_UNIT = re.compile(rf"({_NUMBER})\s+[A-Za-z][A-Za-z ]*\.?")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARKED = re.compile(r"####\s*([^\n]+)")
_SAID = re.compile(r"\banswer\b\s*(?:is|:|=)+\s*([^\n]+)", re.IGNORECASE)


def final_answer(text: str) -> str | None:
    """The answer of a text: boxed, tagged, after ####, said in words, or its last number."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_ANSWER_TAG, _MARKED, _SAID):
        if found := pattern.findall(text):
            return found[-1].strip()
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds, braces balanced; None without one."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None


def plain_number(text: str) -> Fraction | None:
    """The exact value of `1,000`, `$72`, `72.0`, `50%`, `3/4`, `72 clips`; else None."""
    bare = text.strip().replace("\\$", "$").replace("\\%", "%").replace("\u2212", "-")
    bare = bare.strip("$ ").rstrip(".").removesuffix("%").strip()
    if unit := _WITH_UNIT.fullmatch(bare):
        bare = unit[1]
    found = _PLAIN.fullmatch(bare)
    if found is None:
        return None
    top = Fraction(found[1].replace(",", "").replace("$", ""))
    bottom = Fraction(found[2]) if found[2] else Fraction(1)
    return top / bottom if bottom else None
