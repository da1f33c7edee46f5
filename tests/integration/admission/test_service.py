"""The tests that peers make of each other, over a real link on loopback."""

from __future__ import annotations

import random
import time
from contextlib import asynccontextmanager
from types import MappingProxyType

import pytest
import trio

from mesh.admission import service as service_module
from mesh.admission.policy import Thresholds
from mesh.admission.service import AdmissionService
from mesh.gossip.anti_entropy import key_of
from mesh.gossip.view import View
from mesh.identity import TrustStore
from mesh.transport import Lane, Link, LivenessPolicy, Transport, TransportConfig
from mesh.transport.frames import Frame, FrameKind

LOOPBACK = ("/ip4/127.0.0.1/udp/0/quic-v1",)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(service_module, "FIRST_TEST", 0.1)
    monkeypatch.setattr(service_module, "PROBE_GAP", 0.02)
    monkeypatch.setattr(service_module, "BANDWIDTH_AFTER", 0.3)


class Node:
    """One end of a link, with what it tells of it."""

    def __init__(self, transport: Transport, thresholds: Thresholds) -> None:
        self.transport = transport
        self.idle = True
        self.told = []
        self._heard = trio.Event()
        self.service = AdmissionService(
            transport,
            thresholds,
            view=lambda: View(transport.peer_id, 0.0, MappingProxyType({})),
            is_idle=lambda: self.idle,
            announce=self._announce,
            rng=random.Random(transport.peer_id),  # not in step with the other one
        )

    def _announce(self, links):
        self.told.append(links)
        self._heard.set()
        self._heard = trio.Event()

    async def until(self, holds):
        with trio.fail_after(30):
            while not holds():
                await self._heard.wait()

    def work(self):
        self.idle = False
        self.service.work_began()


def run(make_authority, tmp_path, main, thresholds=None, *, often=False):
    """``main(a, b, connect)``; the link is a's to b, and only a has ``thresholds``. ``often``:
    links that are used ping ten times as often."""
    liveness = LivenessPolicy(busy_ping=0.1) if often else LivenessPolicy()
    authority = make_authority("testnet", time.time() - 86_400)

    @asynccontextmanager
    async def opened(name, limits):
        trust = TrustStore(authority.network, [authority.root], tmp_path / name)
        own = authority.identity(name)
        config = TransportConfig(listen=LOOPBACK, liveness=liveness)
        async with Transport.open(config, own, trust) as transport:
            yield Node(transport, limits)

    async def outer():
        async with (
            opened("a", thresholds or Thresholds()) as a,
            opened("b", Thresholds()) as b,
            trio.open_nursery() as nursery,
        ):
            for node in (a, b):
                await nursery.start(node.service.run)
            await main(a, b, lambda: a.transport.connect(b.transport.addresses[0]))
            nursery.cancel_scope.cancel()

    trio.run(outer)


def test_round_trips_and_bandwidth_are_measured_and_told(make_authority, tmp_path):
    async def main(a, b, connect):
        link = await connect()
        await a.until(lambda: a.service.summary(link.peer).upload is not None)
        assert a.service.standings[link.peer].state == "admitted"
        assert [row.key for row in a.told[-1]] == [key_of(link.peer)]
        row = a.told[-1][0]
        assert row.rtt is not None and row.loss is not None and row.state == 0
        assert row.upload > 0 and row.download > 0

    run(make_authority, tmp_path, main)


def test_a_peer_beyond_a_threshold_is_quarantined(make_authority, tmp_path, monkeypatch):
    monkeypatch.setattr("mesh.admission.policy.QUARANTINE_RETEST", 0.1)

    async def main(a, b, connect):
        link = await connect()
        await a.until(lambda: a.service.those("quarantined") == {link.peer})
        assert "rtt" in a.service.standings[link.peer].reason
        assert a.told[-1][0].state == 1

    run(make_authority, tmp_path, main, Thresholds(max_rtt=1e-6))


@pytest.fixture
def transfers(monkeypatch):
    """Links whose bandwidth was tested."""
    seen = []
    measure = service_module.measure_link

    async def counted(link: Link, **how):
        seen.append(link)
        return await measure(link, **how)

    monkeypatch.setattr(service_module, "measure_link", counted)
    return seen


