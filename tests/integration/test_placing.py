"""What a node decides when two things happen at nearly the same time, and when it starts again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from ca.naming import Role
from inference.engines import Load
from mesh import holdings, loading, placing, stages
from mesh.capacity import Capacity
from mesh.config import NodeConfig
from mesh.gossip.advert import Wanted
from mesh.gossip.service import GossipService
from mesh.holdings import Holdings
from mesh.identity import TrustStore
from mesh.placing import Placing
from mesh.routing.placement.from_view import newest_wants
from mesh.routing.placement.steps import Drain, Keep
from mesh.stages import StageServer
from mesh.transport import Transport, TransportConfig
from mesh.wants import OwnWants

MODEL = SimpleNamespace(name="m", digest="ab" * 32, layers=4, context_length=64)


@dataclass
class Node:
    """The parts of a node that place, load and let go, without the rest."""

    transport: Transport
    gossip: GossipService
    holdings: Holdings
    server: StageServer
    placing: Placing
    gates: list[trio.Event]  # who asks for the server next waits at the last of them
    sessions: int = 0

    def add_stage(self) -> int:
        """A stage that is loaded; ``sessions`` run on it."""
        number = self.holdings.expect(MODEL, device="CPU", slots=4, queue=4, layers=(0, 2))
        self.holdings.add_stage(number, {}, 64, lambda: (self.sessions, 0))
        return number

    @property
    def ready(self) -> dict[int, bool]:
        return {holding.id: holding.ready for holding in self.holdings.announced}


async def nothing_is_to_be_loaded(wanted, layers):
    raise AssertionError("nothing is to be loaded here")


@asynccontextmanager
async def open_node(
    home,
    authority,
    name="desk",
    *,
    role=Role.ADMIN,
    knows_peers=False,
    fetch=nothing_is_to_be_loaded,
    **config,
) -> AsyncIterator[Node]:
    """One that publishes and places. An admin's offers no device of its own."""
    identity = authority.identity(name, (role,))
    trust = TrustStore(authority.network, [authority.root], home / "revoked")
    settings = NodeConfig(home=home, **config)
    async with (
        Transport.open(
            TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",)), identity, trust
        ) as transport,
        trio.open_nursery() as nursery,
    ):
        gossip = GossipService(transport, identity, trust, boot=1, rng=random.Random(1))
        holdings = Holdings(
            on_change=lambda: gossip.announce(holdings=holdings.announced),
            on_load=lambda: gossip.report(holdings.loads),
        )
        server = StageServer(
            transport,
            identity,
            settings,
            holdings,
            view=lambda: gossip.view,
            addresses=lambda peer: (),
        )
        gates: list[trio.Event] = []

        async def found():
            if gates:
                await gates.pop().wait()
            return server

        placing = Placing(
            gossip,
            holdings,
            identity,
            settings,
            stages=found,
            fetch=fetch,
            knows_peers=knows_peers,
        )
        await nursery.start(gossip.run)
        await nursery.start(server.run)
        await nursery.start(placing.run)
        yield Node(transport, gossip, holdings, server, placing, gates)
        nursery.cancel_scope.cancel()


@pytest.fixture
def run(make_authority, tmp_path):
    authority = make_authority("testnet", time.time() - 86_400)

    def run(main, **config):
        async def outer():
            with trio.fail_after(30):
                async with open_node(tmp_path, authority, **config) as node:
                    await main(node)

        trio.run(outer)

    return run


@pytest.fixture
def prompt(monkeypatch):
    """Nothing is waited for that may be on its way still."""
    monkeypatch.setattr(stages, "STRAGGLERS", 0.0)


def test_a_stage_is_kept_in_the_turn_in_which_its_last_session_ends(run, prompt):
    async def main(node):
        number = node.add_stage()
        node.sessions = 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.server.drain, number)
            await trio.testing.wait_all_tasks_blocked()
            assert node.ready == {number: False}
            node.sessions = 0
            node.holdings.load_changed()  # what drains will see it in its next turn
            node.server.keep(number)
        assert node.ready == {number: True}
        # And it can be let go later.
        await node.server.drain(number)
        assert node.ready == {}

    run(main)


