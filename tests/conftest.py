"""Fixtures that several rooms share: a tiny model, made as the quickstart makes its own."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from kafka_broker import MORTAL, Broker, needs_kafka_home
from small_run import SmallRun

from streamrft.schemas import codec

# processes of one test share the cores, and torch reads this when it is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a clock decides nothing: how long an example takes says how busy the machine is
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
BUILD = Path(__file__).parents[1] / "examples" / "quickstart" / "build.py"


def pytest_configure(config: pytest.Config) -> None:
    """Files go to workers in the order of collection, not those of the most tests first."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes begins first, lest one worker is left with it at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("e2e", "faults"))


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
    with Broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker.url


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker of this test alone, which it may kill."""
    needs_kafka_home()
    with Broker(tmp_path / "broker", MORTAL) as broker:
        yield broker


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """An S3 store of this module's tests, to which the environment leads."""
    from s3_store import S3Store

    made = S3Store()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made
    made.close()


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """Torch on one thread; whatever a test does to it is gone afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Add a schema to the history, as a release does."""
    here = tmp_path / "schemas"
    shutil.copytree(Path(codec.__file__).parent, here)
    monkeypatch.setattr(codec, "_HERE", here)

    def add(schema: dict[str, Any]) -> None:
        name = f"{schema['name']}.{codec.fingerprint_of(schema).hex()}.avsc"
        (here / "history" / name).write_text(json.dumps(schema))
        codec._schemas.cache_clear()

    codec._schemas.cache_clear()
    yield add
    codec._schemas.cache_clear()


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
