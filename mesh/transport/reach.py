"""Being reached: what peers see of us, dial-back, and punching holes into NATs.

py-libp2p's AutoNAT calls an address public that nobody can reach, and its hole punching does not
work over QUIC. This asks admitted peers instead, over links:

* ``transport.seen``: from which address do you see me?
* ``transport.dial_back``: dial that address from a socket I have not spoken to.
* ``transport.punch``: we are linked through a relay; let us both send to each other's addresses at
  once, so that each NAT takes the other's packets for answers. The socket is the one that all
  connections share, so the addresses that others have seen are the right ones.

A direct path that comes of it takes the link over without losing a frame.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import trio
from libp2p.peer.id import ID
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh.identity import PeerId
from mesh.transport.errors import DialError, RemoteError, TransportError
from mesh.transport.link import Link
from mesh.transport.links import Links, LinkUp
from mesh.transport.messages import Message, Request
from mesh.transport.observe import ObservedAddresses
from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.listen import MeshQuicTransport

logger = logging.getLogger(__name__)

SEEN, DIAL_BACK, PUNCH = "transport.seen", "transport.dial_back", "transport.punch"
_MOST_CANDIDATES = 12
_PUNCH_FOR = 2.0  # seconds of sending into the other NAT
_PUNCH_EVERY = 0.04
_PUNCH_AGAIN = (0.0, 1.0, 5.0, 30.0, 120.0)  # seconds before each of the first attempts
_PUNCH_LATER = 600.0  # and before each further one
_DIAL_BACK_TIMEOUT = 3.0
_DIAL_BACKS_AT_ONCE = 4


class Endpoint(BaseModel):
    """A host (IP address) and a UDP port."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    host: Annotated[str, Field(max_length=64)]
    port: int = Field(ge=1, le=65_535)


