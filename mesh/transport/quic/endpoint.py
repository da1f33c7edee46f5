"""Sockets and connections joined: datagrams to their connection, timers, new connections.

One socket serves listening and dialling, so a NAT on the way sees one mapping, and an address that
another peer has observed is good for everybody.
"""

from __future__ import annotations

import heapq
import ipaddress
import itertools
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from aioquic.buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import (
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler
from libp2p.peer.id import ID

from mesh.transport.errors import DialError, ListenError
from mesh.transport.quic.connection import MeshConnection, State
from mesh.transport.quic.core import MeshQuic, Tuning
from mesh.transport.quic.tls import AdmissionTls
from mesh.transport.quic.udp import Address, UdpSocket

logger = logging.getLogger(__name__)

_CID_LENGTH = 8
_MOST_HANDSHAKES = 256  # inbound, at once
_HANDSHAKES_ON_TRUST = 32  # of them, without proof that the client's address is its own
_TIMER_SLACK = 0.0005  # seconds: timers this close together are served together
_FAREWELL = 3.0  # seconds for which a closed connection is still answered with its close
_MOST_FAREWELLS = 1024


class Endpoint:
    """All QUIC connections of this node."""

    def __init__(
        self,
        *,
        tls: AdmissionTls,
        client: QuicConfiguration,
        server: QuicConfiguration,
        tuning: Tuning,
        keepalive: float,
        clock: Callable[[], float],
    ) -> None:
        self.keepalive = keepalive
        self.on_accept: Callable[[MeshConnection], None] | None = None
        self._tls = tls
        self._client = client
        self._server = server
        self._tuning = tuning
        self._clock = clock
        self._sockets: list[UdpSocket] = []
        self._routes: dict[bytes, MeshConnection] = {}
        self._connections: set[MeshConnection] = set()
        self._handshakes: set[MeshConnection] = set()  # inbound and not yet admitted
        self._timers: list[tuple[float, int]] = []
        self._timed: dict[int, MeshConnection] = {}  # by key, so that no timer keeps one alive
        self._timer_keys = itertools.count()
        self._timer_wakes_at = math.inf
        self._timer_wake = trio.Event()
        self._retry = QuicRetryTokenHandler()
        self._farewells: dict[bytes, tuple[float, bytes, Address, UdpSocket]] = {}
        self._nursery: trio.Nursery | None = None

    def use_identity(
        self, tls: AdmissionTls, client: QuicConfiguration, server: QuicConfiguration
    ) -> None:
        """Use another certificate in handshakes from now on."""
        self._tls, self._client, self._server = tls, client, server

    # -- sockets ------------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> UdpSocket:
        """Open a socket. Raises ListenError."""
        udp = UdpSocket(host, port)
        self._start(udp)
        return udp

    def _start(self, udp: UdpSocket) -> None:
        if self._nursery is None:
            udp.close()
            raise ListenError("the transport is not running")
        self._sockets.append(udp)
        self._nursery.start_soon(self._receive, udp)
        self._nursery.start_soon(udp.drain_backlog)

    def socket_for(self, host: str) -> UdpSocket:
        """The socket from which ``host`` can be reached; opened when there is none."""
        target = ipaddress.ip_address(host.partition("%")[0])
        family = socket.AF_INET if target.version == 4 else socket.AF_INET6
        for udp in self._sockets:
            if udp.family != family or udp.closed:
                continue
            bound = ipaddress.ip_address(udp.host.partition("%")[0])
            if bound.is_unspecified or bound.is_loopback == target.is_loopback:
                return udp
        udp = UdpSocket("0.0.0.0" if target.version == 4 else "::", 0)
        self._start(udp)
        return udp

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then close every connection and socket."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._run_timers)
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    # Before the nursery closes: connections that end now must not use it.
                    self._nursery = None
        finally:
            self._nursery = None
            self.shut()

    def shut(self) -> None:
        for connection in list(self._connections):
            connection.shut(reason="shutting down")
        for udp in self._sockets:
            udp.close()
        self._sockets.clear()
        self._routes.clear()
        self._farewells.clear()
        self._timers.clear()

    def run_soon(self, job: Callable[[], Awaitable[None]]) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._guarded, job)

    async def _guarded(self, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception:
            logger.exception("a callback of a connection failed")

    # -- datagrams ----------------------------------------------------------------------------

    async def _receive(self, udp: UdpSocket) -> None:
        routes = self._routes
        while not udp.closed:
            try:
                await udp.wait_readable()
            except trio.ClosedResourceError:
                return
            touched: dict[MeshConnection, None] = {}
            now = self._clock()
            for data, address in udp.receive():
                if len(data) < 1 + _CID_LENGTH:
                    continue
                short = not data[0] & 0x80
                cid = data[1 : 1 + _CID_LENGTH] if short else data[6 : 6 + data[5]]
                connection = routes.get(cid)
                if connection is None:
                    if short:
                        self._answer_stray(cid, now)
                        continue
                    connection = self._new_connection(udp, data, address)
                    if connection is None:
                        continue
                try:
                    connection.engine.receive_datagram(data, address, now)
                except Exception:
                    self._failed(connection)
                else:
                    touched[connection] = None
            for connection in touched:
                try:
                    connection.pump()
                except Exception:
                    self._failed(connection)
            for address in udp.take_refusals(look=not touched):
                self._refused(address, now)
            # While this waits for the next datagram it must not keep a closed connection alive.
            touched.clear()
            connection = None

    @staticmethod
    def _failed(connection: MeshConnection) -> None:
        """An error that nobody foresaw came of what a peer has sent, at once or when a timer was
        due: it ends that connection."""
        logger.exception("the connection with %s failed", connection.remote_host)
        connection.abandon("it could not be gone on with")

    def _refused(self, address: Address, now: float) -> None:
        """A host says that nobody listens on a port: the process of a peer may have ended."""
        for connection in list(self._connections):
            if connection.engine.get_peer_address() == address:
                connection.refused(now)

    def _new_connection(
        self, udp: UdpSocket, data: bytes, address: Address
    ) -> MeshConnection | None:
        """A datagram of a connection not known: the first of a new one, or nothing of ours."""
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=_CID_LENGTH)
        except ValueError:
            return None
        if header.version is not None and header.version not in self._server.supported_versions:
            if header.version != 0 and len(data) >= 1200:
                answer = encode_quic_version_negotiation(
                    source_cid=header.destination_cid,
                    destination_cid=header.source_cid,
                    supported_versions=self._server.supported_versions,
                )
                udp.send([(answer, address)])
            return None
        if (
            header.packet_type is not QuicPacketType.INITIAL
            or len(data) < 1200
            or self.on_accept is None
            or len(self._handshakes) >= _MOST_HANDSHAKES
        ):
            return None
        original_cid, retry_cid = header.destination_cid, None
        if header.token or len(self._handshakes) >= _HANDSHAKES_ON_TRUST:
            proven = self._prove_address(udp, header, address)
            if proven is None:
                return None
            original_cid, retry_cid = proven, header.destination_cid
        engine = MeshQuic(
            configuration=self._server,
            tuning=self._tuning,
            clock=self._clock,
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retry_cid,
        )
        connection = MeshConnection(
            engine=engine, endpoint=self, udp=udp, expected=None, is_initiator=False
        )
        self._handshakes.add(connection)
        self._connections.add(connection)
        self.add_route(header.destination_cid, connection)
        self.add_route(engine.host_cid, connection)
        return connection

    def _prove_address(self, udp: UdpSocket, header: Any, address: Address) -> bytes | None:
        """The connection id that a client began with, once it has shown that it gets what is sent
        to its address (RFC 9000, 8.1.2). Without that it is only told how; forged addresses cannot
        use up the handshakes that others need."""
        now = self._clock()
        if header.token:
            try:
                original: bytes = self._retry.validate_token(
                    address=address,
                    destination_cid=header.destination_cid,
                    token=header.token,
                    now=now,
                )
            except ValueError:
                return None
            return original
        source_cid = os.urandom(_CID_LENGTH)
        token = self._retry.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source_cid,
            now=now,
        )
        answer = encode_quic_retry(
            version=header.version,
            source_cid=source_cid,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )
        udp.send([(answer, address)])
        return None

    def dial(self, host: str, port: int, expected: ID) -> MeshConnection:
        """Begin a connection; await its ``wait_open``. Raises DialError, ListenError."""
        if self._nursery is None:
            raise DialError("the transport is not running")
        return self._dial_from(self.socket_for(host), host, port, expected)

    def dial_alone(self, host: str, port: int, expected: ID) -> tuple[MeshConnection, UdpSocket]:
        """The same from a new socket, which the caller closes at the end."""
        udp = UdpSocket("::" if ":" in host else "0.0.0.0", 0)
        self._start(udp)
        self._sockets.remove(udp)
        try:
            return self._dial_from(udp, host, port, expected), udp
        except DialError:
            udp.close()
            raise

    def send_byte(self, host: str, port: int) -> None:
        """Send one meaningless byte from the shared socket, to make a NAT expect answers."""
        try:
            self.socket_for(host).send([(b"\0", (host, port))])
        except (ListenError, ValueError) as error:
            logger.debug("no byte to %s: %s", host, error)

    def _dial_from(self, udp: UdpSocket, host: str, port: int, expected: ID) -> MeshConnection:
        try:
            found = socket.getaddrinfo(
                host, port, udp.family, socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
            )
        except OSError as error:
            raise DialError(f"not an address: {host}") from error
        engine = MeshQuic(configuration=self._client, tuning=self._tuning, clock=self._clock)
        connection = MeshConnection(
            engine=engine, endpoint=self, udp=udp, expected=expected, is_initiator=True
        )
        self._connections.add(connection)
        self.add_route(engine.host_cid, connection)
        engine.connect(found[0][4], now=self._clock())
        self.flush(connection)
        return connection

    def flush(self, connection: MeshConnection) -> None:
        """Send what the engine has ready and set its timer."""
        engine = connection.engine
        now = self._clock()
        if engine._network_paths:
            datagrams = engine.datagrams_to_send(now)
            if datagrams:
                for size in connection.udp.send(datagrams):
                    if engine.mtu is not None:
                        engine.mtu.lost(size, now)
                if connection.state is State.CLOSED or engine._close_event is not None:
                    self._keep_farewell(connection, datagrams[-1])
        if connection.state is not State.CLOSED:
            self._arm(connection)

    # -- closing ------------------------------------------------------------------------------

    def _keep_farewell(self, connection: MeshConnection, last: tuple[bytes, Address]) -> None:
        """The close may be lost: answer with it while the peer still sends (RFC 9000, 10.2.1)."""
        if len(self._farewells) >= _MOST_FAREWELLS:
            self._farewells.pop(next(iter(self._farewells)))
        until = self._clock() + _FAREWELL
        for host_cid in connection.engine._host_cids:
            self._farewells[host_cid.cid] = (until, last[0], last[1], connection.udp)

    def _answer_stray(self, cid: bytes, now: float) -> None:
        farewell = self._farewells.pop(cid, None)
        if farewell is not None and now < farewell[0] and not farewell[3].closed:
            farewell[3].send([(farewell[1], farewell[2])])

    # -- used by connections ------------------------------------------------------------------

    def admit(self, certificate: Any, expected: ID | None) -> tuple[ID, Any]:
        return self._tls.admit(certificate, expected)

    def accepted(self, connection: MeshConnection) -> None:
        self._handshakes.discard(connection)
        if self.on_accept is not None:
            self.on_accept(connection)

    def add_route(self, cid: bytes, connection: MeshConnection) -> None:
        self._routes[cid] = connection

    def remove_route(self, cid: bytes) -> None:
        self._routes.pop(cid, None)

    def forget(self, connection: MeshConnection) -> None:
        """Drop every reference to a closed connection."""
        self._connections.discard(connection)
        self._handshakes.discard(connection)
        engine = connection.engine
        for host_cid in engine._host_cids:
            self._routes.pop(host_cid.cid, None)
        self._routes.pop(engine.original_destination_connection_id, None)
        self._routes.pop(engine._retry_source_connection_id, None)
        if connection.timer_key is not None:
            self._timed.pop(connection.timer_key, None)

    @property
    def connections(self) -> frozenset[MeshConnection]:
        return frozenset(self._connections)

    # -- timers -------------------------------------------------------------------------------

    def _arm(self, connection: MeshConnection) -> None:
        """Note when the connection wants to be called. Later times cost nothing here: the entry
        that is there fires early and is put back."""
        at = connection.next_timer()
        if at is None or (
            connection.timer_at is not None and connection.timer_at <= at + _TIMER_SLACK
        ):
            return
        if connection.timer_key is None:
            connection.timer_key = next(self._timer_keys)
            self._timed[connection.timer_key] = connection
        connection.timer_at = at
        heapq.heappush(self._timers, (at, connection.timer_key))
        if at < self._timer_wakes_at:
            self._timer_wake.set()

    async def _run_timers(self) -> None:
        while True:
            self._timer_wakes_at = self._timers[0][0] if self._timers else math.inf
            self._timer_wake = trio.Event()
            with trio.move_on_at(self._timer_wakes_at + trio.current_time() - self._clock()):
                await self._timer_wake.wait()
            due = self._clock() + _TIMER_SLACK
            popped = []
            while self._timers and self._timers[0][0] <= due:
                popped.append(heapq.heappop(self._timers))
            # Each once: whoever wants to be called again at once lets others have their turn first.
            for at, key in popped:
                connection: MeshConnection | None = self._timed.get(key)
                if connection is None or connection.timer_at != at:
                    continue  # closed, or another entry stands for it
                connection.timer_at = None
                wanted = connection.next_timer()
                if wanted is not None and wanted <= due:
                    try:
                        connection.timer_due(max(wanted, self._clock()))
                    except Exception:
                        self._failed(connection)
                else:
                    self._arm(connection)
            connection = None
            await trio.lowlevel.checkpoint()
