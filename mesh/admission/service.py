"""Tests of peers over their links, at a pace that the policy sets, and what others are told of it.

Small probes are frequent, and what a link shows by itself while it is used is taken too. Bandwidth
is tested seldom, one peer at a time, and never while this node or the peer works for anyone: the
peer is asked first and says when that ends, and the test ends at once when work begins on either
side.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from mesh.admission.measure import LinkMeasure, LinkSummary
from mesh.admission.policy import Standing, Thresholds, judge, next_look, problems
from mesh.admission.report import is_news, rows
from mesh.gossip.advert import SeenLink
from mesh.gossip.view import NodeView, View
from mesh.identity import PeerId
from mesh.transport import (
    DeadlineExceeded,
    Link,
    LinkDown,
    LinkFigures,
    LinkMoved,
    LinkUp,
    Message,
    RemoteError,
    Request,
    Transport,
    TransportError,
    measure_link,
    packets_of,
)
from mesh.transport.linkbench import ECHO

_log = logging.getLogger(__name__)

PROBES = 5  # round trips of one test
PROBE_GAP = 0.2  # s
PROBE_TIME = 2.0  # s for an answer
FIRST_TEST = 1.0  # s after a link comes up
BANDWIDTH_AFTER = 5.0  # s that a link must be up
BANDWIDTH_EVERY = 1800.0
BANDWIDTH_MEGABYTES = 1
BANDWIDTH_SECONDS = 2.0  # each way
LEAST_GAP = 0.5  # s between tests of one peer
TELL_GAP = 10.0  # s at least before others are told what was found without a test
# A peer is asked with this before bandwidth is tested. It answers when it has nothing to do, and
# the answer goes on until it has.
IDLE_KIND = "admission.idle"
LONGEST_IDLE = 15.0  # s that a peer may take for a test


@dataclass(slots=True)
class _Peer:
    measure: LinkMeasure = field(default_factory=LinkMeasure)
    standing: Standing = field(default_factory=Standing)
    scope: trio.CancelScope | None = None
    wake: trio.Event = field(default_factory=trio.Event)  # test it now


class AdmissionService:
    """``announce`` tells the mesh what was measured; ``is_idle`` says whether nothing runs here,
    and :meth:`work_began` has to be called when that changes."""

    def __init__(
        self,
        transport: Transport,
        thresholds: Thresholds,
        *,
        view: Callable[[], View],
        is_idle: Callable[[], bool],
        announce: Callable[[Sequence[SeenLink]], None],
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._thresholds = thresholds
        self._view = view
        self._is_idle = is_idle
        self._announce = announce
        self._rng = rng
        self._peers: dict[PeerId, _Peer] = {}
        self._bandwidth = trio.Lock()  # held while any test of bandwidth goes on here
        self._work = trio.Event()  # set, and replaced, when work begins
        self._announced: tuple[SeenLink, ...] = ()
        self._told_at = -math.inf

    # -- what is known ----------------------------------------------------------------------------

    @property
    def standings(self) -> Mapping[PeerId, Standing]:
        return {peer: known.standing for peer, known in self._peers.items()}

    def summary(self, peer: PeerId) -> LinkSummary:
        known = self._peers.get(peer)
        return known.measure.summary(trio.current_time()) if known else LinkSummary()

    def those(self, state: str) -> frozenset[PeerId]:
        return frozenset(p for p, known in self._peers.items() if known.standing.state == state)

    def downloaded(self, peer: PeerId, size: int, seconds: float) -> None:
        """A real transfer says what a test would have said."""
        known = self._peers.get(peer)
        if known is not None:
            known.measure = known.measure.downloaded(size, seconds, trio.current_time())

    def work_began(self) -> None:
        """This node has something to do: a test of bandwidth ends now."""
        self._work.set()
        self._work = trio.Event()

    def used(self, peers: Iterable[PeerId]) -> None:
        """A request has gone over the links to these peers: take what it showed of them."""
        for peer in peers:
            known, link = self._peers.get(peer), self._transport.link(peer)
            if known is not None and link is not None:
                self._look_at(link, known)

    def _pinged(self, link: Link, known: _Peer, seconds: float) -> None:
        """The link has pinged the peer by itself, as it does while anything goes over it."""
        if seconds > PROBE_TIME:
            return  # the peer was away for a while, which is gossip's to judge
        known.measure = known.measure.pinged(seconds, trio.current_time())
        self._look_at(link, known)

    def _look_at(self, link: Link, known: _Peer) -> None:
        now = trio.current_time()
        counts = packets_of(link)
        if counts is not None:
            known.measure = known.measure.counted(*counts, now)
        summary, state = known.measure.summary(now), known.standing.state
        if state == "admitted" and problems(summary, None, self._thresholds):
            known.wake.set()  # test it before the next one suffers from it
            return
        due = now - self._told_at >= TELL_GAP
        if due and is_news(link.peer, summary, state, self._announced):
            self._tell()

    # -- testing ----------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._transport.serve_stream(IDLE_KIND, self._while_idle)
        async with self._transport.events() as events, trio.open_nursery() as nursery:
            for link in list(self._transport.links.values()):
                self._follow(link, nursery)
            task_status.started()
            async for event in events:
                if isinstance(event, LinkUp):
                    self._follow(event.link, nursery)
                elif isinstance(event, LinkMoved):
                    self._peers.setdefault(event.link.peer, _Peer()).wake.set()
                elif isinstance(event, LinkDown):
                    known = self._peers.get(event.peer)
                    if known is not None and known.scope is not None:
                        known.scope.cancel()

    def _follow(self, link: Link, nursery: trio.Nursery) -> None:
        known = self._peers.setdefault(link.peer, _Peer())
        if known.scope is not None:
            known.scope.cancel()
        known.scope = trio.CancelScope()
        link.on_round_trip = partial(self._pinged, link, known)
        nursery.start_soon(self._test_again_and_again, link, known, known.scope)

    async def _test_again_and_again(
        self, link: Link, known: _Peer, scope: trio.CancelScope
    ) -> None:
        up = trio.current_time()
        with scope:
            await trio.sleep(FIRST_TEST * self._rng.uniform(0.5, 1.5))
            while link.is_up:
                await self._test(link, known)
                now = trio.current_time()
                if self._wants_bandwidth(link, known, now - up):
                    await self._test_bandwidth(link, known)
                self._tell()
                wait = known.standing.next_test - now
                if known.measure.bandwidth_at < 0:
                    wait = next_look(known.standing, up=now - up, soon=BANDWIDTH_AFTER, now=now)
                # Nodes that were started together do not test together.
                await trio.sleep(LEAST_GAP)
                rest = wait * self._rng.uniform(0.8, 1.2) - LEAST_GAP
                with trio.move_on_after(max(0.0, rest)):
                    await known.wake.wait()
                known.wake = trio.Event()

    async def _test(self, link: Link, known: _Peer) -> None:
        for _ in range(PROBES):
            began = trio.current_time()
            try:
                await link.request(ECHO, None, b"", timeout=PROBE_TIME)
            except DeadlineExceeded:
                known.measure = known.measure.unanswered(trio.current_time())
            except TransportError:
                return
            else:
                now = trio.current_time()
                known.measure = known.measure.answered(now - began, now)
            await trio.sleep(PROBE_GAP * self._rng.uniform(0.5, 1.5))
        now = trio.current_time()
        counts = packets_of(link)
        if counts is not None:
            known.measure = known.measure.counted(*counts, now)
        before = known.standing
        speed = _tokens_per_second(self._view().nodes.get(link.peer))
        known.standing = judge(before, known.measure.summary(now), speed, self._thresholds, now)
        if known.standing.state != before.state:
            _log.warning("%s is %s: %s", link.peer, known.standing.state, known.standing.reason)

    def _wants_bandwidth(self, link: Link, known: _Peer, up: float) -> bool:
        due = trio.current_time() - known.measure.bandwidth_at > BANDWIDTH_EVERY
        return due and up > BANDWIDTH_AFTER and self._is_idle()

    async def _test_bandwidth(self, link: Link, known: _Peer) -> None:
        async with self._bandwidth:
            found = await self._measure_while_idle(link)
        if found is not None:
            now = trio.current_time()
            size = BANDWIDTH_MEGABYTES << 20
            measure = known.measure.uploaded(size, size / max(1.0, found.up_mb_s * 1e6), now)
            known.measure = measure.downloaded(size, size / max(1.0, found.down_mb_s * 1e6), now)

    async def _measure_while_idle(self, link: Link) -> LinkFigures | None:
        """None when it could not be done, or work began on either side before it was."""
        found: LinkFigures | None = None
        work = self._work
        if not self._is_idle():
            return None
        async with trio.open_nursery() as nursery:

            async def until_work_here() -> None:
                await work.wait()
                nursery.cancel_scope.cancel()

            async def until_work_there() -> None:
                try:
                    async with link.stream(IDLE_KIND) as idle:
                        if await anext(idle, None) is not None:
                            nursery.start_soon(measure)
                            await anext(idle, None)
                except (TransportError, RemoteError) as error:
                    _log.debug("bandwidth to %s is not measured: %s", link.peer, error)
                nursery.cancel_scope.cancel()

            async def measure() -> None:
                nonlocal found
                try:
                    found = await measure_link(
                        link,
                        megabytes=BANDWIDTH_MEGABYTES,
                        round_trips=1,
                        seconds=BANDWIDTH_SECONDS,
                    )
                except (TransportError, RemoteError) as error:
                    _log.info("bandwidth to %s cannot be measured: %s", link.peer, error)
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_work_here)
            nursery.start_soon(until_work_there)
        return found

    async def _while_idle(self, request: Request) -> AsyncGenerator[Message, None]:
        """The peer's side: one message, and the end when this node gets something to do."""
        if not self._is_idle() or self._bandwidth.locked():
            raise RemoteError("busy", "this node has something to do")
        work = self._work
        async with self._bandwidth:
            yield Message()
            with trio.move_on_after(LONGEST_IDLE):
                await work.wait()

    def _tell(self) -> None:
        now = self._told_at = trio.current_time()
        seen = {
            peer: (known.measure.summary(now), known.standing.state)
            for peer, known in self._peers.items()
            if self._transport.link(peer) is not None or known.standing.state != "admitted"
        }
        fresh = rows(seen, self._announced)
        if fresh != self._announced:
            self._announced = fresh
            self._announce(fresh)


def _tokens_per_second(node: NodeView | None) -> float | None:
    """What the node makes of the models it holds, as if it held them whole; the best of them."""
    if node is None:
        return None
    found = [
        (h.last - h.first) / h.layers / h.decode_seconds
        for h in node.holdings
        if h.decode_seconds is not None
    ]
    return max(found, default=None)
