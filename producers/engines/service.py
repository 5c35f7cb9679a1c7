"""One engine for many rollouts at a time: gathers their requests, changes weights between calls."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...schemas.errors import MissingExtra, Timeout
from ...schemas.events import Checkpoint
from ...streams.weights.object_storage import (
    WeightsUnavailable,
    base_of,
    fetch_model_folder,
    load_state_dict,
)
from ..settings import ExplorerSettings
from ..threads import Worker
from ..workflows.chat import Chat
from .engine import (
    Engine,
    EngineError,
    Generation,
    Interrupted,
    PromptTooLong,
    Request,
    WeightsMismatch,
    open_engine,
)

logger = logging.getLogger("streamrft")

_GATHER_S = 0.01
_RETRY_S = 0.5
_STOP_TIMEOUT_S = 3.0


@dataclass
class _Call:
    requests: Sequence[Request]
    min_version: int
    result: asyncio.Future[list[Generation]] = field(compare=False)


class EngineService:
    """absent -> loading -> serving. `generate` belongs to the event loop, the engine to one thread.

    A call goes out when every active group waits for the engine, or 10 ms after it was asked for.
    """

    def __init__(self, settings: ExplorerSettings) -> None:
        self._settings = settings
        self._worker = Worker("engine")
        self._worker.post(_preload)
        self._calls: list[_Call] = []
        self._is_running = self._is_due = False
        self._stopping = threading.Event()
        self._engine: Engine | None = None
        self._chat: Chat | None = None
        self._loaded: Checkpoint | None = None
        self.wanted: Checkpoint | None = None
        """What to serve; set by the explorer from its own thread before it starts a group."""
        self.loading: Checkpoint | None = None
        """What is being read from storage, so that nobody deletes it meanwhile."""
        self._failure: EngineError | None = None
        self.num_active = 0
        """Groups being rolled out; set by the event loop."""
        self.blocker = ""
        self.num_tokens = 0

    @property
    def policy_version(self) -> int:
        """Version served now; -1 before the first."""
        return self._loaded.step if self._loaded else -1

    @property
    def branch(self) -> str:
        """Branch of the weights served now."""
        return self._loaded.branch if self._loaded else "main"

    def check(self) -> None:
        """Raise what broke the engine for good, whoever was told of it before and went on."""
        if self._failure is not None:
            raise self._failure

    async def chat(self) -> Chat:
        """The tokenizer and template of the served model, loaded with the first weights."""
        self.check()
        if self._chat is None:
            await self._worker.call(self._ensure_weights, 0)
        assert self._chat is not None
        return self._chat

    async def generate(self, requests: Sequence[Request], min_version: int = 0) -> list[Generation]:
        """Results in order, under weights of at least `min_version`.

        Raises:
            PromptTooLong: of this call's requests alone.
            Timeout: such weights did not come in time. Interrupted: the process ends.
        """
        await self.chat()
        assert self._engine is not None
        for i, request in enumerate(requests):
            if not 1 <= len(request.tokens) <= self._engine.max_prompt_tokens:
                raise PromptTooLong(
                    f"requests[{i}]: a prompt of {len(request.tokens)} tokens; the model takes 1 "
                    f"to {self._engine.max_prompt_tokens}"
                )
        loop = asyncio.get_running_loop()
        call = _Call(requests, min_version, loop.create_future())
        self._calls.append(call)
        if len(self._calls) == 1:
            loop.call_later(_GATHER_S, self._fall_due)
        self.look()
        return await call.result

    def look(self) -> None:
        """Send what is gathered when nobody else is to come, in the event loop."""
        if self._is_running or not self._calls:
            return
        if self._is_due or len(self._calls) >= self.num_active:
            calls = [c for c in self._calls if not c.result.cancelled()]
            self._calls, self._is_due = [], False
            if calls:
                self._is_running = True
                task = asyncio.get_running_loop().create_task(self._send(calls))
                task.add_done_callback(lambda _: self._next())

    def stop(self) -> None:
        """From any thread: interrupt what runs and take no more."""
        self._stopping.set()
        if self._engine is not None:
            self._engine.interrupt()
        self._worker.stop(_STOP_TIMEOUT_S)

    def _fall_due(self) -> None:
        self._is_due = bool(self._calls)
        self.look()

    def _next(self) -> None:
        self._is_running = False
        if self._calls:
            asyncio.get_running_loop().call_later(_GATHER_S, self._fall_due)
        self.look()

    async def _send(self, calls: list[_Call]) -> None:
        try:
            made = await self._worker.call(self._generate, calls)
        except BaseException as error:
            for call in calls:
                if not call.result.done():
                    call.result.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        start = 0
        for call in calls:
            end = start + len(call.requests)
            if not call.result.done():
                call.result.set_result(made[start:end])
            start = end

    def _generate(self, calls: list[_Call]) -> list[Generation]:
        engine = self._ensure_weights(max(c.min_version for c in calls))
        try:
            made = engine.generate([r for call in calls for r in call.requests])
        except EngineError:
            raise
        except Exception as error:  # out of memory, a broken kernel: no fault of one rollout
            raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error
        self.num_tokens += sum(len(g.tokens) for g in made)
        return made

    def _ensure_weights(self, min_version: int) -> Engine:
        """Serve the newest wanted weights; go on with older ones that are new enough."""
        self.check()
        deadline = time.monotonic() + self._settings.weights_timeout_ms / 1000
        while True:
            wanted = self.wanted
            assert wanted is not None, "an explorer starts no group before the first checkpoint"
            try:
                if wanted != self._loaded:
                    self.loading = wanted
                    self._load(wanted)
                    self.loading = None
                self.blocker = ""
                break
            except WeightsUnavailable as error:
                logger.warning("engine: %s", error)
                if self._may_serve(wanted, min_version):
                    break
                self.blocker = str(error)
                if time.monotonic() > deadline:
                    raise Timeout(
                        f"weights of policy_version {wanted.step}",
                        self._settings.weights_timeout_ms,
                        str(error),
                    ) from error
                if self._stopping.wait(_RETRY_S):
                    raise Interrupted("stopped while waiting for weights") from error
        assert self._engine is not None
        return self._engine

    def _may_serve(self, wanted: Checkpoint, min_version: int) -> bool:
        loaded = self._loaded
        return loaded is not None and loaded.branch == wanted.branch and loaded.step >= min_version

    def _load(self, wanted: Checkpoint) -> None:
        try:
            if self._engine is None:
                self._open(wanted)
            else:
                self._replace(self._engine, wanted)
        except WeightsMismatch as error:
            # waiting would not help: all that is announced after it is of that model too
            self._failure = WeightsMismatch(
                f"policy_version {wanted.step} on branch {wanted.branch} at {wanted.uri}: {error} "
                "Start the explorers again, or train another model under another name."
            )
            raise self._failure from error
        self._loaded = wanted
        if self._stopping.is_set():
            raise Interrupted("stopped while loading weights")

    def _replace(self, engine: Engine, wanted: Checkpoint) -> None:
        loaded = self._loaded
        if loaded is None or wanted.digest != loaded.digest:
            _check_base(loaded, wanted)
            engine.load_weights(load_state_dict(wanted), wanted.step, wanted.branch)
        else:
            engine.policy_version, engine.branch = wanted.step, wanted.branch

    def _open(self, wanted: Checkpoint) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtra("transformers, which the explorer needs,", "train") from error
        settings = self._settings
        with tempfile.TemporaryDirectory(prefix="streamrft-model-") as cache:
            base = base_of(wanted)
            folder = fetch_model_folder(base or wanted, cache)
            self._engine = open_engine(
                settings.engine_type,
                str(folder),
                policy_version=wanted.step,
                branch=wanted.branch,
                dtype=settings.dtype,
                num_threads=num_threads(settings),
                adapter=fetch_model_folder(wanted, cache) if base else None,
            )
            self._chat = Chat(
                AutoTokenizer.from_pretrained(folder),
                max_prompt_tokens=min(settings.max_prompt_tokens, self._engine.max_prompt_tokens),
                truncate=settings.enable_prompt_truncation,
                template=settings.chat_template,
                enable_thinking=settings.enable_thinking,
            )


def _check_base(loaded: Checkpoint | None, wanted: Checkpoint) -> None:
    """The model below an adapter is loaded once."""
    if loaded is not None and loaded.base_digest != wanted.base_digest:
        words = [
            f"an adapter of {c.base_uri}, SHA-256 {c.base_digest[:12]}"
            if c.base_uri
            else "a whole model"
            for c in (wanted, loaded)
        ]
        raise WeightsMismatch(f"is {words[0]}, served is {words[1]}.")


def _preload() -> None:
    """Import what the first weights need while they are not there yet."""
    with contextlib.suppress(Exception):  # `_open` imports again and reports
        importlib.import_module("transformers")
        importlib.import_module(f"{__package__}.transformers_engine")


def num_threads(settings: ExplorerSettings) -> int | None:
    """As configured; else what the environment says, else 1: roles share the machine."""
    if settings.num_threads is not None or "OMP_NUM_THREADS" in os.environ:
        return settings.num_threads
    return 1
