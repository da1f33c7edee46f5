"""Facts of placement out of adverts: whose word counts, and what is made of silence."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from ca.certificate import SKEW, Certificate, Role
from mesh import describe_plan
from mesh.gossip.advert import (
    MAX_WANTS,
    Advert,
    Device,
    Holding,
    MeasuredSpeed,
    SeenLink,
    SignedAdvert,
    Wanted,
    in_time,
)
from mesh.gossip.anti_entropy import key_of
from mesh.gossip.events import AdvertHeard, LinkDown, Mine
from mesh.gossip.membership import Table, apply
from mesh.gossip.view import build_view
from mesh.routing.placement.from_view import (
    claims_in,
    facts_in,
    machines_in,
    measured_by,
    names_of,
    network_in,
    newest_wants,
    verdicts_in,
    want_of,
    wants_in,
)
from mesh.routing.placement.plan import make_plan

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
DIGEST = "ab" * 32
GB = 10**9


def wanted(version=1, publisher="A", **changes):
    fields = {
        "name": "m", "digest": DIGEST, "version": version, "publisher": publisher, "layers": 4,
        "layer_bytes": 1000, "embedding_bytes": 10, "head_bytes": 10, "shared_bytes": 0,
        "kv_bytes": 1, "hidden": 8, "context_length": 64,
    }  # fmt: skip
    return Wanted(**{**fields, **changes})


def link(peer, rtt=10, state=0, **more):
    return SeenLink(key=key_of(peer), rtt=rtt, state=state, **more)


def view_of(suspects=(), **nodes):
    """``A={...}``: fields of its advert, besides ``roles`` and ``memory``."""
    table = Table("A", 1)
    for peer, said in nodes.items():
        fields = dict(said)
        roles = fields.pop("roles", (Role.SERVE, Role.USE))
        memory = fields.pop("memory", GB)
        devices = fields.pop("devices", (Device(name="NPU"), Device(name="CPU", offered=memory)))
        certificate = Certificate(
            f"desk-{peer}", "acme", peer, frozenset(roles), 1, EPOCH, EPOCH, KEY, b"", ()
        )
        advert = Advert(boot=1, sequence=1, beat=10.0, devices=devices, **fields)
        signed = SignedAdvert(advert, certificate, b"")
        event = Mine(signed) if peer == "A" else AdvertHeard(signed)
        table, _ = apply(table, event, 100.0)
    for peer in suspects:
        table, _ = apply(table, LinkDown(peer), 100.0)
    return build_view(table, {}, 100.0)


def test_the_newest_want_counts_and_only_of_nodes_that_may_say_so():
    view = view_of(
        A={"wants": (wanted(3, "A", replicas=1),)},
        B={"wants": (wanted(5, "B", replicas=2),)},
        C={"wants": (wanted(9, "C", replicas=7),), "roles": (Role.USE,)},
        D={"wants": (wanted(5, "A", replicas=4),), "roles": (Role.ADMIN,)},
    )
    assert [w.replicas for w in newest_wants(view)] == [2]
    gone = view_of(A={"wants": (wanted(3),)}, B={"wants": (wanted(4, replicas=0),)})
    assert wants_in(gone) == () and len(newest_wants(gone)) == 1


@settings(max_examples=60, deadline=None)
@given(
    claimed=st.lists(st.integers(1, 2**63 - 1) | st.integers(-10, 10), max_size=MAX_WANTS),
    minutes=st.floats(-3.0, 3.0),
)
def test_no_version_wins_for_ever(claimed, minutes):
    """Whatever a peer claims, what a user publishes afterwards counts, and two minutes later even
    where the clock is two minutes slow."""
    now = 1_800_000_000.0
    near = int((now + 60 * minutes) * 1000)
    theirs = [wanted(v if v > 10 else near + v, "Z", replicas=1) for v in claimed]
    believed = in_time(theirs, now)
    assert all(w.version <= (now + SKEW) * 1000 for w in believed)
    assert all(w in believed for w in theirs if w.version <= now * 1000)
    known = max((w.version for w in believed), default=0)
    ours = wanted(max(int(now * 1000), 1 + known), "A", replicas=3)
    assert in_time([ours], now + 0.001) == (ours,)
    view = view_of(A={"wants": (ours,)}, B={"wants": believed})
    assert [w.replicas for w in newest_wants(view)] == [3]


def test_weights_have_the_names_under_which_they_are_wanted_or_placed():
    def held(number, model, claim, digest=DIGEST):
        return Holding(
            id=number, model=model, digest=digest, kind="replica", first=0, last=4, layers=4,
            context_length=64, device="CPU", ready=False, slots=1, queue=1, claim=claim,
        )  # fmt: skip

    view = view_of(
        A={"wants": (wanted(3), wanted(3, name="gone", replicas=0))},
        B={"holdings": (held(1, "drains", 7), held(2, "typed", None), held(3, "x", 1, "ef" * 32))},
    )
    assert names_of(view, DIGEST) == {wanted(3).name, "drains"}


def test_machines_are_those_that_offer_memory_and_may_serve():
    view = view_of(
        suspects=("E",),
        A={},
        B={"memory": None},
        C={"roles": (Role.USE,)},
        D={"state": "draining"},
        E={},
    )
    assert [m.peer for m in machines_in(view)] == ["A", "E"]
    assert machines_in(view)[0].memory == GB


def test_a_device_of_fixed_shapes_is_known_by_its_name():
    view = view_of(A={}, B={"devices": (Device(name="NPU", offered=GB),)})
    assert [(m.peer, m.fixed) for m in machines_in(view)] == [("A", False), ("B", True)]


def test_a_machine_that_has_not_measured_a_model_is_taken_for_a_usual_one():
    speeds = [MeasuredSpeed(digest=DIGEST, device="CPU", prefill=0.1, decode=d) for d in (1, 2, 3)]
    others = MeasuredSpeed(digest=DIGEST, device="GPU", prefill=0.1, decode=0.001)
    view = view_of(
        A={"speeds": (speeds[0],)}, B={"speeds": (speeds[1],)}, C={"speeds": (speeds[2],)},
        D={"speeds": (others,)},
    )  # fmt: skip
    assert [m.speeds[DIGEST].decode for m in machines_in(view)] == [1, 2, 3, 2]


def test_an_estimate_follows_what_devices_can_do_and_is_told_as_one():
    fast = Device(name="CPU", offered=GB, decode_rate=30 * GB, prefill_rate=400 * GB)
    slow = Device(name="CPU", offered=GB, decode_rate=10 * GB, prefill_rate=100 * GB)
    speed = MeasuredSpeed(digest=DIGEST, device="CPU", prefill=0.1, decode=0.5)
    view = view_of(
        A={"devices": (slow,), "speeds": (speed,), "wants": (wanted(),)}, B={"devices": (fast,)}
    )
    first, second = (machine.speeds[DIGEST] for machine in machines_in(view))
    assert (first.decode, first.prefill) == (0.5, 0.1)
    assert second.decode == pytest.approx(0.5 / 3) and second.prefill == pytest.approx(0.025)
    assert measured_by(view, DIGEST) == {"A"}
    facts = facts_in(view)
    told = describe_plan.plan(view, make_plan(facts.wants, facts.machines, facts.network))
    chains = told["models"][0]["chains"]
    assert {s["name"]: s["speed"] for c in chains for s in c["stages"]} == {
        "desk-A": "measured",
        "desk-B": "estimated",
    }
    # Nobody has measured it: only the devices can be compared.
    new = view_of(A={"devices": (slow,)}, B={"devices": (fast,)})
    shape = want_of(wanted()).model
    first, second = (machine.speed(shape) for machine in machines_in(new))
    assert first.decode / second.decode == pytest.approx(3.0)


def test_half_of_those_who_say_something_can_quarantine_a_node():
    view = view_of(
        A={"links": (link("B", state=1), link("C"))},
        B={"links": (link("A"), link("C", state=2))},
        C={"links": (link("A"), link("B"))},
        D={"links": (link("C"), link("B", state=1), link("A", state=1))},
    )
    assert {p: v.state for p, v in verdicts_in(view).items()} == {"A": 0, "B": 1, "C": 0}
    assert [m.peer for m in machines_in(view) if m.alone] == ["B"]
    rejected = view_of(A={"links": (link("B", state=2),)}, B={})
    assert [m.peer for m in machines_in(rejected)] == ["A"]


def test_the_worse_side_of_a_link_counts_and_a_detour_stands_in_for_what_nobody_measured():
    view = view_of(
        A={"links": (link("B", 20, upload=1000, download=4000), link("Z", 1))},
        B={"links": (link("A", 60, upload=9000, download=9000), link("C", 100))},
        C={},
    )
    net = network_in(view)
    assert net.between("A", "B").delay == pytest.approx(0.003)
    assert net.between("B", "A").bandwidth == pytest.approx(1e6)
    assert net.between("A", "C").delay == pytest.approx(0.008)


def test_holdings_are_claims_and_typed_ones_have_no_sequence():
    def holding(id_, first, last, claim):
        return Holding(
            id=id_, model="m", digest=DIGEST, kind="stage", first=first, last=last, layers=4,
            context_length=64, device="CPU", ready=True, slots=1, queue=1, claim=claim,
        )  # fmt: skip

    view = view_of(A={"holdings": (holding(0, 0, 2, 7), holding(1, 2, 4, None))})
    assert [(c.first, c.sequence) for c in claims_in(view)] == [(0, 7), (2, None)]


def test_what_if_adds_and_removes_machines():
    view = view_of(A={"wants": (wanted(),)}, B={})
    facts = facts_in(view)
    more = describe_plan.what_if(view, "add:16GB, remove:desk-B", facts)
    assert [m.peer for m in more.machines] == ["A", "added-1"]
    assert more.machines[1].memory == 16 * GB
    told = describe_plan.plan(view, make_plan(more.wants, more.machines, more.network))
    names = {s["name"] for c in told["models"][0]["chains"] for s in c["stages"]}
    assert names == {"desk-A", "added-1"}
    for wrong in ("remove:nobody", "add:much", "grow:A", "add:1GB," * 20):
        with pytest.raises(ValueError):
            describe_plan.what_if(view, wrong, facts)
