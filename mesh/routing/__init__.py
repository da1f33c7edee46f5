"""Cost of a route, and the choice of a replica or chain for a request. Pure: no I/O, no clock."""

from mesh.routing.affinity import Affinity, facts_of, marks_of
from mesh.routing.choose import choose
from mesh.routing.in_flight import InFlight, Ticket
from mesh.routing.route import (
    Chain,
    Considered,
    Cost,
    Hop,
    Local,
    Mark,
    PassedOver,
    Replica,
    RequestFacts,
    Route,
)

__all__ = [
    "Affinity",
    "Chain",
    "Considered",
    "Cost",
    "Hop",
    "InFlight",
    "Local",
    "Mark",
    "PassedOver",
    "Replica",
    "RequestFacts",
    "Route",
    "Ticket",
    "choose",
    "facts_of",
    "marks_of",
]
