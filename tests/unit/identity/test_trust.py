"""Whom a node trusts, and how revocation lists take effect."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import load_root
from ca.crl import build_crl
from ca.issue import issue, make_root
from mesh.identity import (
    AdmissionError,
    CertificateError,
    CertificateFileError,
    Reason,
    Role,
    TrustStore,
    peer_id_of,
)

NOW = 1_800_000_000.0
DAY = 86400.0


class Ca:
    def __init__(self, network: str = "acme") -> None:
        self.network = network
        self.key = Ed25519PrivateKey.generate()
        self.der = make_root(self.key, network, serial=1, now=NOW)
        self.root = load_root(self.der)
        self.serial = 100

    def node(self, days: float = 30.0) -> tuple[list[bytes], str, int]:
        """Chain, PeerId and serial of a new node."""
        key = Ed25519PrivateKey.generate().public_key()
        self.serial += 1
        der = issue(
            self.key,
            self.der,
            network=self.network,
            name="desk-7",
            public_key=key,
            roles=[Role.SERVE],
            serial=self.serial,
            now=NOW,
            days=days,
        )
        return [der], peer_id_of(key), self.serial

    def crl(self, number: int, *serials: int) -> bytes:
        return build_crl(
            self.key, self.der, number=number, now=NOW, revoked=dict.fromkeys(serials, NOW)
        )


@pytest.fixture
def ca():
    return Ca()


@pytest.fixture
def trust(ca, tmp_path):
    return TrustStore("acme", [ca.root], tmp_path / "crl")


def reason(trust, chain, peer_id, now=NOW) -> Reason:
    with pytest.raises(AdmissionError) as caught:
        trust.verify_peer(chain, peer_id, now)
    return caught.value.reason


def test_who_is_admitted(ca, trust):
    chain, peer_id, _ = ca.node()
    assert trust.verify_peer(chain, peer_id, NOW).peer_id == peer_id
    assert trust.verify(chain, NOW).peer_id == peer_id


def test_who_is_not(ca, trust):
    chain, peer_id, _ = ca.node()
    assert reason(trust, None, peer_id) is Reason.MISSING
    assert reason(trust, [], peer_id) is Reason.MISSING
    stolen_by = ca.node()[1]
    assert reason(trust, chain, stolen_by) is Reason.WRONG_KEY
    assert reason(trust, chain, peer_id, NOW + 31 * DAY) is Reason.EXPIRED
    assert reason(trust, chain, peer_id, NOW - DAY) is Reason.NOT_YET_VALID
    other_chain, other_peer, _ = Ca().node()
    assert reason(trust, other_chain, other_peer) is Reason.UNKNOWN_CA
    other_chain, other_peer, _ = Ca("beta").node()
    assert reason(trust, other_chain, other_peer) is Reason.WRONG_NETWORK
    assert reason(trust, [b"junk"], peer_id) is Reason.MALFORMED


def test_a_known_chain_is_checked_again_for_time_and_revocation(ca, trust):
    chain, peer_id, serial = ca.node(days=1)
    trust.verify_peer(chain, peer_id, NOW)
    assert reason(trust, chain, peer_id, NOW + 2 * DAY) is Reason.EXPIRED
    trust.verify_peer(chain, peer_id, NOW)
    assert trust.apply_crl(ca.crl(1, serial))
    assert reason(trust, chain, peer_id) is Reason.REVOKED


def test_what_is_kept_is_bounded(ca, trust, monkeypatch):
    monkeypatch.setattr("mesh.identity.trust._KEPT_PATHS", 3)
    nodes = [ca.node() for _ in range(10)]
    for chain, peer_id, _ in nodes * 2:
        trust.verify_peer(chain, peer_id, NOW)
        for bad in ([b"junk"], [chain[0] + b"\0"]):
            assert reason(trust, bad, peer_id) is Reason.MALFORMED
    assert len(trust._paths) == 3


def test_a_newer_list_counts_an_older_one_does_not(ca, trust):
    one, two = ca.node(), ca.node()
    assert trust.apply_crl(ca.crl(5, one[2]))
    assert not trust.apply_crl(ca.crl(5, one[2]))  # the same again
    assert not trust.apply_crl(ca.crl(4))  # rolled back
    assert reason(trust, *one[:2]) is Reason.REVOKED
    trust.verify_peer(*two[:2], NOW)
    assert trust.apply_crl(ca.crl(6, one[2], two[2]))
    assert reason(trust, *two[:2]) is Reason.REVOKED
    assert trust.apply_crl(ca.crl(9, two[2]))  # only the newest counts
    trust.verify_peer(*one[:2], NOW)


def test_two_lists_with_one_number_are_a_fault_of_the_ca(ca, trust):
    chain, peer_id, serial = ca.node()
    trust.apply_crl(ca.crl(5, serial))
    with pytest.raises(CertificateError) as caught:
        trust.apply_crl(ca.crl(5))
    assert caught.value.reason is Reason.ROLLED_BACK
    assert reason(trust, chain, peer_id) is Reason.REVOKED


def test_lists_outlive_the_process(ca, tmp_path):
    chain, peer_id, serial = ca.node()
    TrustStore("acme", [ca.root], tmp_path / "crl").apply_crl(ca.crl(5, serial))
    again = TrustStore("acme", [ca.root], tmp_path / "crl")
    assert reason(again, chain, peer_id) is Reason.REVOKED
    assert not again.apply_crl(ca.crl(4))
    assert again.revocation_lists[ca.root.key].number == 5


def test_each_root_has_its_own_list(tmp_path):
    old, new = Ca(), Ca()
    trust = TrustStore("acme", [old.root, new.root], tmp_path / "crl")
    mine, theirs = old.node(), new.node()
    assert trust.apply_crl(old.crl(900, mine[2]))
    assert trust.apply_crl(new.crl(1, mine[2]))  # lower number, and not its certificate
    assert set(trust.revocation_lists) == {old.root.key, new.root.key}
    assert reason(trust, *mine[:2]) is Reason.REVOKED
    # Both CAs count serials from 101 here, so the new root's list does revoke its own 101.
    assert theirs[2] == mine[2] and reason(trust, *theirs[:2]) is Reason.REVOKED
    fresh = new.node()
    trust.verify_peer(*fresh[:2], NOW)
    # Without the old root in trust, its list is no longer looked at.
    only_new = TrustStore("acme", [new.root], tmp_path / "crl")
    assert set(only_new.revocation_lists) == {new.root.key}


def test_strangers_cannot_revoke(ca, trust):
    stranger = Ca()
    for der in (stranger.crl(9), b"", b"junk"):
        with pytest.raises(CertificateError):
            trust.apply_crl(der)
    assert not trust.revocation_lists


def test_listeners_hear_of_news_when_it_is_in_force(ca, trust, tmp_path):
    chain, peer_id, serial = ca.node()
    heard = []

    def listener(crl):
        files = [path.read_bytes() for path in (tmp_path / "crl").iterdir()]
        heard.append((crl.number, reason(trust, chain, peer_id), crl.der in files))

    stop = trust.on_revocation(listener)
    trust.apply_crl(ca.crl(5, serial))
    trust.apply_crl(ca.crl(5, serial))
    trust.apply_crl(ca.crl(4))
    assert heard == [(5, Reason.REVOKED, True)]
    stop()
    trust.apply_crl(ca.crl(6, serial))
    assert len(heard) == 1


def test_a_full_disk_does_not_stop_a_revocation(ca, trust, monkeypatch, caplog):
    chain, peer_id, serial = ca.node()

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mesh.identity.trust.write_atomic", fail)
    assert trust.apply_crl(ca.crl(5, serial))
    assert reason(trust, chain, peer_id) is Reason.REVOKED
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("content", [b"", b"junk", b"\x30" * 300_000])
def test_a_damaged_list_on_disk_stops_the_start(ca, trust, tmp_path, content):
    trust.apply_crl(ca.crl(5))
    (file,) = (tmp_path / "crl").iterdir()
    file.write_bytes(content)
    with pytest.raises(CertificateFileError) as caught:
        TrustStore("acme", [ca.root], tmp_path / "crl")
    assert str(file) in str(caught.value)


def test_roots_of_other_networks_are_left_out(ca, tmp_path):
    beta = Ca("beta")
    trust = TrustStore("acme", [ca.root, beta.root], tmp_path / "crl")
    assert trust.roots == (ca.root,)
    with pytest.raises(CertificateError):
        trust.apply_crl(beta.crl(1))