class Engine:
    """That of a replica with one answer that runs until :meth:`end`."""

    context_length = 64

    def __init__(self) -> None:
        self._load = Load(active=1, waiting=0, slots=4, cache_used=0.0)

    def load(self):
        return self._load

    def on_load_change(self, listener):
        self._listener = listener

    def end(self):
        self._load = replace(self._load, active=0)
        self._listener(self._load)

    async def aclose(self):
        pass


def test_a_replica_is_unloaded_when_its_last_answer_ends(run, prompt, monkeypatch):
    async def measured(engine):
        return {}

    monkeypatch.setattr(holdings, "measure", measured)

    async def main(node):
        number = node.holdings.expect(MODEL, device="CPU", slots=4, queue=4)
        engine = Engine()
        await node.holdings.add(number, engine)
        with trio.fail_after(5):  # far from LONGEST_DRAIN
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.server.drain, number)
                await trio.testing.wait_all_tasks_blocked()
                assert node.ready == {number: False}
                engine.end()
        assert node.ready == {}

    run(main)


def test_a_stage_that_is_wanted_again_before_it_drains_is_kept(run, prompt):
    async def main(node):
        number = node.add_stage()
        gate = trio.Event()
        node.gates.append(gate)
        await node.placing._take(Drain(number), (), {})
        await trio.testing.wait_all_tasks_blocked()
        assert not node.gates  # what drains is still looking for the server
        await node.placing._take(Keep(number), (), {})
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert node.ready == {number: True}

    run(main)


