"""Responses that outlive their entry node: what the serving side keeps of them, and for how long.

A client that streams gets a secret with its response; the serving side gets a key that is made of
it, and so cannot know the secret. It records what it makes. When the link to the entry node is
lost, the generation goes on and the record stays for :data:`KEEP_SECONDS`; another node that shows
that its client has the secret is given the rest. When the entry node *says* that the response is
not wanted any more, everything ends at once; and so it does when the entry node is back and had
never gone, since it has found another way meanwhile.

A proof is good for one asker and one holder, so who is asked in vain learns nothing that it could
use elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import trio
from pydantic import ValidationError

from ca.naming import Role
from inference.errors import GenerationError
from inference.generation import GenerateRequest, TokenEvent
from mesh.forward.liveness import BEAT_SECONDS
from mesh.forward.wire import (
    BEAT,
    KEPT_KIND,
    Assignment,
    KeptCall,
    write_cut,
    write_event,
    write_kept,
    write_receipt,
)
from mesh.identity import PeerId
from mesh.receipts import SignedReceipt
from mesh.transport import Link, Message, RemoteError, Request, Transport

KEEP_SECONDS = 60.0  # without anybody who reads it
MAX_EVENTS = 1 << 14  # of one response; a longer one is not kept
MAX_KEPT_EVENTS = 1 << 16  # of all responses that have lost their entry node, or have ended
MAX_KEPT = 256

_KEY_TAG = b"meshnode-kept-key-v1\0"
_PROOF_TAG = b"meshnode-kept-proof-v1\0"


def key_of(secret: str) -> bytes:
    """What the serving side is told of a client's secret; 32 bytes."""
    return hashlib.sha256(_KEY_TAG + secret.encode()).digest()


def proof_of(key: bytes, response: str, *, asker: str, holder: str) -> bytes:
    """What shows ``holder`` that the client of ``asker`` has the secret; 32 bytes."""
    return hmac.digest(key, _PROOF_TAG + f"{response} {asker} {holder}".encode(), "sha256")


@dataclass(eq=False)
class Recording:
    """What has been made of one response so far.

    ``events`` follow the tokens that the assignment resumed from, one for each token. The last one
    has ``finish``, and :attr:`receipt` belongs to it, or :attr:`error` says why there is none.
    """

    assignment: Assignment
    request: GenerateRequest
    key: bytes
    boot: bytes  # of the entry node's process
    stop: Callable[[], None]  # ends the generation
    events: list[TokenEvent] = field(default_factory=list)
    receipt: SignedReceipt | None = None
    error: GenerationError | None = None
    too_long: bool = False
    readers: int = 0
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # of its being kept
    _changed: trio.Event = field(default_factory=trio.Event)

    @property
    def first(self) -> int:
        """The position of the first event."""
        return len(self.assignment.resume)

    @property
    def over(self) -> bool:
        return self.error is not None or bool(self.events and self.events[-1].finish)

    def add(self, item: TokenEvent | GenerationError, receipt: SignedReceipt | None) -> None:
        if self.over or self.too_long:
            return
        if isinstance(item, GenerationError):
            self.error = item
        elif len(self.events) >= MAX_EVENTS:
            self.too_long = True
            self.error = GenerationError("node_lost", "the response is too long to be kept")
            self.events.clear()
        else:
            self.events.append(item)
        self.receipt = receipt
        self.changed()

    def changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def before(self, after: int) -> tuple[tuple[int, ...], str]:
        """The first ``after`` tokens and their text. Raises RemoteError ``gone``."""
        events = self.events[: after - self.first]
        ids = [event.token_id for event in events if event.token_id is not None]
        if self.too_long or after < self.first or after > self.first + len(ids):
            raise RemoteError("gone", f"what comes after token {after} is not kept")
        text = self.assignment.text + "".join(event.text for event in events)
        return (*self.assignment.resume, *ids), text

    async def follow(self, after: int) -> AsyncGenerator[Message, None]:
        """Frames as of a call of its own: what comes after the first ``after`` tokens."""
        position = after
        while True:
            while position - self.first < len(self.events):
                event = self.events[position - self.first]
                yield self._message(position, event)
                if event.finish is not None:
                    return
                position += 1
            if self.error is not None:
                yield Message(write_cut(self.error))
                return
            if self.over:  # the end came with a token that is there already
                finish = self.events[-1].finish
                yield self._message(position, TokenEvent(token_id=None, finish=finish))
                return
            heard = False
            with trio.move_on_after(BEAT_SECONDS):
                await self._changed.wait()
                heard = True
            if not heard:
                yield Message(BEAT)

    def _message(self, position: int, event: TokenEvent) -> Message:
        signed = self.receipt if event.finish is not None else None
        return Message(write_event(position, event), write_receipt(signed) if signed else b"")

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[None, None]:
        """While somebody reads, the time does not run."""
        self.readers += 1
        self.changed()
        try:
            yield
        finally:
            self.readers -= 1
            self.changed()

    async def until_unwanted(self) -> None:
        """Return when nobody has read for :data:`KEEP_SECONDS`, or it is to make room."""
        with self.scope:
            while True:
                with trio.move_on_after(KEEP_SECONDS) as limit:
                    while not self.readers:
                        await self._changed.wait()
                if limit.cancelled_caught:
                    return
                while self.readers:
                    await self._changed.wait()


