"""Who is in the mesh: a pure table of peers, and the events that change it.

:func:`apply` takes an event and the time and returns a new table and the effects that the service
must carry out. Nothing here reads a clock; times are seconds of one monotonic clock of this node.

The life of a peer in the table::

             lost link, failed dial, no answer, two missed beats, doubted
        alive  ------------------------------------------->  suspect
          ^  <-------------------------------------------      |
          |     proof of life, or a message sent later         | 3 s without either
          |                                                    v
          +-------  newer message, or a newer boot  --------  gone  ---> forgotten

* A *beat* is the author's own promise of when its next message comes. Two missed beats and a second
  of grace make it suspect; one missed beat changes nothing.
* A suspect gets no new work, and is asked for a *proof of life* (a signature over a fresh nonce),
  directly and through others. What it said before it was suspected, and only arrives now, proves
  nothing.
* ``gone`` entries stay for an hour without being shown, so that an old advert which comes back
  from a slower corner of the mesh is known to be old. This is what keeps ghosts out.
* All that an author says is ordered by (boot, sequence). A newer boot replaces everything of the
  older one at once: a node that comes back after two seconds is the same entry, alive.
* In a large mesh few have a link to any one peer. Who loses such a link, or gets no answer, tells
  the others of its *doubt*. A doubted peer speaks up at once; if nothing is heard from it in time
  it is suspect. A doubt alone harms nobody.
* ``left`` is a peer's own last word for that boot; only a newer boot brings it back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mesh.gossip.advert import HoldingLoad, LoadReport, SignedAdvert
from mesh.gossip.events import (
    AdvertHeard,
    Became,
    Clash,
    Doubt,
    Doubted,
    Effect,
    Event,
    Fetch,
    LinkDown,
    LinkUp,
    LoadHeard,
    Mine,
    MyLoad,
    NoAnswer,
    Probe,
    ProofOfLife,
    Reboot,
    Refused,
    Status,
    Tick,
    Unreachable,
)
from mesh.gossip.peer_map import PeerMap
from mesh.identity import PeerId

MISSED_BEATS = 2
GRACE = 1.0  # s, for gossip's own delay and a busy machine
PROBE_TIME = 3.0  # s that a suspect has to prove that it lives
SPEAK_UP = 3.0  # s that a doubted peer has to be heard from
TOGETHER = 0.25  # s; doubts end at multiples of it, not by the hundred one by one
IN_FLIGHT = 1.0  # s that a message may have been on its way when its author was suspected
REMEMBERED = 3600.0  # s that a peer which is gone is remembered
MAX_NODES = 4096
# A node that meets its own adverts of a newer boot takes a newer one still: its clock stood back at
# start. More than this many times in a minute means that two nodes run with one key.
MAX_REBOOTS = 3
REBOOT_WINDOW = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer. ``load`` is by holding id; ``load_at`` is when it was received."""

    signed: SignedAdvert
    status: Status
    reason: str  # why it has this status, for people
    since: float  # when it got this status
    heard: float  # when its newest message came, or was sent if that is known
    beat: float
    sequence: int  # newest of adverts and load reports
    load: Mapping[int, HoldingLoad]
    load_at: float
    expires: float  # when its certificate ends
    speak_by: float = math.inf  # when something must have been heard from it, since it is doubted

    @property
    def boot(self) -> int:
        return self.signed.advert.boot

    @property
    def left(self) -> bool:
        """It said goodbye: only a newer boot brings it back."""
        return self.signed.advert.state == "left"

    @property
    def deadline(self) -> float:
        """When this entry changes by time alone."""
        if self.status == "alive":
            silent = self.heard + self.beat * MISSED_BEATS + GRACE
            if self.speak_by < math.inf:
                silent = min(silent, math.ceil(self.speak_by / TOGETHER) * TOGETHER)
            return min(silent, self.expires)
        if self.status == "suspect":
            return min(self.since + PROBE_TIME, self.expires)
        return self.since + REMEMBERED


@dataclass(frozen=True, slots=True)
class Table:
    """Everything that this node knows of others, and its own advert among them."""

    me: PeerId
    boot: int
    entries: PeerMap[Entry] = field(default_factory=PeerMap)
    links: frozenset[PeerId] = frozenset()
    reboots: tuple[float, ...] = ()
    deadline: float = math.inf  # when a Tick is due


def apply(table: Table, event: Event, now: float) -> tuple[Table, tuple[Effect, ...]]:
    """The table after ``event`` at time ``now``, and what has to be done about it."""
    match event:
        case Mine(signed):
            return _mine(table, signed, now), ()
        case MyLoad(load):
            return _my_load(table, load, now), ()
        case AdvertHeard():
            return _advert_heard(table, event, now)
        case LoadHeard(peer, report):
            return _load_heard(table, peer, report, now)
        case LinkUp(peer):
            return replace(table, links=table.links | {peer}), ()
        case LinkDown(peer, reason):
            table = replace(table, links=table.links - {peer})
            table, effects = _suspect(table, peer, reason, now)
            if effects and _some_without_link(table):
                effects = (*effects, Doubt(peer))
            return table, effects
        case Unreachable(peer):
            if peer in table.links:
                return table, ()
            return _suspect(table, peer, "no address of it answers", now)
        case NoAnswer(peer):
            table, effects = _suspect(table, peer, "does not answer", now)
            return table, (*effects, Doubt(peer)) if effects else ()
        case Doubted(peer):
            return _doubted(table, peer, now), ()
        case ProofOfLife():
            return _proof(table, event, now)
        case Refused(peers, reason):
            return _refused(table, peers, reason, now)
        case Tick():
            return _tick(table, now)


