"""Addresses of peers as text: ``/ip4/192.0.2.1/udp/4001/quic-v1/p2p/12D3Koo…``."""

from __future__ import annotations

import multiaddr.exceptions
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from mesh.identity import PeerId
from mesh.transport.errors import DialError

_CIRCUIT = "/p2p-circuit"
MAX_ADDRESS = 1024  # characters; a relayed address names three peers


def parse_address(text: str) -> tuple[PeerId, Multiaddr]:
    """The peer that an address names last, and the address. Raises DialError."""
    if len(text) > MAX_ADDRESS:
        raise DialError("an address is too long")
    try:
        address = Multiaddr(text)
        peer = address.get_peer_id()
        if peer is None:
            raise DialError(f"the address does not end in a peer id: {text}")
        return PeerId(ID.from_string(peer).to_base58()), address
    except (multiaddr.exceptions.Error, ValueError) as error:
        raise DialError(f"not an address: {text}") from error


def parse_circuit(text: str) -> tuple[PeerId, str] | None:
    """The relay that a relayed address goes through, and the relay's own address; None for a direct
    address. Raises DialError for what is no address."""
    own, circuit, _ = text.partition(_CIRCUIT)
    if not circuit:
        return None
    relay, _ = parse_address(own)
    return relay, own
