"""Identities of one network, and adverts that are opened once however many nodes get them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Role, load_root
from ca.issue import issue, make_root
from mesh.gossip.advert import Advert, SignedAdvert, open_advert, sign_advert
from mesh.gossip.wire import WIRE, encode
from mesh.identity import Identity, TrustStore, identity_of

NETWORK = "simulated"
NOW = 1_800_000_000.0  # seconds since 1970 for certificates; keys and PeerIds depend on names only


@dataclass(frozen=True, slots=True)
class Opened:
    """``matters`` stands for all of the advert that placement looks at."""

    signed: SignedAdvert
    matters: int


class Mint:
    """Makes identities, signs, and opens."""

    def __init__(self) -> None:
        self._key = _key("authority")
        self._root = load_root(make_root(self._key, NETWORK, serial=1, now=NOW))
        self._trust = TrustStore(NETWORK, [self._root], Path("no-lists-here"))
        self._identities: dict[str, Identity] = {}
        self._opened: dict[bytes, Opened] = {}

    def identity(self, name: str) -> Identity:
        if name not in self._identities:
            key = _key(name)
            der = issue(
                self._key,
                self._root.der,
                network=NETWORK,
                name=name,
                public_key=key.public_key(),
                roles=(Role.SERVE,),
                serial=2 + len(self._identities),
                now=NOW,
            )
            self._identities[name] = identity_of(key, [der], [self._root], now=NOW)
        return self._identities[name]

    def sign(self, name: str, advert: Advert) -> bytes:
        return sign_advert(self.identity(name), advert).envelope

    def open(self, envelope: bytes) -> Opened:
        """Raises AdvertError."""
        known = self._opened.get(envelope)
        if known is None:
            signed = open_advert(envelope, lambda chain: self._trust.verify(chain, NOW))
            fields = signed.advert.model_dump(
                context=WIRE,
                include={"state", "devices", "holdings", "wants", "speeds", "stored", "links"},
            )
            # Never 0, which stands for a node that is not there.
            known = Opened(signed, hash(encode(fields)) or 1)
            self._opened[envelope] = known
        return known


def _key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b".")[:32])
