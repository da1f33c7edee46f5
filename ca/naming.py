"""What certificates name: nodes, networks, PeerIds and roles.

A certificate names its node by one URI, ``libp2p://<network>/<PeerId>``; a CA certificate names its
network by ``libp2p://<network>``. Everything here is checked against a small alphabet, so that a
name taken from a certificate can go into a log line, a topic or a file name as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NewType

import base58
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PeerId = NewType("PeerId", str)

# A DNS label: it becomes a part of topics and of mDNS records.
_NETWORK = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
# What looks like a PeerId or a serial number is no name, so that `revoke` cannot take one for
# the other.
_NODE_NAME = re.compile(
    r"(?!12D3KooW)(?![0-9a-f]{40}\Z)[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
NETWORK_RULE = "1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or digit"
NODE_NAME_RULE = "1 to 63 of A-Z, a-z, 0-9, '.', '_' and -, beginning and ending with A-Z, a-z, 0-9"

_URI_SCHEME = "libp2p://"
_URI = re.compile(r"libp2p://([a-z0-9-]{1,63})(?:/([1-9A-HJ-NP-Za-km-z]{1,64}))?")

# A PeerId of an Ed25519 key is the base58 of an "identity" multihash over the key's protobuf form
# (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md): code 0, length 36, then field
# 1 = 1 (Ed25519), field 2 = the 32 bytes of the key.
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_PEER_ID_LENGTH = 52  # characters, always for this prefix

# Points of order 1, 2, 4 and 8, with the sign bit masked, and the two encodings above the prime
# that decode to one of them. Anybody can make signatures that verify under such a "key".
_SMALL_ORDER = frozenset(
    bytes.fromhex(encoding)
    for encoding in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


class Role(StrEnum):
    """What a certificate allows its node to do."""

    SERVE = "serve"  # be sent work
    USE = "use"  # send work
    ADMIN = "admin"  # control other nodes


def parse_roles(text: str) -> frozenset[Role]:
    """Roles from ``serve,use``. Raises ValueError for none, an unknown one or one given twice."""
    words = [word.strip() for word in text.split(",")]
    known = {role.value: role for role in Role}
    for word in words:
        if word not in known:
            raise ValueError(f"unknown role {word!r}: roles are {', '.join(known)}")
    if len(set(words)) != len(words):
        raise ValueError(f"a role is given twice in {text!r}")
    return frozenset(known[word] for word in words)


def format_roles(roles: Iterable[Role]) -> str:
    """The one written form of a set of roles: sorted, joined by commas."""
    return ",".join(sorted(roles))


def is_network(text: str) -> bool:
    """Whether ``text`` can be a network's name (:data:`NETWORK_RULE`)."""
    return _NETWORK.fullmatch(text) is not None


def is_node_name(text: str) -> bool:
    """Whether ``text`` can be a node's name (:data:`NODE_NAME_RULE`)."""
    return _NODE_NAME.fullmatch(text) is not None


def is_strong_key(key: Ed25519PublicKey) -> bool:
    """Whether only the holder of a private key can sign for ``key``."""
    raw = key.public_bytes_raw()
    return raw[:31] + bytes([raw[31] & 0x7F]) not in _SMALL_ORDER


def peer_id_of(public_key: Ed25519PublicKey) -> PeerId:
    """The libp2p PeerId of a node's key, in base58."""
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key.public_bytes_raw()).decode())


def public_key_of(peer_id: str) -> Ed25519PublicKey:
    """The key inside a PeerId. Raises ValueError when it is not the PeerId of an Ed25519 key."""
    if len(peer_id) != _PEER_ID_LENGTH:
        raise ValueError("not the PeerId of an Ed25519 key")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        raise ValueError("not the PeerId of an Ed25519 key") from None
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise ValueError("not the PeerId of an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw[len(_PEER_ID_PREFIX) :])


def node_uri(network: str, peer_id: str) -> str:
    """The URI that names a node in its certificate."""
    return f"{_URI_SCHEME}{network}/{peer_id}"


def network_uri(network: str) -> str:
    """The URI that names the network in a CA certificate."""
    return f"{_URI_SCHEME}{network}"


def parse_uri(uri: str) -> tuple[str, str | None]:
    """``(network, PeerId or None)`` of a URI made here. Raises ValueError for any other."""
    match = _URI.fullmatch(uri)
    if match is None or not is_network(match[1]):
        raise ValueError("not a libp2p://<network>/<PeerId> URI")
    return match[1], match[2]
