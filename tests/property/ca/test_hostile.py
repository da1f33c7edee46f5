"""Hostile certificates, requests, revocation lists: refused in the documented way, always.

Each strategy starts from something valid and damages it, because random bytes do not get past the
first byte of a parser.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import example, given, settings
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import Ed25519PublicKey as Libp2pKey
from libp2p.peer.id import ID

from ca.certificate import (
    CertificateError,
    Role,
    load_root,
    peer_id_of,
    read_certificate,
    verify_chain,
)
from ca.crl import build_crl, read_crl_file, verify_crl
from ca.form import LEAF_USAGE, ROLES_OID
from ca.issue import issue, make_root
from ca.naming import is_node_name, parse_uri, public_key_of
from ca.pem import read_bundle, write_bundle
from ca.request import make_request, read_request

# The library warns of serial numbers and encodings that it will refuse one day.
pytestmark = pytest.mark.filterwarnings("ignore")

FUZZ = settings(max_examples=1000)
NOW = 1_800_000_000.0


def key_of(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32, "big"))


CA_KEY, NODE_KEY = key_of(1), key_of(2)
ROOT_DER = make_root(CA_KEY, "acme", serial=1, now=NOW)
ROOT = load_root(ROOT_DER)
LEAF = issue(
    CA_KEY,
    ROOT_DER,
    network="acme",
    name="desk-7",
    public_key=NODE_KEY.public_key(),
    roles=[Role.SERVE, Role.USE],
    serial=12345,
    now=NOW,
)
CRL = build_crl(CA_KEY, ROOT_DER, number=3, now=NOW, revoked=dict.fromkeys(range(1, 5), NOW))
CSR = make_request(NODE_KEY, "desk-7")
BUNDLE = write_bundle([LEAF, ROOT_DER])


@st.composite
def damaged(draw, original: bytes) -> bytes:
    """``original`` after a few cuts, insertions, repetitions and changed bytes."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["set", "cut", "insert", "repeat", "swap"])):
            case "set" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=20))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 80))]
            case "swap" if at < len(data):
                other = draw(st.integers(0, len(data) - 1))
                data[at], data[other] = data[other], data[at]
    return bytes(data)


def resigned(der: bytes) -> bytes:
    """A certificate or list whose signed part is that of ``der`` and whose signature holds.

    Goes by the outer lengths alone, so the inside may be as damaged as it likes.
    """
    outer = der[4:] if der[1] == 0x82 else der[3:]
    size = int.from_bytes(outer[2:4], "big") + 4 if outer[1] == 0x82 else outer[2] + 3
    body = outer[:size] + bytes.fromhex("300506032b6570")
    body += b"\x03\x41\x00" + CA_KEY.sign(outer[:size])
    return b"\x30\x82" + len(body).to_bytes(2, "big") + body


