"""Fixtures that several rooms share: a tiny model, made as the quickstart makes its own."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kafka_broker import Broker
from small_run import SmallRun

# processes of one test share the cores, and torch reads this when it is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
BUILD = Path(__file__).parents[1] / "examples" / "quickstart" / "build.py"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 2 layers, hidden 64, vocabulary 263 (7 special tokens and 256 bytes)."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    example = runpy.run_path(str(BUILD))
    example["save_model"](folder, seed=0, hidden=64, heads=2)
    return folder


@pytest.fixture(scope="session")
def kafka_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker that all tests of this session share; each uses its own names."""
    servers = os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    if servers:
        yield f"kafka://{servers}"
        return
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip("Kafka: neither KAFKA_HOME nor KAFKA_BOOTSTRAP_SERVERS is set")
    broker = Broker(tmp_path_factory.mktemp("kafka")).start()
    yield broker.url
    broker.stop()


@pytest.fixture
def small_run(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Callable[..., SmallRun]]:
    """Make whole runs in folders of this test; nothing of them outlives it."""
    made: list[SmallRun] = []

    def make(overrides: Mapping[str, Any] | None = None, **options: Any) -> SmallRun:
        folder = tmp_path / f"run{len(made)}"
        made.append(SmallRun(folder, tiny_model_dir, overrides or {}, **options))
        return made[-1]

    yield make
    for run in made:
        run.kill()
