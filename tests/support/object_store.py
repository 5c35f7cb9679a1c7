"""A store of objects over HTTP for readers, that can go away and come back on its port."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
from ports import free_port

from streamrft.schemas.events import Trajectory
from streamrft.streams import blobs


class ObjectStore:
    """Serves a folder. started <-> stopped: away, connections are refused."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._port = folder, free_port()
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def uri(self) -> str:
        """Of its root."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Answer, on the same port as before."""
        handler = partial(_Quiet, directory=str(self.folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Be away; no error when it is."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def put_claim(self, trajectory: Trajectory) -> Trajectory:
        """What is left of a trajectory whose sequences lie here."""
        left = blobs.put_claim(str(self.folder), trajectory)
        assert left.claim is not None
        claim = msgspec.structs.replace(left.claim, uri=f"{self.uri}/claims/{left.claim.sha256}")
        return msgspec.structs.replace(left, claim=claim)

    def path_of(self, trajectory: Trajectory) -> Path:
        """Where the object of a claim lies on this machine."""
        assert trajectory.claim is not None
        return self.folder / "claims" / trajectory.claim.sha256


class _Quiet(SimpleHTTPRequestHandler):
    """Says nothing of requests."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
