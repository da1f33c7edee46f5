"""Which certificates are trusted: the path to a root, dates, revocation.

A node trusts a set of roots, so that a CA can be replaced by running two for a while. Peers show a
chain, leaf first; it must lead to one of the roots, within one network.

The path builder of the ``cryptography`` library follows the Web PKI, which knows neither Ed25519
keys nor certificates named by URI alone, so the path is checked here, over that library's parser
and signatures. Everything is pure: the time is an argument, in seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ca.errors import CertificateError, Reason
from ca.form import (
    MAX_CERTIFICATE_BYTES,
    Certificate,
    Root,
    parse_certificate,
    read_ca,
    read_leaf,
)
from ca.naming import PeerId, Role, peer_id_of

__all__ = [
    "MAX_CERTIFICATE_BYTES",
    "MAX_CHAIN",
    "NOTHING_REVOKED",
    "SKEW",
    "Certificate",
    "CertificateError",
    "PeerId",
    "Reason",
    "Revoked",
    "Role",
    "Root",
    "TrustedPath",
    "check_now",
    "load_root",
    "peer_id_of",
    "read_certificate",
    "trusted_path",
    "verify_chain",
]

MAX_CHAIN = 4  # leaf, two intermediates, root
SKEW = 120.0  # seconds that two machines' clocks may differ

# Revoked serials under each root, keyed by the root's raw public key (32 bytes). Serials are random
# with 159 bits, so a root's list counts for every certificate below that root.
Revoked = Mapping[bytes, Container[int]]
NOTHING_REVOKED: Revoked = {}


@dataclass(frozen=True)
class TrustedPath:
    """A leaf that a root vouches for, with what remains to be checked each time: dates, revocation.

    ``intermediates`` are ``(serial, not_before, not_after)`` of the CAs between leaf and root.
    """

    certificate: Certificate
    root: Root
    intermediates: tuple[tuple[int, datetime, datetime], ...]


def load_root(der: bytes) -> Root:
    """Check that ``der`` is a CA certificate signed by itself. Dates are checked at each use.

    Raises CertificateError: MALFORMED, NOT_A_CA, UNKNOWN_CA (the signature is not its own).
    """
    parsed = parse_certificate(der, "the CA certificate")
    root = read_ca(parsed, der)
    if parsed.subject != parsed.issuer or not _signed_by(parsed, root.public_key):
        raise CertificateError(Reason.UNKNOWN_CA, "the CA certificate is not signed by itself")
    return root


def read_certificate(der: bytes) -> Certificate:
    """The fields of a node's certificate, form checked, *signature, dates and trust not checked*.

    Raises CertificateError: MALFORMED, NOT_A_LEAF.
    """
    return read_leaf(parse_certificate(der, "the certificate"), der)


def verify_chain(
    chain_der: Sequence[bytes],
    roots: Iterable[Root],
    *,
    network: str,
    now: float,
    revoked: Revoked = NOTHING_REVOKED,
    skew: float = SKEW,
) -> Certificate:
    """Check a peer's chain, leaf first, with or without the root at its end.

    ``now`` in seconds since the epoch, ``skew`` in seconds. Raises CertificateError with any
    reason but MISSING and WRONG_KEY: that the peer *holds* the key is for the caller to know.
    """
    path = trusted_path(chain_der, roots, network=network)
    check_now(path, now=now, revoked=revoked, skew=skew)
    return path.certificate


def trusted_path(chain_der: Sequence[bytes], roots: Iterable[Root], *, network: str) -> TrustedPath:
    """The part of :func:`verify_chain` that does not depend on time, so its result can be kept."""
    if not 1 <= len(chain_der) <= MAX_CHAIN:
        raise CertificateError(
            Reason.MALFORMED, f"a chain holds 1 to {MAX_CHAIN} certificates, not {len(chain_der)}"
        )
    current = parse_certificate(chain_der[0], "the certificate")
    leaf = read_leaf(current, chain_der[0])
    if leaf.network != network:
        raise CertificateError(
            Reason.WRONG_NETWORK,
            f"the certificate of {leaf.name} is for network {leaf.network}, this is {network}",
        )
    trusted = [root for root in roots if root.network == network]
    intermediates: list[tuple[int, datetime, datetime]] = []
    rest = list(chain_der[1:])
    while True:
        root = _issuing_root(current, trusted)
        if root is not None:
            break
        if not rest:
            raise CertificateError(
                Reason.UNKNOWN_CA,
                f"the certificate of {leaf.name} is not signed by a CA that this node trusts",
            )
        der = rest.pop(0)
        parsed = parse_certificate(der, "a CA certificate in the chain")
        ca = read_ca(parsed, der)
        if ca.network != network:
            raise CertificateError(
                Reason.WRONG_NETWORK,
                f"the certificate of {leaf.name} comes from a CA of network {ca.network}",
            )
        if current.issuer != parsed.subject or not _signed_by(current, ca.public_key):
            raise CertificateError(
                Reason.UNKNOWN_CA,
                f"the certificate of {leaf.name} is not signed by the next one in its chain",
            )
        _check_path_length(ca, len(intermediates))
        intermediates.append((parsed.serial_number, ca.not_before, ca.not_after))
        current = parsed
    _check_path_length(root, len(intermediates))
    if rest and rest != [root.der]:
        raise CertificateError(
            Reason.MALFORMED, "the chain holds certificates that do not belong to it"
        )
    certificate = replace(leaf, chain_der=tuple(chain_der[: len(intermediates) + 1]))
    return TrustedPath(certificate, root, tuple(intermediates))


def check_now(
    path: TrustedPath, *, now: float, revoked: Revoked = NOTHING_REVOKED, skew: float = SKEW
) -> None:
    """Check dates and revocation of a trusted path; cheap enough to repeat for live connections.

    Raises CertificateError: NOT_YET_VALID, EXPIRED, REVOKED.
    """
    leaf = path.certificate
    who = f"the certificate of {leaf.name}"
    _check_dates(who, leaf.not_before, leaf.not_after, now, skew)
    above = f"the CA certificate above {leaf.name}"
    for _, not_before, not_after in path.intermediates:
        _check_dates(above, not_before, not_after, now, skew)
    _check_dates(above, path.root.not_before, path.root.not_after, now, skew)
    serials = revoked.get(path.root.key, ())
    if leaf.serial in serials:
        raise CertificateError(Reason.REVOKED, f"{who} is revoked (serial {leaf.serial:040x})")
    if any(serial in serials for serial, _, _ in path.intermediates):
        raise CertificateError(Reason.REVOKED, f"a CA certificate above {leaf.name} is revoked")


def _check_dates(
    what: str, not_before: datetime, not_after: datetime, now: float, skew: float
) -> None:
    if now + skew < not_before.timestamp():
        raise CertificateError(
            Reason.NOT_YET_VALID,
            f"{what} is valid only from {_utc(not_before.timestamp())}, and this machine's clock "
            f"says {_utc(now)}: check the clocks of both machines and of the CA's",
        )
    if now - skew > not_after.timestamp():
        raise CertificateError(
            Reason.EXPIRED,
            f"{what} expired at {_utc(not_after.timestamp())} (this machine's clock says "
            f"{_utc(now)}): renew it, or set the clock if that is wrong",
        )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _check_path_length(ca: Root, below: int) -> None:
    if ca.path_length is not None and below > ca.path_length:
        raise CertificateError(
            Reason.PATH_TOO_LONG,
            f"{below} intermediate CAs where the CA above them allows {ca.path_length}",
        )


def _issuing_root(certificate: x509.Certificate, roots: Iterable[Root]) -> Root | None:
    issuer = certificate.issuer.public_bytes()
    for root in roots:
        if root.subject == issuer and _signed_by(certificate, root.public_key):
            return root
    return None


def _signed_by(certificate: x509.Certificate, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(certificate.signature, certificate.tbs_certificate_bytes)
    except InvalidSignature:
        return False
    return True