class _PunchBody(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    candidates: list[Endpoint] = Field(max_length=_MOST_CANDIDATES)
    dial: bool  # whether the one who is asked dials; otherwise it opens its NAT and waits


def _read(model: Any, body: object) -> Any:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise RemoteError("bad_request", "not in this form") from error


class Reachability:
    """Serves and uses the three questions. ``own`` gives this node's listening endpoints;
    ``promote`` opens a link's lanes over a new connection and moves it there."""

    def __init__(
        self,
        *,
        links: Links,
        quic: MeshQuicTransport,
        observed: ObservedAddresses,
        own: Callable[[], Sequence[tuple[str, int]]],
        promote: Callable[[Link, MeshConnection], Awaitable[None]],
    ) -> None:
        self._observed = observed
        self._links = links
        self._quic = quic
        self._own = own
        self._promote = promote
        self._dial_backs = trio.CapacityLimiter(_DIAL_BACKS_AT_ONCE)
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Look at every link that comes up."""
        async with trio.open_nursery() as nursery, self._links.events() as events:
            self._nursery = nursery
            async for event in events:
                if isinstance(event, LinkUp):
                    direct = isinstance(event.link.carrier.connection, MeshConnection)
                    nursery.start_soon(self._ask if direct else self._leave_relay, event.link)

    # -- our own address ----------------------------------------------------------------------

    async def _ask(self, link: Link) -> None:
        """Learn how a peer sees us, and let it try an address that is new."""
        try:
            answer = await link.request(SEEN, timeout=10)
            seen = _read(Endpoint, answer.body)
            new = self._observed.saw(link.peer, seen.host, seen.port)
            if not new or (seen.host, seen.port) in set(self._own()):
                return
            result = await link.request(DIAL_BACK, seen.model_dump(), timeout=10)
            self._observed.reached(seen.host, seen.port, success=result.body is True)
        except TransportError as error:
            logger.debug("%s does not say how it sees us: %s", link.peer, error)

    async def seen(self, request: Request) -> Message:
        """Serves SEEN."""
        connection = request.link.carrier.connection
        remote = connection.get_remote_address() if isinstance(connection, MeshConnection) else None
        if remote is None:
            raise RemoteError("relayed", "the connection is relayed")
        return Message({"host": remote[0], "port": remote[1]})

    async def dial_back(self, request: Request) -> Message:
        """Serves DIAL_BACK: only to the address from which the peer is seen, so that nobody can be
        made to send to a stranger, and from a new socket, to which no NAT has a mapping."""
        wanted = _read(Endpoint, request.message.body)
        connection = request.link.carrier.connection
        remote = connection.get_remote_address() if isinstance(connection, MeshConnection) else None
        if remote is None or remote[0] != wanted.host:
            raise RemoteError("refused", "that is not where the request comes from")
        async with self._dial_backs:
            with trio.move_on_after(_DIAL_BACK_TIMEOUT):
                return Message(await self._try(wanted, request.peer))
        return Message(False)

    async def _try(self, wanted: Endpoint, peer: PeerId) -> bool:
        connection, udp = self._quic.endpoint.dial_alone(
            wanted.host, wanted.port, ID.from_string(peer)
        )
        try:
            await connection.wait_open()
            return True
        except TransportError:
            return False
        finally:
            connection.shut(reason="dial-back done")
            udp.close()

    # -- from relayed to direct ---------------------------------------------------------------

    def candidates(self) -> list[Endpoint]:
        """Where a peer may try to reach us."""
        pairs = [*self._observed.candidates, *self._own()]
        unique = list(dict.fromkeys(pairs))[:_MOST_CANDIDATES]
        return [Endpoint(host=host, port=port) for host, port in unique]

    async def _leave_relay(self, link: Link) -> None:
        """Try for a direct path while the link is relayed. One side leads: the one that offered."""
        if not link.offered_here:
            return
        for wait in itertools.chain(_PUNCH_AGAIN, itertools.repeat(_PUNCH_LATER)):
            with trio.move_on_after(wait):
                await link.wait_down()
            if not link.is_up or link.path != "relayed":
                return
            try:
                if await self._punch(link, dial=True) or await self._punch(link, dial=False):
                    return
            except TransportError as error:
                logger.debug("no hole to %s: %s", link.peer, error)

    async def _punch(self, link: Link, *, dial: bool) -> bool:
        """One attempt; ``dial``: we dial and the other opens, or the other way round."""
        mine = [each.model_dump() for each in self.candidates()]
        body = {"candidates": mine, "dial": not dial}
        if dial:
            answer = await link.request(PUNCH, body, timeout=5)
            theirs = _read(_PunchBody, answer.body).candidates
            return await self._dial_through(link, theirs)
        answer = await link.request(PUNCH, {**body, "candidates": mine}, timeout=5)
        await self._open(_read(_PunchBody, answer.body).candidates)
        return link.path != "relayed"

    async def punch(self, request: Request) -> Message:
        """Serves PUNCH: begin at once, and say where we may be reached."""
        wanted = _read(_PunchBody, request.message.body)
        if self._nursery is None:
            raise RemoteError("refused", "shutting down")
        if wanted.dial:
            self._nursery.start_soon(self._dial_through, request.link, wanted.candidates)
        else:
            self._nursery.start_soon(self._open, wanted.candidates)
        mine = [each.model_dump() for each in self.candidates()]
        return Message({"candidates": mine, "dial": wanted.dial})

    async def _open(self, candidates: Sequence[Endpoint]) -> None:
        """Send a byte to each candidate again and again: to our NAT, what comes from there is then
        an answer. The other end drops the bytes."""
        until = trio.current_time() + _PUNCH_FOR
        while trio.current_time() < until:
            for each in candidates:
                self._quic.endpoint.send_byte(each.host, each.port)
            await trio.sleep(_PUNCH_EVERY)

    async def _dial_through(self, link: Link, candidates: Sequence[Endpoint]) -> bool:
        """Dial all candidates at once; the link moves to the first that answers."""
        won: list[MeshConnection] = []

        async def attempt(each: Endpoint) -> None:
            try:
                connection = self._quic.endpoint.dial(
                    each.host, each.port, ID.from_string(link.peer)
                )
            except (TransportError, ValueError):
                return
            connection.is_punching = True
            try:
                await connection.wait_open()
            except BaseException as error:
                connection.shut(reason="hole punching ended")
                if not isinstance(error, TransportError):
                    raise
                return
            if won:
                connection.shut(reason="another path was faster")
                return
            won.append(connection)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(_PUNCH_FOR):
            async with trio.open_nursery() as nursery:
                for each in candidates:
                    if _is_address(each.host):
                        nursery.start_soon(attempt, each)
        if not won:
            return False
        if link.path != "relayed":  # the peer's own dial has won meanwhile
            won[0].shut(reason="another path was faster")
            return True
        try:
            await self._promote(link, won[0])
        except (TransportError, DialError) as error:
            won[0].shut(reason="the link did not move")
            logger.debug("link to %s stays relayed: %s", link.peer, error)
            return False
        return True


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