def _with(table: Table, *changed: Entry, without: Iterable[PeerId] = ()) -> Table:
    """``table`` with these entries. Its deadline may then be early, never late: that costs a Tick
    which looks again, and not a look at every entry for each message that comes in."""
    deadline = table.deadline
    for entry in changed:
        if entry.signed.peer != table.me:
            deadline = min(deadline, entry.deadline)
    entries = table.entries.changed({entry.signed.peer: entry for entry in changed}, without)
    # Not replace(): this runs for every message that comes in.
    return Table(table.me, table.boot, entries, table.links, table.reboots, deadline)


def _looked_at(table: Table) -> Table:
    """``table`` with its exact deadline."""
    deadline = min(
        (e.deadline for p, e in table.entries.items() if p != table.me), default=math.inf
    )
    return replace(table, deadline=deadline)


def _mine(table: Table, signed: SignedAdvert, now: float) -> Table:
    advert = signed.advert
    entry = Entry(
        signed=signed,
        status="alive",
        reason="this node",
        since=table.entries[table.me].since if table.me in table.entries else now,
        heard=now,
        beat=advert.beat,
        sequence=advert.sequence,
        load=_by_id(advert.load),
        load_at=now,
        expires=math.inf,
    )
    return _with(replace(table, boot=advert.boot), entry)


def _my_load(table: Table, load: tuple[HoldingLoad, ...], now: float) -> Table:
    mine = table.entries.get(table.me)
    if mine is None:
        return table
    return _with(table, replace(mine, load=_by_id(load), load_at=now))


def _by_id(load: Iterable[HoldingLoad]) -> Mapping[int, HoldingLoad]:
    return MappingProxyType({item.id: item for item in load})


def _advert_heard(table: Table, event: AdvertHeard, now: float) -> tuple[Table, tuple[Effect, ...]]:
    signed = event.signed
    advert, peer = signed.advert, signed.peer
    if peer == table.me:
        return _heard_myself(table, signed, now)
    entry = table.entries.get(peer)
    if entry is None and len(table.entries) >= MAX_NODES:
        oldest = min(
            (e for e in table.entries.values() if e.status == "gone"),
            key=lambda e: e.since,
            default=None,
        )
        if oldest is None:
            return table, ()
        table = _with(table, without=[oldest.signed.peer])
    heard = now - max(0.0, event.age)
    if entry is None or advert.boot > entry.boot:
        fresh = Entry(
            signed=signed,
            status="alive",
            reason="advert",
            since=now,
            heard=heard,
            beat=advert.beat,
            sequence=advert.sequence,
            load=_by_id(advert.load),
            load_at=heard,
            expires=event.expires,
        )
        return _settle(table, entry, fresh, now)
    # A load report may have come first: then the advert is news, but not the newest.
    if entry.left or signed.version <= entry.signed.version:
        return table, ()
    newest = advert.sequence > entry.sequence
    merged = Entry(
        signed=signed,
        status=entry.status,
        reason=entry.reason,
        since=entry.since,
        heard=max(entry.heard, heard),
        beat=advert.beat if newest else entry.beat,
        sequence=max(entry.sequence, advert.sequence),
        load=_by_id(advert.load) if newest else entry.load,
        load_at=heard if newest else entry.load_at,
        expires=event.expires,
        speak_by=_speak_by(entry, heard),
    )
    return _settle(table, entry, _revived(merged, heard, now), now)


def _revived(entry: Entry, heard: float, now: float) -> Entry:
    """``entry`` as alive, if its author must have spoken after it came under suspicion."""
    if entry.status == "alive" or entry.left or entry.expires <= now:
        return entry
    if heard <= entry.since + (IN_FLIGHT if entry.status == "suspect" else 0.0):
        return entry
    return replace(entry, status="alive", reason="heard again", since=now)


def _settle(
    table: Table, was: Entry | None, entry: Entry, now: float
) -> tuple[Table, tuple[Effect, ...]]:
    """Put ``entry`` in the table, as what it is at ``now``, and say what that changes."""
    known = was is not None and was.status != "gone"
    if entry.left and entry.status != "gone":
        entry = replace(entry, status="gone", reason="left", since=now)
    elif entry.status == "alive" and entry.deadline <= now and not known:
        # Whoever passed this on has not heard its author for too long: remembered, not shown.
        entry = replace(entry, status="gone", reason="silent", since=now)
    table = _with(table, entry)
    before = was.status if was is not None else None
    if before == entry.status or (before is None and entry.status == "gone"):
        return table, ()
    return table, (Became(entry.signed.peer, before, entry.status, entry.reason),)


