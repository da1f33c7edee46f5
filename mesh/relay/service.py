"""The relay of one node: its stages, the chains it is the head of, and what peers send to them.

Thin: messages are parsed and checked against who sent them, and go to the stage or chain they are
for. What a stage puts out and a link does not take at once waits in an outbox per peer and kind, so
that one slow link stalls neither the stage nor other chains. A peer that leaves too much of it
waiting is taken for lost.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np
import trio
from numpy.typing import NDArray

from mesh.identity import PeerId
from mesh.relay.closings import Closings
from mesh.relay.compute import StageEngine
from mesh.relay.frames import STEP_KIND, StepHeader, Wire, parse
from mesh.relay.host import StageHost
from mesh.relay.kept import DEFAULT_BYTES
from mesh.relay.links import Buffer, Links, PeerLost
from mesh.relay.messages import (
    CLOSE,
    FENCE,
    GROW,
    LOST,
    OPEN,
    PROBE,
    REFUSED,
    REPLAY,
    TOKENS,
    Close,
    Fenced,
    Grow,
    Held,
    Lost,
    Neighbours,
    Open,
    Opened,
    Probe,
    Probed,
    Refused,
    RefusedSession,
    Replay,
    Tokens,
    histories,
)
from mesh.relay.outbox import Outbox, Parcel
from mesh.relay.refusal import Refusal
from mesh.relay.sessions import Chain, Session

_log = logging.getLogger(__name__)

# One-way kinds, and whether they go on the lane for bulky things.
NOTES = {STEP_KIND: True, TOKENS: False, REFUSED: False, LOST: False}
REQUESTS = (OPEN, FENCE, REPLAY, GROW, CLOSE, PROBE)


class Head(Protocol):
    """A chain that this node coordinates, as the relay sees it."""

    def on_tokens(self, sender: PeerId, message: Tokens) -> None: ...

    def on_refused(self, sender: PeerId, message: Refused) -> None: ...

    def on_lost(self, sender: PeerId, message: Lost) -> None: ...

    def on_link_down(self, peer: PeerId) -> None: ...

    def on_unload(self, host: StageHost) -> None: ...


class Relay:
    """See the module. ``run`` has to be running; stages may come and go meanwhile."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.heads: dict[bytes, Head] = {}
        self._hosts: dict[tuple[str, int, int], StageHost] = {}
        self._chains: dict[bytes, StageHost] = {}  # which stage a chain that is open here is in
        self._closings = Closings()
        self._outboxes: dict[tuple[PeerId, bool], Outbox] = {}
        self._nursery: trio.Nursery | None = None

    # -- composition --------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry outboxes and chains' tasks until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def spawn(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run what outlives a request. While the node shuts down it is not worth starting: peers
        free everything by themselves when its links end."""
        if self._nursery is not None:
            self._nursery.start_soon(_contained, task, *args)

    @asynccontextmanager
    async def stage(
        self,
        engine: StageEngine,
        model: str,
        *,
        kept_bytes: int = DEFAULT_BYTES,
        on_load: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[StageHost]:
        """Serve a loaded stage of the model with digest ``model`` while the context is open.

        ``on_load`` is called when sessions of the stage have come or gone, whoever their head is.
        """
        host = StageHost(engine, model, self, kept_bytes=kept_bytes, on_load=on_load)
        key = (model, host.facts.first, host.facts.last)
        if key in self._hosts:
            raise ValueError(f"layers {key[1]}-{key[2]} of this model are already served here")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run)
            self._hosts[key] = host
            try:
                yield host
            finally:
                del self._hosts[key]
                self._take_leave(host)
                nursery.cancel_scope.cancel()

    def _take_leave(self, host: StageHost) -> None:
        """A stage is being unloaded: whoever has sessions in it must go on elsewhere."""
        for chain in list(host.table.chains.values()):
            self._chains.pop(chain.id, None)
            self._report_lost(chain, self.links.me)
        for head in list(self.heads.values()):
            head.on_unload(host)

    def host(self, model: str, first: int, last: int) -> StageHost | None:
        return self._hosts.get((model, first, last))

    @property
    def hosts(self) -> Iterable[StageHost]:
        return self._hosts.values()

    async def ask(
        self, peer: PeerId, kind: str, message: Wire, payload: bytes = b"", *, timeout: float
    ) -> Any:
        """Ask a stage, of this node too. Raises :class:`Refusal`, :class:`PeerLost`."""
        body = message.model_dump(mode="python")
        if peer == self.links.me:
            return await self.answer(peer, kind, body, payload)
        return await self.links.request(peer, kind, body, payload, timeout=timeout)

    # -- requests of heads --------------------------------------------------------------------

    async def answer(self, sender: PeerId, kind: str, body: Any, payload: Buffer = b"") -> Any:
        """The answer's body to a request from ``sender``. Raises :class:`Refusal`."""
        handler: Callable[[PeerId, Any, Buffer], Awaitable[Wire | None]]
        handler = {
            OPEN: self._open,
            FENCE: self._fence,
            REPLAY: self._replay,
            GROW: self._grow,
            CLOSE: self._close,
            PROBE: self._probe,
        }[kind]
        answer = await handler(sender, body, payload)
        return None if answer is None else answer.model_dump(mode="python")

    async def _open(self, sender: PeerId, body: Any, payload: Buffer) -> Opened:
        message = parse(Open, body)
        ids = histories(message, payload)
        if sender != self.links.me and message.first == 0:
            raise Refusal("wrong_rank", "rank 0 is the head: it opens its own stage itself")
        self._stage_for(message)
        await self._reach(PeerId(message.next))
        # Meanwhile the link to the head may have gone, and the stage.
        await trio.lowlevel.checkpoint_if_cancelled()
        host = self._stage_for(message)
        message, ids = self._closings.sift(sender, message, ids)
        refused = host.open(sender, message, ids) if message.sessions else []
        if message.chain in host.table.chains:
            self._chains[message.chain] = host
        return Opened(refused=tuple(refused), free_tokens=host.table.free_tokens)

    async def _reach(self, peer: PeerId) -> None:
        try:
            await self.links.reach(peer)
        except PeerLost as lost:
            raise Refusal("next_unreachable", str(lost)[:512]) from lost

    def _stage_for(self, message: Open) -> StageHost:
        host = self._hosts.get((message.model, message.first, message.last))
        if host is not None:
            if self._chains.get(message.chain, host) is not host:
                raise Refusal("chain_mismatch", "the chain is open in another stage of this node")
            return host
        here = [f"{first}-{last}" for model, first, last in self._hosts if model == message.model]
        if not here:
            raise Refusal("unknown_model", f"no stage of model {message.model} is loaded here")
        wanted = f"{message.first}-{message.last}"
        raise Refusal("wrong_range", f"layers {', '.join(here)} are here, not {wanted}")

    def _host_of(self, chain: bytes) -> StageHost:
        host = self._chains.get(chain)
        if host is None:
            raise Refusal("unknown_chain", "no session of that chain is open here")
        return host

    async def _fence(self, sender: PeerId, body: Any, _payload: Buffer) -> Fenced:
        message = parse(Neighbours, body)
        host = self._host_of(message.chain)
        held = host.table.fence(sender, message)
        sessions = host.table.chains[message.chain].sessions
        # Output of the running step will be kept up to where the session then stands.
        return Fenced(
            sessions=tuple(
                Held(
                    session=h.session,
                    past=h.past,
                    kept_from=host.kept.kept_from(
                        sessions[h.session].key, sessions[h.session].past
                    ),
                )
                for h in held
            )
        )

    async def _replay(self, sender: PeerId, body: Any, _payload: Buffer) -> None:
        message = parse(Replay, body)
        host = self._host_of(message.chain)

        def act() -> None:
            found = host.table.rewind(sender, message)
            host.replay(host.table.chains[message.chain], found)

        await host.between_steps(act)

    async def _grow(self, sender: PeerId, body: Any, _payload: Buffer) -> None:
        message = parse(Grow, body)
        self._host_of(message.chain).table.grow(sender, message)

    async def _close(self, sender: PeerId, body: Any, _payload: Buffer) -> None:
        message = parse(Close, body)
        host = self._chains.get(message.chain)
        ended: list[Session] = []
        if host is not None:
            ended = host.table.close(sender, message)
            host.free(ended)
            self._tidy(host)
        self._closings.add(sender, message, {session.number for session in ended})

    async def _probe(self, sender: PeerId, body: Any, _payload: Buffer) -> Probed:
        message = parse(Probe, body)
        host = self._host_of(message.chain)
        return Probed(busy=host.busy_with(message.chain))

    def _tidy(self, host: StageHost) -> None:
        """Forget chains that the stage has forgotten."""
        for chain in [c for c, h in self._chains.items() if h is host]:
            if chain not in host.table.chains:
                del self._chains[chain]

    # -- one-way messages ---------------------------------------------------------------------

    def take(self, sender: PeerId, kind: str, body: Any, payload: Buffer = b"") -> None:
        """A one-way message from ``sender``. What is wrong with it is told to who should know."""
        try:
            if kind == STEP_KIND:
                self._step(sender, body, payload)
            elif kind == TOKENS:
                tokens = parse(Tokens, body)
                self._head(tokens.chain).on_tokens(sender, tokens)
            elif kind == REFUSED:
                refused = parse(Refused, body)
                self._head(refused.chain).on_refused(sender, refused)
            elif kind == LOST:
                lost = parse(Lost, body)
                self._head(lost.chain).on_lost(sender, lost)
        except Refusal as refusal:
            _log.debug("%s from %s: %s", kind, sender, refusal)

    def _head(self, chain: bytes) -> Head:
        head = self.heads.get(chain)
        if head is None:
            raise Refusal("unknown_chain", "this node is not the head of that chain")
        return head

    def _step(self, sender: PeerId, body: Any, payload: Buffer) -> None:
        header: StepHeader | None = None
        try:
            header = parse(StepHeader, body)
            self._host_of(header.chain).receive(sender, header, payload)
        except Refusal as refusal:
            if header is None:
                _log.warning("a step frame from %s that is none: %s", sender, refusal)
                return
            # A neighbour's broken frame is the head's business; who is no neighbour gets it back.
            host = self._chains.get(header.chain)
            chain = host.table.chains.get(header.chain) if host is not None else None
            to = chain.head if chain is not None and chain.previous == sender else sender
            self._tell_refused(
                to,
                Refused(
                    chain=header.chain,
                    epoch=header.epoch,
                    step=header.step,
                    ended=True,
                    sessions=tuple(
                        RefusedSession(session=n, code=refusal.code, message=refusal.message[:512])
                        for n in {row[0] for row in header.rows}
                    ),
                ),
            )

    def link_down(self, peer: PeerId) -> None:
        """The link to ``peer`` is gone: what it is the head of ends, heads of others are told."""
        self._closings.forget(peer)
        for host in self._hosts.values():
            host.free(host.table.drop_head(peer))
            self._tidy(host)
            for chain in host.table.beside(peer):
                self._report_lost(chain, peer)
        for head in list(self.heads.values()):
            head.on_link_down(peer)

    def _report_lost(self, chain: Chain, peer: PeerId) -> None:
        lost = Lost(chain=chain.id, epoch=chain.epoch, peer=peer)
        self._tell(chain.head, LOST, lost.model_dump(mode="python"))

    # -- output of stages ---------------------------------------------------------------------

    def activations(self, chain: Chain, body: dict[str, Any], values: NDArray[Any]) -> None:
        payload = np.ascontiguousarray(values).data.cast("B")
        self._post(chain.next, Parcel(STEP_KIND, body, payload))

    def tokens(self, chain: Chain, body: dict[str, Any]) -> None:
        self._tell(chain.head, TOKENS, body)

    def refused(self, chain: Chain, message: Refused) -> None:
        self._tell_refused(chain.head, message)

    def _tell_refused(self, peer: PeerId, message: Refused) -> None:
        self._tell(peer, REFUSED, message.model_dump(mode="python"))

    def _tell(self, peer: PeerId, kind: str, body: dict[str, Any]) -> None:
        if peer == self.links.me:
            self.take(peer, kind, body)
        else:
            self._post(peer, Parcel(kind, body, b""))

    def _post(self, peer: PeerId, parcel: Parcel) -> None:
        bulky = NOTES[parcel.kind]
        outbox = self._outboxes.get((peer, bulky))
        if outbox is not None:
            outbox.put(parcel)
        elif not self.links.try_send(peer, parcel.kind, parcel.body, parcel.payload, bulky=bulky):
            outbox = self._outboxes[peer, bulky] = Outbox(bulky)
            outbox.put(parcel)
            self.spawn(self._deliver, peer, bulky, outbox)

    async def _deliver(self, peer: PeerId, bulky: bool, outbox: Outbox) -> None:
        """Carry an outbox until it is empty. When the peer is lost so is what waits, and heads are
        told."""
        reason = "it does not read what it is sent"
        try:
            with outbox.scope:
                while (parcel := outbox.first) is not None:
                    await self.links.send(
                        peer, parcel.kind, parcel.body, parcel.payload, bulky=bulky
                    )
                    outbox.sent()
                return
        except PeerLost as lost:
            reason = lost.reason
        finally:
            del self._outboxes[peer, bulky]
        _log.info("output for %s is lost: %s", peer, reason)
        for host in self._hosts.values():
            for chain in host.table.beside(peer):
                self._report_lost(chain, peer)


async def _contained(task: Callable[..., Awaitable[None]], *args: Any) -> None:
    """What peers say may lead a chain's task where nobody foresaw: that ends the task alone. Its
    chain falls silent, and entry nodes carry on elsewhere."""
    try:
        await task(*args)
    except Exception:
        _log.exception("a task of a chain failed")