class KeptResponses:
    """The recordings of one node, and who may read them. ``me`` is its PeerId."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._recordings: dict[tuple[str, str], Recording] = {}  # by entry node and response
        self._kept: list[Recording] = []  # those without an entry node, the oldest first
        self._link: Callable[[PeerId], Link | None] = lambda peer: None

    def serve(self, transport: Transport) -> None:
        self._link = transport.link
        transport.serve_stream(KEPT_KIND, self.handle)

    def begin(
        self,
        entry: Link,
        assignment: Assignment,
        request: GenerateRequest,
        stop: Callable[[], None],
    ) -> Recording | None:
        """Record a response for the node at the end of the link ``entry``, if that wants it. Give
        it to :meth:`forget` at its end, or to :meth:`keep`."""
        if assignment.keep is None:
            return None
        recording = Recording(assignment, request, assignment.keep, entry.peer_boot, stop)
        self._recordings[entry.peer, assignment.response] = recording
        return recording

    def forget(self, entry: str, recording: Recording) -> None:
        key = entry, recording.assignment.response
        if self._recordings.get(key) is recording:
            del self._recordings[key]
        recording.add(GenerationError("node_lost", "the response is not kept any more"), None)

    async def keep(self, entry: PeerId, recording: Recording) -> None:
        """Keep a recording for those who may come for it; then end its generation."""
        self._kept.append(recording)
        self._make_room()
        # A node that dials again may have a new link before its old one's work has come here.
        if (link := self._link(entry)) is not None:
            self.entry_lives(link)
        try:
            await recording.until_unwanted()
        finally:
            self._kept.remove(recording)
            recording.stop()
            self.forget(entry, recording)

    def entry_lives(self, entry: Link) -> None:
        """There is a link to a node again: end what it has lost and nobody has come for."""
        for (peer, _), recording in self._recordings.items():
            if (
                (peer, recording.boot) == (entry.peer, entry.peer_boot)
                and recording in self._kept
                and not recording.readers
                and not recording.over
            ):
                recording.scope.cancel()

    def _make_room(self) -> None:
        total = sum(len(recording.events) for recording in self._kept)
        kept = len(self._kept)
        for recording in self._kept:
            if total <= MAX_KEPT_EVENTS and kept <= MAX_KEPT:
                break
            recording.scope.cancel()
            total -= len(recording.events)
            kept -= 1

    def find(self, asker: str, call: KeptCall) -> Recording:
        """Raises RemoteError ``not_found``, also for who has no proof."""
        for (_, response), recording in self._recordings.items():
            if response == call.response:
                proof = proof_of(recording.key, response, asker=asker, holder=self._me)
                if hmac.compare_digest(proof, call.proof):
                    return recording
        raise RemoteError("not_found", "no such response is kept here")

    async def handle(self, request: Request) -> AsyncGenerator[Message, None]:
        """One call: what is known, then frames as of a generation."""
        if Role.USE not in request.certificate.roles:
            raise RemoteError("forbidden", "the certificate does not allow to ask for responses")
        try:
            call = KeptCall.model_validate(request.message.body)
        except ValidationError as error:
            raise RemoteError("malformed", f"{error.error_count()} fields are wrong") from error
        async with aclosing(self.follow(request.peer, call)) as messages:
            async for message in messages:
                yield message

    async def follow(self, asker: str, call: KeptCall) -> AsyncGenerator[Message, None]:
        recording = self.find(asker, call)
        ids, text = recording.before(call.after)
        body, payload = write_kept(recording.request, ids, text)
        async with recording.read():
            yield Message(body, payload)
            async with aclosing(recording.follow(call.after)) as messages:
                async for message in messages:
                    yield message
