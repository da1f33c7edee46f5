"""Certificate requests: what a node sends to its CA, and how the CA reads it.

A request is PKCS#10 with an Ed25519 key, the subject CN = node name, and nothing else. It is
hostile input: it comes from a machine that is not admitted yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from ca.errors import CertificateError, Reason
from ca.form import common_name, guarded
from ca.naming import NODE_NAME_RULE, PeerId, is_node_name, is_strong_key, peer_id_of

MAX_REQUEST_BYTES = 8192


@dataclass(frozen=True)
class Request:
    """A request whose form and self-signature have been checked."""

    name: str
    peer_id: PeerId
    public_key: Ed25519PublicKey = field(compare=False, repr=False)


def make_request(key: Ed25519PrivateKey, name: str) -> bytes:
    """A signed request, in PEM. Raises ValueError for a name that no certificate can have."""
    if not is_node_name(name):
        raise ValueError(f"a node's name is {NODE_NAME_RULE}")
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    )
    return builder.sign(key, None).public_bytes(Encoding.PEM)


def read_request(pem: bytes) -> Request:
    """Check a request in PEM. Raises CertificateError: MALFORMED, with what is wrong."""
    if len(pem) > MAX_REQUEST_BYTES:
        raise CertificateError(Reason.MALFORMED, f"a request has at most {MAX_REQUEST_BYTES} bytes")
    if pem.count(b"-----BEGIN ") != 1:
        raise CertificateError(Reason.MALFORMED, "this is not one certificate request in PEM")

    def read() -> Request:
        parsed = x509.load_pem_x509_csr(pem)
        key = parsed.public_key()
        if not isinstance(key, Ed25519PublicKey) or not is_strong_key(key):
            raise CertificateError(Reason.MALFORMED, "the request's key is not a fit Ed25519 key")
        if not parsed.is_signature_valid:
            raise CertificateError(
                Reason.MALFORMED, "the request is not signed by the key that it names"
            )
        if len(parsed.attributes) > 0:
            raise CertificateError(
                Reason.MALFORMED,
                "the request asks for attributes or extensions; the CA alone decides about those",
            )
        return Request(common_name(parsed.subject), peer_id_of(key), key)

    return guarded("the certificate request", read)
