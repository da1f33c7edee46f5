"""The pure parts: datagram size, congestion, liveness, back-off, observed addresses, contacts."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from mesh.identity import PeerId
from mesh.transport.addresses import parse_address, parse_circuit
from mesh.transport.backoff import Backoff
from mesh.transport.contacts import MAX_ADDRESSES, Contacts
from mesh.transport.errors import DialError
from mesh.transport.liveness import Liveness, LivenessPolicy
from mesh.transport.observe import ObservedAddresses
from mesh.transport.quic.congestion import (
    CUBIC,
    LOSSY,
    CountingCubic,
    LossMeter,
    LossyControl,
    replace_controller,
)
from mesh.transport.quic.mtu import BASE_SIZE, PathMtu, ladder_for

PEER = PeerId("12D3KooWDEtuzYEaBkYwvRKEhXLiGAcotDqXdoUbdvbSCrffY6b2")
OTHER = PeerId("12D3KooWEDXaiinuiciXLp6H2AHX8nUYc6dobM17nXAywmEiyndL")


# -- datagram size --------------------------------------------------------------------------------


def test_size_climbs_the_ladder_one_acknowledged_probe_at_a_time() -> None:
    mtu = PathMtu((1400, 9000))
    assert mtu.next_probe(0.0) == 1400
    assert mtu.next_probe(0.0) is None  # one at a time
    assert mtu.acknowledged(1400)
    assert mtu.size == 1400
    assert mtu.next_probe(0.1) == 9000
    mtu.lost(9000, 0.2)
    assert mtu.size == 1400
    assert mtu.next_probe(0.2) is None
    assert mtu.next_probe(0.5) == 9000  # a busy machine loses a probe, too
    assert mtu.acknowledged(9000)
    assert mtu.next_probe(1.0) is None


def test_size_that_fails_is_tried_less_and_less() -> None:
    mtu = PathMtu((9000,))
    now, tries = 0.0, 0
    while now < 100.0:
        if mtu.next_probe(now) is not None:
            tries += 1
            mtu.lost(9000, now)
        now += 0.1
    assert 3 <= tries <= 6


def test_black_hole_goes_back_to_the_base_and_waits() -> None:
    mtu = PathMtu((9000,))
    mtu.next_probe(0.0)
    mtu.acknowledged(9000)
    assert mtu.black_hole(5.0)
    assert mtu.size == BASE_SIZE
    assert mtu.next_probe(6.0) is None
    assert mtu.next_probe(70.0) == 9000
    assert not mtu.black_hole(71.0)


@pytest.mark.parametrize(
    ("host", "df", "largest"),
    [
        ("127.0.0.1", False, 16_300),
        ("::1", True, 16_300),
        ("192.0.2.1", True, 8972),
        ("2001:db8::1", True, 8952),
        ("fe80::1%eth0", True, 8952),
        ("192.0.2.1", False, None),
    ],
)
def test_ladders(host: str, df: bool, largest: int | None) -> None:
    ladder = ladder_for(host, can_forbid_fragments=df)
    assert (ladder[-1] if ladder else None) == largest
    assert list(ladder) == sorted(ladder)


# -- congestion -----------------------------------------------------------------------------------


def packet(size: int = 1200, sent: float = 0.0) -> Any:
    return SimpleNamespace(sent_bytes=size, sent_time=sent)


def rounds(controller: Any, count: int, *, rtt: float, loss: float, base_rtt: float) -> None:
    """Fill the window each round trip; ``loss`` of it is lost."""
    now = 0.0
    controller.on_rtt_measurement(now=now, rtt=base_rtt)
    for _ in range(count):
        packets = [packet(sent=now) for _ in range(max(controller.congestion_window // 1200, 1))]
        for each in packets:
            controller.on_packet_sent(packet=each)
        now += rtt
        controller.on_rtt_measurement(now=now, rtt=rtt)
        lost = packets[: math.ceil(len(packets) * loss)] if loss else []
        if lost:
            controller.on_packets_lost(now=now, packets=lost)
        for each in packets[len(lost) :]:
            controller.on_packet_acked(packet=each, now=now)
        if controller.congestion_window > 50_000_000:
            return


def test_light_loss_without_delay_is_not_congestion_to_the_lossy_controller() -> None:
    lossy, cubic = LossyControl(max_datagram_size=1200), CountingCubic(max_datagram_size=1200)
    for controller in (lossy, cubic):
        rounds(controller, 40, rtt=0.05, base_rtt=0.05, loss=0.01)
        assert controller.bytes_in_flight == 0
    assert lossy.congestion_window > 5 * cubic.congestion_window


@pytest.mark.parametrize(("rtt", "loss"), [(0.09, 0.0), (0.05, 0.3)])
def test_delay_or_heavy_loss_shrinks_the_window(rtt: float, loss: float) -> None:
    controller = LossyControl(max_datagram_size=1200)
    controller.congestion_window = 2_000_000
    rounds(controller, 20, rtt=rtt, base_rtt=0.05, loss=loss)
    assert controller.congestion_window < 1_000_000
    rounds(controller, 100, rtt=rtt, base_rtt=0.05, loss=loss)
    assert controller.congestion_window >= 16 * 1200


def test_controller_follows_measured_loss_and_comes_back() -> None:
    meter = LossMeter(adaptive=True)
    assert meter.choice(256, 0, 0.05, 0.05) is None
    assert meter.choice(512, 5, 0.05, 0.05) == LOSSY
    sent, chosen = 512, None
    for _ in range(LossMeter.CLEAN_WINDOWS):
        sent += 256
        chosen = meter.choice(sent, 5, 0.05, 0.05)
    assert chosen == CUBIC


@pytest.mark.parametrize(("rtt", "smallest"), [(0.2, 0.05), (0.002, 0.002)])
def test_loss_with_a_queue_or_on_a_short_path_stays_with_cubic(rtt: float, smallest: float) -> None:
    meter = LossMeter(adaptive=True)
    assert meter.choice(256, 20, rtt, smallest) is None


def test_replaced_controller_carries_on() -> None:
    old = CountingCubic(max_datagram_size=1200)
    old.on_packet_sent(packet=packet(5000))
    old.packets_lost = 7
    new = replace_controller(old, LOSSY, 1200)
    assert (new.bytes_in_flight, new.packets_lost) == (5000, 7)
    assert new.congestion_window >= old.congestion_window
    assert replace_controller(new, CUBIC, 1200).ssthresh is not None


# -- liveness -------------------------------------------------------------------------------------

POLICY = LivenessPolicy(idle_ping=25, busy_ping=1, busy_silence=10)


def settled() -> Liveness:
    """Of a link that has been up for a while at 0.0."""
    liveness = Liveness(POLICY)
    for now in (-2.0, -1.0, 0.0):
        assert liveness.next_look(now, last_heard=now, busy=False) == 0.0
        assert liveness.ping_due(now, busy=False) is not None
    return liveness


def test_pings_are_rare_when_idle_and_frequent_when_busy() -> None:
    liveness = settled()
    assert liveness.ping_due(20.0, busy=False) is None
    assert liveness.ping_due(20.0, busy=True) is not None
    assert liveness.ping_due(20.5, busy=True) is None
    assert liveness.ping_due(21.0, busy=True) is not None
    assert liveness.next_look(21.0, last_heard=21.0, busy=False) == pytest.approx(25.0)


def test_pings_are_frequent_while_one_way_messages_come_and_go() -> None:
    liveness = settled()
    assert liveness.carried(5.0)  # whoever waits has to look again
    assert not liveness.carried(5.2)
    assert liveness.ping_due(5.2, busy=False) is not None
    assert liveness.next_look(5.2, last_heard=5.2, busy=False) == pytest.approx(1.0)
    liveness.carried(6.1)
    assert liveness.ping_due(6.2, busy=False) is not None
    # Nothing more: they are rare again. Silence has meant nothing, for no answer is awaited.
    assert liveness.ping_due(7.2, busy=False) is None
    assert liveness.next_look(7.2, last_heard=7.2, busy=False) == pytest.approx(24.0)
    assert not liveness.is_dead(7.2, last_heard=-100.0, busy=False)
    assert liveness.carried(20.0)


def test_round_trip_is_smoothed_and_stray_pongs_are_ignored() -> None:
    liveness = Liveness(POLICY)
    token = liveness.ping_due(0.0, busy=False)
    assert token is not None
    assert liveness.answered(999, 5.0) is None
    assert liveness.rtt is None
    assert liveness.answered(token, 0.1) == pytest.approx(0.1)
    assert liveness.rtt == pytest.approx(0.1)
    assert liveness.answered(token, 9.0) is None
    assert liveness.rtt == pytest.approx(0.1)
    # The least of the first three, then steadily.
    for now, took, rtt in ((1, 0.01, 0.01), (2, 0.3, 0.01), (30, 0.05, 0.015), (60, 0.055, 0.02)):
        token = liveness.ping_due(float(now), busy=False)
        assert token is not None
        liveness.answered(token, now + took)
        assert liveness.rtt == pytest.approx(rtt)


def test_what_was_on_its_way_while_the_path_was_cut_says_nothing_of_its_length() -> None:
    def answer(at: float, took: float) -> float | None:
        token = liveness.ping_due(at, busy=True)
        assert token is not None
        return liveness.answered(token, at + took)

    for later, rtt in ((0.01, 0.01), (0.3, 0.3)):
        liveness = Liveness(POLICY)
        for now in range(4):
            assert answer(float(now), 0.01) == pytest.approx(0.01)
        tokens = [liveness.ping_due(float(now), busy=True) for now in (4, 5, 6)]
        for now, token in zip((4, 5, 6), tokens, strict=True):  # and joined again at 6.5
            assert token is not None
            assert liveness.answered(token, 6.5) is None, now
            assert liveness.rtt == pytest.approx(0.01)
        # The next come soon, and show whether the path is still the same.
        assert liveness.next_look(6.5, last_heard=6.5, busy=False) == pytest.approx(0.5)
        assert answer(7.0, later) == pytest.approx(later)
        assert liveness.rtt == pytest.approx(rtt)
        assert answer(8.0, later) == pytest.approx(later)


def test_only_a_busy_link_dies_of_silence() -> None:
    liveness = Liveness(POLICY)
    assert not liveness.is_dead(1000.0, last_heard=0.0, busy=False)
    liveness.ping_due(1000.0, busy=True)  # busy from now on: the old silence does not count
    assert not liveness.is_dead(1009.0, last_heard=0.0, busy=True)
    assert liveness.is_dead(1010.0, last_heard=0.0, busy=True)
    assert not liveness.is_dead(1010.0, last_heard=1005.0, busy=True)


# -- back-off, observed addresses, contacts -------------------------------------------------------


def test_backoff_doubles_to_its_bound_and_starts_again() -> None:
    backoff = Backoff(Random(1), first=1.0, longest=8.0)
    waits = [backoff.failed() for _ in range(6)]
    for wait, middle in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * middle <= wait <= 1.25 * middle
    backoff.succeeded()
    assert backoff.failed() <= 1.25
    assert backoff.refused() >= 6.0


def test_observed_address_needs_two_witnesses_or_a_dial() -> None:
    observed = ObservedAddresses()
    assert observed.saw(PEER, "203.0.113.5", 4001)
    assert observed.confirmed([]) == []
    assert not observed.saw(OTHER, "203.0.113.5", 4001)
    assert observed.confirmed([]) == [("203.0.113.5", 4001)]
    assert observed.confirmed([("203.0.113.5", 4001)]) == []
    observed.saw(OTHER, "203.0.113.9", 5)
    assert observed.confirmed([]) == []
    observed.reached("203.0.113.9", 5, success=True)
    assert observed.confirmed([]) == [("203.0.113.9", 5)]
    assert observed.is_reachable


@pytest.mark.parametrize("host", ["nonsense", "0.0.0.0", "224.0.0.1", "fe80::1", ""])
def test_senseless_observations_are_ignored(host: str) -> None:
    observed = ObservedAddresses()
    assert not observed.saw(PEER, host, 4001)
    assert not observed.saw(PEER, "203.0.113.5", 0)
    assert observed.candidates == []


def test_liar_cannot_fill_the_memory_with_observations() -> None:
    observed = ObservedAddresses()
    for port in range(1, 1000):
        observed.saw(PEER, "203.0.113.5", port)
    assert len(observed.candidates) == 1


def address(port: int, peer: str = PEER) -> str:
    return f"/ip4/192.0.2.1/udp/{port}/quic-v1/p2p/{peer}"


def test_contacts_survive_a_restart_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "home" / "peers.json"
    contacts = Contacts(path)
    for port in range(1, MAX_ADDRESSES + 3):
        assert contacts.add(PEER, [address(port)], now=float(port))
    assert not contacts.add(PEER, [address(MAX_ADDRESSES + 2)], now=99.0)
    contacts.add(PEER, [address(1, OTHER), "nonsense"], now=99.0)
    trio.run(contacts.save)
    again = Contacts(path)
    assert again.all() == contacts.all()
    assert len(again.addresses(PEER)) == MAX_ADDRESSES
    assert again.addresses(PEER)[0] == address(MAX_ADDRESSES + 2)
    assert again.addresses(OTHER) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2, "peers": {}}', '{"peers": 5}'])
def test_damaged_contacts_are_ignored(tmp_path: Path, content: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(content)
    assert Contacts(path).all() == {}


def test_addresses() -> None:
    relayed = f"{address(4001)}/p2p-circuit/p2p/{OTHER}"
    assert parse_address(address(4001))[0] == PEER
    assert parse_address(relayed)[0] == OTHER
    assert parse_circuit(relayed) == (PEER, address(4001))
    assert parse_circuit(address(4001)) is None


@pytest.mark.parametrize(
    "text", ["", "nonsense", "/ip4/192.0.2.1/udp/1/quic-v1", "/ip4/999.0.0.1/udp/1", "/" * 5000]
)
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(DialError):
        parse_address(text)
