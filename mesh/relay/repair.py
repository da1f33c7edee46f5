"""Mending a chain: fence the survivors, fill the replacements, let kept output flow again.

The order matters. First every stage is at the new epoch, so that nothing of the old one can arrive
later. Then replacements have all sessions open. Then stages are told from the last to the first
what to hold and what to send again, so that each is ready before the one before it sends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from mesh.identity import PeerId
from mesh.relay.frames import parse
from mesh.relay.links import PeerLost, at_once
from mesh.relay.messages import (
    CLOSE,
    FENCE,
    MAX_SESSIONS,
    OPEN,
    PROBE,
    REPLAY,
    Close,
    Fenced,
    Held,
    Open,
    Opened,
    Probe,
    Replay,
    ReplaySession,
)
from mesh.relay.recovery import Marks, plan
from mesh.relay.refusal import Refusal
from mesh.relay.ring import Ring
from mesh.relay.service import Relay
from mesh.relay.session_state import HeadSession
from mesh.relay.watch import PATIENCE, QUIET

_log = logging.getLogger(__name__)

FENCE_SECONDS = 1.5  # it is answered at once, even while the stage computes
OPEN_SECONDS = 10.0  # a stage may have to dial the next one
CLOSE_SECONDS = 15.0  # longer than a silent link lives: with its link, a stage frees everything
REPLAY_SECONDS = 30.0  # it waits for the step that is running


@dataclass(slots=True)
class Mended:
    """``sent``: how many tokens of each session the first stage has. ``anew``: sessions whose kept
    output does not reach back far enough; they are no longer open anywhere that matters."""

    sent: dict[int, int] = field(default_factory=dict)
    anew: list[HeadSession] = field(default_factory=list)


async def mend(relay: Relay, ring: Ring, sessions: Sequence[HeadSession]) -> Mended:
    """Bring all stages to the ring's epoch with every session where it was.

    Raises :class:`PeerLost` for a stage that does not answer or will not go along; then the ring
    needs another one in its place, and another epoch.
    """
    held = await _fence(relay, ring)
    mended = Mended()
    orders: dict[int, tuple[Marks, ...]] = {}
    for session in sessions:
        marks = plan(
            len(session.tokens), session.prompt, [stage.get(session.number) for stage in held]
        )
        if marks is None:
            mended.anew.append(session)
        else:
            orders[session.number] = marks
            mended.sent[session.number] = marks[0].past
    going_on = [session for session in sessions if session.number in orders]
    await at_once(
        partial(
            _open_missing,
            relay,
            ring,
            rank,
            [session for session in going_on if session.number not in stage],
            {number: marks[rank].emit_from for number, marks in orders.items()},
        )
        for rank, stage in enumerate(held)
    )
    for rank in reversed(range(len(held))):
        known = [session for session in going_on if session.number in held[rank]]
        for start in range(0, len(known), MAX_SESSIONS):
            await _replay(relay, ring, rank, known[start : start + MAX_SESSIONS], orders)
    return mended


async def _replay(
    relay: Relay,
    ring: Ring,
    rank: int,
    sessions: Sequence[HeadSession],
    orders: Mapping[int, tuple[Marks, ...]],
) -> None:
    peer = ring.route[rank].peer
    part = tuple(
        ReplaySession(
            session=session.number,
            past=orders[session.number][rank].past,
            emit_from=orders[session.number][rank].emit_from,
            replay_from=orders[session.number][rank].replay_from,
        )
        for session in sessions
    )
    message = Replay(chain=ring.id, epoch=ring.epoch, sessions=part)
    try:
        await relay.ask(peer, REPLAY, message, timeout=REPLAY_SECONDS)
    except Refusal as refusal:
        # When all clients leave meanwhile, the stage forgets the chain. Otherwise it has no reason
        # to refuse, and if it does, it is of no use.
        if refusal.code != "unknown_chain" or not all(session.ended for session in sessions):
            raise PeerLost(peer, str(refusal)) from refusal


async def _fence(relay: Relay, ring: Ring) -> list[dict[int, Held]]:
    """What each rank holds, by session."""
    held: list[dict[int, Held]] = [{} for _ in ring.route]

    async def fence(rank: int) -> None:
        peer = ring.route[rank].peer
        try:
            answer = await relay.ask(peer, FENCE, ring.fence(rank), timeout=FENCE_SECONDS)
            for session in parse(Fenced, answer).sessions:
                held[rank][session.session] = session
        except Refusal as refusal:
            # A replacement, or one that has forgotten everything: it holds nothing.
            if refusal.code != "unknown_chain":
                raise PeerLost(peer, str(refusal)) from refusal

    await at_once(partial(fence, rank) for rank in range(len(held)))
    return held


async def _open_missing(
    relay: Relay,
    ring: Ring,
    rank: int,
    sessions: Sequence[HeadSession],
    emit_from: dict[int, int],
) -> None:
    peer = ring.route[rank].peer
    for start in range(0, len(sessions), MAX_SESSIONS):
        described = [
            ring.describe(rank, session, emit_from[session.number])
            for session in sessions[start : start + MAX_SESSIONS]
        ]
        message = ring.open(rank, [session for session, _ in described])
        payload = b"".join(history for _, history in described)
        try:
            opened = await open_at(relay, peer, message, payload)
        except Refusal as refusal:
            raise PeerLost(peer, str(refusal)) from refusal
        for refused in opened.refused:
            raise PeerLost(peer, f"{refused.code}: {refused.message}")


async def open_at(relay: Relay, peer: PeerId, message: Open, history: bytes) -> Opened:
    """Open sessions at one stage. Raises :class:`PeerLost` and :class:`Refusal`.

    It has time to dial the next one, and is asked meanwhile whether it is there.
    """
    answers: list[Any] = []
    waiting = trio.CancelScope()

    async def ask() -> None:
        answers.append(await relay.ask(peer, OPEN, message, history, timeout=OPEN_SECONDS))
        waiting.cancel()

    async def watch() -> None:
        with waiting:
            while True:
                await trio.sleep(QUIET)
                with suppress(Refusal):  # it does not know the chain yet, but it answers
                    await relay.ask(peer, PROBE, Probe(chain=message.chain), timeout=PATIENCE)

    await at_once((ask, watch))
    return parse(Opened, answers[0])


async def close_at(relay: Relay, peer: PeerId, message: Close) -> None:
    """Tell one stage to forget sessions, if it is there."""
    try:
        await relay.ask(peer, CLOSE, message, timeout=CLOSE_SECONDS)
    except (PeerLost, Refusal) as error:
        # A stage whose link to its head is gone frees everything by itself.
        _log.debug("closing at %s: %s", peer, error)
