"""Nodes that know one address find each other, and notice who comes and goes."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import trio

from ca.certificate import Role, load_root
from mesh.gossip import exchange
from mesh.gossip.advert import HoldingLoad
from mesh.gossip.talks import SYNCS_AT_ONCE
from mesh.identity import TrustStore
from mesh.transport import RemoteError, Transport, TransportConfig


def test_nodes_that_know_one_address_form_a_full_mesh(on_net):
    async def test(net):
        nodes = await net.mesh(5)
        start = time.monotonic()
        for node in nodes:
            await node.sees(*(n for n in nodes if n is not node))
        print(f"5 nodes: all seen and linked after {time.monotonic() - start:.2f} s")
        await trio.sleep(1.2)
        view = nodes[1].gossip.view
        assert all(n.link is not None for n in view.alive)
        assert {n.name for n in view.alive} == {"node-0", "node-2", "node-3", "node-4"}

    on_net(test)


def test_who_has_many_new_links_asks_over_two_at_a_time_what_is_there(on_net):
    async def test(net):
        first = await net.start(net.identity("first"))
        send, asked = trio.open_memory_channel(100)
        under_way, counts = 0, []

        def slowly(peer):
            async def answer(_):
                nonlocal under_way
                under_way += 1
                counts.append(under_way)
                await trio.sleep(0.2)
                under_way -= 1
                await send.send(peer)
                raise RemoteError("busy", "later")

            return answer

        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            peers = set()
            for i in range(6):
                who = net.identity(f"slow-{i}")
                trust = TrustStore("acme", [load_root(net.root_der)], net.folder / f"slow-{i}")
                config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))
                transport = await stack.enter_async_context(Transport.open(config, who, trust))
                transport.serve(exchange.SYNC, slowly(who.peer_id))
                await transport.connect(first.transport.addresses[0])
                peers.add(who.peer_id)
            await first.gossip.wait_until(lambda _: set(first.transport.links) == peers)
            for link in first.transport.links.values():
                nursery.start_soon(first.gossip._talks.sync, link)
            with trio.fail_after(20):
                while peers:
                    peers.discard(await asked.receive())
        assert max(counts) == SYNCS_AT_ONCE

    on_net(test)


def test_what_a_node_announces_reaches_all_and_load_follows(on_net, make_holding):
    async def test(net):
        nodes = await net.mesh(3)
        for node in nodes:
            await node.sees(*(n for n in nodes if n is not node))
        await trio.sleep(1.5)
        start = time.monotonic()
        nodes[2].gossip.announce(holdings=(make_holding(7),))
        for node in nodes:
            with trio.fail_after(5):
                await node.gossip.wait_until(lambda v: v.can_use("m"))
        print(f"a new holding is known everywhere after {time.monotonic() - start:.3f} s")
        busy = HoldingLoad(id=7, active=3, waiting=2, free_kv=1000)
        start = time.monotonic()
        nodes[2].gossip.report([busy])
        peer = nodes[2].peer
        assert nodes[2].gossip.view.nodes[peer].load[7].active == 3  # its own view at once
        with trio.fail_after(5):
            await nodes[0].gossip.wait_until(
                lambda v: 7 in v.nodes[peer].load and v.nodes[peer].load[7].active == 3
            )
        print(f"load is known after {time.monotonic() - start:.3f} s")

    on_net(test)


def test_capacity_of_a_node_without_the_role_does_not_count(on_net, make_holding):
    async def test(net):
        a = await net.start(net.identity("a"))
        user = await net.start(net.identity("user", Role.USE))
        user.gossip.announce(holdings=(make_holding(1),))
        await user.transport.connect(a.transport.addresses[0])
        await a.sees(user)
        with trio.fail_after(5):
            await a.gossip.wait_until(lambda v: v.nodes[user.peer].advert.holdings != ())
        assert a.gossip.view.nodes[user.peer].holdings == ()
        assert not a.gossip.view.can_use("m")

    on_net(test)


def test_a_node_that_leaves_is_gone_at_once(on_net, monkeypatch):
    # Who has no time to say goodbye is suspect first: a slow machine gets more of it.
    monkeypatch.setattr("mesh.gossip.service.LEAVE_TIME", 10.0)

    async def test(net):
        nodes = await net.mesh(3)
        a, b, c = nodes
        for node in nodes:
            await node.sees(*(n for n in nodes if n is not node))
        start = time.monotonic()
        await c.leave()
        await a.sees(b, within=3.0)
        await b.sees(a, within=3.0)
        print(f"gone after {time.monotonic() - start:.3f} s")
        assert c.peer not in a.gossip.view.nodes

    on_net(test)


def test_leave_and_rejoin_within_two_seconds(on_net, make_holding):
    async def test(net):
        nodes = await net.mesh(3)
        a, b, c = nodes
        for node in nodes:
            await node.sees(*(n for n in nodes if n is not node))
        await c.leave()
        await trio.sleep(1.0)
        again = await net.start(c.identity)
        again.gossip.announce(holdings=(make_holding(2),))
        await again.transport.connect(a.transport.addresses[0])
        for node in (a, b):
            with trio.fail_after(5):
                await node.gossip.wait_until(lambda v: v.can_use("m"))
            assert len(node.gossip.view.nodes) == 3
            assert node.gossip.view.nodes[c.peer].advert.boot == again.gossip.boot

    on_net(test)


def test_a_newcomer_has_the_whole_view_after_one_exchange(on_net):
    async def test(net):
        nodes = await net.mesh(5)
        for node in nodes:
            await node.sees(*(n for n in nodes if n is not node))
        newcomer = await net.start(net.identity("newcomer"))
        await newcomer.transport.connect(nodes[3].transport.addresses[0])
        start = time.monotonic()
        with trio.fail_after(3):
            await newcomer.gossip.wait_until(lambda v: len(v.alive) == 5)
        print(f"the whole view after {time.monotonic() - start:.3f} s")

    on_net(test)


def test_a_newcomer_does_not_take_a_busy_node_for_an_idle_one(on_net, make_holding):
    async def test(net):
        busy = await net.start(net.identity("busy"))
        busy.gossip.announce(holdings=(make_holding(1),))
        await trio.sleep(0.5)  # its advert is out
        for active in (5, 6, 7, 8):  # who asks whom depends on the newcomer's PeerId
            busy.gossip.report([HoldingLoad(id=1, active=active, waiting=0)])
            await trio.sleep(0.7)  # and so is its load report
            newcomer = await net.start(net.identity(f"newcomer-{active}"))
            await newcomer.transport.connect(busy.transport.addresses[0])

            def has_fresh_advert(view, active=active):
                node = view.nodes.get(busy.peer)
                return node is not None and [one.active for one in node.advert.load] == [active]

            # Older adverts and load reports come by gossip, too; this one by anti-entropy only.
            with trio.fail_after(5):
                view = await newcomer.gossip.wait_until(has_fresh_advert)
            assert view.can_use("m")
            node = view.nodes[busy.peer]
            assert node.load_of(node.holdings[0]).active == active

    on_net(test)


def test_a_revocation_reaches_every_node_and_throws_the_revoked_out(on_net):
    async def test(net):
        nodes = await net.mesh(4)
        for node in nodes:
            await node.sees(*(n for n in nodes if n is not node))
        await trio.sleep(1.5)
        *rest, bad = nodes
        start = time.monotonic()
        rest[0].trust.apply_crl(net.crl(1, bad.identity.certificate.serial))
        for node in rest:
            await node.sees(*(n for n in rest if n is not node), within=5)
            assert bad.peer not in node.gossip.view.nodes
        print(f"thrown out everywhere after {time.monotonic() - start:.3f} s")
        with trio.fail_after(10):
            while any(bad.peer in n.transport.links for n in rest):  # noqa: ASYNC110
                await trio.sleep(0.05)
        await trio.sleep(2)
        assert all(bad.peer not in n.gossip.view.nodes for n in rest)
        # A node that was away hears of it when it comes back.
        late = await net.start(net.identity("late"))
        await late.transport.connect(rest[1].transport.addresses[0])
        await late.sees(*rest, within=5)
        assert [crl.number for crl in late.trust.revocation_lists.values()] == [1]

    on_net(test)


def test_a_node_whose_clock_stood_back_is_heard_all_the_same(on_net):
    async def test(net):
        a, b = await net.mesh(2)
        await a.sees(b)
        await b.leave()
        again = await net.start(b.identity, boot=b.gossip.boot)
        await again.transport.connect(a.transport.addresses[0])
        await a.sees(again, within=5)
        assert again.gossip.boot > b.gossip.boot

    on_net(test)
