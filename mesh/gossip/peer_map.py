"""An immutable mapping by peer of which a changed copy costs little, however many peers there are.

The membership table is immutable and changes with every message. In a mesh of a thousand nodes,
copying all of it each time would be most of the work. Here entries lie in a fixed number of small
dictionaries; a change copies one of those and shares the others.
"""

from __future__ import annotations

import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar, overload

from mesh.identity import PeerId

_BUCKETS = 32  # about the square root of the size of a large mesh

V = TypeVar("V")
D = TypeVar("D")


def _bucket(peer: PeerId) -> int:
    # Not hash(): the order of entries is to be the same in every process.
    return zlib.crc32(peer.encode("utf-8", "replace")) % _BUCKETS


class PeerMap(Mapping[PeerId, V]):
    """Read it like any mapping; :meth:`changed` gives another one."""

    __slots__ = ("_buckets", "_count")

    def __init__(self) -> None:
        self._buckets: tuple[dict[PeerId, V], ...] = ({},) * _BUCKETS
        self._count = 0

    def changed(self, entries: Mapping[PeerId, V], without: Iterable[PeerId] = ()) -> PeerMap[V]:
        """With ``entries`` added or replaced, after the peers ``without`` were taken out."""
        buckets = list(self._buckets)
        count = self._count
        for peer in without:
            index = _bucket(peer)
            if peer in buckets[index]:
                buckets[index] = {p: e for p, e in buckets[index].items() if p != peer}
                count -= 1
        for peer, entry in entries.items():
            index = _bucket(peer)
            bucket = buckets[index]
            if bucket is self._buckets[index]:
                bucket = buckets[index] = bucket.copy()
            count += peer not in bucket
            bucket[peer] = entry
        found: PeerMap[V] = PeerMap()
        found._buckets = tuple(buckets)
        found._count = count
        return found

    def __getitem__(self, peer: PeerId) -> V:
        return self._buckets[_bucket(peer)][peer]

    @overload
    def get(self, peer: PeerId, /) -> V | None: ...

    @overload
    def get(self, peer: PeerId, /, default: V | D) -> V | D: ...

    def get(self, peer: PeerId, /, default: V | D | None = None) -> V | D | None:
        return self._buckets[_bucket(peer)].get(peer, default)

    def __contains__(self, peer: object) -> bool:
        return isinstance(peer, str) and peer in self._buckets[_bucket(PeerId(peer))]

    def __iter__(self) -> Iterator[PeerId]:
        return chain.from_iterable(self._buckets)

    def __len__(self) -> int:
        return self._count

    def items(self) -> ItemsView[PeerId, V]:
        return _Items(self)


class _Items(ItemsView[PeerId, V]):
    """Without a look-up of each."""

    _mapping: PeerMap[V]

    def __iter__(self) -> Iterator[tuple[PeerId, V]]:
        return chain.from_iterable([bucket.items() for bucket in self._mapping._buckets])
