"""The life of a peer in the membership table, one rule at a time."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Certificate, Role
from mesh.gossip.advert import Advert, HoldingLoad, LoadReport, SignedAdvert
from mesh.gossip.events import (
    AdvertHeard,
    Became,
    Clash,
    Doubt,
    Doubted,
    Fetch,
    LinkDown,
    LinkUp,
    LoadHeard,
    Mine,
    Probe,
    ProofOfLife,
    Reboot,
    Refused,
    Tick,
    Unreachable,
)
from mesh.gossip.membership import MAX_REBOOTS, SPEAK_UP, Table, apply

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def signed(peer, boot=1, sequence=1, beat=10.0, state="up", load=()):
    advert = Advert(boot=boot, sequence=sequence, beat=beat, state=state, load=load)
    certificate = Certificate(
        name=peer.lower(),
        network="acme",
        peer_id=peer,
        roles=frozenset({Role.SERVE}),
        serial=1,
        not_before=EPOCH,
        not_after=EPOCH,
        public_key=KEY,
        der=b"",
        chain_der=(),
    )
    return SignedAdvert(advert, certificate, b"envelope")


class Mesh:
    """A table with its effects collected, at node ME."""

    def __init__(self):
        self.table, _ = apply(Table("ME", 100), Mine(signed("ME", 100)), 0.0)
        self.effects = []

    def __call__(self, event, now):
        self.table, effects = apply(self.table, event, now)
        self.effects += effects
        return effects

    def status(self, peer="A"):
        entry = self.table.entries.get(peer)
        return None if entry is None else entry.status

    def tick_until(self, now):
        """Ticks at every deadline up to ``now``, as the service does."""
        while self.table.deadline <= now:
            before = self.table
            self(Tick(), self.table.deadline)
            assert self.table is not before, "a deadline that does nothing would spin"


@pytest.fixture
def mesh():
    return Mesh()


def test_an_advert_makes_a_peer_alive(mesh):
    assert mesh(AdvertHeard(signed("A")), 1.0) == (Became("A", None, "alive", "advert"),)
    assert mesh.status() == "alive"


def test_one_missed_beat_changes_nothing_two_make_suspect_then_gone(mesh):
    mesh(AdvertHeard(signed("A", beat=2.0)), 0.0)
    mesh.tick_until(3.9)
    assert mesh.status() == "alive"
    mesh.tick_until(5.0)
    assert mesh.status() == "suspect"
    assert Probe("A") in mesh.effects
    mesh.tick_until(7.9)
    assert mesh.status() == "suspect"
    mesh.tick_until(8.0)
    assert mesh.status() == "gone"


def test_the_beat_is_what_the_newest_message_promised(mesh):
    mesh(AdvertHeard(signed("A", beat=10.0)), 0.0)
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=2, beat=2.0)), 1.0)
    mesh.tick_until(6.0)
    assert mesh.status() == "suspect"


def test_a_lost_link_makes_suspect_at_once_and_a_proof_of_life_ends_that(mesh):
    mesh(AdvertHeard(signed("A")), 0.0)
    mesh(LinkUp("A"), 0.1)
    assert mesh(LinkDown("A", "reset"), 1.0) == (
        Became("A", "alive", "suspect", "reset"),
        Probe("A"),
    )
    mesh(ProofOfLife("A", 1), 1.2)
    assert mesh.status() == "alive"
    mesh.tick_until(10.0)
    assert mesh.status() == "alive"


def test_what_was_said_before_the_suspicion_does_not_end_it(mesh):
    mesh(AdvertHeard(signed("A")), 0.0)
    mesh(LinkDown("A"), 1.0)
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=2, beat=2.0)), 1.5)
    mesh(AdvertHeard(signed("A", sequence=3)), 1.9)
    assert mesh.status() == "suspect"
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=4, beat=2.0)), 2.5)
    assert mesh.status() == "alive"


def test_a_failed_dial_makes_suspect_but_not_while_there_is_a_link(mesh):
    mesh(AdvertHeard(signed("A")), 0.0)
    mesh(LinkUp("A"), 0.1)
    mesh(Unreachable("A"), 0.2)
    assert mesh.status() == "alive"
    mesh(LinkDown("A"), 0.3)
    mesh(ProofOfLife("A", 1), 0.4)
    mesh(Unreachable("A"), 0.5)
    assert mesh.status() == "suspect"


def test_a_lost_link_is_told_to_those_who_have_none(mesh):
    for peer in "ABC":
        mesh(AdvertHeard(signed(peer)), 0.0)
    mesh(LinkUp("A"), 0.1)
    mesh(LinkUp("B"), 0.1)
    assert Doubt("A") in mesh(LinkDown("A"), 1.0)
    assert mesh(LinkDown("A"), 1.1) == ()
    mesh(LinkUp("C"), 1.2)
    assert Doubt("B") not in mesh(LinkDown("B"), 1.3), "every peer that is alive has a link"


def test_a_doubted_peer_that_speaks_up_stays_alive_and_one_that_does_not_is_lost(mesh):
    mesh(AdvertHeard(signed("A", beat=60.0)), 0.0)
    mesh(AdvertHeard(signed("B", beat=60.0)), 0.0)
    mesh(Doubted("A"), 10.0)
    mesh(Doubted("B"), 10.0)
    mesh(Doubted("B"), 12.0)
    assert (mesh.status("A"), mesh.status("B")) == ("alive", "alive")
    mesh(AdvertHeard(signed("A", sequence=2, beat=60.0)), 10.5)
    # This it said before it was doubted.
    mesh(AdvertHeard(signed("B", sequence=2, beat=60.0), age=5.0), 11.0)
    mesh.tick_until(10.0 + SPEAK_UP)
    assert (mesh.status("A"), mesh.status("B")) == ("alive", "suspect")
    assert Probe("B") in mesh.effects
    mesh.tick_until(20.0)
    assert (mesh.status("A"), mesh.status("B")) == ("alive", "gone")
    mesh(Doubted("B"), 21.0)
    mesh(Doubted("unheard of"), 21.0)
    assert mesh.status("B") == "gone"


def test_many_who_are_doubted_one_by_one_are_looked_at_together(mesh):
    peers = [f"P{i}" for i in range(100)]
    for peer in peers:
        mesh(AdvertHeard(signed(peer, beat=60.0)), 0.0)
    for i, peer in enumerate(peers):
        mesh(Doubted(peer), 10.0 + i / 100)
    ticks = 0
    while mesh.table.deadline < 20.0:
        at = mesh.table.deadline
        mesh(Tick(), at)
        ticks += 1
        late = [p for p in peers if mesh.table.entries[p].speak_by <= at]
        assert not late, "each at its time or a little later"
    assert {mesh.status(peer) for peer in peers} == {"gone"}
    assert ticks <= 12


def test_old_news_never_brings_a_ghost_back(mesh):
    mesh(AdvertHeard(signed("A", sequence=5)), 0.0)
    mesh(LinkDown("A"), 1.0)
    mesh.tick_until(4.0)
    assert mesh.status() == "gone"
    # Another node has not noticed yet and passes on what it knows: the same, or a little more.
    mesh(AdvertHeard(signed("A", sequence=5), age=0.5), 5.0)
    assert mesh.status() == "gone"
    mesh(AdvertHeard(signed("A", sequence=6), age=4.5), 5.0)
    assert mesh.status() == "gone"
    mesh(AdvertHeard(signed("A", sequence=4, boot=1)), 6.0)
    assert mesh.status() == "gone"
    # It said this after we had given it up.
    mesh(AdvertHeard(signed("A", sequence=7), age=0.5), 7.0)
    assert mesh.status() == "alive"


def test_an_advert_whose_author_was_silent_for_long_is_only_remembered(mesh):
    assert mesh(AdvertHeard(signed("A", beat=2.0), age=60.0), 100.0) == ()
    assert mesh.status() == "gone"
    assert mesh(AdvertHeard(signed("A", sequence=2, beat=2.0), age=0.1), 101.0) == (
        Became("A", "gone", "alive", "heard again"),
    )


def test_leave_is_final_for_that_boot(mesh):
    mesh(AdvertHeard(signed("A")), 0.0)
    effects = mesh(AdvertHeard(signed("A", sequence=2, state="left")), 1.0)
    assert effects == (Became("A", "alive", "gone", "left"),)
    mesh(AdvertHeard(signed("A", sequence=1)), 1.5)
    mesh(AdvertHeard(signed("A", sequence=3)), 9.0)
    mesh(ProofOfLife("A", 1), 9.5)
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=10, beat=2.0)), 9.6)
    mesh(LinkDown("A"), 9.7)
    assert mesh.status() == "gone"


def test_leave_and_rejoin_within_two_seconds_is_one_entry_alive(mesh):
    mesh(AdvertHeard(signed("A", boot=1, load=(HoldingLoad(id=1, active=3, waiting=0),))), 0.0)
    mesh(LinkUp("A"), 0.1)
    mesh(AdvertHeard(signed("A", boot=1, sequence=2, state="left")), 5.0)
    mesh(LinkDown("A", "closed"), 5.1)
    assert mesh(AdvertHeard(signed("A", boot=2)), 6.5) == (Became("A", "gone", "alive", "advert"),)
    assert len(mesh.table.entries) == 2
    # Late echoes of the old life.
    mesh(AdvertHeard(signed("A", boot=1, sequence=2, state="left")), 6.6)
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=99, beat=2.0)), 6.7)
    assert mesh.status() == "alive"
    assert mesh.table.entries["A"].load == {}


def test_a_killed_peer_that_restarts_before_anyone_noticed_replaces_itself(mesh):
    mesh(AdvertHeard(signed("A", boot=1, sequence=50)), 0.0)
    mesh(LinkUp("A"), 0.1)
    assert mesh(AdvertHeard(signed("A", boot=2, sequence=1)), 1.0) == ()
    assert mesh.table.entries["A"].boot == 2
    assert mesh.status() == "alive"


def test_news_of_a_boot_whose_advert_is_missing_is_fetched(mesh):
    assert mesh(LoadHeard("A", LoadReport(boot=1, sequence=2, beat=2.0)), 0.0) == (Fetch("A"),)
    assert mesh(ProofOfLife("A", 1), 0.1) == (Fetch("A"),)
    mesh(AdvertHeard(signed("A", boot=1)), 0.2)
    assert mesh(LoadHeard("A", LoadReport(boot=2, sequence=1, beat=2.0)), 0.3) == (Fetch("A"),)
    assert mesh.status() == "alive"


def test_load_only_goes_forward(mesh):
    busy, idle = HoldingLoad(id=1, active=3, waiting=0), HoldingLoad(id=1, active=0, waiting=0)
    mesh(AdvertHeard(signed("A", sequence=1)), 0.0)
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=4, beat=2.0, load=(busy,))), 1.0)
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=3, beat=2.0, load=(idle,))), 1.1)
    # An advert made before the report, delivered after it.
    mesh(AdvertHeard(signed("A", sequence=2, load=(idle,))), 1.2)
    entry = mesh.table.entries["A"]
    assert entry.load == {1: busy}
    assert entry.load_at == 1.0
    assert entry.signed.version == (1, 2)


def test_a_refused_peer_is_gone_and_no_proof_of_life_helps(mesh):
    mesh(AdvertHeard(signed("A")), 0.0)
    assert mesh(Refused(frozenset({"A", "unknown"}), "revoked"), 1.0) == (
        Became("A", "alive", "gone", "revoked"),
    )
    mesh(ProofOfLife("A", 1), 2.0)
    mesh(LoadHeard("A", LoadReport(boot=1, sequence=9, beat=2.0)), 5.0)
    assert mesh.status() == "gone"


def test_a_certificate_that_ends_ends_the_peer(mesh):
    mesh(AdvertHeard(signed("A"), expires=5.0), 0.0)
    mesh.tick_until(5.0)
    assert mesh.status() == "gone"
    mesh(AdvertHeard(signed("A", sequence=2), expires=1000.0), 6.0)
    assert mesh.status() == "alive"


def test_gone_peers_are_forgotten_in_the_end(mesh):
    mesh(AdvertHeard(signed("A")), 0.0)
    mesh.tick_until(5000.0)
    assert mesh.status() is None
    assert mesh.table.deadline == math.inf


def test_a_clock_that_stood_back_is_overtaken(mesh):
    """Others remember this node by a newer boot than it took at start."""
    assert mesh(AdvertHeard(signed("ME", boot=500, sequence=3)), 1.0) == (Reboot(501),)
    assert mesh.table.boot == 501
    assert mesh(AdvertHeard(signed("ME", boot=500, sequence=3)), 1.1) == ()


def test_two_nodes_with_one_key_are_noticed(mesh):
    for turn in range(MAX_REBOOTS):
        boot = mesh.table.boot + 1
        assert mesh(AdvertHeard(signed("ME", boot=boot)), 1.0 + turn) == (Reboot(boot + 1),)
        mesh(Mine(signed("ME", boot + 1)), 1.0 + turn)
    assert mesh(AdvertHeard(signed("ME", boot=mesh.table.boot + 1)), 9.0) == (Clash(),)


def test_this_node_never_suspects_itself(mesh):
    mesh(LinkDown("ME"), 1.0)
    mesh(Refused(frozenset({"ME"}), "revoked"), 1.0)
    mesh.tick_until(1e6)
    assert mesh.status("ME") == "alive"
