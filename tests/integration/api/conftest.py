"""A node whose answers are scripts, and a real HTTP server in front of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from inference.generation import Finish, GenerateRequest, TokenEvent, TokenLogprob
from mesh.api import (
    AnswerEvent,
    Completed,
    Health,
    ModelInfo,
    Started,
    create_app,
    open_listeners,
    serve,
)
from mesh.forward.following import NotKept

PEER = "12D3KooWGRUvhyqA8rLhBzHbDXYw3sUVDBYTHVVS6kHbcxPvGKTv"
Script = Callable[[GenerateRequest, str], AsyncGenerator[AnswerEvent, None]]


class ScriptedNode:
    """Implements ``mesh.api.Node``; ``script`` is what ``answer`` runs."""

    peer = PEER

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or self.say("Hello", " world", "!")
        self.requests: list[GenerateRequest] = []
        self.ids: list[str] = []
        self.keys: list[bytes | None] = []
        self.asked_for: list[tuple[str, bytes, int]] = []
        self.rest: Any = None  # what `kept` finds
        self.running = 0
        self.pulled = 0  # events that the HTTP layer has taken
        self._changed: trio.Event | None = None
        self.ready = True

    async def answer(
        self, request: GenerateRequest, request_id: str, *, keep: bytes | None = None
    ) -> AsyncGenerator[AnswerEvent, None]:
        self.requests.append(request)
        self.ids.append(request_id)
        self.keys.append(keep)
        self.running += 1
        self._wake()
        try:
            async with aclosing(self.script(request, request_id)) as events:
                async for event in events:
                    yield event
                    self.pulled += 1
        finally:
            self.running -= 1
            self._wake()

    async def kept(self, response: str, key: bytes, after: int) -> Any:
        self.asked_for.append((response, key, after))
        if self.rest is None:
            raise NotKept("gone" if after > 100 else "not_found")
        return self.rest

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def until(self, running: int, timeout: float = 10.0) -> None:
        """Return when so many generations run."""
        with trio.fail_after(timeout):
            while self.running != running:
                self._changed = trio.Event()
                await self._changed.wait()

    def models(self) -> Sequence[ModelInfo]:
        return [
            ModelInfo("demo", 1_700_000_000, [PEER], "sha256:00", 2048),
            ModelInfo("OpenVINO/Qwen3-8B-int4-ov", 1_700_000_001, [PEER]),
        ]

    def view(self) -> Mapping[str, Any]:
        return {"nodes": {PEER: {"status": "alive", "rtt": float("nan")}}}

    def capabilities(self) -> Mapping[str, Any]:
        return {"devices": ["CPU"]}

    def health(self) -> Health:
        return Health(PEER, self.ready, () if self.ready else ("the model loads",))

    @staticmethod
    def events(*texts: str, prompt: int = 5, reason: Any = "stop") -> list[AnswerEvent]:
        """A whole answer of one token per text."""
        tokens = [
            TokenEvent(
                token_id=index,
                text=text,
                logprob=TokenLogprob(token_id=index, token=text, logprob=-0.25),
                top_logprobs=(TokenLogprob(token_id=index, token=text, logprob=-0.25),),
            )
            for index, text in enumerate(texts)
        ]
        finish = Finish(
            reason=reason, prompt_tokens=prompt, completion_tokens=len(texts), cached_tokens=1
        )
        ids = list(range(len(texts)))
        return [
            Started(PEER),
            *tokens,
            TokenEvent(token_id=None, finish=finish),
            Completed(PEER, b"\x00receipt", [{"peer": PEER}], {"decode": 0.5}, ids),
        ]

    @classmethod
    def say(cls, *texts: str, pause: float = 0.0) -> Script:
        async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
            for event in cls.events(*texts):
                yield event
                await trio.sleep(pause)

        return script

    @classmethod
    def say_for_ever(cls, text: str = "tick ", pause: float = 0.01) -> Script:
        async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
            yield Started(PEER)
            while True:
                yield TokenEvent(token_id=1, text=text)
                await trio.sleep(pause)

        return script

    @classmethod
    def fail(cls, error: Exception, after: int = 0) -> Script:
        """Raise after so many tokens (0: before the first)."""

        async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
            yield Started(PEER)
            for index in range(after):
                yield TokenEvent(token_id=index, text=f"t{index}")
            raise error

        return script


@pytest.fixture
def node() -> ScriptedNode:
    return ScriptedNode()


class Serving:
    """A running server: its URL, and the events that stop it."""

    def __init__(self, url: str, stop: trio.Event, closing: trio.Event) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.stop = stop
        self.closing = closing


@asynccontextmanager
async def _serving(
    node: ScriptedNode, *, api_key: str | None = None, bind: str = "127.0.0.1:0"
) -> AsyncIterator[Serving]:
    stop, closing = trio.Event(), trio.Event()
    app = create_app(node, api_key=api_key, closing=closing)
    listeners = await open_listeners([bind], api_key=api_key)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(serve, app, listeners, stop=stop, closing=closing))
        yield Serving(urls[0], stop, closing)
        nursery.cancel_scope.cancel()


@pytest.fixture
def serving() -> Any:
    """``async with serving(node) as server``: the API of ``node`` on a loopback port."""
    return _serving
