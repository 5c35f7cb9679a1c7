"""An S3 store (moto's server in a thread), that can go away and come back with what it holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.core.base_backend import BackendDict
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.s3.models import s3_backends
from ports import free_port
from s3fs import S3FileSystem

BUCKET = "checkpoints"
_ACCOUNT = "123456789012"


class S3Store:
    """started <-> stopped: away, connections are refused."""

    def __init__(self) -> None:
        self._port = free_port()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server: ThreadedMotoServer | None = None
        self._backend.create_bucket(BUCKET, "us-east-1")
        self.start()

    @property
    def uri(self) -> str:
        """Of its bucket."""
        return f"s3://{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            # s3fs asks five times itself: a test does not wait for five times five
            "AWS_MAX_ATTEMPTS": "1",
        }

    def start(self) -> None:
        """Answer, on the same port as before."""
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Be away; no error when it is."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def close(self) -> None:
        """Go, and forget everything."""
        self.stop()
        self._backend.reset()
        # its address would be asked by the next test, too
        S3FileSystem.clear_instance_cache()

    @property
    def names(self) -> list[str]:
        """Names of the objects that are there whole."""
        return sorted(self._backend.buckets[BUCKET].keys.keys())

    def num_parts(self, name: str) -> int:
        """Parts that an object went up in; its tag tells. 0 when it went up at once."""
        tag = self._backend.buckets[BUCKET].keys[name].etag.strip('"')
        return int(tag.partition("-")[2] or 0)

    @property
    def uploads(self) -> dict[str, int]:
        """Objects that go up in parts and are not whole, and how many of their parts are there."""
        there = list(self._backend.buckets[BUCKET].multiparts.values())
        return {upload.key_name: len(upload.parts) for upload in there}

    @contextmanager
    def silent_after(self, begin: str) -> Iterator[threading.Event]:
        """Inside, whoever puts an object of such a name hears nothing of it; set by the first."""
        backend: Any = self._backend
        put, has_come, may_answer = backend.put_object, threading.Event(), threading.Event()

        def put_object(bucket: str, name: str, *args: Any, **kwargs: Any) -> Any:
            made = put(bucket, name, *args, **kwargs)
            if name.startswith(begin):
                has_come.set()
                may_answer.wait()
            return made

        backend.put_object = put_object
        try:
            yield has_come
        finally:
            del backend.put_object
            may_answer.set()

    def begin_upload(self, name: str) -> None:
        """Somebody begins an object in parts, and is not done."""
        where: Any = self._backend
        where.create_multipart_upload(BUCKET, name, {}, "STANDARD", {}, None, "", "")

    @property
    def _backend(self):
        backends: BackendDict = s3_backends
        return backends[_ACCOUNT]["aws"]
