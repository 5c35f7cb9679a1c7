"""What a process that takes training steps is asked for, and how it answers, turn by turn."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .batch import Batch

LEARNING_RATE = 1e-6
ENTROPY_COEF = 0.01


@dataclass(frozen=True)
class Work:
    """What a process was asked for."""

    kind: str
    model: str
    batch: Batch
    num_threads: int
    rows: int

    @property
    def sequences(self) -> list[tuple[list[int], list[int]]]:
        """(prompt, response), as they are trained."""
        return self.batch.sequences("dpo" if self.kind == "dpo" else "grpo")


class Turns:
    """Lines from stdin to results on stdout; between `begin` and `end` lies a step."""

    def begin(self) -> bool:
        """Wait for the next turn; whether there is one."""
        if not sys.stdin.readline():
            return False
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return True

    def end(self, **found: Any) -> None:
        """Tell what the step took, and what it found."""
        seconds = time.perf_counter() - self._wall
        self.say(seconds=seconds, cpu_s=time.process_time() - self._cpu, **found)

    def say(self, **found: Any) -> None:
        """One line of JSON."""
        print(json.dumps(found), flush=True)


def model_of(work: Work) -> Any:
    """The model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)


def tokenizer_of(work: Work) -> Any:
    """Its tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(work.model)


def peak_mb() -> float:
    """The most memory that this process had, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(found) * 1024 / 1e6
