"""Requests from machines that nobody knows yet."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from ca.certificate import CertificateError, Reason, peer_id_of
from ca.request import MAX_REQUEST_BYTES, make_request, read_request


def refused(pem: bytes, match: str) -> None:
    with pytest.raises(CertificateError, match=match) as caught:
        read_request(pem)
    assert caught.value.reason is Reason.MALFORMED


def csr(*names, key=None, extension=None, algorithm=None) -> bytes:
    subject = x509.Name([x509.NameAttribute(oid, value) for oid, value in names])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    if extension is not None:
        builder = builder.add_extension(extension, False)
    return builder.sign(key or Ed25519PrivateKey.generate(), algorithm).public_bytes(Encoding.PEM)


def test_round_trip():
    key = Ed25519PrivateKey.generate()
    request = read_request(make_request(key, "desk-7"))
    assert request.name == "desk-7"
    assert request.peer_id == peer_id_of(key.public_key())
    assert request.public_key == key.public_key()


def test_names_are_bounded():
    for name in ("", "a/b", "a" * 64, "a\nb"):
        with pytest.raises(ValueError, match="name"):
            make_request(Ed25519PrivateKey.generate(), name)
    refused(csr((NameOID.COMMON_NAME, "a/b")), "subject")
    refused(csr(), "subject")
    refused(csr((NameOID.COMMON_NAME, "a"), (NameOID.ORGANIZATION_NAME, "o")), "subject")
    refused(csr((NameOID.ORGANIZATION_NAME, "o")), "subject")


def test_only_ed25519():
    key = ec.generate_private_key(ec.SECP256R1())
    refused(csr((NameOID.COMMON_NAME, "a"), key=key, algorithm=hashes.SHA256()), "Ed25519")


def test_the_key_must_have_signed_it():
    pem = make_request(Ed25519PrivateKey.generate(), "desk-7")
    der = x509.load_pem_x509_csr(pem).public_bytes(Encoding.DER)
    mine = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    old = x509.load_pem_x509_csr(pem).public_key().public_bytes_raw()
    stolen = x509.load_der_x509_csr(der.replace(old, mine)).public_bytes(Encoding.PEM)
    refused(stolen, "not signed by the key")


def test_a_request_cannot_ask_for_more():
    refused(
        csr((NameOID.COMMON_NAME, "a"), extension=x509.BasicConstraints(True, None)),
        "the CA alone",
    )


def test_only_one_block_and_not_too_much():
    pem = make_request(Ed25519PrivateKey.generate(), "desk-7")
    refused(pem + pem, "not one certificate request")
    refused(b"", "not one certificate request")
    refused(pem + b"x" * MAX_REQUEST_BYTES, "at most")
    refused(pem.replace(b"CERTIFICATE REQUEST", b"CERTIFICATE"), "cannot be read")
    refused(pem[:100] + pem[110:], "cannot be read")
