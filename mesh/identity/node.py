"""Who this node is: its key and its certificate, loaded and checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import (
    Certificate,
    CertificateError,
    PeerId,
    Reason,
    Root,
    load_root,
    peer_id_of,
    read_certificate,
    verify_chain,
)
from ca.files import read_bounded
from ca.pem import MAX_BUNDLE_BYTES, read_bundle
from mesh.identity.keys import load_key, sign


class CertificateFileError(Exception):
    """A certificate file that this node cannot use; one line that names file and cause.

    ``reason`` is None when the file could not be read at all.
    """

    def __init__(self, message: str, reason: Reason | None = None) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class NodePem:
    """What a ``node.pem`` holds. ``chain_der`` is leaf first and without roots; nothing is verified
    but that every root is signed by itself."""

    certificate: Certificate
    chain_der: tuple[bytes, ...]
    roots: tuple[Root, ...]


@dataclass(frozen=True)
class Identity:
    """A node's key with the certificate for it and the roots that the node trusts.

    ``certificate.chain_der`` is what to show to peers.
    """

    key: Ed25519PrivateKey = field(repr=False, compare=False)
    certificate: Certificate
    roots: tuple[Root, ...] = field(repr=False)

    @property
    def peer_id(self) -> PeerId:
        return self.certificate.peer_id

    @property
    def network(self) -> str:
        return self.certificate.network

    def sign(self, tag: bytes, data: bytes) -> bytes:
        """Sign for the purpose that ``tag`` names; see :func:`mesh.identity.keys.sign`."""
        return sign(self.key, tag, data)


def load_node_pem(path: Path) -> NodePem:
    """Read ``node.pem``: the node's certificate, then intermediate CAs, then one or more roots.

    To trust a second CA of the same network, append its ``ca.pem``. Raises CertificateFileError.
    """
    certificates = _read_certificates(path)
    if _is_root(certificates[0]):
        raise CertificateFileError(
            f"{path} is a CA's certificate and not a node's: give the node.pem that `meshca issue` "
            "wrote for this node",
            Reason.NOT_A_LEAF,
        )
    try:
        leaf = read_certificate(certificates[0])
        roots, chain = _sort_out(certificates)
    except CertificateError as error:
        raise CertificateFileError(f"{path}: {error.message}", error.reason) from None
    if not roots:
        raise CertificateFileError(
            f"{path}: the CA's certificate is missing after the node's", Reason.UNKNOWN_CA
        )
    return NodePem(leaf, chain, roots)


def load_roots(path: Path) -> tuple[Root, ...]:
    """Read a ``ca.pem``: one or more roots and nothing else. Raises CertificateFileError."""
    try:
        return tuple(load_root(der) for der in _read_certificates(path))
    except CertificateError as error:
        raise CertificateFileError(f"{path}: {error.message}", error.reason) from None


def load_identity(key_path: Path, certificate_path: Path, *, now: float) -> Identity:
    """Load a node's key and certificate and check that they can be used at ``now`` (epoch seconds).

    Raises KeyFileError, or CertificateFileError with reason WRONG_KEY, EXPIRED, NOT_YET_VALID,
    UNKNOWN_CA or what else is wrong.
    """
    pem = load_node_pem(certificate_path)
    key = load_key(key_path)
    peer_id = peer_id_of(key.public_key())
    if pem.certificate.peer_id != peer_id:
        raise CertificateFileError(
            f"{certificate_path} is for another key: it names {pem.certificate.peer_id}, and "
            f"{key_path} is {peer_id}",
            Reason.WRONG_KEY,
        )
    return identity_of(key, pem.chain_der, pem.roots, now=now, source=str(certificate_path))


def identity_of(
    key: Ed25519PrivateKey,
    chain_der: Sequence[bytes],
    roots: Sequence[Root],
    *,
    now: float,
    source: str = "the certificate",
) -> Identity:
    """Put an identity together after checking all of it; ``source`` begins the error message."""
    try:
        leaf = read_certificate(chain_der[0])
        certificate = verify_chain(chain_der, roots, network=leaf.network, now=now)
    except CertificateError as error:
        raise CertificateFileError(f"{source}: {error.message}", error.reason) from None
    if certificate.peer_id != peer_id_of(key.public_key()):
        raise CertificateFileError(f"{source} is for another key", Reason.WRONG_KEY)
    return Identity(key, certificate, tuple(root for root in roots if root.network == leaf.network))


def _read_certificates(path: Path) -> tuple[bytes, ...]:
    try:
        return read_bundle(read_bounded(path, MAX_BUNDLE_BYTES))
    except FileNotFoundError:
        raise CertificateFileError(
            f"there is no certificate at {path}; `meshnode init` makes a request for one, which "
            "the CA signs"
        ) from None
    except OSError as error:
        raise CertificateFileError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CertificateFileError(str(error), Reason.MALFORMED) from None
    except CertificateError as error:
        raise CertificateFileError(f"{path}: {error.message}", error.reason) from None


def _is_root(der: bytes) -> bool:
    try:
        load_root(der)
    except CertificateError:
        return False
    return True


def _sort_out(certificates: Sequence[bytes]) -> tuple[tuple[Root, ...], tuple[bytes, ...]]:
    """Roots, and the leaf with the intermediates, each in the order of the file."""
    roots: list[Root] = []
    chain = [certificates[0]]
    for der in certificates[1:]:
        try:
            roots.append(load_root(der))
        except CertificateError as error:
            if error.reason is not Reason.UNKNOWN_CA:  # that is: not signed by itself
                raise
            chain.append(der)
    return tuple(roots), tuple(chain)
