"""py-libp2p's QUIC transport, with everything below its configuration replaced.

The parent gives the TLS configuration of libp2p and the interface that a swarm expects. Its own
connection and listener are not used: they lose data, leak and poll (see the modules beside this
one for each defect).
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from typing import Any

import psutil
import trio
from libp2p.abc import IListener
from libp2p.crypto.keys import PrivateKey
from libp2p.custom_types import THandler
from libp2p.peer.id import ID
from libp2p.transport.quic.config import QUICTransportConfig
from libp2p.transport.quic.transport import QUICTransport
from multiaddr import Multiaddr
from multiaddr.exceptions import ProtocolLookupError

from mesh.transport.errors import DialError, ListenError
from mesh.transport.quic.congestion import CONTROLLERS
from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.core import Tuning
from mesh.transport.quic.endpoint import Endpoint
from mesh.transport.quic.tls import AdmissionTls, Verify
from mesh.transport.quic.udp import UdpSocket


def endpoint_of(address: Multiaddr) -> tuple[str, int]:
    """Host (an IP address) and UDP port of ``/ip4|ip6/…/udp/…/quic-v1``. Raises ValueError."""
    protocols = [protocol.name for protocol in address.protocols()]
    if protocols[1:3] != ["udp", "quic-v1"] or protocols[0] not in ("ip4", "ip6"):
        raise ValueError(f"not a QUIC address: {address}")
    return str(address.value_for_protocol(protocols[0])), int(address.value_for_protocol("udp"))


def quic_address(host: str, port: int) -> Multiaddr:
    bare = host.partition("%")[0]
    return Multiaddr(f"/ip{ipaddress.ip_address(bare).version}/{bare}/udp/{port}/quic-v1")


def interface_addresses(family: int) -> list[str]:
    """Addresses of this machine that others can use; loopback only when there is no other."""
    usable, loopback = [], []
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family != family:
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if address.is_loopback:
                loopback.append(str(address))
            elif not address.is_link_local and not address.is_unspecified:
                usable.append(str(address))
    return usable or loopback


class MeshListener(IListener):
    """One listening socket."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._udp: UdpSocket | None = None

    async def listen(self, maddr: Multiaddr) -> None:
        """Raises ListenError with a message for the user."""
        try:
            host, port = endpoint_of(maddr)
        except (ValueError, IndexError, ProtocolLookupError) as error:
            raise ListenError(f"not a QUIC address to listen on: {maddr}") from error
        self._udp = self._endpoint.listen(host, port)
        await trio.lowlevel.checkpoint()

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        """Where others reach this socket: for a wildcard, the addresses of the interfaces now."""
        if self._udp is None or self._udp.closed:
            return ()
        hosts = [self._udp.host]
        if ipaddress.ip_address(self._udp.host.partition("%")[0]).is_unspecified:
            hosts = interface_addresses(self._udp.family)
        return tuple(quic_address(host, self._udp.port) for host in hosts)

    async def close(self) -> None:
        if self._udp is not None:
            self._udp.close()
        await trio.lowlevel.checkpoint()


class MeshQuicTransport(QUICTransport):
    """The transport registered with the swarm."""

    def __init__(
        self,
        private_key: PrivateKey,
        *,
        chain: Sequence[bytes],
        verify: Verify,
        tuning: Tuning,
        idle_timeout: float,
        keepalive: float,
    ) -> None:
        config = QUICTransportConfig(
            min_connections=0,
            low_watermark=0,
            enable_draft29=False,
            idle_timeout=idle_timeout,
            max_datagram_size=1200,
            congestion_control_algorithm=CONTROLLERS[tuning.congestion],
            STREAM_FLOW_CONTROL_WINDOW=tuning.stream_window,
            CONNECTION_FLOW_CONTROL_WINDOW=tuning.connection_window,
        )
        super().__init__(private_key, config)
        self._verify = verify
        self._use_chain(chain)
        self.endpoint = Endpoint(
            tls=self._security_manager,
            client=self._quic_configs["quic-v1_client"],
            server=self._quic_configs["quic-v1_server"],
            tuning=tuning,
            keepalive=keepalive,
            clock=time.monotonic,
        )

    def _use_chain(self, chain: Sequence[bytes]) -> None:
        self._security_manager = AdmissionTls(self._private_key, self._peer_id, chain, self._verify)
        self._quic_configs: dict[Any, Any] = {}
        self._setup_quic_configurations()

    def renew(self, chain: Sequence[bytes]) -> None:
        """Show this certificate chain in new handshakes."""
        self._use_chain(chain)
        self.endpoint.use_identity(
            self._security_manager,
            self._quic_configs["quic-v1_client"],
            self._quic_configs["quic-v1_server"],
        )

    def create_listener(self, handler_function: THandler) -> MeshListener:
        return MeshListener(self.endpoint)

    async def dial(self, maddr: Multiaddr) -> MeshConnection:
        """Connect to an address that ends in ``/p2p/…``. Raises DialError or NotAdmitted."""
        try:
            host, port = endpoint_of(maddr)
            expected = ID.from_string(maddr.get_peer_id())
        except (ValueError, IndexError, ProtocolLookupError, TypeError) as error:
            raise DialError(f"not a QUIC address with a peer id: {maddr}") from error
        connection = self.endpoint.dial(host, port, expected)
        try:
            await connection.wait_open()
        except BaseException:
            connection.shut(reason="dial given up")
            raise
        return connection

    async def close(self) -> None:
        self.endpoint.shut()
        await trio.lowlevel.checkpoint()

    async def _cleanup_terminated_connection(self, connection: Any) -> None:
        """The endpoint keeps its own books."""
