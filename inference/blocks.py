"""Which KV blocks hold which tokens of which session. Pure.

A runtime does not check block tables: a wrong index ends the process. So indices are only ever made
here, each block counts how many tables hold it, and a table never reaches further than what was
reserved. Blocks that several sessions share (a common prefix) are whole ones and nobody writes into
them: rows are only ever added behind a session's length, and a session whose length ends inside a
shared block is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class OutOfBlocks(Exception):
    """Not enough free blocks. Nothing was changed."""


@dataclass(slots=True)
class _Table:
    length: int = 0  # tokens
    count: int = 0  # blocks in use at the front of `blocks`
    blocks: NDArray[np.int32] = field(default_factory=lambda: np.empty(16, np.int32))


class BlockTables:
    """The tables of all sessions over one pool of ``blocks`` blocks of ``block_size`` tokens.

    Sessions are named by integers that the caller chooses.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} blocks of {block_size} tokens")
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, -1, -1))  # a stack: the lowest number goes out first
        self._holders = [0] * blocks
        self._tables: dict[int, _Table] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def __contains__(self, session: int) -> bool:
        return session in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def open(self, session: int) -> None:
        if session in self._tables:
            raise ValueError(f"session {session} is open")
        self._tables[session] = _Table()

    def length(self, session: int) -> int:
        """Tokens that the session has reserved blocks for."""
        return self._tables[session].length

    def indices(self, session: int) -> NDArray[np.int32]:
        """The session's blocks in order: int32, a view that is valid until its next change."""
        table = self._tables[session]
        return table.blocks[: table.count]

    def cost(self, session: int, past: int, length: int) -> int:
        """How many free blocks it takes to go back to ``past`` tokens and on to ``length``.

        Negative when more blocks come free than are needed. Raises ValueError when ``past`` is
        more than the session has, or lies inside a block that others hold too.
        """
        table = self._tables[session]
        if not 0 <= past <= table.length:
            raise ValueError(f"session {session} has {table.length} tokens, not {past}")
        keep = -(-past // self.block_size)
        wanted = -(-length // self.block_size)
        if past == table.length:
            return wanted - table.count
        if past % self.block_size and self._holders[table.blocks[keep - 1]] > 1:
            raise ValueError(f"token {past} of session {session} lies inside a shared block")
        released = table.blocks[keep : table.count].tolist()
        return wanted - keep - [self._holders[block] for block in released].count(1)

    def extend(self, session: int, length: int) -> None:
        """Make room for ``length`` tokens in all. Raises :class:`OutOfBlocks`."""
        table = self._tables[session]
        if length < table.length:
            raise ValueError(f"session {session} has {table.length} tokens, more than {length}")
        need = -(-length // self.block_size) - table.count
        if need > len(self._free):
            raise OutOfBlocks(f"{need} blocks are needed and {len(self._free)} are free")
        if table.count + need > len(table.blocks):
            grown = np.empty(max(table.count + need, 2 * len(table.blocks)), np.int32)
            grown[: table.count] = table.blocks[: table.count]
            table.blocks = grown
        for _ in range(need):
            block = self._free.pop()
            self._holders[block] = 1
            table.blocks[table.count] = block
            table.count += 1
        table.length = length

    def truncate(self, session: int, length: int) -> None:
        """Forget the tokens from ``length`` on and give back blocks that held only those.

        Raises ValueError when the new end lies inside a block that others hold too.
        """
        self.cost(session, length, length)  # refuses what cannot be
        table = self._tables[session]
        keep = -(-length // self.block_size)
        self._release(table.blocks[keep : table.count])
        table.count = keep
        table.length = length

    def fork(self, source: int, target: int, length: int) -> None:
        """Open ``target`` with the first ``length`` tokens of ``source``: the blocks are shared.

        ``length`` must be whole blocks.
        """
        if length % self.block_size:
            raise ValueError(f"{length} tokens are not whole blocks of {self.block_size}")
        origin = self._tables[source]
        if not 0 <= length <= origin.length:
            raise ValueError(f"session {source} has {origin.length} tokens, not {length}")
        self.open(target)
        count = length // self.block_size
        table = _Table(length, count, np.empty(max(16, count), np.int32))
        table.blocks[:count] = origin.blocks[:count]
        for block in table.blocks[:count]:
            self._holders[block] += 1
        self._tables[target] = table

    def close(self, session: int) -> None:
        """Give back what the session holds. A session that is not open is fine."""
        table = self._tables.pop(session, None)
        if table is not None:
            self._release(table.blocks[: table.count])

    def _release(self, blocks: NDArray[np.int32]) -> None:
        for block in reversed(blocks.tolist()):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
