"""Tests of peers over their links, at a pace that the policy sets, and what others are told of it.

Small probes are frequent; bandwidth is tested seldom, one peer at a time, and never while this node
or the peer works for anyone.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from mesh.admission.measure import LinkMeasure, LinkSummary
from mesh.admission.policy import Standing, Thresholds, judge
from mesh.admission.report import rows
from mesh.gossip.advert import SeenLink
from mesh.gossip.view import NodeView, View
from mesh.identity import PeerId
from mesh.transport import (
    DeadlineExceeded,
    Link,
    LinkDown,
    LinkUp,
    RemoteError,
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
BANDWIDTH_SECONDS = 2.0


@dataclass(slots=True)
class _Peer:
    measure: LinkMeasure = field(default_factory=LinkMeasure)
    standing: Standing = field(default_factory=Standing)
    scope: trio.CancelScope | None = None


class AdmissionService:
    """``announce`` tells the mesh what was measured; ``is_idle`` says whether nothing runs here."""

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
        self._bandwidth = trio.Lock()
        self._announced: tuple[SeenLink, ...] = ()

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

    # -- testing ----------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with self._transport.events() as events, trio.open_nursery() as nursery:
            for link in list(self._transport.links.values()):
                self._follow(link, nursery)
            task_status.started()
            async for event in events:
                if isinstance(event, LinkUp):
                    self._follow(event.link, nursery)
                elif isinstance(event, LinkDown):
                    known = self._peers.get(event.peer)
                    if known is not None and known.scope is not None:
                        known.scope.cancel()

    def _follow(self, link: Link, nursery: trio.Nursery) -> None:
        known = self._peers.setdefault(link.peer, _Peer())
        if known.scope is not None:
            known.scope.cancel()
        known.scope = trio.CancelScope()
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
                    wait = min(wait, BANDWIDTH_AFTER)
                # Nodes that were started together do not test together.
                await trio.sleep(max(0.5, wait * self._rng.uniform(0.8, 1.2)))

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
        node = self._view().nodes.get(link.peer)
        busy = node is not None and any(n.active or n.waiting for n in node.load.values())
        return due and up > BANDWIDTH_AFTER and not busy and self._is_idle()

    async def _test_bandwidth(self, link: Link, known: _Peer) -> None:
        async with self._bandwidth:
            try:
                found = await measure_link(
                    link,
                    megabytes=BANDWIDTH_MEGABYTES,
                    round_trips=1,
                    seconds=BANDWIDTH_SECONDS,
                )
            except (TransportError, RemoteError) as error:
                _log.info("bandwidth to %s cannot be measured: %s", link.peer, error)
                return
            now = trio.current_time()
            size = BANDWIDTH_MEGABYTES << 20
            measure = known.measure.uploaded(size, size / max(1.0, found.up_mb_s * 1e6), now)
            known.measure = measure.downloaded(size, size / max(1.0, found.down_mb_s * 1e6), now)

    def _tell(self) -> None:
        now = trio.current_time()
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
