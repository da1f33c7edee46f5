"""Circuit relay v2: through a peer to one that cannot be reached directly.

The relay only copies bytes. The two ends speak Noise with each other, so the relay can neither read
nor forge; and before anything else they show each other their admission certificates over it, so a
relayed peer is as admitted as a direct one. Only then does the swarm learn of the connection.

Any node relays for admitted peers that it has a direct connection to, reservation or not, within
limits on number, time and bytes. py-libp2p's own relay gives up circuits that are idle for a few
seconds and its dialling does not work through ``connect``, so only its messages are used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio
from libp2p.abc import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    HopMessage,
    Limit,
    Reservation,
    Status,
    StopMessage,
)
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as CircuitPeer
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from multiaddr import Multiaddr

from ca.certificate import Certificate, CertificateError
from mesh.identity import PeerId
from mesh.transport.errors import DialError, NotAdmitted, TransportError
from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.tls import Verify, pack_chain, unpack_chain

logger = logging.getLogger(__name__)

HOP = TProtocol("/libp2p/circuit/relay/0.2.0/hop")
STOP = TProtocol("/libp2p/circuit/relay/0.2.0/stop")
_ANSWER = 5.0  # seconds for one message of the protocol
_ADMISSION = 10.0  # seconds from the first byte of a circuit to an admitted connection
_GIVE_BACK = 1.0  # seconds that giving up a circuit may take
_PIECE = 64 << 10
_LARGEST_CHAIN = 8192


@dataclass(frozen=True)
class RelayLimits:
    """What this node gives away as a relay."""

    circuits: int = 64  # at once
    circuits_per_peer: int = 8
    seconds: float = 3600.0  # of one circuit
    bytes: int = 4 << 30  # of one circuit, both ways together


class Relay:
    """Both sides of circuits, and the middle. ``swarm`` is py-libp2p's."""

    def __init__(
        self,
        host: Any,
        *,
        chain: Callable[[], Sequence[bytes]],
        verify: Verify,
        limits: RelayLimits,
    ) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._chain = chain
        self._verify = verify
        self._limits = limits
        self._circuits: dict[str, int] = {}
        host.set_stream_handler(HOP, self._hop)
        host.set_stream_handler(STOP, self._stop)

    # -- in the middle ------------------------------------------------------------------------

    async def _hop(self, stream: Any) -> None:
        """A peer wants a reservation or a circuit through this node."""
        asking = stream.muxed_conn.peer_id
        try:
            with trio.fail_after(_ANSWER):
                message = await read_delimited_msg(stream, HopMessage)
            if message.type == HopMessage.RESERVE:
                await self._answer(stream, Status.OK, reserve=True)
                await stream.close()
                return
            if message.type != HopMessage.CONNECT:
                await self._answer(stream, Status.UNEXPECTED_MESSAGE)
                await stream.close()
                return
            await self._join(stream, asking, ID(message.peer.id))
        except Exception as error:
            logger.debug("circuit of %s: %r", asking, error)
            await stream.reset()

    async def _answer(self, stream: Any, status: Any, *, reserve: bool = False) -> None:
        message = HopMessage(type=HopMessage.STATUS, status=status)
        message.limit.CopyFrom(self._limit())
        if reserve:
            addresses = [address.to_bytes() for address in self._host.get_addrs()]
            expires = int(time.time() + self._limits.seconds)
            message.reservation.CopyFrom(Reservation(expire=expires, addrs=addresses))
        await write_delimited_msg(stream, message)

    def _limit(self) -> Limit:
        return Limit(duration=int(self._limits.seconds), data=self._limits.bytes)

    async def _join(self, stream: Any, asking: ID, target: ID) -> None:
        """Open the other half of a circuit and copy until one side is done."""
        name = str(asking)
        if (
            sum(self._circuits.values()) >= self._limits.circuits
            or self._circuits.get(name, 0) >= self._limits.circuits_per_peer
        ):
            await self._answer(stream, Status.RESOURCE_LIMIT_EXCEEDED)
            await stream.close()
            return
        direct = next(
            (
                connection
                for connection in self._swarm.get_connections(target)
                if isinstance(connection.muxed_conn, MeshConnection)
            ),
            None,
        )
        if direct is None or target == asking:
            await self._answer(stream, Status.NO_RESERVATION)
            await stream.close()
            return
        self._circuits[name] = self._circuits.get(name, 0) + 1
        try:
            with trio.fail_after(_ANSWER):
                other = await self._host.new_stream(target, [STOP])
                peer = CircuitPeer(id=asking.to_bytes())
                request = StopMessage(type=StopMessage.CONNECT, peer=peer, limit=self._limit())
                await write_delimited_msg(other, request)
                answer = await read_delimited_msg(other, StopMessage)
            if answer.status != Status.OK:
                await self._answer(stream, Status.CONNECTION_FAILED)
                await stream.close()
                return
            await self._answer(stream, Status.OK)
            await self._copy_both(stream, other)
        finally:
            self._circuits[name] -= 1
            if not self._circuits[name]:
                del self._circuits[name]

    async def _copy_both(self, one: Any, other: Any) -> None:
        left = self._limits.bytes

        async def copy(source: Any, target: Any) -> None:
            nonlocal left
            try:
                while left > 0:
                    data = await source.muxed_stream.read(_PIECE)
                    left -= len(data)
                    await target.muxed_stream.write(data)
            except Exception as error:
                logger.debug("circuit ends: %r", error)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(self._limits.seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copy, one, other)
                nursery.start_soon(copy, other, one)
        for stream in (one, other):
            await stream.reset()

    # -- at the ends --------------------------------------------------------------------------

    async def dial(self, relay: PeerId, peer: PeerId) -> Any:
        """A swarm connection to ``peer`` through ``relay``, admitted on both sides.

        Raises DialError, NotAdmitted.
        """
        stream: Any = None
        try:
            target = ID.from_string(peer)
            with trio.fail_after(_ADMISSION):
                stream = await self._host.new_stream(ID.from_string(relay), [HOP])
                request = HopMessage(
                    type=HopMessage.CONNECT, peer=CircuitPeer(id=target.to_bytes())
                )
                await write_delimited_msg(stream, request)
                answer = await read_delimited_msg(stream, HopMessage)
                if answer.status != Status.OK:
                    raise DialError(f"{relay} does not relay to {peer}: status {answer.status}")
                return await self._upgrade(stream, relay, target)
        except BaseException as error:
            # Also when it is cancelled: the peer itself may have come meanwhile.
            if stream is not None:
                with trio.move_on_after(_GIVE_BACK, shield=True):
                    await stream.reset()
            if not isinstance(error, Exception) or isinstance(error, TransportError):
                raise
            if isinstance(error, trio.TooSlowError):
                raise DialError(f"no circuit through {relay} in time") from error
            raise DialError(f"no circuit through {relay}: {error}") from error

    async def _stop(self, stream: Any) -> None:
        """A relay brings a circuit from a peer."""
        relay = PeerId(stream.muxed_conn.peer_id.to_base58())
        try:
            with trio.fail_after(_ADMISSION):
                message = await read_delimited_msg(stream, StopMessage)
                if message.type != StopMessage.CONNECT:
                    raise DialError("not a request to connect")
                answer = StopMessage(type=StopMessage.STATUS, status=Status.OK)
                await write_delimited_msg(stream, answer)
                connection = await self._upgrade(stream, relay, None)
            await connection.event_closed.wait()
        except Exception as error:
            logger.debug("circuit through %s: %r", relay, error)
            await stream.reset()

    async def _upgrade(self, stream: Any, relay: PeerId, target: ID | None) -> Any:
        """Noise, then certificates, then streams: in this order, so that a peer that is not
        admitted has nothing to talk to but the admission itself."""
        dialling = target is not None
        peer_part = f"/p2p/{target}" if target is not None else ""
        raw = RawConnection(
            stream.muxed_stream,
            dialling,
            ConnectionType.RELAYED,
            [Multiaddr(f"/p2p/{relay}/p2p-circuit{peer_part}")],
        )
        upgrader = self._swarm.upgrader
        secured = await upgrader.upgrade_security(raw, dialling, target)
        peer = secured.get_remote_peer()
        certificate = await self._admit(secured, PeerId(peer.to_base58()))
        muxed = await upgrader.upgrade_connection(secured, peer)
        muxed.certificate = certificate
        return await self._swarm.add_conn(muxed, "outbound" if dialling else "inbound")

    async def _admit(self, secured: Any, peer: PeerId) -> Certificate:
        chain = pack_chain(self._chain())
        await secured.write(len(chain).to_bytes(2, "big") + chain)
        size = int.from_bytes(await _read_exactly(secured, 2), "big")
        if size > _LARGEST_CHAIN:
            raise NotAdmitted("the certificate chain is too large")
        theirs = unpack_chain(await _read_exactly(secured, size))
        try:
            return self._verify(theirs, peer)
        except CertificateError as error:
            await secured.close()
            raise NotAdmitted(error.message) from error


async def _read_exactly(connection: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await connection.read(size - len(data))
        if not piece:
            raise DialError("the circuit ended during admission")
        data += piece
    return data
