"""A chain as its head describes it to the stages. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mesh.identity import PeerId
from mesh.relay.activations import Encoding
from mesh.relay.messages import Neighbours, Open, OpenSession
from mesh.relay.session_state import HeadSession
from mesh.relay.sessions import needs_history


@dataclass(frozen=True, slots=True)
class Hop:
    """A node and the layers ``[first, last)`` that it runs."""

    peer: PeerId
    first: int
    last: int


Route = tuple[Hop, ...]


class Ring:
    """Hops in order, the first is the head's own; together they cover ``layers`` exactly.

    ``activations`` between stages: ``f32`` is exact, all others are approximate.

    Raises ValueError for a route that does not, or that names a node twice: the chain alone has to
    say which of a node's stages a message is for.
    """

    def __init__(
        self, model: str, layers: int, route: Sequence[Hop], *, activations: Encoding = "f32"
    ) -> None:
        due = 0
        for hop in route:
            if hop.first != due or hop.last <= hop.first:
                raise ValueError(f"layers {due}-{layers} are to follow, not {hop.first}-{hop.last}")
            due = hop.last
        if due != layers or not route:
            raise ValueError(f"the route ends at layer {due} of {layers}")
        if len({hop.peer for hop in route}) != len(route):
            raise ValueError("a node occurs twice in the route: give it one range")
        self.id = secrets.token_bytes(16)
        self.model = model
        self.layers = layers
        self.route: Route = tuple(route)
        self.epoch = 1
        self.activations: Encoding = activations

    @property
    def tail(self) -> PeerId:
        return self.route[-1].peer

    @property
    def peers(self) -> frozenset[PeerId]:
        return frozenset(hop.peer for hop in self.route)

    def rank(self, peer: PeerId) -> int:
        return next(rank for rank, hop in enumerate(self.route) if hop.peer == peer)

    def replace(self, rank: int, peer: PeerId) -> None:
        hops = list(self.route)
        hops[rank] = Hop(peer, hops[rank].first, hops[rank].last)
        self.route = tuple(hops)

    def fence(self, rank: int) -> Neighbours:
        previous, following = self._beside(rank)
        return Neighbours(chain=self.id, epoch=self.epoch, previous=previous, next=following)

    def open(self, rank: int, sessions: Sequence[OpenSession]) -> Open:
        hop = self.route[rank]
        previous, following = self._beside(rank)
        return Open(
            chain=self.id,
            epoch=self.epoch,
            previous=previous,
            next=following,
            model=self.model,
            first=hop.first,
            last=hop.last,
            layers=self.layers,
            rank=rank,
            stages=len(self.route),
            activations=self.activations,
            sessions=tuple(sessions),
        )

    def describe(
        self, rank: int, session: HeadSession, emit_from: int
    ) -> tuple[OpenSession, bytes]:
        """How the stage of ``rank`` is to open the session, and the history that goes with it."""
        last = rank == len(self.route) - 1
        history = session.tokens if last and needs_history(session.sampling) else []
        described = OpenSession(
            session=session.number,
            capacity=session.capacity,
            emit_from=emit_from,
            prompt=session.prompt,
            history=len(history),
            sampling=session.sampling if last else None,
        )
        return described, np.array(history, "<i4").tobytes()

    def _beside(self, rank: int) -> tuple[PeerId, PeerId]:
        """The neighbours of a rank; the head's own stage comes after itself."""
        previous = self.route[max(rank - 1, 0)].peer
        return previous, self.route[(rank + 1) % len(self.route)].peer
