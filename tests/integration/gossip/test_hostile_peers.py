"""What an admitted peer may send: nonsense, forgeries, rumours. And peers out of reach."""

from __future__ import annotations

import pytest
import trio

from mesh.gossip import exchange
from mesh.gossip.advert import Advert, sign_advert
from mesh.gossip.anti_entropy import Record
from mesh.gossip.exchange import encode_transfer
from mesh.transport import DialError, RemoteError


def test_nonsense_is_answered_with_an_error_and_harms_nothing(on_net):
    async def test(net):
        a, b = await net.mesh(2)
        await a.sees(b)
        link = b.transport.link(a.peer)
        for kind in (exchange.SYNC, exchange.ALIVE, exchange.PROBE):
            for body in (None, {}, {"version": 1}, [1, 2], {"nonce": b"short"}):
                with pytest.raises(RemoteError) as caught:
                    await link.request(kind, body, b"\xff" * 100)
                assert caught.value.code == "malformed"
        good = {"version": 1, "boot": 1, "lists": []}
        for payload in (b"x" * 19, bytes(20 * 5000)):
            with pytest.raises(RemoteError):
                await link.request(exchange.SYNC, good, payload)
        for payload in (b"", b"\x81" * 1000, bytes(5 << 20)):
            with pytest.raises(RemoteError):
                await link.request(exchange.PUSH, None, payload)
        await link.request(exchange.PUSH, None, encode_transfer([Record(0.0, b"junk")], [b"junk"]))
        assert a.alive() == {b.peer}

    on_net(test)


def test_nobody_can_speak_for_another(on_net):
    async def test(net):
        a, b, c = await net.mesh(3)
        await a.sees(b, c)
        await c.sees(a, b)
        await trio.sleep(1.5)
        # Signed by B under its own name: passed off as news of C it is news of B.
        forged = sign_advert(b.identity, Advert(boot=1 << 40, sequence=1, beat=10.0))
        await b.transport.link(a.peer).request(
            exchange.PUSH, None, encode_transfer([Record(0.0, forged.envelope)], [])
        )
        assert a.gossip.view.nodes[b.peer].advert.boot == 1 << 40
        assert a.gossip.view.nodes[c.peer].advert.boot == c.gossip.boot
        # The advert of C, published by B.
        topic = a.gossip._topics["advert"]
        last_words = sign_advert(
            c.identity, Advert(boot=c.gossip.boot, sequence=1 << 20, beat=10.0, state="left")
        )
        await b.transport.publish(topic, last_words.envelope)
        await trio.sleep(1.0)
        assert c.peer in a.alive()

    on_net(test)


def test_a_doubt_about_a_peer_that_lives_harms_nothing(on_net):
    async def test(net):
        a, b, c = await net.mesh(3)
        await a.sees(b, c)
        await b.sees(a, c)
        await trio.sleep(2.5)
        seen = set()
        with trio.move_on_after(3):
            async with trio.open_nursery() as nursery:

                async def watch():
                    async for view in a.gossip.views():
                        seen.add(view.nodes[c.peer].status)

                nursery.start_soon(watch)
                await b.transport.publish(a.gossip._topics["doubt"], c.peer.encode())
                await b.transport.publish(a.gossip._topics["doubt"], b"\xff" * 1000)
                await trio.sleep_forever()
        assert seen == {"alive"}

    on_net(test)


def test_a_peer_that_only_others_can_reach_is_alive_without_a_link(on_net):
    async def test(net):
        a = await net.start(net.identity("a"))
        b = await net.start(net.identity("b"))
        c = await net.start(net.identity("c"))

        async def no_way(*_, **__):
            raise DialError("no way")

        for node in (a, c):
            node.transport.link_to = no_way
            node.transport.keep = lambda *_: None
        seen = []

        async def watch():
            async for view in a.gossip.views():
                if c.peer in view.nodes:
                    seen.append(view.nodes[c.peer].status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for node in (a, c):
                await b.transport.connect(node.transport.addresses[0])
            with trio.fail_after(15):
                while "suspect" not in seen or a.alive() != {b.peer, c.peer}:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert a.gossip.view.nodes[c.peer].link is None
        assert a.gossip.view.nodes[c.peer].reason == "proof of life"
        assert "gone" not in seen

    on_net(test)
