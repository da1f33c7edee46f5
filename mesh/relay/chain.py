"""The head of a chain: opens sessions on all stages, keeps the ring turning, mends it after a loss.

A :class:`ChainHead` coordinates one chain for many sessions. Its own node holds rank 0; steps go
into that stage, and what comes back from the last one are tokens. Nothing here waits for a client:
tokens go into each session's queue, which holds at most what the session may produce.

Messages that stages send are handled at once in the trio thread. What takes time (opening, growing,
closing, mending) runs in tasks of the relay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio

from inference.errors import ErrorCode, GenerationError
from inference.generation import FinishReason
from mesh.identity import PeerId
from mesh.relay.activations import Encoding
from mesh.relay.host import StageHost
from mesh.relay.links import PeerLost, at_once
from mesh.relay.mending import Mender, Spare
from mesh.relay.messages import (
    GROW,
    Grow,
    Lost,
    Refused,
    Sampled,
    Tokens,
)
from mesh.relay.refusal import Refusal
from mesh.relay.repair import Mended, open_at
from mesh.relay.ring import Hop, Ring, Route
from mesh.relay.room import Room
from mesh.relay.schedule import Schedule
from mesh.relay.service import Relay
from mesh.relay.session_state import Drawn, HeadSession

_log = logging.getLogger(__name__)

GROWTH = 256  # tokens of room that a session reserves ahead of what it has
GROW_BELOW = 64  # and asks for more when less than this is left
ASK_SECONDS = 10.0
MAX_REPAIRS = 3  # of one session, for rows that a stage finds out of place
# A stage that says one of these has lost track of a session: mending sets it right.
_ASTRAY = frozenset({"unknown_chain", "unknown_session", "wrong_position", "stale_epoch"})


class ChainHead:
    """One chain. ``route`` begins with this node; ``slots`` sessions run, ``queue`` more may wait.

    ``activations`` other than f32 make less go over the network, and the chain only approximately
    the uncut model; where a stage does not take them they are f32. ``changed`` is called when a
    session starts or ends, and when rank 0 is unloaded. Raises ValueError for a route that is none,
    or whose first stage is not loaded here.
    """

    def __init__(
        self,
        relay: Relay,
        model: str,
        layers: int,
        route: Sequence[Hop],
        *,
        spare: Spare,
        slots: int = 16,
        queue: int = 64,
        activations: Encoding = "f32",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.ring = Ring(model, layers, route, activations=activations)
        host = relay.host(model, route[0].first, route[0].last)
        if host is None or route[0].peer != relay.links.me:
            raise ValueError("rank 0 of the route is not a stage that is loaded on this node")
        self.slots = slots
        self._relay = relay
        self._host = host
        self._queue = queue
        self._changed = changed
        self._places = trio.Semaphore(slots)
        self._schedule = Schedule(len(route))
        self._sessions: dict[int, HeadSession] = {}
        self._entering = 0
        self._next_number = 1
        self._mender = Mender(
            relay,
            self.ring,
            spare,
            sessions=lambda: list(self._sessions.values()),
            is_idle=lambda: self.idle,
            mended=self._mended,
            failed=self._fail_all,
            go_on=self._pump,
        )
        self._door = trio.Lock()
        self._opening = 0
        self._room = Room(relay, self.ring)
        self._failure: Callable[[], GenerationError] | None = None
        relay.heads[self.ring.id] = self

    @property
    def route(self) -> Route:
        return self.ring.route

    @property
    def context_length(self) -> int:
        """Tokens that the first stage takes in one session."""
        return self._host.facts.context_length

    @property
    def cache_used(self) -> float:
        """The part of the first stage's KV memory that is reserved, 0 to 1."""
        return self._host.table.used

    @property
    def active(self) -> int:
        return len(self._sessions)

    @property
    def waiting(self) -> int:
        return self._places.statistics().tasks_waiting

    @property
    def failed(self) -> bool:
        """The chain is of no use any more; make another one."""
        return self._failure is not None

    @property
    def whole(self) -> bool:
        """It runs on its route as that stands: nothing has failed or is lost and not replaced."""
        return self._failure is None and not self._mender.lost

    @property
    def idle(self) -> bool:
        return not self._sessions and not self._entering

    def close(self) -> None:
        """Fail what is running and be no head any more."""
        self._fail_all("node_lost", "the chain is being shut down")
        self._relay.heads.pop(self.ring.id, None)

    # -- sessions -----------------------------------------------------------------------------

    async def start(self, session: HeadSession) -> None:
        """Begin a session; waits for a place. Afterwards it must be given to :meth:`end`.

        Raises :class:`GenerationError`; then there is nothing to end.
        """
        session.asked = trio.current_time()
        session.spent = [0.0] * len(self.route)
        if self._failure is not None:
            raise self._failure()
        if not self._places.value and self.waiting >= self._queue:
            raise GenerationError(
                "overloaded", f"{self.waiting} requests wait for this chain", retry_after=1.0
            )
        with self.expecting():
            await self._places.acquire()
            try:
                await self._enter(session)
            except BaseException:
                self.end(session)
                raise
        session.started = trio.current_time()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Inside, the chain is not idle: a session is on its way into it."""
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1
            self._changed()

    def end(self, session: HeadSession) -> None:
        """The session is over or not wanted any more: free it everywhere. Twice is fine."""
        if not session.ended:
            session.ended = True
            self._leave(session, tell=True)
            self._places.release()
            self._changed()

    async def _enter(self, session: HeadSession) -> None:
        """Open the session on all stages and let it into the ring, unless it has ended.

        Sessions open side by side; where room is short they queue at the door, first come first
        served.
        """
        if not self._door.locked():
            self._opening += 1
            try:
                if await self._try_to_enter(session, tell=True) is None:
                    return
            finally:
                self._opening -= 1
                self._room.tell_ended()
        async with self._door:
            while True:
                ended = self._room.ended
                given_back = await self._try_to_enter(session, tell=False)
                if given_back is None:
                    return
                await given_back.wait()  # it must not stand in its own way
                others = self._sessions or self._opening or self._room.ending
                if not others and not ended.is_set():
                    message = "other chains have taken the KV memory that this session needs"
                    raise GenerationError("overloaded", message, retry_after=1.0)
                await ended.wait()

    async def _try_to_enter(self, session: HeadSession, *, tell: bool) -> trio.Event | None:
        """None: it is in, or has ended. Otherwise there is no room now, and the event comes when
        what the stages have reserved for it is free again. Raises :class:`GenerationError` when
        there never will be any.

        ``tell``: whoever is at the door may try again when this has not worked.
        """
        given_back: trio.Event | None = None
        while not session.ended:
            await self._mender.wait_steady()
            if self._failure is not None:
                raise self._failure()
            epoch = self.ring.epoch
            session.number = self._next_number
            self._next_number += 1
            session.capacity = min(session.length, len(session.tokens) + GROWTH)
            opened = full = False
            try:
                await at_once(partial(self._open, rank, session) for rank in range(len(self.route)))
                steady = self.ring.epoch == epoch and self._mender.steady
                opened = steady and not session.ended and self._failure is None
            except PeerLost as lost:
                self._mender.lose(lost.peer)
            except Refusal as refusal:
                if self.ring.epoch == epoch:
                    full = refusal.code == "no_free_blocks"
                    if not full and (refusal.code != "wrong_encoding" or not self._make_exact()):
                        raise _as_error(refusal) from refusal
            finally:
                if not opened:
                    given_back = self._room.give_back(session.number, tell=tell)
            if full:
                return given_back
            if opened:
                self._place(session)
                break
        return None

    def _make_exact(self) -> bool:
        """A stage does not take the chain's form of activations: use f32 from now on.

        False when that is no way out. Stages begin a chain of a later epoch anew, so those that
        have been asked already will not mind.
        """
        if self.ring.activations == "f32" or self._sessions:
            return False
        self.ring.activations = "f32"
        self.ring.epoch += 1
        return True

    def _place(self, session: HeadSession) -> None:
        session.starved = session.growing = False
        self._note_route(session)
        self._sessions[session.number] = session
        self._schedule.add(session.number, session.tokens, session.prompt, session.capacity)
        self._mender.watch()
        self._pump()

    def _note_route(self, session: HeadSession) -> None:
        """Who runs the session from here on; once a peer is lost, nobody can tell its serial."""
        session.routes.append((session.produced, self.route))
        for hop in self.route:
            session.serials[hop.peer] = self._relay.links.serial(hop.peer)

    async def _open(self, rank: int, session: HeadSession) -> None:
        emit_from = len(session.tokens) - 1 if rank == len(self.route) - 1 else 0
        described, history = self.ring.describe(rank, session, emit_from)
        peer = self.route[rank].peer
        message = self.ring.open(rank, [described])
        try:
            opened = await open_at(self._relay, peer, message, history)
        except Refusal as refusal:
            if refusal.code == "next_unreachable":
                # The head is what comes after the last stage, and it is here.
                blamed = PeerId(message.next) if message.next != self._relay.links.me else peer
                raise PeerLost(blamed, refusal.message) from refusal
            raise
        for refused in opened.refused:
            raise Refusal.told(refused.code, f"{peer}: {refused.message}")

    def _leave(self, session: HeadSession, *, tell: bool) -> None:
        """Take a session out of the ring and free its KV on all stages."""
        if self._sessions.pop(session.number, None) is not None:
            self._schedule.remove(session.number)
            self._room.give_back(session.number, tell=tell)
            self._pump()
        elif tell:
            self._room.tell_ended()

    # -- the ring -----------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send whatever may be sent."""
        if not self._mender.steady:
            return
        while (step := self._schedule.next()) is not None:
            self._host.submit(self._relay.links.me, self.ring.id, self.ring.epoch, step)

    def on_tokens(self, sender: PeerId, message: Tokens) -> None:
        """What the last stage has drawn in a step."""
        if sender != self.ring.tail or message.epoch != self.ring.epoch:
            return
        self._mender.heard()
        stepped = self._schedule.stepped(message.step, len(message.sampled), trio.current_time())
        for number in stepped:
            spent = self._sessions[number].spent
            for rank, seconds in enumerate(message.spent[: len(spent)]):
                spent[rank] += seconds
        drawn = []
        for sampled in message.sampled:
            if self._schedule.expects(sampled.session, sampled.position):
                drawn.append(self._sessions[sampled.session])
                self._take(drawn[-1], sampled)
        self._pump()
        for session in drawn:  # once the runtime computes: what they wake up would hold that up
            session.changed.set()

    def _take(self, session: HeadSession, sampled: Sampled) -> None:
        token = sampled.token
        session.tokens.append(token)
        if not session.first_token:
            session.first_token = trio.current_time()
        reason: FinishReason | None = None
        if token in session.ends:
            reason = "stop"
        elif len(session.tokens) >= session.length:
            reason = "length"
        top = tuple((item.token, item.logprob) for item in sampled.top)
        session.outcomes.append(Drawn(token, sampled.logprob, top, reason))
        if reason is not None:
            self.end(session)
            return
        self._schedule.token(session.number, token)
        if session.starved:
            self._unblock()
            return
        short = session.capacity - len(session.tokens) < GROW_BELOW
        if short and session.capacity < session.length and not session.growing:
            session.growing = True
            self._relay.spawn(self._grow, session)

    def on_refused(self, sender: PeerId, message: Refused) -> None:
        """A stage does not accept rows: their sessions fail, or the chain has to be mended."""
        if sender not in self.ring.peers or message.epoch != self.ring.epoch:
            return
        self._mender.heard()
        if message.ended:
            self._schedule.done(message.step)
        for refused in message.sessions:
            session = self._sessions.get(refused.session)
            if session is None:
                continue
            session.repairs += 1
            if refused.code in _ASTRAY and session.repairs <= MAX_REPAIRS:
                self._mender.mend_soon()
                continue
            reason = f"{sender}: {refused.code}: {refused.message}"
            self._fail(session, GenerationError("engine_failed", reason))
        self._pump()

    def _fail(self, session: HeadSession, error: GenerationError) -> None:
        session.put(error)
        self.end(session)

    def _fail_all(self, code: ErrorCode, message: str) -> None:
        """The chain is of no use any more."""
        self._failure = partial(GenerationError, code, message)
        for session in list(self._sessions.values()):
            self._fail(session, self._failure())
        self._room.give_back_all()

    # -- room ---------------------------------------------------------------------------------

    async def _grow(self, session: HeadSession) -> None:
        """Reserve more tokens on all stages, waiting for others to give up theirs if need be."""
        number = session.number
        while self._sessions.get(number) is session:
            epoch = self.ring.epoch
            capacity = min(session.length, session.capacity + GROWTH)
            message = Grow(chain=self.ring.id, session=number, capacity=capacity)
            freed = self._room.freed
            try:
                await at_once(
                    partial(self._relay.ask, hop.peer, GROW, message, timeout=ASK_SECONDS)
                    for hop in self.route
                )
            except PeerLost as lost:
                self._mender.lose(lost.peer)
            except Refusal as refusal:
                if self._sessions.get(number) is not session:
                    return  # it has begun anew meanwhile, and asks under its new number
                if refusal.code == "no_free_blocks":
                    session.starved = True
                    self._unblock()
                    await freed.wait()
                elif self._mender.steady:
                    self._fail(session, GenerationError("engine_failed", str(refusal)))
            else:
                # Who has taken over from a stage that had answered does not know of it.
                if self.ring.epoch == epoch:
                    if self._sessions.get(number) is session:
                        session.capacity = capacity
                        session.growing = session.starved = False
                        self._schedule.grow(number, capacity)
                        self._pump()
                    return
            await self._mender.wait_steady()

    def _unblock(self) -> None:
        """When every session stands still for lack of room, the youngest gives way."""
        running = list(self._sessions.values())
        if not all(other.starved and len(other.tokens) > other.capacity for other in running):
            return
        if len(running) == 1:
            message = "other chains have taken the KV memory that this session needs"
            self._fail(running[0], GenerationError("overloaded", message, retry_after=1.0))
        elif running:
            # It comes back when another one has ended: room that it frees is for those that wait.
            youngest = max(running, key=lambda other: other.asked)
            self._begin_anew(youngest, self._room.ended)

    def _begin_anew(self, session: HeadSession, when: trio.Event | None) -> None:
        """Compute a session from its token ids again, in the place that it has.

        One that waits for ``when`` leaves its room to those that run. Otherwise whoever is at the
        door may try: nobody may be left whose end would tell it.
        """
        self._leave(session, tell=when is None)
        self._entering += 1
        self._relay.spawn(self._enter_again, session, when)

    async def _enter_again(self, session: HeadSession, when: trio.Event | None) -> None:
        try:
            if when is not None:
                await when.wait()
            await self._enter(session)
        except GenerationError as error:
            if not session.ended:
                self._fail(session, error)
        finally:
            self._entering -= 1
            self._changed()

    # -- losses -------------------------------------------------------------------------------

    def on_lost(self, sender: PeerId, message: Lost) -> None:
        """A stage has no link to its neighbour."""
        if sender in self.ring.peers and message.epoch == self.ring.epoch:
            self._mender.lose(PeerId(message.peer))

    def on_link_down(self, peer: PeerId) -> None:
        self._mender.lose(peer)

    def on_unload(self, host: StageHost) -> None:
        if host is self._host:
            self._fail_all("node_lost", "the first stage of the chain has been unloaded")
            self._changed()

    def _mended(self, mended: Mended, tried: Collection[int]) -> None:
        """The stages are at a new epoch, and may hold the sessions of these numbers."""
        self._schedule.restart(mended.sent)
        for number in tried:
            session = self._sessions.get(number)
            if session is None:
                self._room.give_back(number, tell=False)
            elif session.routes[-1][1] != self.route:
                self._note_route(session)
        for session in mended.anew:
            if self._sessions.get(session.number) is session:  # or it has given way meanwhile
                self._begin_anew(session, None)


def _as_error(refusal: Refusal) -> GenerationError:
    """What a client is to know of a stage that does not take its session."""
    if refusal.code == "context_length":
        return GenerationError("context_length_exceeded", refusal.message, param="max_tokens")
    return GenerationError("engine_failed", str(refusal))