def _heard_myself(
    table: Table, signed: SignedAdvert, now: float
) -> tuple[Table, tuple[Effect, ...]]:
    mine = table.entries.get(table.me)
    boot = signed.advert.boot
    if boot < table.boot or (mine is not None and signed.version <= mine.signed.version):
        return table, ()
    recent = tuple(t for t in table.reboots if now - t < REBOOT_WINDOW)
    if len(recent) >= MAX_REBOOTS:
        return table, (Clash(),)
    table = replace(table, boot=boot + 1, reboots=(*recent, now))
    return table, (Reboot(boot + 1),)


def _load_heard(
    table: Table, peer: PeerId, report: LoadReport, now: float
) -> tuple[Table, tuple[Effect, ...]]:
    entry = table.entries.get(peer)
    if peer == table.me:
        return table, ()
    if entry is None or report.boot > entry.boot:
        return table, (Fetch(peer),)
    if entry.status == "gone":
        # Its advert says whether it is admitted again, and what it holds now.
        return table, () if entry.left else (Fetch(peer),)
    if report.boot < entry.boot or report.sequence <= entry.sequence:
        return table, ()
    merged = replace(
        entry,
        heard=max(entry.heard, now),
        speak_by=math.inf,
        beat=report.beat,
        sequence=report.sequence,
        load=_by_id(report.load),
        load_at=now,
    )
    return _settle(table, entry, _revived(merged, now, now), now)


def _suspect(
    table: Table, peer: PeerId, reason: str, now: float
) -> tuple[Table, tuple[Effect, ...]]:
    entry = table.entries.get(peer)
    if entry is None or entry.status != "alive" or peer == table.me:
        return table, ()
    doubted = replace(entry, status="suspect", reason=reason, since=now)
    return _with(table, doubted), (Became(peer, "alive", "suspect", reason), Probe(peer))


def _some_without_link(table: Table) -> bool:
    """Whether not every pair of nodes has a link: then nobody sees everything by itself."""
    return any(
        entry.status == "alive" and peer != table.me and peer not in table.links
        for peer, entry in table.entries.items()
    )


def _doubted(table: Table, peer: PeerId, now: float) -> Table:
    entry = table.entries.get(peer)
    if entry is None or entry.status != "alive" or peer == table.me or entry.speak_by < math.inf:
        return table
    return _with(table, replace(entry, speak_by=now + SPEAK_UP))


def _speak_by(entry: Entry, heard: float) -> float:
    """What remains of a doubt when something is heard that its author said at ``heard``."""
    return math.inf if heard > entry.speak_by - SPEAK_UP else entry.speak_by


def _proof(table: Table, event: ProofOfLife, now: float) -> tuple[Table, tuple[Effect, ...]]:
    entry = table.entries.get(event.peer)
    if event.peer == table.me:
        return table, ()
    if entry is None or event.boot > entry.boot:
        return table, (Fetch(event.peer),)
    if event.boot < entry.boot or entry.left or entry.expires <= now:
        return table, ()
    alive = replace(entry, heard=now, speak_by=math.inf)
    if entry.status != "alive":
        alive = replace(alive, status="alive", reason="proof of life", since=now)
    return _settle(table, entry, alive, now)


def _refused(
    table: Table, peers: frozenset[PeerId], reason: str, now: float
) -> tuple[Table, tuple[Effect, ...]]:
    changed: list[Entry] = []
    effects: list[Effect] = []
    for peer in sorted(peers):
        entry = table.entries.get(peer)
        if entry is None or entry.status == "gone" or peer == table.me:
            continue
        # No proof of life helps now, only an advert under a certificate that holds.
        changed.append(replace(entry, status="gone", reason=reason, since=now, expires=now))
        effects.append(Became(peer, entry.status, "gone", reason))
    return _with(table, *changed), tuple(effects)


def _tick(table: Table, now: float) -> tuple[Table, tuple[Effect, ...]]:
    if now < table.deadline:
        return table, ()
    changed: list[Entry] = []
    forgotten: list[PeerId] = []
    effects: list[Effect] = []
    for peer, entry in table.entries.items():
        if peer == table.me or entry.deadline > now:
            continue
        if entry.status == "gone":
            forgotten.append(peer)
        elif entry.expires <= now:
            changed.append(
                replace(entry, status="gone", reason="its certificate has expired", since=now)
            )
            effects.append(Became(peer, entry.status, "gone", changed[-1].reason))
        elif entry.status == "suspect":
            changed.append(
                replace(entry, status="gone", reason=f"{entry.reason}, no proof of life", since=now)
            )
            effects.append(Became(peer, "suspect", "gone", changed[-1].reason))
        else:
            changed.append(
                replace(entry, status="suspect", reason="silent", since=now, speak_by=math.inf)
            )
            effects += [Became(peer, "alive", "suspect", "silent"), Probe(peer), Doubt(peer)]
    return _looked_at(_with(table, *changed, without=forgotten)), tuple(effects)
