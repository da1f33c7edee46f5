"""PEM bundles of certificates, as in ``node.pem``: the leaf first, then the CAs."""

from __future__ import annotations

from collections.abc import Iterable

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from ca.errors import CertificateError, Reason
from ca.form import guarded

MAX_BUNDLE_BYTES = 64 << 10
MAX_BUNDLE_CERTIFICATES = 16


def read_bundle(data: bytes) -> tuple[bytes, ...]:
    """The certificates of a PEM file, in DER, in order; there is at least one.

    Text between the blocks is allowed, a private key is not. Raises CertificateError: MALFORMED.
    """
    if len(data) > MAX_BUNDLE_BYTES:
        raise CertificateError(
            Reason.MALFORMED, f"more than {MAX_BUNDLE_BYTES} bytes of certificates"
        )
    if b"PRIVATE KEY-----" in data:
        raise CertificateError(
            Reason.MALFORMED, "there is a private key among the certificates: keep it apart"
        )
    if data.count(b"-----BEGIN CERTIFICATE-----") > MAX_BUNDLE_CERTIFICATES:
        raise CertificateError(
            Reason.MALFORMED, f"more than {MAX_BUNDLE_CERTIFICATES} certificates in one file"
        )
    if b"-----BEGIN CERTIFICATE REQUEST-----" in data:
        raise CertificateError(
            Reason.MALFORMED, "there is a request in it, which the CA has to sign: `meshca issue`"
        )
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise CertificateError(Reason.MALFORMED, "there is no PEM certificate in it")
    parsed = guarded("the PEM file", lambda: x509.load_pem_x509_certificates(data))
    return tuple(
        guarded("the PEM file", lambda one=one: one.public_bytes(Encoding.DER))  # type: ignore[misc]
        for one in parsed
    )


def write_bundle(chain_der: Iterable[bytes]) -> bytes:
    """A PEM file of certificates given in DER."""
    return b"".join(
        x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM) for der in chain_der
    )
