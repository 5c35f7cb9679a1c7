"""A whole run on Kafka, 3 join workers and 2 explorers, while any of its processes is killed."""

import random
import secrets
import time

import pytest
from small_run import SmallRun

STEPS, NUM_KILLS = 10, 8
QUICK_STEPS = 6
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
def quiet_digest(tmp_path_factory, tiny_model_dir):
    """Final weights of an uninterrupted run on the embedded log."""
    run = SmallRun(tmp_path_factory.mktemp("embedded"), tiny_model_dir, steps=STEPS)
    run.finish()
    return run.final_digest()


def test_run_reaches_its_goal_whatever_is_killed(small_run, kafka_url):
    run = small_run(on(kafka_url), steps=QUICK_STEPS, num_rows=200)
    rng = random.Random(0)
    kill_at_random(run, rng, rng.sample(sorted({*ROLES}), len({*ROLES})))
    run.check_whole()
    assert len(run.cuts()) == QUICK_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_killed_run_gives_the_weights_of_a_quiet_one(small_run, kafka_url, quiet_digest, seed):
    run = small_run(on(kafka_url), steps=STEPS, num_rows=200)
    rng = random.Random(seed)
    kill_at_random(run, rng, rng.choices(ROLES, k=NUM_KILLS))
    run.check_whole()
    assert run.final_digest() == quiet_digest


def kill_at_random(run, rng, roles):
    """Kill a process of each role in turn, at any time, and wait until it reached its goal."""
    hold_at = f"trainer.step_done@{run.steps - 1}"
    process = run.start(hold_at=hold_at)
    run.wait_for(lambda: run.children(" explore "), "explorer")
    for role in roles:
        time.sleep(rng.uniform(0.5, 3.0))
        if role == "supervisor":
            run.kill_supervisor(process)
            process = run.start(hold_at=hold_at)
        else:
            rng.choice(run.living(role, process)).kill()
    run.let_go()
    assert process.wait(480) == 0, run.output()
