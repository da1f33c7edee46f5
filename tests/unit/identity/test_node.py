"""Loading who this node is, and saying in one line why it cannot be."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ca.pem import write_bundle
from mesh.identity import (
    CertificateFileError,
    KeyFileError,
    Reason,
    Role,
    create_key,
    load_identity,
    load_node_pem,
    load_roots,
)

NOW = 1_800_000_000.0
DAY = 86400.0


@pytest.fixture
def acme(make_authority):
    return make_authority("acme", now=NOW)


@pytest.fixture
def home(tmp_path, acme):
    """A folder with the key and certificate of desk-7."""
    identity = acme.identity("desk-7")
    pem = identity.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "node.key").write_bytes(pem)
    (tmp_path / "node.key").chmod(0o600)
    (tmp_path / "node.pem").write_bytes(write_bundle([identity.certificate.der]) + acme.ca_pem)
    return tmp_path


def load(home, now=NOW):
    return load_identity(home / "node.key", home / "node.pem", now=now)


def refused(home, reason, match, now=NOW):
    with pytest.raises(CertificateFileError, match=match) as caught:
        load(home, now)
    assert caught.value.reason is reason
    assert "node.pem" in str(caught.value) and "\n" not in str(caught.value)


def test_an_identity(home, acme):
    identity = load(home)
    assert identity.network == "acme"
    assert identity.certificate.name == "desk-7"
    assert identity.certificate.roles == {Role.SERVE, Role.USE}
    assert identity.peer_id == acme.identity("desk-7").peer_id
    assert identity.roots == (acme.root,)
    assert identity.certificate.chain_der == (identity.certificate.der,)
    assert identity.sign(b"meshnode-test", b"x") == acme.identity("desk-7").sign(
        b"meshnode-test", b"x"
    )
    assert identity.key.private_bytes_raw().hex() not in repr(identity)


def test_expired_and_not_yet(home):
    refused(home, Reason.EXPIRED, "expired at .*clock", now=NOW + 31 * DAY)
    refused(home, Reason.NOT_YET_VALID, "clock", now=NOW - DAY)


def test_for_another_key(home):
    (home / "node.key").unlink()
    create_key(home / "node.key")
    refused(home, Reason.WRONG_KEY, "for another key")


def test_from_an_unknown_ca(home, acme, make_authority):
    other = make_authority("acme", now=NOW, name="other")
    leaf = write_bundle([acme.identity("desk-7").certificate.der])
    (home / "node.pem").write_bytes(leaf + other.ca_pem)
    refused(home, Reason.UNKNOWN_CA, "not signed by a CA")
    (home / "node.pem").write_bytes(leaf)
    refused(home, Reason.UNKNOWN_CA, "CA's certificate is missing")


def test_two_cas_are_trusted_when_both_are_there(home, acme, make_authority):
    other = make_authority("acme", now=NOW, name="other")
    stranger = make_authority("beta", now=NOW)
    with (home / "node.pem").open("ab") as file:
        file.write(other.ca_pem + stranger.ca_pem)
    assert load(home).roots == (acme.root, other.root)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "no PEM certificate"),
        (b"\0" * 100, "no PEM certificate"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be read"),
        (b"-----BEGIN CERTIFICATE-----\n", "cannot be read"),
        (b"-----BEGIN CERTIFICATE REQUEST-----\n", "a request in it, which the CA has to sign"),
        (b"x" * 70_000, "larger"),
    ],
)
def test_what_is_no_certificate(home, content, match):
    (home / "node.pem").write_bytes(content)
    refused(home, Reason.MALFORMED, match)


def test_a_key_in_the_certificate_file(home):
    with (home / "node.pem").open("ab") as file:
        file.write((home / "node.key").read_bytes())
    refused(home, Reason.MALFORMED, "keep it apart")


def test_too_many_certificates(home, acme):
    (home / "node.pem").write_bytes(acme.ca_pem * 17)
    refused(home, Reason.MALFORMED, "more than 16")


def test_the_ca_alone(home, acme):
    (home / "node.pem").write_bytes(acme.ca_pem)
    refused(home, Reason.NOT_A_LEAF, "is a CA's certificate .* `meshca issue` wrote")


def test_missing_files(home):
    (home / "node.pem").unlink()
    refused(home, None, "there is no certificate at")
    (home / "node.pem").mkdir()
    refused(home, None, "cannot read")


def test_a_missing_key(home):
    (home / "node.key").unlink()
    with pytest.raises(KeyFileError, match="meshnode init"):
        load(home)


def test_a_ca_pem(tmp_path, home, acme, make_authority):
    other = make_authority("acme", now=NOW, name="other")
    path = tmp_path / "ca.pem"
    path.write_bytes(acme.ca_pem + other.ca_pem)
    assert load_roots(path) == (acme.root, other.root)
    with pytest.raises(CertificateFileError) as caught:
        load_roots(home / "node.pem")
    assert caught.value.reason is Reason.NOT_A_CA


def test_node_pem_is_sorted_out(home, acme):
    pem = load_node_pem(home / "node.pem")
    assert pem.roots == (acme.root,)
    assert pem.chain_der == (pem.certificate.der,)
