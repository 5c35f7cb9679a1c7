"""One configuration on both logs: only `event_log:` differs, and the weights are the same."""

import secrets

import pytest
from small_run import SmallRun

POINTS = (
    "join.before_commit",
    "join.committed",
    "scheduler.before_commit",
    "explorer.published",
    "trainer.cut_published@3",
    "checkpoint.published@2",
)


@pytest.fixture(scope="module")
def embedded_digest(tmp_path_factory, tiny_model_dir):
    """Final weights of an uninterrupted run on the embedded log."""
    run = SmallRun(tmp_path_factory.mktemp("embedded"), tiny_model_dir)
    run.finish()
    return run.final_digest()


@pytest.fixture(params=["faust", pytest.param("native", marks=pytest.mark.slow)])
def on(request):
    """What a run on Kafka has different; its name is new, since runs share the broker."""

    def settings(url):
        name = f"small-{secrets.token_hex(4)}"
        return {"name": name, "event_log": url, "streams": {"engine": request.param}}

    return settings


def test_same_run_gives_the_same_weights_on_the_embedded_log_and_on_kafka(
    small_run, kafka_url, embedded_digest, on
):
    run = small_run(on(kafka_url))
    run.finish()
    run.check_whole()
    assert not list(run.job.glob("log.db*"))
    assert run.final_digest() == embedded_digest


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_run_on_kafka_gives_the_weights_of_a_quiet_one(
    small_run, kafka_url, embedded_digest, point, on
):
    run = small_run(on(kafka_url))
    run.finish_killed_at(point)
    run.check_whole()
    assert run.final_digest() == embedded_digest


@pytest.mark.slow
def test_run_goes_on_over_a_killed_broker(small_run, embedded_digest, broker, on):
    run = small_run(on(broker.url))
    process = run.start(hold_at="trainer.step_done@4")
    run.wait_for(lambda: run.cuts(), "first cut")
    broker.kill()
    broker.start()
    run.let_go()
    assert process.wait(480) == 0, run.output()
    run.check_whole()
    assert run.final_digest() == embedded_digest
