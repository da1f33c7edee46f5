"""This node's addresses as others see them. Pure.

Behind a NAT a node cannot know its own address; its peers can. One peer may lie, or see us from
inside the same network, so an address is told to others only when two peers agree on it or when a
dial to it from outside has succeeded.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from mesh.identity import PeerId

_MOST = 16  # addresses kept


class ObservedAddresses:
    """Host and port pairs by the peers that saw them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], set[PeerId]] = {}
        self._reached: set[tuple[str, int]] = set()

    def saw(self, observer: PeerId, host: str, port: int) -> bool:
        """``observer`` sees this node at ``host`` and ``port``. True when that is a new address.

        What no NAT would map to (loopback, multicast, nonsense) is left out.
        """
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if (
            not 0 < port < 65_536
            or address.is_multicast
            or address.is_unspecified
            or address.is_link_local
        ):
            return False
        for observers in self._seen.values():
            observers.discard(observer)
        key = (str(address), port)
        new = key not in self._seen
        self._seen.setdefault(key, set()).add(observer)
        stale = [k for k, who in self._seen.items() if not who and k not in self._reached]
        for each in stale:
            del self._seen[each]
        while len(self._seen) > _MOST:
            del self._seen[next(iter(self._seen))]
        return new

    def reached(self, host: str, port: int, *, success: bool) -> None:
        """A dial to this address from outside, on a connection of its own, went so."""
        key = (host, port)
        if success:
            self._reached.add(key)
        else:
            self._reached.discard(key)

    @property
    def candidates(self) -> list[tuple[str, int]]:
        """All, the best supported first: for hole punching, where trying costs little."""
        return sorted(self._seen, key=lambda key: -len(self._seen[key]))

    def confirmed(self, own: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those to tell others, without the ones that are this node's ``own`` anyway."""
        known = set(own)
        return [
            key
            for key in self.candidates
            if key not in known and (key in self._reached or len(self._seen[key]) >= 2)
        ]

    @property
    def is_reachable(self) -> bool:
        """Somebody outside has dialled us with success."""
        return bool(self._reached)
