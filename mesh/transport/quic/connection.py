"""One QUIC connection: events of the engine become streams, and writes become datagrams.

All work is done where it arises, without tasks of its own: a batch of datagrams is fed by the
endpoint and followed by one :meth:`MeshConnection.pump`, a write flushes at once, and timers are
kept by the endpoint. py-libp2p sees an ``IMuxedConn``.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import trio
from aioquic.quic import events
from aioquic.quic.connection import QuicConnectionState
from libp2p.abc import ConnectionType, IMuxedConn
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from ca.certificate import Certificate
from mesh.transport.errors import DialError, NotAdmitted
from mesh.transport.quic.core import MeshQuic
from mesh.transport.quic.mtu import PathMtu, ladder_for
from mesh.transport.quic.stream import Buffer, MeshStream

if TYPE_CHECKING:
    from mesh.transport.quic.endpoint import Endpoint
    from mesh.transport.quic.udp import UdpSocket

logger = logging.getLogger(__name__)

REFUSED = 0x10E  # application error code: the peer is not admitted
_HANDSHAKE = 10.0  # seconds, inbound: whoever is not admitted by then does not stay
_STREAM_GIVEN_UP = 0x00
# A host that says so again and again over this many seconds, with no packet of the peer between,
# has nobody on that port. One answer proves nothing: it can be forged, or come from a router.
_REFUSED_FOR = 0.6
_ASK_AGAIN = 0.12  # seconds between packets sent to get such an answer


class State(Enum):
    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSED = "closed"


class MeshConnection(IMuxedConn):
    """A connection to one peer. ``peer_id`` and ``certificate`` are set once it is open."""

    def __init__(
        self,
        *,
        engine: MeshQuic,
        endpoint: Endpoint,
        udp: UdpSocket,
        expected: ID | None,
        is_initiator: bool,
    ) -> None:
        self.engine = engine
        self.udp = udp
        self.state = State.HANDSHAKE
        self.peer_id = expected
        self.certificate: Certificate | None = None
        self.close_reason = ""
        self.is_punching = False  # into a NAT that may refuse at first
        self.event_started = trio.Event()
        self.timer_at: float | None = None  # this and the next are kept by the endpoint
        self.timer_key: int | None = None
        self.blocked: set[MeshStream] = set()  # streams with a writer that waits
        self.on_close: Callable[[], Awaitable[None]] | None = None  # set by the swarm
        self.on_path_change: Callable[[], None] | None = None
        self._endpoint = endpoint
        self._expected = expected
        self._is_initiator = is_initiator
        self._streams: dict[int, MeshStream] = {}
        self._next_outbound = 0 if is_initiator else 1
        self._next_inbound = 1 if is_initiator else 0
        self._skipped_inbound: set[int] = set()
        self._accepting: deque[MeshStream] = deque()
        self._accept_wake = trio.Event()
        self._settled = trio.Event()  # open, or failed
        self._closed = trio.Event()
        self._path: Any = None
        self._keepalive_at = 0.0
        self._kept_alive_at = 0.0  # when the last ping for that was sent
        self._refusal: str | None = None
        self._refused_since: float | None = None
        self._ask_at: float | None = None
        self._give_up_at = engine.last_received + _HANDSHAKE

    # -- driven by the endpoint ---------------------------------------------------------------

    def pump(self) -> None:
        """Take what the engine made of the last input, then send what it wants sent."""
        while (event := self.engine.next_event()) is not None:
            self._handle(event)
        if self.state is State.CLOSED:
            return
        if self.engine._state is QuicConnectionState.DRAINING:
            # The peer has closed. The engine reports it only after its draining period.
            self._handle(self.engine._close_event)
            return
        self._follow_path()
        self._endpoint.flush(self)
        for stream in list(self.blocked):
            stream.refresh_writable()

    def _handle(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.StreamDataReceived):
            stream = self._stream_for(event.stream_id)
            if stream is not None:
                stream.feed(event.data, event.end_stream)
            else:
                self.consumed(event.stream_id, len(event.data))
        elif isinstance(event, events.ConnectionIdIssued):
            self._endpoint.add_route(event.connection_id, self)
        elif isinstance(event, events.ConnectionIdRetired):
            self._endpoint.remove_route(event.connection_id)
        elif isinstance(event, events.StreamReset):
            if (stream := self._stream_for(event.stream_id)) is not None:
                stream.peer_reset()
        elif isinstance(event, events.StopSendingReceived):
            if (stream := self._stream_for(event.stream_id)) is not None:
                stream.peer_stopped()
        elif isinstance(event, events.HandshakeCompleted):
            self._complete_handshake()
        elif isinstance(event, events.ConnectionTerminated):
            reason = event.reason_phrase or f"closed by the peer (code {event.error_code:#x})"
            self._terminated(self._refusal or reason)

    def _complete_handshake(self) -> None:
        try:
            peer, certificate = self._endpoint.admit(
                self.engine.tls._peer_certificate, self._expected
            )
        except NotAdmitted as error:
            self._refusal = str(error)
            logger.info("refused %s: %s", self.remote_host, error)
            self.engine.close(error_code=REFUSED, reason_phrase=f"not admitted: {error}"[:200])
            self._endpoint.flush(self)
            self._terminated(self._refusal)
            return
        self.peer_id, self.certificate = peer, certificate
        self.state = State.OPEN
        self._settled.set()
        if not self._is_initiator:
            self._endpoint.accepted(self)

    def _terminated(self, reason: str) -> None:
        """Nothing will come any more: wake everybody who waits."""
        if self.state is State.CLOSED:
            return
        was_open = self.state is State.OPEN
        self.state = State.CLOSED
        self.close_reason = reason
        self._endpoint.forget(self)
        for stream in list(self._streams.values()):
            stream.peer_reset()
        self._streams.clear()
        self.blocked.clear()
        self._accepting.clear()
        self._accept_wake.set()
        self._settled.set()
        self._closed.set()
        if was_open and self.on_close is not None:
            self._endpoint.run_soon(self.on_close)

    def _follow_path(self) -> None:
        """Start the datagram size over when the peer is reached by another address."""
        address = self.engine.get_peer_address()
        if address is None or address == self._path:
            return
        moved = self._path is not None
        self._path = address
        ladder = ladder_for(address[0], can_forbid_fragments=self.udp.can_forbid_fragments)
        self.engine.start_path(PathMtu(ladder))
        if moved:
            logger.info("peer %s moved to %s:%s", self.peer_id, *address[:2])
            if self.on_path_change is not None:
                self.on_path_change()

    def timer_due(self, now: float) -> None:
        """The time that :meth:`next_timer` gave has come."""
        if self.state is State.HANDSHAKE and not self._is_initiator and now >= self._give_up_at:
            self.shut(reason="the handshake took too long")
            return
        engine_at = self.engine.get_timer()
        if engine_at is not None and engine_at <= now:
            self.engine.handle_timer(now)
            self.engine.review_congestion()
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            self.engine.send_ping(0)
        if self.state is State.OPEN and now >= self._keepalive_at:
            self._kept_alive_at = now
            self.engine.send_ping(0)
        self.pump()

    def refused(self, now: float) -> None:
        """The peer's host says that nobody listens where the peer was."""
        if self.state is State.CLOSED or (self.is_punching and self.state is State.HANDSHAKE):
            return
        if self._refused_since is None or self.engine.last_received > self._refused_since:
            self._refused_since = now
        if now - self._refused_since >= _REFUSED_FOR:
            self.engine.close(reason_phrase="nobody listens there")
            self._terminated("nobody listens there any more")
            return
        self._ask_at = now + _ASK_AGAIN
        self._endpoint.flush(self)

    def next_timer(self) -> float | None:
        timer: float | None = self.engine.get_timer()
        if self.state is State.HANDSHAKE and not self._is_initiator:
            timer = self._give_up_at if timer is None else min(timer, self._give_up_at)
        if self._ask_at is not None:
            timer = self._ask_at if timer is None else min(timer, self._ask_at)
        if self.state is State.OPEN:
            # Any packet from the peer restarts the wait: only an idle path needs a ping.
            active_at = max(self.engine.last_received, self._kept_alive_at)
            self._keepalive_at = active_at + self._endpoint.keepalive
            timer = self._keepalive_at if timer is None else min(timer, self._keepalive_at)
        return timer

    async def wait_open(self) -> None:
        """Wait for the end of the handshake. Raises DialError or NotAdmitted."""
        await self._settled.wait()
        if self.state is not State.OPEN:
            if self._refusal is not None:
                raise NotAdmitted(self._refusal)
            if self.close_reason.startswith("not admitted"):
                raise NotAdmitted(f"the peer refused us: {self.close_reason}")
            raise DialError(self.close_reason or "closed during the handshake")

    # -- used by streams ----------------------------------------------------------------------

    def _stream_for(self, stream_id: int) -> MeshStream | None:
        """The stream of an event, made on its first one; None for one that was closed here.

        Late data of a closed stream must not make a new one, so ids that were seen are known:
        all below ``_next_inbound`` except those that were skipped and may still come.
        """
        stream = self._streams.get(stream_id)
        if stream is not None:
            return stream
        if bool(stream_id & 2) or bool(stream_id & 1) != self._is_initiator:
            return None
        if stream_id >= self._next_inbound:
            self._skipped_inbound.update(range(self._next_inbound, stream_id, 4))
            self._next_inbound = stream_id + 4
        elif stream_id in self._skipped_inbound:
            self._skipped_inbound.discard(stream_id)
        else:
            return None
        stream = self._streams[stream_id] = MeshStream(self, stream_id)
        self._accepting.append(stream)
        self._accept_wake.set()
        return stream

    def consumed(self, stream_id: int, count: int) -> None:
        if count and self.engine.consumed(stream_id, count) and self.state is State.OPEN:
            self._endpoint.flush(self)

    def unacknowledged(self, stream_id: int) -> int:
        stream = self.engine._streams.get(stream_id)
        if stream is None:
            return 0
        sender = stream.sender
        return int(sender._buffer_stop - sender._buffer_start)

    def write_parts(self, stream_id: int, parts: Sequence[Buffer]) -> bool:
        """Send on a stream. Returns False when the stream does not take data any more."""
        if self.state is not State.OPEN:
            return False
        try:
            for part in parts:
                self.engine.send_stream_data(stream_id, part)
        except (RuntimeError, ValueError):
            return False
        self._endpoint.flush(self)
        return True

    def end_stream(self, stream_id: int) -> None:
        """Send the end of a stream, when there is still one to end."""
        if self.state is State.OPEN:
            try:
                self.engine.send_stream_data(stream_id, b"", end_stream=True)
            except (RuntimeError, ValueError):
                return
            self._endpoint.flush(self)

    def reset_stream(self, stream_id: int) -> None:
        if self.state is State.OPEN:
            try:
                self.engine.reset_stream(stream_id, _STREAM_GIVEN_UP)
            except ValueError:
                return
            self._endpoint.flush(self)

    def stop_stream(self, stream_id: int) -> None:
        if self.state is State.OPEN:
            try:
                self.engine.stop_stream(stream_id, _STREAM_GIVEN_UP)
            except ValueError:
                return
            self._endpoint.flush(self)

    def stream_done(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None:
            self.engine.forget_stream(stream_id)

    def set_priority(self, stream: MeshStream, priority: int) -> None:
        """Lower numbers are served first; streams start with ``core.DEFAULT_PRIORITY``."""
        self.engine.set_priority(stream.stream_id, priority)

    # -- the connection as py-libp2p and the link see it --------------------------------------

    async def start(self) -> None:
        self.event_started.set()
        await trio.lowlevel.checkpoint()

    async def open_stream(self) -> MeshStream:
        if self.state is not State.OPEN:
            raise MuxedConnUnavailable(self.close_reason or "the connection is not open")
        stream_id = self._next_outbound
        self._next_outbound += 4
        # The engine takes lower ids that were not used yet for finished ones: use it now.
        self.engine._get_or_create_stream_for_send(stream_id)
        stream = self._streams[stream_id] = MeshStream(self, stream_id)
        await trio.lowlevel.checkpoint()
        return stream

    async def accept_stream(self) -> MeshStream:
        while not self._accepting:
            if self.state is State.CLOSED:
                raise MuxedConnUnavailable(self.close_reason)
            self._accept_wake = trio.Event()
            await self._accept_wake.wait()
        return self._accepting.popleft()

    async def close(self) -> None:
        self.shut()
        await trio.lowlevel.checkpoint_if_cancelled()

    def shut(self, code: int = 0, reason: str = "closed here") -> None:
        """Close now: tell the peer and wake everybody who waits. Needs no further care."""
        if self.state is State.CLOSED:
            return
        self.engine.close(error_code=code, reason_phrase=reason[:200])
        self._endpoint.flush(self)
        self._terminated(reason)

    def abandon(self, reason: str) -> None:
        """The same without a word to the peer, when the engine is of no use any more."""
        self._terminated(reason)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    @property
    def is_initiator(self) -> bool:
        return self._is_initiator

    @property
    def is_established(self) -> bool:
        return self.state is State.OPEN

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def remote_host(self) -> str:
        address = self.engine.get_peer_address() or self._path
        return str(address[0]) if address else "?"

    def get_remote_address(self) -> tuple[str, int] | None:
        address = self.engine.get_peer_address() or self._path
        return (str(address[0]).partition("%")[0], int(address[1])) if address else None

    @property
    def rtt(self) -> float | None:
        """Smoothed round trip time in seconds; None before the first measurement."""
        recovery = self.engine._loss
        return float(recovery._rtt_smoothed) if recovery._rtt_initialized else None

    def get_transport_addresses(self) -> list[Multiaddr]:
        remote = self.get_remote_address()
        if remote is None:
            return []
        version = ipaddress.ip_address(remote[0]).version
        return [Multiaddr(f"/ip{version}/{remote[0]}/udp/{remote[1]}/quic-v1")]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT
