"""Which sequence holds the KV of a prompt's beginning. Pure.

Sequences are found by their first block and then compared token by token, so nobody is ever given
the KV of a text that merely hashes alike.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Protocol


class Holder(Protocol):
    """A sequence: the KV of the first ``scheduled`` of its ``tokens`` is there, and the first
    ``prompt`` are what others may share."""

    session: int
    tokens: list[int]
    prompt: int
    scheduled: int


class Prefixes:
    """Running sequences, and finished ones that are kept: the least recently used goes first."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[int, Holder] = {}
        self._kept: OrderedDict[int, Holder] = OrderedDict()
        self._by_start: defaultdict[tuple[int, ...], dict[int, Holder]] = defaultdict(dict)

    def __contains__(self, session: int) -> bool:
        return session in self._running or session in self._kept

    @property
    def kept(self) -> int:
        return len(self._kept)

    def run(self, holder: Holder) -> None:
        """A sequence starts; its ``tokens`` and ``scheduled`` are read when they are needed."""
        self._running[holder.session] = holder
        self._by_start[self._start(holder)][holder.session] = holder

    def forget(self, holder: Holder) -> None:
        """A running sequence has lost its blocks."""
        del self._running[holder.session]
        self._unlist(holder)

    def keep(self, holder: Holder) -> list[int]:
        """A running sequence has finished and keeps its blocks.

        Returns kept sessions that it makes needless, because it begins with all that they hold.
        """
        self.forget(holder)
        found = self._by_start.get(self._start(holder), {})
        covered = [
            other
            for session, other in found.items()
            if session in self._kept and self._common(holder, other.tokens) >= other.scheduled
        ]
        for other in covered:
            del self._kept[other.session]
            self._unlist(other)
        self._kept[holder.session] = holder
        self._by_start[self._start(holder)][holder.session] = holder
        return [other.session for other in covered]

    def evict(self) -> int:
        """Let go of the kept session that was not used for the longest time, and name it."""
        session, holder = self._kept.popitem(last=False)
        self._unlist(holder)
        return session

    def longest(self, tokens: list[int]) -> tuple[int, int]:
        """(session, tokens): the most whole blocks in common with a prompt of ``tokens``, leaving
        two or more to compute. (-1, 0) when there is nothing in common."""
        limit = (len(tokens) - 2) // self._block_size * self._block_size
        best, most = -1, 0
        if limit > 0:
            for session, holder in self._by_start.get(self._key(tokens), {}).items():
                common = min(self._common(holder, tokens), limit) // self._block_size
                if common * self._block_size > most:
                    best, most = session, common * self._block_size
        if best in self._kept:
            self._kept.move_to_end(best)
        return best, most

    def _common(self, holder: Holder, tokens: list[int]) -> int:
        """How many tokens at the beginning agree, of those whose KV ``holder`` has."""
        size = self._block_size
        most = min(holder.scheduled, holder.prompt, len(tokens))
        at = 0
        while at < most and holder.tokens[at : at + size] == tokens[at : at + size]:
            at += size
        if at < most:
            pairs = zip(holder.tokens[at:most], tokens[at:most], strict=True)
            return at + next((i for i, (a, b) in enumerate(pairs) if a != b), most - at)
        return most

    def _key(self, tokens: list[int]) -> tuple[int, ...]:
        return tuple(tokens[: self._block_size])

    def _start(self, holder: Holder) -> tuple[int, ...]:
        return self._key(holder.tokens[: holder.prompt])

    def _unlist(self, holder: Holder) -> None:
        key = self._start(holder)
        del self._by_start[key][holder.session]
        if not self._by_start[key]:
            del self._by_start[key]
