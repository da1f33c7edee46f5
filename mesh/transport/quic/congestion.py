"""Congestion control: cubic, a controller for lossy paths, and the choice between the two.

Cubic reads every loss as congestion. On a Wi-Fi or radio path that loses one packet in a hundred
for reasons of its own, cubic sinks to a few packets per round trip. ``LossyControl`` takes delay as
the sign of congestion instead, and loss only when there is a lot of it.

The trade-off: on a path whose queue is so short that congestion shows as light loss without delay,
``LossyControl`` takes more than its share from connections that run cubic. So cubic is the default,
and ``auto`` leaves it only while a path keeps losing packets without growing slower, and returns to
it when that ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.congestion.cubic import CubicCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket

CUBIC = "mesh-cubic"
LOSSY = "mesh-lossy"

_FLOOR_PACKETS = 16
_GROWTH = 1.05  # per round trip without a sign of congestion
_RETREAT = 0.85  # per round trip with one
_LOSS_IS_CONGESTION = 0.10  # fraction of a round trip's packets
_DELAY_FRACTION = 0.25  # of the path's own round trip time ...
_DELAY_FLOOR = 0.005  # ... and never less than this many seconds count as a queue


class CountingCubic(CubicCongestionControl):
    """aioquic's cubic, which also counts what was lost."""

    packets_lost = 0

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        listed = list(packets)
        self.packets_lost += len(listed)
        super().on_packets_lost(now=now, packets=listed)


class LossyControl(QuicCongestionControl):
    """A window that grows until the round trip time does, one decision per round trip."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.packets_lost = 0
        self._max_datagram_size = max_datagram_size
        self._starting = True
        self._round_ends = 0.0
        self._round_acked = 0
        self._round_lost = 0
        self._round_rtt = math.inf
        self._was_full = False
        self._rtt_min = math.inf

    @property
    def _floor(self) -> int:
        return _FLOOR_PACKETS * self._max_datagram_size

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self._was_full |= self.bytes_in_flight * 2 > self.congestion_window
        self.bytes_in_flight -= packet.sent_bytes
        self._round_acked += 1
        if self._starting:
            self.congestion_window += packet.sent_bytes
        if now >= self._round_ends:
            self._end_round(now)

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        self.bytes_in_flight += packet.sent_bytes

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._round_lost += 1
            self.packets_lost += 1

    def on_persistent_congestion(self) -> None:
        self.congestion_window = self._floor
        self._starting = False

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        self._rtt_min = min(self._rtt_min, rtt)
        self._round_rtt = min(self._round_rtt, rtt)

    def _end_round(self, now: float) -> None:
        rtt = self._round_rtt if self._round_rtt < math.inf else self._rtt_min
        if rtt == math.inf:
            return
        total = self._round_acked + self._round_lost
        lossy = self._round_lost > 2 and self._round_lost > _LOSS_IS_CONGESTION * total
        slow = rtt - self._rtt_min > max(_DELAY_FRACTION * self._rtt_min, _DELAY_FLOOR)
        if lossy or slow:
            self._starting = False
            self.congestion_window = max(int(self.congestion_window * _RETREAT), self._floor)
        elif not self._starting and self._was_full:
            step = max(int(self.congestion_window * (_GROWTH - 1)), self._max_datagram_size)
            self.congestion_window += step
        self._round_acked = self._round_lost = 0
        self._round_rtt = math.inf
        self._was_full = False
        self._round_ends = now + rtt


register_congestion_control(CUBIC, CountingCubic)
register_congestion_control(LOSSY, LossyControl)

CONTROLLERS = {"cubic": CUBIC, "lossy": LOSSY, "auto": CUBIC}


def replace_controller(old: Any, name: str, max_datagram_size: int) -> Any:
    """A controller of the other kind that carries on with the packets in flight."""
    kind = LossyControl if name == LOSSY else CountingCubic
    new = kind(max_datagram_size=max_datagram_size)
    new.bytes_in_flight = old.bytes_in_flight
    new.packets_lost = old.packets_lost
    new.congestion_window = max(old.congestion_window, _FLOOR_PACKETS * max_datagram_size)
    if isinstance(new, CountingCubic):
        new.ssthresh = new.congestion_window
    return new


class LossMeter:
    """Measures a path's loss in windows of packets, and says when to change the controller."""

    WINDOW = 256  # packets sent between two looks
    LOSSY_ABOVE = 0.003
    CLEAN_BELOW = 0.001
    CLEAN_WINDOWS = 8
    CONGESTED_DELAY = 1.5  # a round trip this many times the smallest is a queue
    SHORT_PATH = 0.010  # seconds of round trip below which cubic recovers fast enough

    def __init__(self, *, adaptive: bool) -> None:
        self.loss = 0.0  # smoothed fraction of packets lost
        self._adaptive = adaptive
        self._sent = 0
        self._lost = 0
        self._clean = 0
        self._lossy = False

    def choice(self, sent: int, lost: int, rtt: float, rtt_min: float) -> str | None:
        """A controller to change to, or None. ``sent`` and ``lost`` count all packets so far."""
        window = sent - self._sent
        if window < self.WINDOW:
            return None
        loss = (lost - self._lost) / window
        self._sent, self._lost = sent, lost
        self.loss += (loss - self.loss) * 0.5
        if not self._adaptive or rtt_min == math.inf:
            return None
        queueing = rtt > self.CONGESTED_DELAY * rtt_min + _DELAY_FLOOR
        if not self._lossy:
            if loss > self.LOSSY_ABOVE and rtt_min > self.SHORT_PATH and not queueing:
                self._lossy, self._clean = True, 0
                return LOSSY
            return None
        self._clean = self._clean + 1 if loss < self.CLEAN_BELOW else 0
        if self._clean >= self.CLEAN_WINDOWS:
            self._lossy = False
            return CUBIC
        return None
