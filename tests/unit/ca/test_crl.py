"""Revocation lists: what they say and whose word counts."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from ca.certificate import CertificateError, Reason, load_root
from ca.crl import MAX_CRL_BYTES, build_crl, read_crl_file, verify_crl
from ca.pem import write_bundle

NOW = 1_800_000_000.0


def crl(ca, number=7, revoked=None, key=None) -> bytes:
    return build_crl(key or ca.key, ca.der, number=number, now=NOW, revoked=revoked or {})


def refused(der, roots, reason) -> None:
    with pytest.raises(CertificateError) as caught:
        verify_crl(der, roots)
    assert caught.value.reason is reason


def test_what_a_list_says(acme):
    der = crl(acme, 7, {5: NOW - 10, (1 << 159) - 1: NOW})
    read = verify_crl(der, [acme.root])
    assert read.number == 7
    assert read.network == "acme"
    assert read.root_key == acme.root.key
    assert read.revoked == {5: NOW - 10, (1 << 159) - 1: NOW}
    assert read.issued.timestamp() == NOW
    assert read.der == der


def test_an_empty_list(acme):
    assert verify_crl(crl(acme), [acme.root]).revoked == {}


def test_only_a_trusted_root_speaks(acme, make_ca):
    other = make_ca()
    refused(crl(other), [acme.root], Reason.UNKNOWN_CA)
    refused(crl(acme, key=other.key), [acme.root], Reason.UNKNOWN_CA)
    refused(crl(acme), [], Reason.UNKNOWN_CA)
    assert verify_crl(crl(other), [acme.root, other.root]).root_key == other.root.key


def test_a_node_cannot_speak_for_the_ca(acme):
    key = Ed25519PrivateKey.generate()
    leaf = acme.leaf(key=key)
    der = build_crl(key, leaf, number=9, now=NOW, revoked={1: NOW})
    refused(der, [acme.root], Reason.UNKNOWN_CA)


def test_a_root_that_may_not_sign_lists(acme):
    subject = x509.load_der_x509_certificate(acme.der).subject
    usage = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
    quiet = load_root(
        acme.forge(
            key=acme.key,
            issuer=subject,
            subject=subject,
            san=[x509.UniformResourceIdentifier("libp2p://acme")],
            constraints=x509.BasicConstraints(True, 0),
            usage=usage,
            roles=None,
        )
    )
    refused(crl(acme), [quiet], Reason.NOT_A_CA)


@pytest.mark.filterwarnings("ignore")
def test_every_single_changed_bit_is_refused(acme):
    # Some signatures end in bits that are zero and could be called unused; take one of those.
    serial = 5
    while (der := crl(acme, revoked={serial: NOW}))[-1] & 7:
        serial += 1
    roots = [acme.root]
    for position in range(len(der) * 8):
        changed = bytearray(der)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(CertificateError):
            verify_crl(bytes(changed), roots)


def test_size_is_bounded_and_the_largest_fits(acme):
    refused(b"\x30" * (MAX_CRL_BYTES + 1), [acme.root], Reason.MALFORMED)
    big = crl(acme, revoked={(1 << 158) + n: NOW for n in range(6000)})
    assert len(big) < MAX_CRL_BYTES
    assert len(verify_crl(big, [acme.root]).revoked) == 6000


def test_files_in_pem_and_der(acme):
    der = crl(acme)
    pem = x509.load_der_x509_crl(der).public_bytes(Encoding.PEM)
    assert read_crl_file(pem) == der
    assert read_crl_file(der) == der
    for wrong in (pem[:80], write_bundle([acme.der]), b"-----BEGIN" + bytes(3 * MAX_CRL_BYTES)):
        with pytest.raises(CertificateError):
            read_crl_file(wrong)
