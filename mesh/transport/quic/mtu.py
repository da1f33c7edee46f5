"""Which datagram size a path carries: probed upward, given up when packets vanish.

QUIC starts at 1200 bytes, which every path must carry (RFC 9000, section 14). One datagram costs
about the same work whatever its size, so a larger one is what makes a fast link fast. This is a
small version of DPLPMTUD (RFC 8899): it tries a short ladder of sizes that real links have, each
with a padded PING of its own, and never risks data on a size that has not been acknowledged.
"""

from __future__ import annotations

import ipaddress

BASE_SIZE = 1200
# aioquic writes the length of a STREAM frame in 14 bits, so nothing above this can be filled.
LARGEST_SIZE = 16_300
# Ethernet less IPv4/UDP and IPv6/UDP headers; PPPoE and most tunnels; jumbo frames.
_LADDER_IPV4 = (1392, 1472, 8972)
_LADDER_IPV6 = (1372, 1452, 8952)
_LADDER_LOOPBACK = (8972, LARGEST_SIZE)  # the first for systems that bound UDP at 9216 bytes
# Seconds before a size that failed is tried again: soon at first, because a busy machine loses a
# probe as easily as a narrow path does.
_RETRY_FIRST, _RETRY_FACTOR, _RETRY_LONGEST = 0.2, 5.0, 600.0
_AFTER_BLACK_HOLE = 60.0


def ladder_for(host: str, *, can_forbid_fragments: bool) -> tuple[int, ...]:
    """Sizes worth probing toward ``host``, ascending.

    Without the don't-fragment bit a probe would be fragmented and prove nothing, so then only the
    loopback is probed.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_loopback:
        return _LADDER_LOOPBACK
    if not can_forbid_fragments:
        return ()
    return _LADDER_IPV4 if address.version == 4 else _LADDER_IPV6


class PathMtu:
    """The size in use and the probe that may be outstanding. Time is an argument, in seconds."""

    def __init__(self, ladder: tuple[int, ...]) -> None:
        self.size = BASE_SIZE
        self._ladder = ladder
        self._outstanding: int | None = None
        self._failures = 0
        self._resume_at = 0.0

    def wants_probe(self, now: float) -> bool:
        """Whether :meth:`next_probe` would give a size."""
        return (
            self._outstanding is None
            and now >= self._resume_at
            and bool(self._ladder)
            and self._ladder[-1] > self.size
        )

    def next_probe(self, now: float) -> int | None:
        """The size to probe now, or None. A returned size counts as sent."""
        if self._outstanding is not None or now < self._resume_at:
            return None
        larger = next((size for size in self._ladder if size > self.size), None)
        if larger is not None:
            self._outstanding = larger
        return larger

    def acknowledged(self, size: int) -> bool:
        """A probe of ``size`` arrived. Returns True when the size in use grew."""
        if self._outstanding == size:
            self._outstanding = None
            self._failures = 0
        if size <= self.size:
            return False
        self.size = size
        return True

    def lost(self, size: int, now: float) -> None:
        """A probe of ``size`` did not arrive, or the system refused to send it."""
        if self._outstanding != size:
            return
        self._outstanding = None
        wait = min(_RETRY_FIRST * _RETRY_FACTOR**self._failures, _RETRY_LONGEST)
        self._failures = min(self._failures + 1, 10)
        self._resume_at = now + wait

    def black_hole(self, now: float) -> bool:
        """Nothing gets through any more. Returns True when the size fell back to the base."""
        if self.size == BASE_SIZE:
            return False
        self.size = BASE_SIZE
        self._outstanding = None
        self._failures = 0
        self._resume_at = now + _AFTER_BLACK_HOLE
        return True
