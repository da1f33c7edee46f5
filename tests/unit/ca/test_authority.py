"""What the CA signs, refuses, records and revokes."""

from __future__ import annotations

import sqlite3

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca import vault
from ca.authority import Authority
from ca.certificate import Role, verify_chain
from ca.crl import verify_crl
from ca.errors import (
    AlreadyInitialisedError,
    LedgerError,
    LockedError,
    NotInitialisedError,
    RefusedError,
    UnknownCertificateError,
)
from ca.pem import read_bundle
from ca.request import make_request, read_request

NOW = 1_800_000_000.0
DAY = 86400.0
SECRET = b"correct horse"
BOTH = frozenset({Role.SERVE, Role.USE})


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(vault, "_SCRYPT_N", 1 << 14)


@pytest.fixture
def ca(tmp_path):
    return Authority.create(tmp_path / "ca", "acme", SECRET, now=NOW)


@pytest.fixture
def key(ca):
    return ca.unlock(SECRET)


def request(name="desk-7", node_key=None):
    return read_request(make_request(node_key or Ed25519PrivateKey.generate(), name))


def test_a_new_ca(ca, tmp_path):
    assert ca.network == "acme"
    assert ca.entries() == []
    assert read_bundle(ca.root_path.read_bytes()) == (ca.root.der,)
    for name in ("ca.key", "ledger.sqlite3"):
        assert (tmp_path / "ca" / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ca").stat().st_mode & 0o777 == 0o700
    number, der = ca.crl()
    assert verify_crl(der, [ca.root]).revoked == {} and number == int(NOW)
    again = Authority.open(tmp_path / "ca")
    assert again.root == ca.root


def test_only_one_ca_to_a_folder(ca, key, tmp_path):
    with pytest.raises(AlreadyInitialisedError, match="acme"):
        Authority.create(tmp_path / "ca", "beta", b"another one", now=NOW)
    assert Authority.open(tmp_path / "ca").unlock(SECRET).private_bytes_raw() == (
        key.private_bytes_raw()
    )


def test_an_init_that_was_interrupted_can_be_repeated(tmp_path, monkeypatch):
    class PowerCut(Exception):
        pass

    def cut(*_, **__):
        raise PowerCut

    folder = tmp_path / "ca"
    for where in ("ca.authority.write_atomic", "ca.authority.build_crl"):
        with monkeypatch.context() as patch, pytest.raises(PowerCut):
            patch.setattr(where, cut)
            Authority.create(folder, "acme", SECRET, now=NOW)
        with pytest.raises(NotInitialisedError):
            Authority.open(folder)
    (folder / "ledger.sqlite3").write_bytes(b"")
    with pytest.raises(NotInitialisedError):
        Authority.open(folder)
    Authority.create(folder, "acme", SECRET, now=NOW).unlock(SECRET)


def test_a_lost_ca_pem_comes_back(ca, tmp_path):
    ca.root_path.unlink()
    assert Authority.open(tmp_path / "ca").root_path.exists()


def test_what_is_no_ca(ca, tmp_path):
    with pytest.raises(NotInitialisedError):
        Authority.open(tmp_path / "nothing")
    (tmp_path / "ledger.sqlite3").write_bytes(b"not a database, and long enough to be read")
    with pytest.raises(LedgerError):
        Authority.open(tmp_path)
    with pytest.raises(LockedError):
        ca.unlock(b"wrong")
    (tmp_path / "ca" / "ca.key").write_bytes(vault.seal(Ed25519PrivateKey.generate(), SECRET))
    with pytest.raises(LockedError, match="another CA"):
        ca.unlock(SECRET)


def test_an_issued_certificate_verifies_and_is_recorded(ca, key):
    asked = request()
    entry = ca.issue(key, asked, BOTH, now=NOW, days=3)
    certificate = verify_chain(
        read_bundle(ca.bundle(entry)), [ca.root], network="acme", now=NOW + DAY
    )
    assert (certificate.name, certificate.peer_id) == ("desk-7", asked.peer_id)
    assert certificate.roles == BOTH
    assert certificate.not_before.timestamp() == NOW - 60
    assert certificate.not_after.timestamp() == NOW + 3 * DAY
    assert ca.entries() == [entry]
    assert entry.serial == certificate.serial and entry.der == certificate.der
    for target in ("desk-7", "DESK-7", asked.peer_id, f"{entry.serial:040x}"):
        assert ca.find(target) == [entry]
    with pytest.raises(UnknownCertificateError):
        ca.find("desk-8")


def test_what_cannot_be_recorded_is_not_issued(ca, key, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("ca.ledger.Transaction.record", fail)
        ca.issue(key, request(), BOTH, now=NOW)
    assert ca.entries() == []


def test_limits_of_a_certificate(ca, key):
    for days in (0, -1, 4000, float("nan"), float("inf")):
        with pytest.raises(RefusedError, match="days"):
            ca.issue(key, request(), BOTH, now=NOW, days=days)
    with pytest.raises(RefusedError, match="role"):
        ca.issue(key, request(), (), now=NOW)
    with pytest.raises(RefusedError, match=r"only 10\.0 days more"):
        ca.issue(key, request(), BOTH, now=NOW + 3640 * DAY, days=30)
    with pytest.raises(RefusedError, match="clock"):
        ca.issue(key, request(), BOTH, now=NOW - DAY)
    assert ca.entries() == []


def test_a_name_belongs_to_one_key_at_a_time(ca, key):
    mine = Ed25519PrivateKey.generate()
    ca.issue(key, request("desk-7", mine), BOTH, now=NOW, days=1)
    with pytest.raises(RefusedError, match="belongs to"):
        ca.issue(key, request("Desk-7"), BOTH, now=NOW)
    with pytest.raises(RefusedError, match="belongs to"):
        ca.check(request("Desk-7"), now=NOW)
    ca.issue(key, request("desk-7", mine), BOTH, now=NOW, days=2)  # the same node, again
    ca.issue(key, request("desk-7"), BOTH, now=NOW + 3 * DAY)  # the name is free again


def test_revoking_a_node_ends_all_of_it_and_bars_its_key(ca, key):
    mine = Ed25519PrivateKey.generate()
    first = ca.issue(key, request("desk-7", mine), BOTH, now=NOW)
    second = ca.issue(key, request("desk-8", mine), BOTH, now=NOW)
    other = ca.issue(key, request("other"), BOTH, now=NOW)
    done = ca.revoke(key, "desk-7", now=NOW + 5)
    assert {entry.serial for entry in done.entries} == {first.serial, second.serial}
    crl = verify_crl(done.crl_der, [ca.root])
    assert crl.number == done.crl_number == int(NOW) + 5
    assert crl.revoked == {first.serial: NOW + 5, second.serial: NOW + 5}
    assert ca.crl() == (done.crl_number, done.crl_der)
    assert {e.serial: e.state(NOW + 6) for e in ca.entries()} == {
        first.serial: "revoked",
        second.serial: "revoked",
        other.serial: "valid",
    }
    with pytest.raises(RefusedError, match="revoked"):
        ca.issue(key, request("desk-9", mine), BOTH, now=NOW)
    ca.issue(key, request("desk-7"), BOTH, now=NOW + 6)  # the name is free for a new key


def test_revoking_a_serial_ends_that_certificate_only(ca, key):
    mine = Ed25519PrivateKey.generate()
    wide = ca.issue(key, request("desk-7", mine), set(Role), now=NOW)
    narrow = ca.issue(key, request("desk-7", mine), {Role.USE}, now=NOW)
    done = ca.revoke(key, f"{wide.serial:040x}", now=NOW)
    assert [entry.serial for entry in done.entries] == [wide.serial]
    assert [e.state(NOW) for e in ca.find("desk-7")] == ["revoked", "valid"]
    assert ca.find(f"{narrow.serial:040x}")[0].revoked is None
    ca.issue(key, request("desk-7", mine), {Role.USE}, now=NOW)


def test_a_name_means_who_holds_it_now(ca, key):
    before, after = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    old = ca.issue(key, request("desk-7", before), BOTH, now=NOW, days=1)
    moved = ca.issue(key, request("desk-1", before), BOTH, now=NOW, days=90)
    new = ca.issue(key, request("desk-7", after), BOTH, now=NOW + 2 * DAY)
    done = ca.revoke(key, "desk-7", now=NOW + 2 * DAY)
    assert [entry.serial for entry in done.entries] == [new.serial]
    assert moved.state(NOW + 2 * DAY) == "valid" and old.state(NOW + 2 * DAY) == "expired"
    assert ca.find("desk-1")[0].revoked is None


def test_revoking_twice_changes_nothing(ca, key):
    entry = ca.issue(key, request(), BOTH, now=NOW)
    done = ca.revoke(key, "desk-7", now=NOW)
    for target in ("desk-7", entry.peer_id, f"{entry.serial:040x}"):
        again = ca.revoke(key, target, now=NOW + 10)
        assert again.entries == () and again.crl_number == done.crl_number
    with pytest.raises(UnknownCertificateError):
        ca.revoke(key, "desk-9", now=NOW)


def test_an_expired_node_can_be_barred_by_its_peer_id(ca, key):
    mine = Ed25519PrivateKey.generate()
    entry = ca.issue(key, request("desk-7", mine), BOTH, now=NOW, days=1)
    with pytest.raises(UnknownCertificateError, match="expired"):
        ca.revoke(key, "desk-7", now=NOW + 2 * DAY)
    ca.revoke(key, entry.peer_id, now=NOW + 2 * DAY)
    with pytest.raises(RefusedError, match="revoked"):
        ca.issue(key, request("desk-7", mine), BOTH, now=NOW + 2 * DAY)


def test_list_numbers_only_go_up_even_when_the_clock_does_not(ca, key):
    numbers = []
    for n, now in enumerate((NOW, NOW, NOW - 30, NOW + 100)):
        ca.issue(key, request(f"node-{n}"), BOTH, now=NOW)
        numbers.append(ca.revoke(key, f"node-{n}", now=now).crl_number)
    base = int(NOW)
    assert numbers == [base + 1, base + 2, base + 3, base + 100]


def test_lists_drop_what_has_expired(ca, key):
    for name, days in (("short", 1), ("long", 90)):
        ca.issue(key, request(name), BOTH, now=NOW, days=days)
        done = ca.revoke(key, name, now=NOW)
    assert len(verify_crl(done.crl_der, [ca.root]).revoked) == 2
    ca.issue(key, request("third"), BOTH, now=NOW + 3 * DAY)
    done = ca.revoke(key, "third", now=NOW + 3 * DAY)
    names = {
        e.name for e in ca.entries() if e.serial in verify_crl(done.crl_der, [ca.root]).revoked
    }
    assert names == {"long", "third"}


def test_a_revocation_without_its_list_does_not_happen(ca, key, monkeypatch):
    ca.issue(key, request(), BOTH, now=NOW)
    monkeypatch.setattr("ca.authority.MAX_CRL_BYTES", 100)
    with pytest.raises(RefusedError, match="full"):
        ca.revoke(key, "desk-7", now=NOW)
    assert ca.find("desk-7")[0].revoked is None
    ca.check(request("desk-9"), now=NOW)


def test_the_ledger_only_grows(ca, key, tmp_path):
    ca.issue(key, request(), BOTH, now=NOW)
    ca.revoke(key, "desk-7", now=NOW)
    with sqlite3.connect(tmp_path / "ca" / "ledger.sqlite3") as connection:
        for statement in (
            "DELETE FROM certificates",
            "UPDATE certificates SET name = 'x'",
            "DELETE FROM revocations",
            "DELETE FROM barred",
            "UPDATE authority SET network = 'beta'",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="only grows"):
                connection.execute(statement)
    connection.close()


def test_a_ledger_of_another_version_is_left_alone(ca, tmp_path):
    connection = sqlite3.connect(tmp_path / "ca" / "ledger.sqlite3")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(LedgerError, match="version"):
        Authority.open(tmp_path / "ca")
    with pytest.raises(LedgerError, match="version"):
        Authority.create(tmp_path / "ca", "acme", SECRET, now=NOW)
