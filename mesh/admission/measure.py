"""What this node has measured of its path to one peer. Pure: time is an argument.

Round trip time comes from small probes and, for nothing, from the pings that a link makes by itself
while anything goes over it. Jitter is the smoothed change between successive probes, as RTP does it
(RFC 3550, 6.4.1). Loss counts packets where the transport knows them, and unanswered probes.
Bandwidth comes from seldom bulk probes and from real transfers, whichever was last.

Everything ages: what was not measured again for a while says less and less, and in the end nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SMOOTHING = 1 / 8  # of round trip times, as TCP does it (RFC 6298)
JITTER_SMOOTHING = 1 / 16
LOSS_KEPT = 0.9  # weight of what was known before, per probe
BANDWIDTH_SMOOTHING = 0.5
SETTLING = 3  # round trips of a link that is new; opening it stretches them, and the least counts
STALE_PATH = 300.0  # s after which a round trip time says nothing any more
STALE_BANDWIDTH = 3600.0  # s
# Fewer bytes than this are not a measurement: the congestion window would still be opening.
LEAST_TRANSFER = 256 << 10


@dataclass(frozen=True, slots=True)
class LinkSummary:
    """What is known now; None where nothing is. Seconds, bytes per second, share of packets."""

    rtt: float | None = None
    jitter: float | None = None
    loss: float | None = None
    upload: float | None = None
    download: float | None = None


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """The aggregate for one peer. Each method returns a new one."""

    rtt: float | None = None
    last_rtt: float | None = None
    jitter: float = 0.0
    loss: float = 0.0
    probes: int = 0
    packets: tuple[int, int] | None = None  # sent and lost, as the transport counted last
    path_at: float = -math.inf
    upload: float | None = None
    upload_at: float = -math.inf
    download: float | None = None
    download_at: float = -math.inf

    def answered(self, rtt: float, now: float) -> LinkMeasure:
        """A probe was answered after ``rtt`` seconds."""
        fresh = now - self.path_at > STALE_PATH or self.rtt is None or self.last_rtt is None
        if fresh or self.rtt is None or self.last_rtt is None:
            smoothed, jitter = rtt, 0.0
        else:
            steady = self.rtt + (rtt - self.rtt) * SMOOTHING
            smoothed = min(self.rtt, rtt) if self.probes < SETTLING else steady
            jitter = self.jitter + (abs(rtt - self.last_rtt) - self.jitter) * JITTER_SMOOTHING
        return replace(
            self,
            rtt=smoothed,
            last_rtt=rtt,
            jitter=jitter,
            loss=0.0 if fresh else self.loss * LOSS_KEPT,
            probes=self.probes + 1,
            path_at=now,
        )

    def pinged(self, rtt: float, now: float) -> LinkMeasure:
        """A ping of the link itself took ``rtt`` seconds. That says how far the peer is while the
        link works; how steady it is, and what is lost, is left to probes at their own pace."""
        if self.rtt is None or now - self.path_at > STALE_PATH:
            return self.answered(rtt, now)
        return replace(self, rtt=self.rtt + (rtt - self.rtt) * SMOOTHING, path_at=now)

    def unanswered(self, now: float) -> LinkMeasure:
        """A probe got no answer in its time."""
        loss = self.loss * LOSS_KEPT + (1.0 - LOSS_KEPT)
        return replace(self, loss=loss, probes=self.probes + 1, path_at=now)

    def counted(self, sent: int, lost: int, now: float) -> LinkMeasure:
        """What the transport says of all packets since the connection began.

        Smaller numbers than before are those of another connection.
        """
        before_sent, before_lost = self.packets or (0, 0)
        if sent < before_sent or lost < before_lost:
            before_sent = before_lost = 0
        measured = replace(self, packets=(sent, lost), path_at=max(self.path_at, now))
        fresh = sent - before_sent
        if fresh < 1:
            return measured
        # Few packets say little: their weight grows with their number.
        weight = min(0.5, fresh / 400)
        share = min(1.0, (lost - before_lost) / fresh)
        return replace(measured, loss=self.loss + (share - self.loss) * weight)

    def uploaded(self, size: int, seconds: float, now: float) -> LinkMeasure:
        """``size`` bytes were sent to the peer and arrived within ``seconds``."""
        if size < LEAST_TRANSFER or seconds <= 0.0:
            return self
        known = self.upload if now - self.upload_at <= STALE_BANDWIDTH else None
        return replace(self, upload=_blend(known, size / seconds), upload_at=now)

    def downloaded(self, size: int, seconds: float, now: float) -> LinkMeasure:
        """The same from the peer."""
        if size < LEAST_TRANSFER or seconds <= 0.0:
            return self
        known = self.download if now - self.download_at <= STALE_BANDWIDTH else None
        return replace(self, download=_blend(known, size / seconds), download_at=now)

    def summary(self, now: float) -> LinkSummary:
        path = now - self.path_at <= STALE_PATH
        return LinkSummary(
            rtt=self.rtt if path else None,
            jitter=self.jitter if path and self.rtt is not None else None,
            loss=self.loss if path and (self.probes or self.packets) else None,
            upload=self.upload if now - self.upload_at <= STALE_BANDWIDTH else None,
            download=self.download if now - self.download_at <= STALE_BANDWIDTH else None,
        )

    @property
    def bandwidth_at(self) -> float:
        """When both directions were last known."""
        return min(self.upload_at, self.download_at)


def _blend(known: float | None, fresh: float) -> float:
    return fresh if known is None else known + (fresh - known) * BANDWIDTH_SMOOTHING
