"""One configuration on both logs: only `event_log:` differs, and the weights are the same."""

import secrets


def test_same_run_gives_the_same_weights_on_the_embedded_log_and_on_kafka(small_run, kafka_url):
    embedded = small_run()
    embedded.finish()
    distributed = small_run({"name": f"small-{secrets.token_hex(4)}", "event_log": kafka_url})
    distributed.finish()
    distributed.check_whole()
    assert not list(distributed.job.glob("log.db*"))
    assert distributed.final_digest() == embedded.final_digest()
    assert [c.step for c in distributed.cuts()] == [c.step for c in embedded.cuts()]
