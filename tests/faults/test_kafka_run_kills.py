"""A whole run on Kafka, 3 join workers and 2 explorers, while any of its processes is killed."""

import random
import secrets
import time

import pytest
from small_run import SmallRun

STEPS, NUM_KILLS = 10, 8
ROLES = ("join", "join", "explore", "explore", "train", "schedule", "supervisor")
SHAPE = {
    "streams": {"workers": 3},
    "explorer": {"rollout_model": {"engine_num": 2}},
}


def on(url):
    """What differs from a run on the embedded log; runs share the broker."""
    options = {"session_timeout_ms": 6_000}
    log = {"event_log": {"url": url, "options": options}}
    return {"name": f"small-{secrets.token_hex(4)}", **log, **SHAPE}


@pytest.fixture(scope="module")
def embedded_digest(tmp_path_factory, tiny_model_dir):
    """Final weights of an uninterrupted run on the embedded log."""
    run = SmallRun(tmp_path_factory.mktemp("embedded"), tiny_model_dir, steps=STEPS)
    run.finish()
    return run.final_digest()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_run_reaches_its_goal_whatever_is_killed(small_run, kafka_url, embedded_digest, seed):
    rng = random.Random(seed)
    run = small_run(on(kafka_url), steps=STEPS, num_rows=200)
    process = run.start()
    run.wait_for(lambda: run.children(" explore "), "explorer")
    killed = []
    while len(killed) < NUM_KILLS and process.poll() is None:
        time.sleep(rng.uniform(0.5, 3.0))
        role = rng.choice(ROLES)
        if role == "supervisor":
            process.kill()
            process.wait(10)
            run.wait_for(lambda: not run.children(), "end of the children", 10)
            process = run.start()
        elif living := run.children(f" {role} "):
            rng.choice(living).kill()
        else:
            continue
        killed.append(role)
    assert len(killed) == NUM_KILLS, f"over after {killed}\n{run.output()}"
    assert process.wait(180) == 0, run.output()
    run.check_whole()
    assert run.final_digest() == embedded_digest