@pytest.mark.parametrize("who", ["this node", "the peer"])
def test_nothing_bulky_is_sent_while_either_side_works(
    make_authority, tmp_path, transfers, monkeypatch, who
):
    monkeypatch.setattr(service_module, "LEAST_GAP", 0.05)

    async def main(a, b, connect):
        worker = a if who == "this node" else b
        worker.work()
        link = await connect()
        asked = a.service._measure_while_idle
        # Tests that are due, and one that was decided on just before.
        await a.until(lambda: a.service.summary(link.peer).rtt is not None)
        await trio.sleep(1.5)
        assert await asked(link) is None
        assert not transfers
        worker.idle = True
        await a.until(lambda: a.service.summary(link.peer).upload is not None)
        assert transfers

    run(make_authority, tmp_path, main)


@pytest.mark.parametrize("who", ["this node", "the peer"])
def test_a_test_of_bandwidth_ends_when_work_begins(make_authority, tmp_path, monkeypatch, who):
    monkeypatch.setattr(service_module, "BANDWIDTH_AFTER", 1e9)  # only the one that is asked for
    monkeypatch.setattr(service_module, "BANDWIDTH_MEGABYTES", 1000)
    monkeypatch.setattr(service_module, "BANDWIDTH_SECONDS", 60.0)
    begun = trio.Event()
    measure = service_module.measure_link

    async def noticed(link: Link, **how):
        begun.set()
        return await measure(link, **how)

    monkeypatch.setattr(service_module, "measure_link", noticed)

    async def main(a, b, connect):
        link = await connect()
        found = []

        async def test():
            found.append(await a.service._measure_while_idle(link))

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(test)
                await begun.wait()
                await trio.sleep(0.2)
                assert not found
                (a if who == "this node" else b).work()
        assert found == [None]

    run(make_authority, tmp_path, main)


def test_what_passes_between_stages_keeps_the_round_trip_fresh(
    make_authority, tmp_path, monkeypatch
):
    """Stages tell each other things one way: nobody asks, so no request shows how long it takes."""
    monkeypatch.setattr(service_module, "TELL_GAP", 0.1)

    async def main(a, b, connect):
        link = await connect()
        ends = [(a, link), (b, b.transport.links[a.transport.peer_id])]
        for node, end in ends:
            await node.until(lambda node=node, end=end: node.service.summary(end.peer).upload)
        measured = [node.service._peers[end.peer] for node, end in ends]
        # The tests are over, the next ones a minute away: soon nothing is pinged any more.
        before, now = [], [known.measure.path_at for known in measured]
        with trio.fail_after(20):
            while before != now:
                before = now
                await trio.sleep(0.5)
                now = [known.measure.path_at for known in measured]

        async def pass_rows_until(holds):
            with trio.fail_after(10), ends[1][1].handle("activations", lambda message: None):
                while not holds():
                    await link.send("activations", payload=b"row")
                    await trio.sleep(0.05)

        await pass_rows_until(
            lambda: all(
                known.measure.path_at > then + 0.5
                for known, then in zip(measured, before, strict=True)
            )
        )
        # The way has become longer: others hear of it without a test, beyond noise and not before.
        told = a.told[-1][0].rtt
        known = measured[0]
        for _ in range(40):
            known.measure = known.measure.pinged(told * 1e-4 + 0.1, trio.current_time())
        await pass_rows_until(lambda: a.told[-1][0].rtt > told + 500)

    run(make_authority, tmp_path, main, often=True)


def test_a_link_that_is_found_wanting_while_it_is_used_is_tested_at_once(make_authority, tmp_path):
    async def main(a, b, connect):
        link = await connect()
        await a.until(lambda: a.service.summary(link.peer).rtt is not None)
        before = a.service.summary(link.peer).rtt
        # Pings of the link that took long, one after the other, as while a request was under way.
        for number in range(92, 100):
            link._liveness._outstanding[number] = time.monotonic() - 1.5
            link._dispatch(link._ports[Lane.CONTROL], Frame(FrameKind.PONG, number, b"", b""))
        after = a.service.summary(link.peer).rtt
        assert after > before and after > 0.1
        link._dispatch(link._ports[Lane.CONTROL], Frame(FrameKind.PONG, 99, b"", b""))
        a.service.used([link.peer, "12D3KooWNobody"])
        assert a.service.summary(link.peer).rtt == after  # the same pong does not count twice
        # That is beyond the threshold: it is tested now, and not in a minute.
        await a.until(lambda: a.service.summary(link.peer).rtt < after)

    run(make_authority, tmp_path, main, Thresholds(max_rtt=0.1))