def test_who_takes_a_model_back_while_it_is_read_has_the_last_word(
    run, demo_model, tmp_path, monkeypatch
):
    read, describe = threading.Event(), placing.describe_model

    def described(manifest):
        read.wait(10)  # as from a cold disk
        return describe(manifest)

    monkeypatch.setattr(placing, "describe_model", described)

    async def main(node):
        async def serve(replicas):
            wanted = await node.placing.serve(
                demo_model.name, replicas=replicas, max_nodes=None, context=64, sessions=1
            )
            said.append((wanted.version, wanted.replicas))

        said: list[tuple[int, int | None]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(serve, 0)
            await trio.testing.wait_all_tasks_blocked()
            read.set()
        assert said == sorted(said) and [count for _, count in said] == [1, 0]
        kept = OwnWants(tmp_path / "wants.json", time.time())
        assert [(w.version, w.replicas) for w in kept] == said[1:]
        await node.gossip.wait_until(
            lambda view: [(w.version, w.replicas) for w in newest_wants(view)] == said[1:]
        )

    run(main, models=demo_model.path.parent)


def test_what_was_published_while_the_clock_was_ahead_is_repaired_by_publishing_it_again(
    run, demo_model, monkeypatch
):
    clock, ahead = time.time, 7200.0
    monkeypatch.setattr(time, "time", lambda: clock() + ahead)

    async def main(node):
        async def serve(replicas):
            wanted = await node.placing.serve(
                demo_model.name, replicas=replicas, max_nodes=None, context=64, sessions=1
            )
            await node.gossip.wait_until(lambda view: newest_wants(view) == (wanted,))
            return wanted

        nonlocal ahead
        wrong = await serve(1)
        ahead = 0.0
        right = await serve(0)  # which needs what was published to know what it is
        assert right.version < wrong.version - 7_000_000
        assert [w.version for w in node.placing._own] == [right.version]

    run(main, models=demo_model.path.parent)


def test_weights_have_one_name_at_a_time(run, demo_model, tmp_path):
    same = WANTED.model_copy(update={"digest": demo_model.digest})
    OwnWants(tmp_path / "wants.json", time.time()).put(same)

    async def main(node):
        await node.gossip.wait_until(newest_wants)
        with pytest.raises(ValueError, match="has the weights of m, which"):
            await node.placing.serve(
                demo_model.name, replicas=1, max_nodes=None, context=64, sessions=1
            )

    run(main, models=demo_model.path.parent)


WANTED = Wanted(
    name=MODEL.name, digest=MODEL.digest, version=1, publisher="P", layers=MODEL.layers,
    layer_bytes=1, embedding_bytes=0, head_bytes=0, shared_bytes=0, kv_bytes=1, hidden=8,
    context_length=MODEL.context_length,
)  # fmt: skip


def test_a_publisher_that_starts_again_plans_when_it_has_heard_of_a_peer(
    make_authority, tmp_path, monkeypatch
):
    monkeypatch.setattr(placing, "SETTLE", 0.05)
    authority = make_authority("testnet", time.time() - 86_400)

    def started(name, **options):
        home = tmp_path / name
        home.mkdir()
        OwnWants(home / "wants.json", time.time()).put(WANTED)
        return open_node(home, authority, name, **options)

    async def planned(node):
        while not node.placing.plan.models:  # noqa: ASYNC110 (nobody is told of a plan)
            await trio.sleep(0.01)

    async def main():
        with trio.fail_after(30):
            async with started("first") as first:
                await planned(first)  # there is nobody to wait for
                async with started("again", knows_peers=True) as again:
                    await trio.sleep(0.5)
                    assert not again.placing.plan.models
                    await again.transport.connect(first.transport.addresses[0])
                    await planned(again)
            monkeypatch.setattr(placing, "ALONE", 0.1)
            async with started("left", knows_peers=True) as left:
                await planned(left)  # the others are gone

    trio.run(main)


def test_what_another_took_back_stays_so_when_its_publisher_starts_again(
    make_authority, tmp_path, monkeypatch
):
    monkeypatch.setattr(placing, "SETTLE", 0.05)
    authority = make_authority("testnet", time.time() - 86_400)
    withdrawn = WANTED.model_copy(update={"version": 2, "replicas": 0, "publisher": "Q"})
    for name, wanted in (("desk", WANTED), ("other", withdrawn)):
        (tmp_path / name).mkdir()
        OwnWants(tmp_path / name / "wants.json", time.time()).put(wanted)

    def kept():
        return tuple(OwnWants(tmp_path / "desk" / "wants.json", time.time()))

    async def main():
        with trio.fail_after(30):
            async with (
                open_node(tmp_path / "desk", authority, "desk") as desk,
                open_node(tmp_path / "other", authority, "other") as other,
            ):
                await desk.transport.connect(other.transport.addresses[0])
                while kept() != (withdrawn,):  # noqa: ASYNC110 (a file tells nobody)
                    await trio.sleep(0.01)
            async with open_node(tmp_path / "desk", authority, "desk") as desk:
                view = await desk.gossip.wait_until(newest_wants)
                assert newest_wants(view) == (withdrawn,)

    trio.run(main)


@pytest.mark.slow
def test_a_device_of_fixed_shapes_loads_one_stage_with_the_context_that_is_wanted(
    make_authority, demo_model, tmp_path, monkeypatch
):
    """What the plan gives it is what it can load: a whole model as a stage of all layers."""
    monkeypatch.setattr(loading, "runs_fixed_shapes", lambda device: True)
    monkeypatch.setattr(Capacity, "static", True)
    authority = make_authority("testnet", time.time() - 86_400)

    async def fetch(wanted, layers):
        return demo_model

    async def main():
        models = demo_model.path.parent
        async with open_node(
            tmp_path, authority, role=Role.SERVE, fetch=fetch, models=models, memory="2GB"
        ) as node:
            name = demo_model.name
            await node.placing.serve(name, replicas=1, max_nodes=None, context=128, sessions=2)
            with trio.fail_after(120):
                view = await node.gossip.wait_until(lambda view: view.can_use(name))
            (holding,) = view.nodes[node.transport.peer_id].holdings
            assert holding.kind == "stage" and (holding.first, holding.last) == (0, 30)
            assert holding.context_length == 128
            assert node.server.chains.load(demo_model.digest, 0, 30) == (0, 0)

    trio.run(main)
