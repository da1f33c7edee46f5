"""Two nodes test each other over a real link."""

from __future__ import annotations

import random
import time
from types import MappingProxyType

import pytest
import trio

from mesh.admission.policy import Thresholds
from mesh.admission.service import AdmissionService
from mesh.gossip.anti_entropy import key_of
from mesh.gossip.view import View
from mesh.identity import TrustStore
from mesh.transport import Transport, TransportConfig

LOOPBACK = ("/ip4/127.0.0.1/udp/0/quic-v1",)


def run(make_authority, tmp_path, thresholds, idle, until):
    """What ``a`` has measured of ``b`` and announced, once ``until`` holds."""
    authority = make_authority("testnet", time.time() - 86_400)

    def opened(name):
        trust = TrustStore(authority.network, [authority.root], tmp_path / name)
        return Transport.open(TransportConfig(listen=LOOPBACK), authority.identity(name), trust)

    async def main():
        told = []
        heard = trio.Event()

        def announce(links):
            told.append(links)
            nonlocal heard
            heard.set()
            heard = trio.Event()

        async with opened("a") as a, opened("b") as b, trio.open_nursery() as nursery:
            service = AdmissionService(
                a,
                thresholds,
                view=lambda: View(a.peer_id, 0.0, MappingProxyType({})),
                is_idle=lambda: idle,
                announce=announce,
                rng=random.Random(1),
            )
            await nursery.start(service.run)
            await a.connect(b.addresses[0])
            with trio.fail_after(60):
                while not until(service, b.peer_id):
                    await heard.wait()
            summary = service.summary(b.peer_id)
            nursery.cancel_scope.cancel()
        return service, b.peer_id, told[-1], summary

    return trio.run(main)


@pytest.mark.slow
def test_round_trips_and_bandwidth_are_measured_and_told(make_authority, tmp_path):
    service, peer, told, _ = run(
        make_authority,
        tmp_path,
        Thresholds(),
        True,
        lambda service, peer: service.summary(peer).upload is not None,
    )
    assert service.standings[peer].state == "admitted"
    assert [row.key for row in told] == [key_of(peer)]
    row = told[0]
    assert row.rtt is not None and row.loss is not None and row.state == 0
    assert row.upload > 0 and row.download > 0


@pytest.mark.slow
def test_a_peer_beyond_a_threshold_is_quarantined_and_nothing_bulky_is_sent_beside_work(
    make_authority, tmp_path
):
    service, peer, told, summary = run(
        make_authority,
        tmp_path,
        Thresholds(max_rtt=1e-6),
        False,  # this node is never idle
        lambda service, peer: service.those("quarantined") == {peer},
    )
    assert "rtt" in service.standings[peer].reason
    assert told[0].state == 1
    assert summary.upload is None
