"""A stage's side of chains and sessions: who may do what, and where each session stands. Pure.

Each session has three marks, in tokens, ``past <= started <= accepted``:

* ``accepted``: rows up to here have been let in; the next row must begin exactly here.
* ``started``: rows up to here are in the running step or were in one before.
* ``past``: KV up to here is complete.

A fence makes a chain's epoch greater. Rows that were let in but not started are void from then on,
rows of the running step are finished and count (their output is kept, not sent). So what a stage
answers to a fence is final at once, however long the running step takes.

Room is reserved for a session's whole capacity when it opens or grows, so a row that is let in
never fails for lack of KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from inference.generation import SamplingParams
from mesh.identity import PeerId
from mesh.relay.activations import ENCODINGS, Encoding
from mesh.relay.frames import Row, StepHeader
from mesh.relay.messages import (
    Close,
    Grow,
    Held,
    Neighbours,
    Open,
    OpenSession,
    RefusedSession,
    Replay,
)
from mesh.relay.refusal import Refusal

# Chains without a session are forgotten, so this bounds what many heads can pile up.
MAX_CHAINS = 1024


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a loaded stage is. ``hidden`` counts features at its borders."""

    model: str  # digest
    first: int
    last: int
    layers: int
    hidden: int
    block_size: int  # tokens
    blocks: int
    context_length: int  # tokens

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.layers


@dataclass(slots=True, eq=False)
class Session:
    """``key`` names it in the stage's engine and is never used again."""

    key: int
    number: int
    capacity: int
    prompt: int
    emit_from: int
    sampling: SamplingParams | None
    history: list[int] | None  # token ids so far, where penalties need them
    accepted: int = 0
    started: int = 0
    past: int = 0


@dataclass(slots=True, eq=False)
class Chain:
    """A chain that this stage is in. ``head`` is the peer that opened it."""

    id: bytes
    head: PeerId
    epoch: int
    previous: PeerId
    next: PeerId
    rank: int
    stages: int
    activations: Encoding
    sessions: dict[int, Session] = field(default_factory=dict)


