"""Which revocation lists two nodes should exchange. Pure; the trust store keeps and checks them.

Each trusted root has at most one list in force, and its number only grows, so that comparing
numbers says everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ca.crl import RevocationList
from mesh.gossip.wire import WireError

MAX_ROOTS = 8
ROOT_KEY_BYTES = 32
MAX_NUMBER = 1 << 63

Numbers = Mapping[bytes, int]
"""Number of the list in force, by the raw public key of its root."""


def numbers(lists: Mapping[bytes, RevocationList]) -> list[list[Any]]:
    """What to say in a digest: ``[[root key, number], ...]``."""
    return [[root, crl.number] for root, crl in sorted(lists.items())[:MAX_ROOTS]]


def parse_numbers(value: Any) -> Numbers:
    """Raises :class:`~mesh.gossip.wire.WireError`."""
    if not isinstance(value, list) or len(value) > MAX_ROOTS:
        raise WireError("not a list of revocation list numbers")
    found: dict[bytes, int] = {}
    for row in value:
        match row:
            case [bytes(root), int(number)] if (
                len(root) == ROOT_KEY_BYTES and 0 <= number <= MAX_NUMBER
            ):
                found[root] = number
            case _:
                raise WireError("not a [root key, number]")
    return found


def newer_than(theirs: Numbers, lists: Mapping[bytes, RevocationList]) -> tuple[bytes, ...]:
    """Our lists (DER) that the other side lacks, though it may not trust their roots."""
    return tuple(
        crl.der
        for root, crl in sorted(lists.items())[:MAX_ROOTS]
        if theirs.get(root, -1) < crl.number
    )
