"""Which chains are trusted, and for which reason the others are not."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from ca.certificate import (
    MAX_CERTIFICATE_BYTES,
    SKEW,
    Certificate,
    CertificateError,
    Reason,
    Role,
    load_root,
    peer_id_of,
    verify_chain,
)
from ca.form import LEAF_USAGE
from ca.issue import make_root
from ca.naming import node_uri

# Half of the changed bits make serial numbers negative, of which the library warns.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number")

NOW = 1_800_000_000.0
DAY = 86400.0


def verify(ca, *chain, now=NOW, network="acme", roots=None, **more) -> Certificate:
    return verify_chain(chain, roots or [ca.root], network=network, now=now, **more)


def reason(ca, *chain, **more) -> Reason:
    with pytest.raises(CertificateError) as caught:
        verify(ca, *chain, **more)
    assert "\n" not in caught.value.message
    return caught.value.reason


def test_a_certificate_says_who_it_is_for(acme):
    key = Ed25519PrivateKey.generate()
    leaf = acme.leaf("desk-7", key, [Role.SERVE, Role.ADMIN], serial=0xABC)
    certificate = verify(acme, leaf)
    assert certificate.name == "desk-7"
    assert certificate.network == "acme"
    assert certificate.peer_id == peer_id_of(key.public_key())
    assert certificate.roles == {Role.SERVE, Role.ADMIN}
    assert certificate.serial == 0xABC
    assert certificate.public_key == key.public_key()
    assert certificate.not_before.timestamp() == NOW - 60
    assert certificate.not_after.timestamp() == NOW + 30 * DAY
    assert certificate.der == leaf and certificate.chain_der == (leaf,)


def test_the_root_may_be_shown_and_is_left_out_of_the_result(acme):
    leaf = acme.leaf()
    assert verify(acme, leaf, acme.der) == verify(acme, leaf)


def test_several_roots_count_at_once(acme, make_ca):
    new = make_ca()
    both = [acme.root, new.root]
    assert verify(acme, acme.leaf("old"), roots=both).name == "old"
    assert verify(acme, new.leaf("new"), roots=both).name == "new"


def test_another_ca_is_unknown_even_with_the_same_name(acme, make_ca):
    other = make_ca()
    assert reason(acme, other.leaf()) is Reason.UNKNOWN_CA
    assert reason(acme, other.leaf(), other.der) is Reason.UNKNOWN_CA
    same_name = x509.load_der_x509_certificate(acme.der).subject
    forged = acme.forge(signer=other.key, issuer=same_name)
    assert reason(acme, forged) is Reason.UNKNOWN_CA


def test_the_issuers_name_must_match_too(acme):
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody else")])
    assert reason(acme, acme.forge(issuer=issuer)) is Reason.UNKNOWN_CA


def test_networks_are_kept_apart(acme, make_ca):
    other = make_ca("beta")
    assert reason(acme, other.leaf(), roots=[acme.root, other.root]) is Reason.WRONG_NETWORK
    # A CA of another network that certifies a name in this one.
    key = Ed25519PrivateKey.generate()
    uri = node_uri("acme", peer_id_of(key.public_key()))
    leaf = other.forge(key=key, san=[x509.UniformResourceIdentifier(uri)])
    assert reason(acme, leaf, roots=[acme.root, other.root]) is Reason.UNKNOWN_CA


def test_dates_hold_with_two_minutes_of_skew(acme):
    leaf = acme.leaf(days=1)
    end = NOW + DAY
    for now in (NOW - 60 - SKEW, NOW, end + SKEW):
        assert verify(acme, leaf, now=now)
    assert reason(acme, leaf, now=end + SKEW + 1) is Reason.EXPIRED
    # The CA was made a day before, so that only the leaf is too young.
    acme.now += DAY
    young = acme.leaf()
    assert reason(acme, young, now=NOW + DAY - 60 - SKEW - 1) is Reason.NOT_YET_VALID


def test_messages_about_dates_speak_of_clocks_with_both_times(acme):
    with pytest.raises(CertificateError, match=r"expired at 2027-02-14 08:00:00 UTC.*clock") as e:
        verify(acme, acme.leaf(), now=NOW + 31 * DAY)
    assert "2027-02-15 08:00:00 UTC" in e.value.message
    with pytest.raises(CertificateError, match=r"valid only from 2027-01-15 .*check the clocks"):
        verify(acme, acme.leaf(), now=NOW - DAY)


def test_the_root_expires_too(make_ca):
    old = make_ca(now=NOW - 3651 * DAY)
    assert reason(old, old.leaf(now=NOW)) is Reason.EXPIRED


def test_a_revoked_serial_is_refused_under_its_own_root_only(acme, make_ca):
    other = make_ca()
    leaf = acme.leaf(serial=5)
    assert reason(acme, leaf, revoked={acme.root.key: {5}}) is Reason.REVOKED
    assert verify(acme, leaf, revoked={acme.root.key: {6}})
    assert verify(acme, leaf, revoked={other.root.key: {5}})


def test_every_single_changed_bit_is_refused(acme):
    # Some signatures end in bits that are zero and could be called unused; take one of those.
    while (leaf := acme.leaf())[-1] & 7:
        pass
    roots = [acme.root]
    for position in range(len(leaf) * 8):
        changed = bytearray(leaf)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(CertificateError):
            verify_chain([bytes(changed)], roots, network="acme", now=NOW)


def test_a_signature_cannot_be_respelled(acme):
    """S and S + L would both satisfy the equation; RFC 8032, 5.1.7 wants S below L."""
    order = 2**252 + 27742317777372353535851937790883648493
    leaf = acme.leaf()
    respelled = int.from_bytes(leaf[-32:], "little") + order
    assert reason(acme, leaf[:-32] + respelled.to_bytes(32, "little")) is Reason.UNKNOWN_CA


def test_every_truncation_and_any_tail_is_malformed(acme):
    leaf = acme.leaf()
    for length in range(len(leaf)):
        assert reason(acme, leaf[:length]) is Reason.MALFORMED
    assert reason(acme, leaf + b"\0") is Reason.MALFORMED
    assert reason(acme, leaf + leaf) is Reason.MALFORMED
    assert reason(acme, b"\x30" * (MAX_CERTIFICATE_BYTES + 1)) is Reason.MALFORMED


def test_chains_are_bounded(acme):
    leaf = acme.leaf()
    with pytest.raises(CertificateError, match="1 to 4"):
        verify_chain([], [acme.root], network="acme", now=NOW)
    assert reason(acme, leaf, *[acme.der] * 4) is Reason.MALFORMED
    assert reason(acme, leaf, acme.der, acme.der) is Reason.MALFORMED
    assert reason(acme, leaf, acme.leaf()) is Reason.MALFORMED


def uri(key) -> x509.UniformResourceIdentifier:
    return x509.UniformResourceIdentifier(node_uri("acme", peer_id_of(key.public_key())))


@pytest.mark.parametrize(
    "san",
    [
        lambda key: [],
        lambda key: [uri(key), uri(key)],
        lambda key: [uri(key), x509.DNSName("desk-7")],
        lambda key: [x509.DNSName("desk-7")],
        lambda key: [uri(Ed25519PrivateKey.generate())],
        lambda key: [x509.UniformResourceIdentifier("libp2p://acme")],
        lambda key: [x509.UniformResourceIdentifier(uri(key).value + "/x")],
        lambda key: [x509.UniformResourceIdentifier(uri(key).value.replace("acme", "ACME"))],
        lambda key: [x509.UniformResourceIdentifier(uri(key).value.replace("acme", "-a"))],
        lambda key: [x509.UniformResourceIdentifier(uri(key).value.replace("libp2p", "spiffe"))],
        lambda key: [x509.UniformResourceIdentifier(uri(key).value + "\n")],
    ],
)
def test_exactly_one_uri_names_network_and_key(acme, san):
    key = Ed25519PrivateKey.generate()
    assert reason(acme, acme.forge(key=key, san=san(key))) is Reason.MALFORMED


def test_a_node_is_no_ca(acme):
    ca = x509.BasicConstraints(True, None)
    assert reason(acme, acme.forge(constraints=ca)) is Reason.NOT_A_LEAF
    for usage in ("key_cert_sign", "crl_sign", "key_encipherment"):
        flags = {name: getattr(LEAF_USAGE, name) for name in FLAGS} | {usage: True}
        forged = acme.forge(usage=x509.KeyUsage(**flags, encipher_only=False, decipher_only=False))
        assert reason(acme, forged) is Reason.NOT_A_LEAF
    assert reason(acme, acme.der) is Reason.NOT_A_LEAF


FLAGS = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
)


def test_constraints_must_be_there_and_critical(acme):
    assert reason(acme, acme.forge(constraints=None)) is Reason.MALFORMED
    assert reason(acme, acme.forge(constraints_critical=False)) is Reason.MALFORMED
    assert reason(acme, acme.forge(usage=None)) is Reason.MALFORMED


def test_a_node_cannot_sign_for_others(acme):
    key = Ed25519PrivateKey.generate()
    thief = acme.leaf("thief", key)
    forged = acme.forge(signer=key, issuer=x509.load_der_x509_certificate(thief).subject)
    assert reason(acme, forged, thief) is Reason.NOT_A_CA
    assert reason(acme, forged, thief, acme.der) is Reason.NOT_A_CA


@pytest.mark.parametrize(
    "roles",
    [
        None,
        b"",
        b"serve",
        b"\x0c\x00",
        b"\x0c\x05admins",
        b"\x0c\x06admins",
        b"\x0c\x09use,serve",  # not sorted
        b"\x0c\x09serve,use\x00",
        b"\x0c\x81\x09serve,use",  # a length that is not DER
        b"\x13\x05serve",  # PrintableString
        b"\x0c\x0bserve,serve",
        b"\x0c\x05SERVE",
        b"\x0c\x06serve,",
    ],
)
def test_roles_have_one_written_form(acme, roles):
    assert reason(acme, acme.forge(roles=roles)) is Reason.MALFORMED


def test_unknown_extensions_count_only_when_critical(acme):
    extension = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")
    assert verify(acme, acme.forge(extra=[(extension, False)]))
    assert reason(acme, acme.forge(extra=[(extension, True)])) is Reason.MALFORMED


@pytest.mark.parametrize(
    "names",
    [
        [],
        [(NameOID.COMMON_NAME, "a"), (NameOID.COMMON_NAME, "b")],
        [(NameOID.COMMON_NAME, "a"), (NameOID.ORGANIZATION_NAME, "b")],
        [(NameOID.ORGANIZATION_NAME, "a")],
        [(NameOID.COMMON_NAME, "../a")],
        [(NameOID.COMMON_NAME, "a\n")],
        [(NameOID.COMMON_NAME, "a" * 64)],
        [(NameOID.COMMON_NAME, "é")],
        [(NameOID.COMMON_NAME, "12D3KooWabc")],
    ],
)
def test_the_subject_is_one_plain_name(acme, names):
    subject = x509.Name([x509.NameAttribute(oid, value) for oid, value in names])
    key = Ed25519PrivateKey.generate()
    # An empty subject is what `subject or default` would replace.
    forged = (
        acme.forge(key=key, subject=subject)
        if names
        else acme.forge(
            key=key,
            subject=x509.Name(
                [x509.RelativeDistinguishedName([x509.NameAttribute(NameOID.COUNTRY_NAME, "DE")])]
            ),
        )
    )
    assert reason(acme, forged) is Reason.MALFORMED


def test_only_ed25519(acme):
    name = [x509.UniformResourceIdentifier("libp2p://acme/12D3KooW")]
    for key in (ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)):
        assert reason(acme, acme.forge(key=key, san=name)) is Reason.MALFORMED
    signer = ec.generate_private_key(ec.SECP256R1())
    forged = acme.forge(signer=signer, hash_algorithm=hashes.SHA256())
    assert reason(acme, forged) is Reason.MALFORMED


def test_a_key_that_anybody_can_sign_for_is_refused(acme):
    weak = Ed25519PublicKey.from_public_bytes(b"\x01" + bytes(31))
    weak.verify(b"\x01" + bytes(63), b"any message")  # that is how weak it is
    assert reason(acme, acme.forge(public_key=weak)) is Reason.MALFORMED


def test_serials_are_positive_and_of_20_octets(acme):
    assert verify(acme, acme.forge(serial=(1 << 159) - 1))
    # The library does not make larger ones, so make one by hand: 20 octets with the top bit set
    # are a negative number.
    leaf = acme.forge(serial=0x7F << 152 | 1)
    assert leaf.count(b"\x02\x14\x7f") == 1
    assert reason(acme, leaf.replace(b"\x02\x14\x7f", b"\x02\x14\xff")) is Reason.MALFORMED


class TestIntermediates:
    """Roots made by `meshca` allow none; one that allows some can be made with other tools."""

    @pytest.fixture
    def tall(self, make_ca):
        """A CA whose root allows one intermediate."""
        ca = make_ca()
        root = ca.intermediate(
            ca.key, issuer=x509.load_der_x509_certificate(ca.der).subject, path_length=1
        )
        subject = x509.load_der_x509_certificate(root).subject
        ca.der = ca.intermediate(ca.key, issuer=subject, path_length=1)
        return ca

    def branch(self, ca, **more):
        key = Ed25519PrivateKey.generate()
        der = ca.intermediate(key, **{"name": "lower", **more})
        leaf = ca.forge(signer=key, issuer=x509.load_der_x509_certificate(der).subject)
        return key, der, leaf

    def test_a_chain_through_one(self, tall):
        _, der, leaf = self.branch(tall)
        assert verify(tall, leaf, der).chain_der == (leaf, der)
        assert verify(tall, leaf, der, tall.der).chain_der == (leaf, der)
        assert reason(tall, leaf) is Reason.UNKNOWN_CA
        assert reason(tall, leaf, tall.der) is Reason.UNKNOWN_CA

    def test_the_root_made_here_allows_none(self, acme):
        _, der, leaf = self.branch(acme)
        assert reason(acme, leaf, der) is Reason.PATH_TOO_LONG

    def test_path_length_counts_down(self, tall):
        key, upper, _ = self.branch(tall, path_length=0)
        low_key = Ed25519PrivateKey.generate()
        low = tall.intermediate(
            low_key,
            signer=key,
            issuer=x509.load_der_x509_certificate(upper).subject,
            name="lowest",
        )
        leaf = tall.forge(signer=low_key, issuer=x509.load_der_x509_certificate(low).subject)
        assert reason(tall, leaf, low, upper) is Reason.PATH_TOO_LONG

    def test_of_another_network(self, tall):
        _, der, leaf = self.branch(tall, network="beta")
        assert reason(tall, leaf, der) is Reason.WRONG_NETWORK

    def test_expired_or_revoked(self, tall):
        _, der, leaf = self.branch(tall, days=1, serial=99)
        assert reason(tall, leaf, der, now=NOW + 2 * DAY) is Reason.EXPIRED
        assert reason(tall, leaf, der, revoked={tall.root.key: {99}}) is Reason.REVOKED

    def test_in_the_wrong_order(self, tall):
        _, der, leaf = self.branch(tall)
        assert reason(tall, leaf, tall.der, der) is Reason.UNKNOWN_CA
        assert reason(tall, der, leaf) is Reason.NOT_A_LEAF

    def test_a_stranger_in_the_middle(self, tall):
        _, der, _ = self.branch(tall)
        assert reason(tall, tall.forge(signer=Ed25519PrivateKey.generate()), der) is (
            Reason.UNKNOWN_CA
        )


class TestRoots:
    def test_fields(self, acme):
        root = acme.root
        assert root.network == "acme"
        assert root.path_length == 0 and root.signs_crls
        assert root.key == acme.key.public_key().public_bytes_raw()

    def test_must_have_signed_itself(self, acme):
        der = acme.intermediate(Ed25519PrivateKey.generate())
        with pytest.raises(CertificateError) as caught:
            load_root(der)
        assert caught.value.reason is Reason.UNKNOWN_CA

    def test_a_leaf_is_no_root(self, acme):
        with pytest.raises(CertificateError) as caught:
            load_root(acme.leaf())
        assert caught.value.reason is Reason.NOT_A_CA

    def test_network_names_are_checked_when_one_is_made(self):
        for name in ("", "Acme", "a.b", "-a", "a-", "a" * 64, "a\n", "é"):
            with pytest.raises(ValueError, match="network"):
                make_root(Ed25519PrivateKey.generate(), name, serial=1, now=NOW)
