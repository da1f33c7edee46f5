"""Two nodes compare what they know and exchange what the other lacks. Pure, over the table.

A digest is 20 bytes per peer: the first 8 of SHA-256(PeerId), the boot, the sequence of its advert.
Peers that are gone are in the digest, so that nobody sends them back, but are not sent themselves;
those that left are, for a while, because their last word must reach everyone.

A round is one request and its answer: the caller sends its digest; the answer brings the adverts
that the caller lacks and names those that the answerer lacks, which the caller then pushes. So a
newcomer, whose digest is almost empty, has the whole view after one round trip.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mesh.gossip.membership import MAX_NODES, Entry, Table
from mesh.gossip.wire import WireError
from mesh.identity import PeerId

KEY_BYTES = 8
_LINE = struct.Struct(f">{KEY_BYTES}sQI")
MAX_DIGEST = MAX_NODES * _LINE.size
MAX_WANTED = MAX_NODES * KEY_BYTES
# One transfer, certificate chains included: about 3,000 adverts of ordinary size. What does not fit
# comes with the next round.
MAX_TRANSFER = 4 << 20
FAREWELL = 60.0  # s for which the last word of a peer that left is passed on

Version = tuple[int, int]  # boot, sequence of the advert
_NEVER: Version = (0, 0)


@dataclass(frozen=True, slots=True)
class Record:
    """An advert's envelope, and how many seconds ago the sender heard from its author."""

    age: float
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Difference:
    """What to send, and which peers (by digest key) to ask for. ``more``: not all of it fitted."""

    send: tuple[Record, ...]
    want: tuple[bytes, ...]
    more: bool


@lru_cache(maxsize=2 * MAX_NODES)
def key_of(peer: PeerId) -> bytes:
    return hashlib.sha256(peer.encode()).digest()[:KEY_BYTES]


def digest(table: Table) -> bytes:
    return b"".join(
        [_LINE.pack(key_of(peer), *entry.signed.version) for peer, entry in table.entries.items()]
    )


def parse_digest(data: bytes) -> Mapping[bytes, Version]:
    """Raises :class:`~mesh.gossip.wire.WireError`."""
    if len(data) > MAX_DIGEST or len(data) % _LINE.size:
        raise WireError(f"a digest of {len(data)} bytes")
    return {key: (boot, sequence) for key, boot, sequence in _LINE.iter_unpack(data)}


def parse_wanted(data: bytes) -> frozenset[bytes]:
    """Raises :class:`~mesh.gossip.wire.WireError`."""
    if len(data) > MAX_WANTED or len(data) % KEY_BYTES:
        raise WireError(f"a list of wanted adverts of {len(data)} bytes")
    return frozenset(data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES))


def compare(
    table: Table, theirs: Mapping[bytes, Version], now: float, limit: int = MAX_TRANSFER
) -> Difference:
    """What the owner of digest ``theirs`` lacks of ours, newest first, and what we lack."""
    lacking: list[Entry] = []
    ours: dict[bytes, Version] = {}
    for peer, entry in table.entries.items():
        key = key_of(peer)
        ours[key] = version = entry.signed.version
        # Mostly the two know the same.
        if theirs.get(key, _NEVER) < version and _may_be_sent(entry, now):
            lacking.append(entry)
    want = tuple([key for key, version in theirs.items() if ours.get(key, _NEVER) < version])
    send, more = _within(table, lacking, now, limit)
    return Difference(send, want, more)


def wanted(
    table: Table, keys: Iterable[bytes], now: float, limit: int = MAX_TRANSFER
) -> tuple[Record, ...]:
    """The adverts that the other side asked for."""
    asked = frozenset(keys)
    if not asked:
        return ()
    entries = [
        entry
        for peer, entry in table.entries.items()
        if key_of(peer) in asked and _may_be_sent(entry, now)
    ]
    return _within(table, entries, now, limit)[0]


def _may_be_sent(entry: Entry, now: float) -> bool:
    if entry.left:
        return now - entry.since < FAREWELL
    # Who learns of a peer after it was doubted would not hear of the doubt.
    return entry.status == "alive" and entry.speak_by == math.inf


def _within(
    table: Table, entries: Sequence[Entry], now: float, limit: int
) -> tuple[tuple[Record, ...], bool]:
    records: list[Record] = []
    size = 0
    # This node's own advert first: the other side can then talk to us whatever else happens.
    for entry in sorted(entries, key=lambda e: (e.signed.peer != table.me, -e.heard)):
        size += len(entry.signed.envelope) + 16
        if size > limit:
            return tuple(records), True
        age = 0.0 if entry.signed.peer == table.me else max(0.0, now - entry.heard)
        records.append(Record(age, entry.signed.envelope))
    return tuple(records), False
