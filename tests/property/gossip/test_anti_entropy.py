"""After one round two nodes know the same, whatever each knew before."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from ca.certificate import Certificate, Role
from mesh.gossip import anti_entropy
from mesh.gossip.advert import Advert, SignedAdvert
from mesh.gossip.anti_entropy import compare, digest, key_of, parse_digest, parse_wanted, wanted
from mesh.gossip.events import AdvertHeard, Doubted, LinkDown, Mine, Tick
from mesh.gossip.membership import Table, apply

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
VERSIONS = st.tuples(st.integers(1, 3), st.integers(1, 3))
KNOWN = st.dictionaries(st.sampled_from([f"P{i}" for i in range(8)]), VERSIONS)


def signed(peer, boot, sequence, state="up"):
    certificate = Certificate(
        peer, "acme", peer, frozenset({Role.SERVE}), 1, EPOCH, EPOCH, KEY, b"", ()
    )
    advert = Advert(boot=boot, sequence=sequence, beat=10.0, state=state)
    return SignedAdvert(advert, certificate, f"{peer} {boot} {sequence} {state}".encode())


def table_of(me, known):
    table, _ = apply(Table(me, 1), Mine(signed(me, 1, 1)), 0.0)
    for peer, (boot, sequence) in known.items():
        table, _ = apply(table, AdvertHeard(signed(peer, boot, sequence)), 0.0)
    return table


def take(table, records, now):
    for record in records:
        peer, boot, sequence, state = record.envelope.decode().split()
        event = AdvertHeard(signed(peer, int(boot), int(sequence), state), record.age)
        table, _ = apply(table, event, now)
    return table


def versions(table):
    return {p: e.signed.version for p, e in table.entries.items() if e.status != "gone"}


@settings(max_examples=200)
@given(ours=KNOWN, theirs=KNOWN)
def test_one_round_makes_both_know_the_newest_of_both(ours, theirs):
    a, b = table_of("A", ours), table_of("B", theirs)
    diff = compare(b, parse_digest(digest(a)), 1.0)
    a = take(a, diff.send, 1.0)
    b = take(b, wanted(a, parse_wanted(b"".join(diff.want)), 1.0), 1.0)
    newest = {
        peer: max(ours.get(peer, (0, 0)), theirs.get(peer, (0, 0))) for peer in {*ours, *theirs}
    }
    assert versions(a) == versions(b) == {**newest, "A": (1, 1), "B": (1, 1)}
    again = compare(b, parse_digest(digest(a)), 1.0)
    assert again.send == again.want == ()


def test_the_suspect_and_the_gone_are_not_sent_and_not_sent_back():
    a, b = table_of("A", {"X": (1, 5)}), table_of("B", {"X": (1, 5)})
    a, _ = apply(a, LinkDown("X"), 1.0)
    nobody = parse_digest(b"")
    assert {r.envelope.split()[0] for r in compare(a, nobody, 1.0).send} == {b"A"}
    a, _ = apply(a, Tick(), 4.0)
    assert a.entries["X"].status == "gone"
    assert [r.envelope for r in compare(b, parse_digest(digest(a)), 4.0).send] == [b"B 1 1 up"]


def test_the_doubted_are_not_sent_to_those_who_have_not_heard_of_the_doubt():
    a = table_of("A", {"X": (1, 5)})
    a, _ = apply(a, Doubted("X"), 1.0)
    assert [r.envelope for r in compare(a, {}, 1.5).send] == [b"A 1 1 up"]
    a, _ = apply(a, AdvertHeard(signed("X", 1, 6)), 2.0)
    assert len(compare(a, {}, 2.5).send) == 2


def test_the_last_word_of_one_that_left_is_passed_on_for_a_while():
    a = table_of("A", {"X": (1, 5)})
    a, _ = apply(a, AdvertHeard(signed("X", 1, 6, "left")), 1.0)
    b = table_of("B", {"X": (1, 5)})
    diff = compare(a, parse_digest(digest(b)), 2.0)
    b = take(b, diff.send, 2.0)
    assert b.entries["X"].status == "gone"
    late = compare(a, parse_digest(digest(b)), 2.0 + anti_entropy.FAREWELL)
    assert late.send == ()


def test_what_does_not_fit_comes_next_time_and_the_own_advert_first():
    known = {f"P{i}": (1, 1) for i in range(8)}
    b = table_of("B", known)
    a = table_of("A", {})
    rounds = 0
    while True:
        diff = compare(b, parse_digest(digest(a)), 1.0, limit=100)
        assert rounds or diff.send[0].envelope.startswith(b"B")
        a = take(a, diff.send, 1.0)
        rounds += 1
        if not diff.more:
            break
    assert rounds > 1
    assert set(versions(a)) == {"A", "B", *known}


def test_keys_are_short_and_distinct():
    keys = {key_of(f"peer {i}") for i in range(10_000)}
    assert len(keys) == 10_000
    assert {len(k) for k in keys} == {8}
