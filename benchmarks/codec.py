"""Encodings of one trajectory a second: packed arrays in Avro (ours), Avro arrays, and JSON.

Avro arrays: the same record, its tokens, masks and log-probs as `array` of int and float.
JSON: the same record as an object with lists, by the standard library and by msgspec.

    python benchmarks/codec.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fastavro
import msgspec
import numpy as np

from streamrft.schemas import arrays, codec, plain
from streamrft.schemas import events as ev

ELEMENTS = {"tokens": "int", "loss_mask": "int", "logprobs": "float", "policy_versions": "int"}


@dataclass(frozen=True)
class Contender:
    """One encoding: event -> bytes and back."""

    name: str
    encode: Callable[[], bytes]
    decode: Callable[[bytes], Any]


def trajectory(num_tokens: int) -> ev.Trajectory:
    """One rollout, three quarters of it written by the policy."""
    rng = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 4
    sequence = ev.Sequence(
        tokens=arrays.pack_ints(rng.integers(0, 50_000, num_tokens)),
        loss_mask=arrays.pack_mask(mask),
        logprobs=arrays.pack_floats(np.where(mask, -rng.random(num_tokens), 0.0)),
        policy_versions=arrays.pack_runs([3] * int(mask.sum())),
    )
    return ev.Trajectory(
        trajectory_id="bench.1:0:a1",
        group_id="bench.1",
        slot=0,
        attempt="a1",
        number=1,
        taskset="bench",
        row=1,
        producer="explorer-0",
        branch="main",
        min_policy_version=3,
        max_policy_version=3,
        group_size=8,
        sequences=[sequence],
        finish_reason="stop",
        scores=[ev.Score(source="accuracy", value=1.0)],
        reward_sources={"accuracy": 1.0},
        produced_at=1_700_000_000_000,
    )


def contenders(event: ev.Trajectory) -> list[Contender]:
    """Ours first; each decodes into what a program would work with."""
    as_lists = plain.to_plain(event)
    return [
        Contender(
            "ours: packed bytes, checked",
            lambda: codec.encode(event),
            lambda value: codec.decode(value, ev.Trajectory),
        ),
        avro_arrays(as_lists),
        Contender("json, standard library", lambda: json.dumps(as_lists).encode(), json.loads),
        Contender(
            "json, msgspec", lambda: msgspec.json.encode(as_lists), lambda v: msgspec.json.decode(v)
        ),
    ]


def avro_arrays(as_lists: dict[str, Any]) -> Contender:
    """The same schema with arrays of numbers."""
    schema = codec.schema_of(ev.Trajectory)
    sequences = next(f for f in schema["fields"] if f["name"] == "sequences")
    for field in sequences["type"]["items"]["fields"]:
        if field["name"] in ELEMENTS:
            field["type"] = {"type": "array", "items": ELEMENTS[field["name"]]}
    parsed = fastavro.parse_schema(schema)
    (sequence,) = as_lists["sequences"]
    runs = [number for pair in sequence["policy_versions"] for number in pair]
    record = as_lists | {"sequences": [sequence | {"policy_versions": runs}]}

    def encode() -> bytes:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, record)
        return out.getvalue()

    return Contender(
        "avro arrays", encode, lambda value: fastavro.schemaless_reader(io.BytesIO(value), parsed)
    )


def measure(num_tokens: int, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Best rate of each over interleaved rounds, and the size of its value."""
    found: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for c in contenders(trajectory(num_tokens)):
            value = c.encode()
            best = found.setdefault(
                c.name, {"encode_per_s": 0, "decode_per_s": 0, "size_bytes": len(value)}
            )
            best["encode_per_s"] = max(best["encode_per_s"], rate(c.encode, seconds))
            best["decode_per_s"] = max(
                best["decode_per_s"], rate(lambda c=c, v=value: c.decode(v), seconds)
            )
    return found


def rate(call: Callable[[], Any], seconds: float) -> float:
    """Calls a second over about `seconds`."""
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        for _ in range(20):
            call()
        count += 20
    return count / spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds, seconds = (2, 0.1) if arguments.quick else (5, 0.4)
    results = {n: measure(n, rounds, seconds) for n in (200, 1024)}
    if arguments.json:
        print(json.dumps(as_numbers(results)))
        return
    for num_tokens, found in results.items():
        print(f"{num_tokens:>6} tokens{'':24}{'encode/s':>10}{'decode/s':>10}{'bytes':>9}")
        for name, row in found.items():
            numbers = (row["encode_per_s"], row["decode_per_s"], row["size_bytes"])
            print(f"  {name:<34}{numbers[0]:>10,.0f}{numbers[1]:>10,.0f}{numbers[2]:>9,.0f}")


def as_numbers(results: dict[int, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Flat names; `*_ratio` is ours over the other."""
    flat: dict[str, float] = {}
    for num_tokens, found in results.items():
        (ours, *others) = found.items()
        for name, row in found.items():
            flat |= {f"{num_tokens} {name} {k}": round(v) for k, v in row.items()}
        for name, row in others:
            for kind in ("encode_per_s", "decode_per_s"):
                ratio = ours[1][kind] / row[kind]
                flat[f"{num_tokens} {kind}_ratio to {name}"] = round(ratio, 2)
    return flat


if __name__ == "__main__":
    main()
