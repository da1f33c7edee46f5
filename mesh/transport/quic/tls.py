"""Admission inside the TLS handshake.

libp2p's TLS certificate is ephemeral and self-signed; an extension in it binds it to the peer's
long-lived key. A second, non-critical extension of ours carries the chain of the peer's *admission*
certificate. Both sides check it the moment the handshake is complete, before any byte of a stream
is looked at and before py-libp2p knows of the connection: a check in a protocol of its own would
lose the race against a client that sends a request right behind its last handshake message.

Implementations of libp2p that do not know the extension ignore it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import cbor2
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from libp2p.crypto.keys import PrivateKey
from libp2p.peer.id import ID
from libp2p.transport.quic.exceptions import QUICPeerVerificationError
from libp2p.transport.quic.security import QUICTLSConfigManager

from ca.certificate import Certificate, CertificateError
from mesh.identity import PeerId
from mesh.transport.errors import NotAdmitted

# Checks a chain (DER, leaf first, or None) against a peer; raises when it does not admit the peer.
Verify = Callable[[Sequence[bytes] | None, PeerId], Certificate]

# A UUID as an OID (ITU-T X.667): private without a registered enterprise number.
ADMISSION_EXTENSION = x509.ObjectIdentifier("2.25.89342903334759475226657157113795578040")
_LONGEST_CHAIN = 4
_LARGEST_CHAIN = 8192  # bytes


def pack_chain(chain: Sequence[bytes]) -> bytes:
    """The extension's content: a CBOR array of DER certificates, leaf first."""
    return cbor2.dumps(list(chain))


def unpack_chain(data: bytes) -> list[bytes]:
    """The inverse, of hostile input. Raises NotAdmitted."""
    if len(data) > _LARGEST_CHAIN:
        raise NotAdmitted("the certificate chain is too large")
    try:
        chain = cbor2.loads(data, max_depth=2, allow_indefinite=False)
    except (cbor2.CBORDecodeError, ValueError) as error:
        raise NotAdmitted("the certificate chain cannot be read") from error
    if (
        not isinstance(chain, list)
        or not 1 <= len(chain) <= _LONGEST_CHAIN
        or not all(isinstance(item, bytes) for item in chain)
    ):
        raise NotAdmitted("the certificate chain cannot be read")
    return chain


class AdmissionTls(QUICTLSConfigManager):
    """libp2p's TLS identity of this node, extended by its admission certificate."""

    def __init__(
        self, private_key: PrivateKey, peer_id: ID, chain: Sequence[bytes], verify: Verify
    ) -> None:
        super().__init__(private_key, peer_id)
        self.tls_config: Any
        self._verify = verify
        if chain:
            self._carry(chain)

    def _carry(self, chain: Sequence[bytes]) -> None:
        old = self.tls_config.certificate
        builder = (
            x509.CertificateBuilder()
            .subject_name(old.subject)
            .issuer_name(old.issuer)
            .public_key(old.public_key())
            .serial_number(old.serial_number)
            .not_valid_before(old.not_valid_before_utc)
            .not_valid_after(old.not_valid_after_utc)
        )
        for extension in old.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        admission = x509.UnrecognizedExtension(ADMISSION_EXTENSION, pack_chain(chain))
        builder = builder.add_extension(admission, critical=False)
        self.tls_config = dataclasses.replace(
            self.tls_config,
            certificate=builder.sign(self.tls_config.private_key, hashes.SHA256()),
        )

    def admit(self, certificate: Any, expected: ID | None) -> tuple[ID, Certificate]:
        """Identity and admission certificate of the peer behind a TLS certificate.

        Raises NotAdmitted, whatever was wrong.
        """
        if certificate is None:
            raise NotAdmitted("the peer showed no TLS certificate")
        try:
            peer = self.verify_peer_identity(certificate, expected)
        except QUICPeerVerificationError as error:
            raise NotAdmitted(str(error)) from error
        try:
            extension = certificate.extensions.get_extension_for_oid(ADMISSION_EXTENSION)
            chain = unpack_chain(extension.value.value)
        except x509.ExtensionNotFound:
            chain = None
        except ValueError as error:
            raise NotAdmitted("the TLS certificate cannot be read") from error
        try:
            return peer, self._verify(chain, PeerId(peer.to_base58()))
        except CertificateError as error:
            raise NotAdmitted(error.message) from error