@st.composite
def damaged_inside(draw, original: bytes) -> bytes:
    """Bytes changed inside the signed part, and signed by the CA: what a careless CA would sign."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(8, len(data) - 75))] = draw(st.integers(0, 255))
    return resigned(bytes(data))


def refuses_or_accepts(call):
    """The result, or None when it was refused in the documented way. Anything else is a failure."""
    try:
        return call()
    except CertificateError as error:
        assert error.message and "\n" not in error.message and len(error.message) < 500
        return None


def test_resigned_is_what_it_says():
    assert resigned(LEAF) == LEAF and resigned(CRL) == CRL


@FUZZ
@given(st.one_of(st.binary(max_size=200), damaged(LEAF), damaged(ROOT_DER)))
def test_damaged_certificates(der):
    assert der in (LEAF, ROOT_DER) or refuses_or_accepts(lambda: verify(der)) is None
    refuses_or_accepts(lambda: read_certificate(der))
    refuses_or_accepts(lambda: load_root(der))


def verify(*chain):
    return verify_chain(chain, [ROOT], network="acme", now=NOW)


@FUZZ
@given(damaged_inside(LEAF))
def test_what_a_careless_ca_signs_is_still_what_it_must_be(der):
    certificate = refuses_or_accepts(lambda: verify(der))
    if certificate is not None:
        assert certificate.network == "acme"
        assert certificate.peer_id == peer_id_of(certificate.public_key)
        assert is_node_name(certificate.name)
        assert certificate.roles and certificate.roles <= set(Role)
        assert 0 < certificate.serial < 1 << 159
        assert certificate.der == der


@pytest.mark.parametrize("name", [b"mesh CA", b"desk-7", b"acme", b"libp2p", b"serve"])
def test_names_that_are_no_text(name):
    assert name in LEAF
    der = resigned(LEAF.replace(name, b"\xff" * len(name)))
    assert refuses_or_accepts(lambda: verify(der)) is None


@FUZZ
@given(st.lists(st.sampled_from([LEAF, ROOT_DER, b"", b"\x30\x00", CRL]), max_size=6))
def test_any_order_of_parts(chain):
    accepted = refuses_or_accepts(lambda: verify(*chain))
    assert (accepted is not None) == (chain in ([LEAF], [LEAF, ROOT_DER]))


@FUZZ
@given(st.one_of(st.binary(max_size=200), damaged(CRL), damaged_inside(CRL)))
def test_damaged_lists(der):
    crl = refuses_or_accepts(lambda: verify_crl(der, [ROOT]))
    if crl is not None:
        assert 0 <= crl.number < 1 << 63 and crl.der == der
    refuses_or_accepts(lambda: read_crl_file(der))


@FUZZ
@given(st.one_of(st.binary(max_size=200), damaged(CSR)))
@example(CSR.replace(b"\n", b"\r\n"))
def test_damaged_requests(pem):
    request = refuses_or_accepts(lambda: read_request(pem))
    if request is not None:
        assert is_node_name(request.name)
        assert request.peer_id == peer_id_of(request.public_key)


@FUZZ
@given(damaged(x509.load_pem_x509_csr(CSR).public_bytes(Encoding.DER)))
def test_damaged_requests_inside_pem(der):
    try:
        pem = x509.load_der_x509_csr(der).public_bytes(Encoding.PEM)
    except Exception:
        return  # the library's parser refuses it; the one above tests that
    request = refuses_or_accepts(lambda: read_request(pem))
    if request is not None:
        assert (request.name, request.peer_id) == ("desk-7", peer_id_of(NODE_KEY.public_key()))


@FUZZ
@given(st.one_of(st.binary(max_size=300), damaged(BUNDLE)))
def test_damaged_bundles(data):
    for der in refuses_or_accepts(lambda: read_bundle(data)) or ():
        refuses_or_accepts(lambda der=der: verify(der))


@FUZZ
@given(st.integers(0, 2**32))
def test_certificates_of_any_shape(seed):
    """Certificates that the library can make and meshca does not, signed by the right CA."""
    rng = random.Random(seed)
    refuses_or_accepts(lambda: verify(strange(rng)))


def strange(rng: random.Random) -> bytes:
    start = datetime.fromtimestamp(NOW, UTC) + timedelta(days=rng.choice([-60, -1, 0, 60]))
    names = [
        x509.NameAttribute(rng.choice([NameOID.COMMON_NAME, NameOID.SURNAME]), rng.choice(TEXTS))
        for _ in range(rng.randrange(3))
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(names))
        .issuer_name(x509.load_der_x509_certificate(ROOT_DER).subject)
        .public_key(NODE_KEY.public_key())
        .serial_number(rng.choice([1, 1 << 100, (1 << 159) - 1]))
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=rng.choice([0, 1, 3000])))
    )
    peer_id = peer_id_of(NODE_KEY.public_key())
    extensions: list[x509.ExtensionType] = [
        x509.BasicConstraints(rng.random() < 0.2, None),
        rng.choice([LEAF_USAGE, x509.KeyUsage(*[True] * 9)]),
        x509.SubjectAlternativeName(
            [
                x509.UniformResourceIdentifier(
                    rng.choice(
                        [f"libp2p://acme/{peer_id}", "libp2p://", "x:", f"libp2p://a/{'1' * 99}"]
                    )
                )
                for _ in range(rng.choice([1, 1, 1, 2, 50]))
            ]
        ),
        x509.UnrecognizedExtension(ROLES_OID, rng.choice([b"\x0c\x05serve", b"", b"\x0c\xff"])),
        x509.ExtendedKeyUsage([x509.ObjectIdentifier("1.2.3")]),
    ]
    for extension in rng.sample(extensions, rng.randrange(len(extensions) + 1)):
        builder = builder.add_extension(extension, rng.random() < 0.5)
    return builder.sign(CA_KEY, None).public_bytes(Encoding.DER)


TEXTS = ["desk-7", "a" * 60, "\0", "é", "../..", "12D3KooW", " ", "a\nb"]


@FUZZ
@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_are_those_of_libp2p(seed):
    key = Ed25519PrivateKey.from_private_bytes(seed).public_key()
    theirs = ID.from_pubkey(Libp2pKey.from_bytes(key.public_bytes_raw())).to_base58()
    assert peer_id_of(key) == theirs
    assert public_key_of(theirs) == key


@FUZZ
@given(st.text(max_size=80))
def test_texts_that_are_no_peer_id_or_uri(text):
    for parse in (public_key_of, parse_uri):
        try:
            parse(text)
        except ValueError:
            continue
        # Only real ones get through; text that hypothesis makes up is never a key's 52 characters.
        assert parse is parse_uri and text.startswith("libp2p://")