class SessionTable:
    """All chains and sessions of one stage. Every change comes in through a method below.

    ``sender`` is always the authenticated peer. Methods raise :class:`Refusal` and then have
    changed nothing. Those that end sessions return them; the caller frees their KV.
    """

    def __init__(self, facts: StageFacts) -> None:
        self.facts = facts
        self.takes = ENCODINGS  # forms of activations
        self.chains: dict[bytes, Chain] = {}
        self._reserved = 0  # blocks
        self._next_key = 0

    @property
    def free_tokens(self) -> int:
        return (self.facts.blocks - self._reserved) * self.facts.block_size

    @property
    def used(self) -> float:
        """The part of the KV memory that is reserved, 0 to 1."""
        return self._reserved / self.facts.blocks

    @property
    def sessions(self) -> int:
        return sum(len(chain.sessions) for chain in self.chains.values())

    def open(
        self, sender: PeerId, message: Open, histories: Sequence[list[int]]
    ) -> tuple[list[RefusedSession], list[Session]]:
        """Open sessions; returns those refused, and those of an earlier epoch that this ended.

        ``histories`` has the token ids of each session of the message. A chain that is here with
        an earlier epoch is begun anew: its head believes that this stage holds nothing.
        """
        self._check_stage(message)
        chain = self.chains.get(message.chain)
        if chain is not None and chain.head != sender:
            raise Refusal("wrong_peer", "this chain belongs to another head")
        if chain is not None and message.epoch < chain.epoch:
            raise Refusal("stale_epoch", f"the chain is at epoch {chain.epoch}")
        if chain is None and len(self.chains) >= MAX_CHAINS:
            raise Refusal("no_free_blocks", f"there are {MAX_CHAINS} chains open already")
        described = _chain(sender, message)
        ended: list[Session] = []
        if chain is not None and chain.epoch == message.epoch:
            if _description(chain) != _description(described):
                raise Refusal("chain_mismatch", "the chain is open with other neighbours or ranks")
        else:
            ended = self._forget(message.chain)
            chain = described
        refused: list[RefusedSession] = []
        for wanted, history in zip(message.sessions, histories, strict=True):
            try:
                session = self._admit(chain, wanted, history)
            except Refusal as refusal:
                refused.append(
                    RefusedSession(
                        session=wanted.session, code=refusal.code, message=refusal.message
                    )
                )
            else:
                chain.sessions[session.number] = session
                self.chains[chain.id] = chain
        return refused, ended

    def _check_stage(self, message: Open) -> None:
        facts = self.facts
        if message.model != facts.model:
            raise Refusal("unknown_model", f"the stage here is of model {facts.model}")
        if (message.first, message.last, message.layers) != (facts.first, facts.last, facts.layers):
            raise Refusal(
                "wrong_range",
                f"layers {facts.first}-{facts.last} of {facts.layers} are here, not "
                f"{message.first}-{message.last} of {message.layers}",
            )
        if message.activations not in self.takes:
            raise Refusal("wrong_encoding", f"taken here are {', '.join(sorted(self.takes))}")

    def _admit(self, chain: Chain, wanted: OpenSession, history: list[int]) -> Session:
        facts = self.facts
        if wanted.session in chain.sessions:
            raise Refusal("session_exists", f"session {wanted.session} is open")
        if wanted.capacity > facts.context_length:
            raise Refusal(
                "context_length",
                f"{wanted.capacity} tokens are more than this stage's {facts.context_length}",
            )
        if (wanted.sampling is not None) != facts.is_last:
            raise Refusal("malformed", "the last stage, and only that, is told how to sample")
        if wanted.prompt > wanted.capacity or wanted.emit_from > wanted.capacity:
            raise Refusal("malformed", "the capacity does not hold what the session has")
        needed = wanted.emit_from + 1 if needs_history(wanted.sampling) else 0
        if len(history) != needed:
            raise Refusal("malformed", f"{needed} token ids of history needed, not {len(history)}")
        self._reserve(wanted.capacity)
        self._next_key += 1
        return Session(
            key=self._next_key,
            number=wanted.session,
            capacity=wanted.capacity,
            prompt=wanted.prompt,
            emit_from=wanted.emit_from,
            sampling=wanted.sampling,
            history=history if needed else None,
        )

    def _reserve(self, capacity: int, held: int = 0) -> None:
        blocks = -(-capacity // self.facts.block_size) + (-held // self.facts.block_size)
        if self._reserved + blocks > self.facts.blocks:
            raise Refusal(
                "no_free_blocks", f"{capacity} tokens wanted, room for {self.free_tokens} is free"
            )
        self._reserved += blocks

    def grow(self, sender: PeerId, message: Grow) -> None:
        """Reserve more for a session. Less than it has is fine and changes nothing."""
        session = self._session(self._owned(sender, message.chain), message.session)
        if message.capacity > self.facts.context_length:
            raise Refusal("context_length", f"this stage takes {self.facts.context_length} tokens")
        if message.capacity > session.capacity:
            self._reserve(message.capacity, session.capacity)
            session.capacity = message.capacity

    def close(self, sender: PeerId, message: Close) -> list[Session]:
        """End sessions, or the whole chain. What is not here (any more) is fine."""
        chain = self.chains.get(message.chain)
        if chain is None:
            return []
        self._owned(sender, message.chain)
        if not message.sessions:
            # A node that was replaced may be back in the chain when it hears that it was.
            return self._forget(chain.id) if chain.epoch <= message.epoch else []
        return self._end(chain, message.sessions)

    def drop_head(self, peer: PeerId) -> list[Session]:
        """The link to ``peer`` is gone: everything that it is the head of ends."""
        mine = [chain.id for chain in self.chains.values() if chain.head == peer]
        return [session for chain in mine for session in self._forget(chain)]

    def beside(self, peer: PeerId) -> list[Chain]:
        """Chains in which ``peer`` is this stage's neighbour but not the head."""
        return [
            chain
            for chain in self.chains.values()
            if peer in (chain.previous, chain.next) and peer != chain.head
        ]

    def fence(self, sender: PeerId, message: Neighbours) -> list[Held]:
        """Void all rows of earlier epochs and take new neighbours.

        Returns where each session stands; ``kept_from`` is left to who keeps the output.
        """
        chain = self._owned(sender, message.chain)
        if message.epoch <= chain.epoch:
            raise Refusal("stale_epoch", f"the chain is at epoch {chain.epoch}")
        chain.epoch = message.epoch
        chain.previous, chain.next = PeerId(message.previous), PeerId(message.next)
        held = []
        for session in chain.sessions.values():
            session.accepted = session.started
            held.append(Held(session=session.number, past=session.started, kept_from=0))
        return held

    def rewind(self, sender: PeerId, message: Replay) -> list[tuple[Session, int]]:
        """Cut sessions as told; returns each with the position to replay from.

        No step of the chain may be running. A session that has been closed meanwhile is passed
        over; otherwise it is all or nothing.
        """
        chain = self._owned(sender, message.chain)
        if message.epoch != chain.epoch:
            raise Refusal("stale_epoch", f"the chain is at epoch {chain.epoch}")
        found = []
        for wanted in message.sessions:
            session = chain.sessions.get(wanted.session)
            if session is None:
                continue
            if wanted.past > session.past or wanted.replay_from > wanted.past:
                raise Refusal(
                    "wrong_position",
                    f"session {session.number} has {session.past} tokens: cannot keep "
                    f"{wanted.past} and replay from {wanted.replay_from}",
                )
            found.append((session, wanted))
        for session, wanted in found:
            session.past = session.started = session.accepted = wanted.past
            session.emit_from = wanted.emit_from
            if session.history is not None:
                del session.history[wanted.emit_from + 1 :]
        return [(session, wanted.replay_from) for session, wanted in found]

    def current(self, sender: PeerId, chain_id: bytes, epoch: int) -> Chain | None:
        """The chain that rows of ``sender`` belong to; None when they are late, of an epoch that
        was fenced."""
        chain = self.chains.get(chain_id)
        if chain is None:
            raise Refusal("unknown_chain", "no session of that chain is open here")
        if chain.previous != sender:
            raise Refusal("wrong_peer", "activations of this chain come from another node")
        if epoch > chain.epoch:
            raise Refusal("stale_epoch", f"the chain is at epoch {chain.epoch} here")
        return chain if epoch == chain.epoch else None

    def expect(self, sender: PeerId, header: StepHeader) -> Chain | None:
        """The chain that a frame belongs to; None when it is late."""
        chain = self.current(sender, header.chain, header.epoch)
        if chain is None:
            return None
        if header.encoding not in ("f32", chain.activations):
            raise Refusal(
                "wrong_encoding", f"activations of this chain are {chain.activations} or f32"
            )
        if len(header.spent) > chain.rank:
            raise Refusal("malformed", f"times of {len(header.spent)} stages before {chain.rank}")
        return chain

    def accept(self, chain: Chain, rows: Iterable[Row]) -> dict[int, Refusal]:
        """Let rows in; returns the sessions whose row is refused, and which stay as they are."""
        refused: dict[int, Refusal] = {}
        for row in rows:
            session = chain.sessions.get(row.session)
            if session is None:
                refusal = Refusal("unknown_session", f"session {row.session} is not open here")
            elif row.position != session.accepted:
                refusal = Refusal(
                    "wrong_position",
                    f"session {row.session} stands at {session.accepted}, not at {row.position}",
                )
            elif row.end > session.capacity:
                refusal = Refusal(
                    "beyond_capacity",
                    f"session {row.session} has room for {session.capacity} tokens, not {row.end}",
                )
            else:
                session.accepted = row.end
                continue
            refused[row.session] = refusal
        return refused

    def _owned(self, sender: PeerId, chain_id: bytes) -> Chain:
        chain = self.chains.get(chain_id)
        if chain is None:
            raise Refusal("unknown_chain", "no session of that chain is open here")
        if chain.head != sender:
            raise Refusal("wrong_peer", "this chain belongs to another head")
        return chain

    @staticmethod
    def _session(chain: Chain, number: int) -> Session:
        try:
            return chain.sessions[number]
        except KeyError:
            raise Refusal("unknown_session", f"session {number} is not open here") from None

    def _end(self, chain: Chain, numbers: Iterable[int]) -> list[Session]:
        ended = [s for n in numbers if (s := chain.sessions.pop(n, None)) is not None]
        for session in ended:
            self._reserved -= -(-session.capacity // self.facts.block_size)
        if not chain.sessions:
            self.chains.pop(chain.id, None)
        return ended

    def _forget(self, chain_id: bytes) -> list[Session]:
        chain = self.chains.get(chain_id)
        return [] if chain is None else self._end(chain, list(chain.sessions))


def needs_history(sampling: SamplingParams | None) -> bool:
    """Do penalties depend on the tokens that are there already?"""
    return sampling is not None and (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def _chain(head: PeerId, message: Open) -> Chain:
    return Chain(
        id=message.chain,
        head=head,
        epoch=message.epoch,
        previous=PeerId(message.previous),
        next=PeerId(message.next),
        rank=message.rank,
        stages=message.stages,
        activations=cast(Encoding, message.activations),  # one of those taken
    )


def _description(chain: Chain) -> tuple[object, ...]:
    return (chain.previous, chain.next, chain.rank, chain.stages, chain.activations)
