"""Losses of one chain: noticing them, finding replacements, and bringing the ring to a new epoch.

There is one mending at a time. What is lost meanwhile is looked at before it ends, so a second loss
does not need a second mending. While it lasts nothing is sent into the ring.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from functools import partial

import trio

from inference.errors import ErrorCode, GenerationError
from mesh.identity import PeerId
from mesh.relay.frames import parse
from mesh.relay.links import PeerLost, at_once
from mesh.relay.messages import PROBE, Close, Probe, Probed
from mesh.relay.refusal import Refusal
from mesh.relay.repair import Mended, close_at, mend
from mesh.relay.ring import Ring
from mesh.relay.service import Relay
from mesh.relay.session_state import HeadSession
from mesh.relay.watch import PATIENCE, Watch

_log = logging.getLogger(__name__)

MEND_SECONDS = 8.0
CHANCE_SECONDS = 10.0  # a lost peer without a spare is tried again at most this often

# (model digest, first, last, peers that will not do) -> a node that has this stage loaded.
Spare = Callable[[str, int, int, frozenset[PeerId]], PeerId | None]


class Mender:
    """``sessions`` gives those in the ring. ``mended`` is called when the stages are ready to go on
    and then ``go_on``; ``failed`` when there is no way to go on."""

    def __init__(
        self,
        relay: Relay,
        ring: Ring,
        spare: Spare,
        *,
        sessions: Callable[[], list[HeadSession]],
        is_idle: Callable[[], bool],
        mended: Callable[[Mended, Collection[int]], None],
        failed: Callable[[ErrorCode, str], None],
        go_on: Callable[[], None],
    ) -> None:
        self._relay = relay
        self._ring = ring
        self._spare = spare
        self._sessions = sessions
        self._is_idle = is_idle
        self._mended = mended
        self._failed = failed
        self._go_on = go_on
        self._steady = trio.Event()  # set while nothing is being mended
        self._steady.set()
        self._gone: set[PeerId] = set()
        self._chances: dict[PeerId, float] = {}  # when a lost peer was last tried again
        self._watch = Watch(trio.current_time())
        self._watching = False

    @property
    def steady(self) -> bool:
        return self._steady.is_set()

    @property
    def lost(self) -> bool:
        """Somebody in the ring is lost, and nobody has taken over yet."""
        return bool(self._gone & self._ring.peers)

    async def wait_steady(self) -> None:
        """Wait until the ring is whole; what was lost while nobody needed it is mended first."""
        if self._gone:
            self.mend_soon()
        await self._steady.wait()

    def lose(self, peer: PeerId) -> None:
        """``peer`` is of no use in this chain, if it is in it."""
        if peer in self._ring.peers and peer != self._relay.links.me:
            self._gone.add(peer)
            if not self._is_idle():
                self.mend_soon()

    def mend_soon(self) -> None:
        if self._steady.is_set():
            self._steady = trio.Event()
            self._relay.spawn(self._mend)

    async def _mend(self) -> None:
        try:
            with trio.move_on_after(MEND_SECONDS) as limit:
                await self._mend_until_whole()
            if limit.cancelled_caught:
                self._failed("node_lost", f"the chain was not whole in {MEND_SECONDS:g} s")
        except GenerationError as error:
            self._failed(error.code, error.message)
        finally:
            self._steady.set()
        self._watch.heard(trio.current_time())
        self._go_on()

    async def _mend_until_whole(self) -> None:
        """Replace what is gone and bring the rest to a new epoch, until that goes well."""
        useless: set[PeerId] = set()
        tried: set[int] = set()  # sessions that a stage may hold, also when they have ended since
        while True:
            gone, self._gone = self._gone & self._ring.peers, set()
            for peer in gone:
                self._replace(peer, useless)
            self._ring.epoch += 1
            sessions = self._sessions()
            tried |= {session.number for session in sessions}
            try:
                mended = await mend(self._relay, self._ring, sessions)
            except PeerLost as lost:
                _log.info("mending a chain: %s", lost)
                self._gone.add(lost.peer)
            if not self._gone & self._ring.peers:
                break
        self._mended(mended, tried)

    def _replace(self, peer: PeerId, useless: set[PeerId]) -> None:
        """Put another node in the place of ``peer``; without one, try ``peer`` once more."""
        rank = self._ring.rank(peer)
        hop = self._ring.route[rank]
        spare = None
        if peer != self._relay.links.me:
            unwanted = frozenset(useless | self._ring.peers | {peer})
            spare = self._spare(self._ring.model, hop.first, hop.last, unwanted)
        if spare is not None:
            _log.info("layers %d-%d: %s takes over from %s", hop.first, hop.last, spare, peer)
            self._ring.replace(rank, spare)
            # It may live, and only its neighbour cannot reach it.
            forget = Close(chain=self._ring.id, epoch=self._ring.epoch)
            self._relay.spawn(close_at, self._relay, peer, forget)
        elif trio.current_time() - self._chances.get(peer, -math.inf) < CHANCE_SECONDS:
            raise GenerationError(
                "node_lost",
                f"{peer} is lost, and nobody else has layers {hop.first}-{hop.last} ready",
            )
        else:
            self._chances[peer] = trio.current_time()
        useless.add(peer)

    def heard(self) -> None:
        """Something has come back from the ring."""
        self._watch.heard(trio.current_time())

    def watch(self) -> None:
        """Keep watch as long as there are sessions in the ring."""
        if not self._watching:
            self._watching = True
            self._relay.spawn(self._keep_watch)

    async def _keep_watch(self) -> None:
        """Ask the stages when nothing comes back; runs while there are sessions."""
        self._watch.heard(trio.current_time())
        try:
            while self._sessions():
                await self._steady.wait()
                delay = self._watch.ask_in(trio.current_time())
                if delay > 0:
                    await trio.sleep(delay)
                else:
                    await self._ask_all()
        finally:
            self._watching = False

    async def _ask_all(self) -> None:
        asked = trio.current_time()
        busy = False

        async def probe(peer: PeerId) -> None:
            nonlocal busy
            message = Probe(chain=self._ring.id)
            answer = await self._relay.ask(peer, PROBE, message, timeout=PATIENCE)
            busy = busy or parse(Probed, answer).busy

        try:
            await at_once(partial(probe, hop.peer) for hop in self._ring.route)
        except PeerLost as lost:
            self.lose(lost.peer)
        except Refusal:
            self.mend_soon()
        else:
            if self._watch.answered(asked, trio.current_time(), busy=busy):
                self.mend_soon()
