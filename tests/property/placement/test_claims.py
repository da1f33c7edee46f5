"""From claims to layouts: stable, the same everywhere, and without taking down what works."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.gossip.advert import Holding
from mesh.routing.placement.claims import Claim, arrange, complete_chains, next_sequence
from mesh.routing.placement.facts import (
    WORKSPACE,
    Connection,
    Machine,
    ModelShape,
    Network,
    Speed,
    Want,
)
from mesh.routing.placement.steps import Drain, Held, Keep, Load, next_steps

MB = 1 << 20
MODEL = ModelShape("m", "ab" * 32, 6, 10 * MB, 10 * MB, 10 * MB, 0, 512, 1024, 4096)
OTHER = replace(MODEL, name="n", digest="cd" * 32, layers=4)
WANT = Want(MODEL, context=1024, sessions=1)


def machine(peer, layers, decode=0.001):
    layer = MODEL.layer_bytes + MODEL.kv_bytes * 1024
    memory = WORKSPACE + MODEL.head_bytes + layers * layer
    return Machine(peer, memory, {d: Speed(0.0001, decode) for d in (MODEL.digest, OTHER.digest)})


def network(machines):
    pairs = itertools.combinations([m.peer for m in machines], 2)
    return Network({pair: Connection(0.001, 1e8) for pair in pairs})


def claims_of(plan, ready=True, sequence=1):
    return [
        Claim(s.peer, model.want.model.digest, s.first, s.last, sequence, ready)
        for model in plan.models
        for s in model.stages
    ]


def held(plan):
    return {
        (s.peer, model.want.model.digest, s.first, s.last)
        for model in plan.models
        for s in model.stages
    }


def claim(peer, first, last, sequence=1, ready=True, digest=MODEL.digest):
    return Claim(peer, digest, first, last, sequence, ready)


@st.composite
def situations(draw):
    machines = [
        replace(
            machine(
                f"P{i}", draw(st.integers(0, 7)), draw(st.sampled_from([0.0005, 0.001, 0.004]))
            ),
            fixed=draw(st.sampled_from([False, False, False, True])),
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    wants = [replace(WANT, replicas=draw(st.sampled_from([None, 1, 2])))]
    if draw(st.booleans()):
        wants.append(
            Want(OTHER, replicas=draw(st.sampled_from([None, 1])), context=1024, sessions=1)
        )
    claims = []
    for peer in [m.peer for m in machines] + ["gone"]:
        for model in (MODEL, OTHER):
            if draw(st.booleans()):
                first = draw(st.integers(0, model.layers - 1))
                last = draw(st.integers(first + 1, model.layers))
                sequence = draw(st.sampled_from([1, 2, 3, None]))
                claims.append(claim(peer, first, last, sequence, draw(st.booleans()), model.digest))
    return wants, machines, claims


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_any_claims_give_a_sound_layout_which_is_the_same_in_any_order(situation, rng):
    wants, machines, claims = situation
    net = network(machines)
    plan = arrange(wants, machines, net, claims)
    taken = dict.fromkeys((m.peer for m in machines), 0)
    typed = {(c.peer, c.digest) for c in claims if c.sequence is None}
    for model in plan.models:
        peers = [stage.peer for stage in model.stages]
        assert len(peers) == len(set(peers))
        for chain in model.chains:
            bounds = [(s.first, s.last) for s in chain.stages]
            assert bounds[0][0] == 0 and bounds[-1][1] == model.want.model.layers
            assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        for stage in model.stages:
            if (stage.peer, model.want.model.digest) not in typed:
                taken[stage.peer] += stage.bytes
    assert all(taken[m.peer] <= max(0, m.memory) for m in machines)
    shuffled = [list(part) for part in (wants, machines, claims)]
    for part in shuffled:
        rng.shuffle(part)
    assert arrange(shuffled[0], shuffled[1], net, shuffled[2]) == plan


@given(situations())
@settings(max_examples=60, deadline=None)
def test_weights_that_are_wanted_under_two_names_are_laid_out_once(situation):
    wants, machines, claims = situation
    net = network(machines)
    again = replace(wants[0], model=replace(MODEL, name="z"), replicas=3)
    *models, other = arrange([again, *wants], machines, net, claims).models
    assert tuple(models) == arrange(wants, machines, net, claims).models
    assert other.want == again and not other.stages
    assert other.notes == ("has the weights of m, which is wanted too: only that is laid out",)


@given(situations())
@settings(max_examples=120, deadline=None)
def test_a_layout_that_is_claimed_and_loaded_stays(situation):
    wants, machines, claims = situation
    net = network(machines)
    typed = [c for c in claims if c.sequence is None]
    holders = {(c.peer, c.digest) for c in typed}
    layouts = []
    made: list[Claim] = []
    for _ in range(4):
        plan = arrange(wants, machines, net, [*typed, *made])
        made = [c for c in claims_of(plan) if (c.peer, c.digest) not in holders]
        # What users typed may come to be used; what was placed stays where it is.
        layouts.append({entry for entry in held(plan) if entry[:2] not in holders})
    assert layouts[-1] == layouts[-2]
    if not typed:
        assert layouts[0] == layouts[-1]


def test_a_lost_stage_is_taken_over_by_a_free_machine_and_nothing_else_moves():
    machines = [machine(p, 3) for p in "BCD"]  # A is gone
    claims = [claim("A", 0, 3), claim("B", 3, 6)]
    plan = arrange([replace(WANT, replicas=1)], machines, network(machines), claims)
    chain = plan.models[0].chains[0]
    assert [(s.peer, s.first, s.last) for s in chain.stages] == [("C", 0, 3), ("B", 3, 6)]


def test_a_broken_chain_is_not_mended_when_one_machine_does_it_alone():
    machines = [machine("B", 3), machine("C", 9)]
    plan = arrange([replace(WANT, replicas=1)], machines, network(machines), [claim("B", 3, 6)])
    assert [chain.peers for chain in plan.models[0].chains] == [("C",)]


def test_what_is_loaded_wins_then_the_earlier_claim_then_the_peer():
    machines = [machine(p, 7) for p in "ABC"]
    want = replace(WANT, replicas=1)

    def winner(*claims):
        return arrange([want], machines, network(machines), claims).models[0].chains[0].peers

    assert winner(claim("A", 0, 6, 2), claim("B", 0, 6, 1)) == ("B",)
    assert winner(claim("A", 0, 6, 1, False), claim("B", 0, 6, 5)) == ("B",)
    assert winner(claim("B", 0, 6, 1), claim("A", 0, 6, 1)) == ("A",)


def test_two_halves_that_each_made_a_chain_keep_one_of_them():
    machines = [machine(p, 3) for p in "ABCD"]
    claims = [claim("A", 0, 3, 4), claim("B", 3, 6, 4), claim("C", 0, 3, 2), claim("D", 3, 6, 2)]
    plan = arrange([replace(WANT, replicas=1)], machines, network(machines), claims)
    assert [chain.peers for chain in plan.models[0].chains] == [("C", "D")]
    both = arrange([WANT], machines, network(machines), claims)
    assert len(both.models[0].chains) == 2


def test_it_is_laid_out_anew_only_when_that_is_better_by_the_margin():
    old = [machine("A", 3, 0.002), machine("B", 3, 0.002)]
    claims = [claim("A", 0, 3), claim("B", 3, 6)]
    want = replace(WANT, replicas=1)
    for decode, moves in ((0.0018, False), (0.0002, True)):
        machines = [*old, machine("C", 8, decode), machine("D", 2, decode)]
        slow = [m if m.peer != "C" else replace(m, memory=old[0].memory) for m in machines]
        plan = arrange([want], slow, network(slow), claims)
        assert (held(plan) != held(arrange([want], old, network(old), claims))) == moves


def test_a_working_chain_is_not_broken_to_make_a_better_one():
    """C is fast, but A would have to unload what works to take other layers."""
    machines = [machine("A", 3), machine("B", 3, 0.01), machine("C", 4, 0.0001)]
    claims = [claim("A", 3, 6), claim("B", 0, 3)]
    want = replace(WANT, replicas=1)
    plan = arrange([want], machines, network(machines), claims)
    target = {stage.peer: (stage.first, stage.last) for stage in plan.models[0].stages}
    assert target.get("A", (3, 6)) == (3, 6)


def test_more_chains_are_made_when_machines_join():
    machines = [machine(p, 3) for p in "ABCDE"]
    claims = [claim("A", 0, 3), claim("B", 3, 6)]
    model = arrange([WANT], machines, network(machines), claims).models[0]
    assert next(chain.peers for chain in model.chains) == ("A", "B")
    assert len(model.chains) == 2 and len(model.spares) == 1


def test_a_model_that_is_not_wanted_any_more_is_let_go():
    plan = arrange([], [machine("A", 7)], Network({}), [claim("A", 0, 6)])
    one = Held(0, MODEL.digest, 0, 6, WANT.stage_bytes(0, 6), True)
    assert next_steps("A", 1 << 40, plan, [claim("A", 0, 6)], [one]) == (Drain(0),)


def test_an_old_stage_goes_on_until_the_new_layout_is_loaded():
    machines = [machine("A", 20), machine("B", 7, 0.0001)]
    want = replace(WANT, replicas=1)
    old = [claim("A", 0, 6)]
    plan = arrange([want], machines, network(machines), old)
    assert held(plan) == {("B", MODEL.digest, 0, 6)}
    needed = WANT.stage_bytes(0, 6)
    mine = Held(7, MODEL.digest, 0, 6, needed, True)
    size = machines[0].memory
    assert next_steps("A", size, plan, old, [mine]) == ()
    assert next_steps("B", machines[1].memory, plan, old, []) == (Load(want, 0, 6, needed),)
    loading = [*old, claim("B", 0, 6, 2, ready=False)]
    assert next_steps("A", size, plan, loading, [mine]) == ()
    loaded = [*old, claim("B", 0, 6, 2)]
    assert next_steps("A", size, plan, loaded, [mine]) == (Drain(7),)
    # Meanwhile B is lost: what drains is wanted again.
    back = arrange([want], machines[:1], Network({}), old)
    drained = replace(mine, draining=True)
    assert next_steps("A", size, back, old, [drained]) == (Keep(7),)


def test_memory_is_made_by_letting_go_of_what_is_part_of_nothing():
    machines = [machine("A", 3), machine("B", 3)]
    want = replace(WANT, replicas=1)
    stray = Held(1, MODEL.digest, 1, 4, WANT.stage_bytes(1, 4), True)
    claims = [claim("A", 1, 4, 9)]
    plan = arrange([want], machines, network(machines), claims)
    if plan.of("A") and plan.of("A")[0][1].first != 1:
        assert next_steps("A", machines[0].memory, plan, claims, [stray]) == (Drain(1),)


def test_sequences_grow_past_all_that_were_seen():
    assert next_sequence([], MODEL.digest) == 1
    assert next_sequence([claim("A", 0, 3, 7), claim("B", 3, 6, None)], MODEL.digest) == 8


class Mesh:
    """Nodes that all see the same, each taking its own steps; loading takes a while."""

    def __init__(self, wants, machines, rng):
        self.wants, self.machines, self.rng = wants, {m.peer: m for m in machines}, rng
        self.held = {m.peer: [] for m in machines}  # (Held, sequence)
        self.ids = itertools.count()

    @property
    def claims(self):
        return [
            Claim(peer, h.digest, h.first, h.last, sequence, h.ready and not h.draining)
            for peer, held in self.held.items()
            for h, sequence in held
        ]

    def plan(self):
        machines = list(self.machines.values())
        return arrange(self.wants, machines, network(machines), self.claims)

    def act(self, peer):
        mine = self.held[peer]
        steps = next_steps(
            peer, self.machines[peer].memory, self.plan(), self.claims, [h for h, _ in mine]
        )
        for step in steps:
            if isinstance(step, Load):
                sequence = next_sequence(self.claims, step.want.model.digest)
                fresh = Held(
                    next(self.ids), step.want.model.digest, step.first, step.last, step.bytes, False
                )
                mine.append((fresh, sequence))
            else:
                draining = isinstance(step, Drain)
                mine[:] = [
                    (replace(h, draining=draining) if h.id == step.id else h, s) for h, s in mine
                ]
        return bool(steps)

    def progress(self, peer):
        """Loads end, what drains is unloaded."""
        mine = self.held[peer]
        before = list(mine)
        mine[:] = [(replace(h, ready=True), s) for h, s in mine if not h.draining]
        return mine != before

    def settle(self):
        for _ in range(200):
            peers = sorted(self.machines)
            self.rng.shuffle(peers)
            moved = [self.act(p) | (self.rng.random() < 0.5 and self.progress(p)) for p in peers]
            if not any(moved) and not any(self.progress(p) for p in peers):
                return
        raise AssertionError("never comes to rest")

    def working(self, model=MODEL):
        claims = [c for c in self.claims if c.digest == model.digest and c.ready]
        return complete_chains(claims, model.layers)


@given(st.data(), st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_meshes_come_to_rest_through_joins_and_losses(data, seed):
    rng = random.Random(seed)
    replicas = data.draw(st.sampled_from([None, 1, 2]))
    machines = [machine(f"P{i}", rng.randint(1, 7), rng.choice([0.0005, 0.001])) for i in range(5)]
    mesh = Mesh([replace(WANT, replicas=replicas)], machines, rng)
    for turn in range(4):
        mesh.settle()
        plan = mesh.plan()
        now = {(c.peer, c.digest, c.first, c.last) for c in mesh.claims}
        if plan.models[0].chains:
            assert held(plan) <= now
            assert len(mesh.working()) >= len(plan.models[0].chains)
        if turn % 2:
            peer = f"N{turn}"
            mesh.machines[peer] = machine(peer, rng.randint(3, 8))
            mesh.held[peer] = []
        else:
            lost = rng.choice(sorted(mesh.machines))
            del mesh.machines[lost], mesh.held[lost]


def test_the_greatest_sequence_that_can_be_said_is_not_exceeded():
    """A peer that has said it must not keep others from claiming."""
    said = Claim("x", MODEL.digest, 0, 1, (1 << 32) - 1, True)
    holding = Holding(
        id=1, model="m", digest=MODEL.digest, kind="stage", first=0, last=1, layers=6,
        context_length=1, device="CPU", ready=False, slots=1, queue=0,
        claim=next_sequence([said], MODEL.digest),
    )  # fmt: skip
    assert holding.claim == said.sequence
