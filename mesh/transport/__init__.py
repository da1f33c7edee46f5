"""The only place that knows libp2p and QUIC: admitted links to peers, and gossip."""

from __future__ import annotations

from mesh.transport.errors import (
    DeadlineExceeded,
    DialError,
    LinkClosed,
    ListenError,
    NotAdmitted,
    RemoteError,
    TransportError,
)
from mesh.transport.lanes import Lane
from mesh.transport.link import Link
from mesh.transport.linkbench import LinkFigures, RoundTrips, measure_link, packets_of
from mesh.transport.links import LinkDown, LinkMoved, LinkUp
from mesh.transport.liveness import LivenessPolicy
from mesh.transport.messages import Message, Request
from mesh.transport.quic.core import Tuning
from mesh.transport.transport import Transport, TransportConfig

__all__ = [
    "DeadlineExceeded",
    "DialError",
    "Lane",
    "Link",
    "LinkClosed",
    "LinkDown",
    "LinkFigures",
    "LinkMoved",
    "LinkUp",
    "ListenError",
    "LivenessPolicy",
    "Message",
    "NotAdmitted",
    "RemoteError",
    "Request",
    "RoundTrips",
    "Transport",
    "TransportConfig",
    "TransportError",
    "Tuning",
    "measure_link",
    "packets_of",
]
