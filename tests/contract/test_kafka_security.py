"""Kafka with rights: passwords, access lists and TLS of a broker that asks for them."""

import subprocess

import pytest
from join_run import JoinRun
from join_scripts import scored
from kafka_broker import Broker, needs_kafka_home
from kafka_rights import IN_THE_CLEAR, Right, environment_of, grant, user_settings
from log_process import read
from ports import free_port

from streamrft.schemas.errors import AccessDenied, ConfigError
from streamrft.schemas.events import now_ms
from streamrft.streams.log import Limits, Partition, TopicSpec, open_log


def certificates(folder):
    """A certificate authority and a server's key and certificate for 127.0.0.1, as PEM files."""
    folder.mkdir()

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        words = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj")
        openssl("req", "-x509", *new_key, *words, f"/CN={name} of this test")
    openssl("req", *new_key, "-keyout", "key.pem", "-out", "csr.pem", "-subj", "/CN=broker")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl("x509", "-req", "-in", "csr.pem", *authority, "-extfile", "names", "-out", "cert.pem")
    parts = [(folder / name).read_text() for name in ("key.pem", "cert.pem", "ca.pem")]
    (folder / "server.pem").write_text("".join(parts))
    return folder


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A broker that knows four users, with a listener in the clear and one with TLS."""
    needs_kafka_home()
    folder = tmp_path_factory.mktemp("secured")
    keys = certificates(folder / "keys")
    tls = free_port()
    settings = {
        **user_settings("alice", ("bob", "carol")),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keys / "server.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(keys / "ca.pem"),
    }
    with Broker(folder / "broker", settings, more_listeners={"SASL_SSL": tls}) as broker:
        yield broker, f"kafka://127.0.0.1:{tls}", keys


@pytest.fixture
def open_as(secured, monkeypatch):
    """Open the log as a user; closed when the test ends."""
    broker, tls_url, _ = secured
    opened = []

    def open_(user, secret=None, *, options=IN_THE_CLEAR, url=broker.url):
        for variable, value in environment_of(user, secret).items():
            monkeypatch.setenv(variable, value)
        found = tls_url if url == "tls" else url
        opened.append(open_log(found, Limits(options=options)))
        return opened[-1]

    yield open_
    for log in opened:
        log.close()


def grant_all(broker, user, namespace, *kinds):
    """Everything under a namespace: what a process of a run needs, with all three kinds."""
    grant(broker, "alice", user, [Right("ALL", kind, namespace, is_prefix=True) for kind in kinds])


def write_and_read(log, topic):
    producer = log.producer()
    producer.send(topic, b"v", partition=0)
    producer.flush()
    consumer = log.consumer()
    consumer.assign({Partition(topic, 0): 0})
    return [r.value for r in read(consumer, 1)]


def test_user_and_password_come_from_the_environment(open_as):
    log = open_as("alice")
    log.ensure_topics([TopicSpec("alices.topic", 1)])
    assert write_and_read(log, "alices.topic") == [b"v"]


def test_wrong_password_is_refused_at_once_naming_what_to_check(open_as):
    with pytest.raises(AccessDenied, match="refuses the user.*STREAMRFT_KAFKA_PASSWORD"):
        open_as("alice", "guess")


def test_user_without_rights_is_told_which_one_is_missing(open_as):
    open_as("alice").ensure_topics([TopicSpec("hers.topic", 1)])
    log = open_as("bob")
    for refused in (
        lambda: log.describe(["hers.topic"]),
        lambda: log.end_offsets([Partition("hers.topic", 0)]),
        lambda: log.producer().send("hers.topic", b"v"),
        lambda: log.consumer(group="hers.g").subscribe(["hers.topic"]),
        lambda: log.ensure_topics([TopicSpec("hers.other", 1)]),
    ):
        with pytest.raises(
            AccessDenied, match=r"hers\..*a right on this (topic|cluster) is missing"
        ):
            refused()


def test_rights_on_the_namespace_are_all_that_a_run_needs(open_as, secured):
    grant_all(secured[0], "carol", "ours.run", "TOPIC", "GROUP", "TRANSACTIONAL_ID")
    log = open_as("carol")
    log.ensure_topics([TopicSpec("ours.run.a", 1), TopicSpec("ours.run.b", 1)])
    assert write_and_read(log, "ours.run.a") == [b"v"]
    lease = log.acquire("ours.run.trainer", owner="me", ttl_ms=10_000, timeout_ms=5_000)
    producer = log.producer(fence=lease)
    producer.send("ours.run.b", b"fenced")
    producer.flush()
    log.release(lease)
    consumer = log.consumer(group="ours.run.join", member="join-0")
    consumer.subscribe(["ours.run.a"])
    assert [r.value for r in read(consumer, 1)] == [b"v"]
    writer = log.producer()
    with writer.transaction():
        writer.send("ours.run.b", b"joined")
        writer.send_positions(consumer, consumer.positions())
    assert consumer.committed(consumer.assignment()) == consumer.positions()
    with pytest.raises(AccessDenied, match=r"transactional id|group"):
        log.consumer(group="theirs").committed([Partition("ours.run.a", 0)])


def test_tls_verifies_the_broker_by_the_given_authority(open_as, secured):
    _, _, keys = secured
    # SASL over TLS is what a user in the environment means, unless options say otherwise
    log = open_as("alice", options={"ssl.ca.location": str(keys / "ca.pem")}, url="tls")
    log.ensure_topics([TopicSpec("alices.tls", 1)])
    assert write_and_read(log, "alices.tls") == [b"v"]


def test_broker_that_the_authority_did_not_sign_is_refused_with_the_reason(open_as, secured):
    _, _, keys = secured
    with pytest.raises(AccessDenied, match=r"TLS.*certificate.*ssl\.ca\.location"):
        open_as("alice", options={"ssl.ca.location": str(keys / "other.pem")}, url="tls")


def test_faust_comes_in_over_tls_with_the_same_options_and_environment(open_as, secured):
    _, _, keys = secured
    log = open_as("alice", options={"ssl.ca.location": str(keys / "ca.pem")}, url="tls")
    run = JoinRun(log, namespace="alices.run", engine="faust")
    run.send(scored("g1:0:a", 1.0, at=now_ms()))
    run.drive(lambda: run.num("experiences") == 1)
    assert [e.trajectory_id for e in run.experiences()] == ["g1:0:a"]


def test_faust_without_a_right_on_the_group_says_which_is_missing(open_as, secured):
    grant_all(secured[0], "bob", "bobs.run", "TOPIC", "TRANSACTIONAL_ID")
    run = JoinRun(open_as("bob"), namespace="bobs.run", engine="faust")
    with pytest.raises(AccessDenied, match=r"bobs\.run\.join.*a right on this group is missing"):
        run.drive(lambda: False, timeout_s=60)


@pytest.mark.parametrize("name", ["sasl.password", "sasl.username", "ssl.key.password"])
def test_secret_among_the_options_is_refused_naming_its_variable(name):
    with pytest.raises(ConfigError, match=f"options.{name}: a secret.*STREAMRFT_KAFKA_"):
        open_log("kafka://localhost:1", Limits(options={name: "x"}))
