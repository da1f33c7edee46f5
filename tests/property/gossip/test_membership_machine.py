"""Whatever happens in whatever order, the membership table keeps its promises."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ca.certificate import Certificate, Role
from mesh.gossip.advert import Advert, LoadReport, SignedAdvert
from mesh.gossip.events import (
    AdvertHeard,
    Became,
    Doubted,
    LinkDown,
    LinkUp,
    LoadHeard,
    Mine,
    Probe,
    ProofOfLife,
    Refused,
    Tick,
    Unreachable,
)
from mesh.gossip.membership import GRACE, MISSED_BEATS, PROBE_TIME, Table, apply

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
PEERS = st.sampled_from(["A", "B", "C"])
BEAT = 2.0


def signed(peer, boot=1, sequence=1, state="up"):
    certificate = Certificate(
        peer.lower(), "acme", peer, frozenset({Role.SERVE}), 1, EPOCH, EPOCH, KEY, b"", ()
    )
    return SignedAdvert(
        Advert(boot=boot, sequence=sequence, beat=BEAT, state=state), certificate, b""
    )


class Membership(RuleBasedStateMachine):
    """Peers that speak, fall silent, restart and leave; messages that repeat, age and reorder.

    ``said`` is what each peer really did say, in order: the model only delivers from there, since
    nobody can forge a signature.
    """

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.table, _ = apply(Table("ME", 1), Mine(signed("ME")), 0.0)
        self.said = {p: [(1, 1, "up", 0.0)] for p in "ABC"}
        self.left = dict.fromkeys("ABC", False)
        self.shown = {}  # status as followed from the effects alone

    def apply(self, event):
        before = self.table
        self.table, effects = apply(self.table, event, self.now)
        for peer, entry in before.entries.items():
            after = self.table.entries.get(peer)
            if after is not None:
                assert after.signed.version >= entry.signed.version, "went back"
                if entry.left and after.status != "gone":
                    assert after.boot > entry.boot, "came back after its last word"
        for effect in effects:
            if isinstance(effect, Became):
                assert self.shown.get(effect.peer) == effect.was or effect.was in (None, "gone")
                self.shown[effect.peer] = effect.now
                if effect.now == "suspect":
                    assert Probe(effect.peer) in effects
        return effects

    @rule(peer=PEERS, load=st.booleans())
    def speak(self, peer, load):
        boot, sequence, _, _ = self.said[peer][-1]
        if self.left[peer]:
            return
        self.said[peer].append((boot, sequence + 1, "load" if load else "up", self.now))

    @rule(peer=PEERS)
    def restart(self, peer):
        boot = self.said[peer][-1][0] + 1
        self.said[peer].append((boot, 1, "up", self.now))
        self.left[peer] = False

    @rule(peer=PEERS)
    def leave(self, peer):
        if not self.left[peer]:
            boot, sequence, _, _ = self.said[peer][-1]
            self.said[peer].append((boot, sequence + 1, "left", self.now))
            self.left[peer] = True

    @rule(peer=PEERS, back=st.integers(0, 20), honest=st.booleans())
    def deliver(self, peer, back, honest):
        boot, sequence, what, at = self.said[peer][-1 - min(back, len(self.said[peer]) - 1)]
        if what == "load":
            self.apply(LoadHeard(peer, LoadReport(boot=boot, sequence=sequence, beat=BEAT)))
        else:
            age = self.now - at if honest else 0.0
            self.apply(AdvertHeard(signed(peer, boot, sequence, what), age=age))

    @rule(peer=PEERS)
    def link_up(self, peer):
        self.apply(LinkUp(peer))

    @rule(peer=PEERS)
    def link_down(self, peer):
        self.apply(LinkDown(peer))
        entry = self.table.entries.get(peer)
        assert entry is None or entry.status != "alive"

    @rule(peer=PEERS)
    def unreachable(self, peer):
        self.apply(Unreachable(peer))

    @rule(peer=PEERS)
    def doubted(self, peer):
        before = self.table.entries.get(peer)
        assert self.apply(Doubted(peer)) == ()
        after = self.table.entries.get(peer)
        assert (after.status if after else None) == (before.status if before else None)

    @rule(peer=PEERS)
    def refuse(self, peer):
        self.apply(Refused(frozenset({peer}), "revoked"))
        entry = self.table.entries.get(peer)
        assert entry is None or entry.status == "gone"

    @precondition(lambda self: True)
    @rule(peer=PEERS)
    def prove(self, peer):
        boot = self.said[peer][-1][0]
        if not self.left[peer]:
            self.apply(ProofOfLife(peer, boot))

    @rule(seconds=st.floats(0.01, 30.0))
    def pass_time(self, seconds):
        until = self.now + seconds
        ticks = 0
        while self.table.deadline <= until:
            self.now = max(self.now, self.table.deadline)
            self.apply(Tick())
            ticks += 1
            assert ticks < 20, "deadlines that do nothing"
        self.now = until

    @rule()
    def early_tick_changes_nothing(self):
        if self.table.deadline > self.now:
            table, effects = apply(self.table, Tick(), self.now)
            assert table is self.table
            assert effects == ()

    @invariant()
    def one_entry_each_and_never_ahead_of_what_was_said(self):
        for peer, entry in self.table.entries.items():
            if peer == "ME":
                assert entry.status == "alive"
                continue
            assert entry.signed.peer == peer
            assert (entry.boot, entry.sequence) <= self.said[peer][-1][:2]
            assert entry.deadline > self.now - 1e-9 or entry.deadline >= self.table.deadline
            if entry.status == "suspect":
                assert self.now <= entry.since + PROBE_TIME + 1e-9
            if entry.status == "alive":
                assert self.now <= entry.heard + MISSED_BEATS * BEAT + GRACE + 1e-6 or (
                    self.table.deadline <= self.now
                )

    @invariant()
    def effects_tell_the_whole_story(self):
        for peer, status in self.shown.items():
            entry = self.table.entries.get(peer)
            assert (entry.status if entry else "gone") == status


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
