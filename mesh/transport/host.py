"""The py-libp2p host: QUIC only, Noise only for what is relayed, and nobody in who is not admitted.

Settings here work around what the library does by default: it accepts plaintext, dials whatever it
knows, counts dead connections against a peer, limits how many connections may ever come in, and
waits 250 ms before every dial.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import trio
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p import new_host
from libp2p.crypto.ed25519 import Ed25519PrivateKey as Libp2pPrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.network.config import ConnectionConfig
from libp2p.network.exceptions import SwarmException
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.listen import MeshQuicTransport

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024
_MAX_STREAMS = 65_536


def key_pair_of(key: Ed25519PrivateKey) -> KeyPair:
    """The same key in py-libp2p's form."""
    raw = key.private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    private = Libp2pPrivateKey.from_bytes(raw)
    return KeyPair(private, private.get_public_key())


def build_host(
    keys: KeyPair,
    quic: MeshQuicTransport,
    *,
    is_admitted: Callable[[Any], bool],
    advertised: Callable[[Sequence[Multiaddr]], Sequence[Multiaddr]],
) -> Any:
    """A host over ``quic``.

    ``is_admitted`` judges a connection that is not QUIC (a relayed one) before the swarm knows it;
    ``advertised`` turns listening addresses into those told to others.
    """
    limits = ResourceManager(
        limits=ResourceLimits(max_connections=_MAX_CONNECTIONS, max_streams=_MAX_STREAMS),
        connection_limits=ConnectionLimits(max_established_total=_MAX_CONNECTIONS),
        enable_rate_limiting=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
        enable_memory_limits=False,
        enable_metrics=False,
    )
    noise = NoiseTransport(keys, noise_privkey=create_x25519_key_pair().private_key)
    host = new_host(
        key_pair=keys,
        transports=[quic],
        sec_opt={NOISE: noise},
        resource_manager=limits,
        connection_config=ConnectionConfig(
            min_connections=0,
            low_watermark=0,
            high_watermark=_MAX_CONNECTIONS,
            max_connections=_MAX_CONNECTIONS,
            max_connections_per_peer=8,
        ),
        addrs_factory=advertised,
        disable_identify_address_discovery=True,
    )
    _guard(host.get_network(), is_admitted)
    _contain(host.get_network())
    _quieten(host.get_network())
    return host


def _quieten(swarm: Any) -> None:
    """Keep the swarm from dialling by itself: links do that, and know when not to.

    With all its watermarks at zero it still aims at half of the connections that it may have, and
    dials whatever is in its address book; and a stream wanted by gossip to a peer that has just
    gone would bring the connection back.
    """

    async def nothing(*_: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def refuse(peer: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise SwarmException(f"there is no link to {peer}")

    swarm.auto_connector.run_background_task = nothing
    swarm.auto_connector.maybe_connect = nothing
    swarm.dial_peer = refuse


def _contain(swarm: Any) -> None:
    """What a peer sends on a stream of whatever protocol costs it that stream. An error that a
    handler of the library does not expect would otherwise end every connection."""
    handle = swarm.common_stream_handler

    async def contained(stream: Any) -> None:
        try:
            await handle(stream)
        except Exception as error:
            logger.warning("a stream of %s ended: %r", stream.muxed_conn.peer_id, error)
            await stream.reset()

    swarm.set_stream_handler(contained)


def _guard(swarm: Any, is_admitted: Callable[[Any], bool]) -> None:
    """Every connection of every transport and direction passes here before anything is served.

    A QUIC connection has been checked in its handshake; this holds even if that were bypassed.
    """
    register = swarm.add_conn

    async def add_conn(muxed: Any, direction: str = "unknown") -> Any:
        checked = (
            muxed.certificate is not None
            if isinstance(muxed, MeshConnection)
            else (is_admitted(muxed))
        )
        if not checked:
            with trio.CancelScope(shield=True):
                await muxed.close()
            raise SwarmException(f"{muxed.peer_id} is not admitted")
        connection = await register(muxed, direction)
        if muxed.is_closed:
            # It closed while it was being registered: the swarm has cleaned up before it entered
            # it, and would keep it, and gossip its peer, for ever.
            swarm.remove_conn(connection)
            await swarm.notify_disconnected(connection)
            raise SwarmException(f"the connection to {muxed.peer_id} closed at once")
        return connection

    swarm.add_conn = add_conn
