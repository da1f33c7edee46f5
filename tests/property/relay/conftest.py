"""A whole mesh in memory: toy stages whose output depends on every token before it, links that can
be slow, cut, or silent, and a reference to compare with."""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import outcome
import pytest
import trio

from inference.generation import SamplingParams
from inference.paged import StageRange
from inference.sampling import Sampled, Sampler, sample
from inference.stage import Part, StageRefusal, StepBatch
from mesh.identity import PeerId
from mesh.relay.chain import ChainHead
from mesh.relay.host import StageHost
from mesh.relay.links import PeerLost
from mesh.relay.ring import Hop
from mesh.relay.service import Relay
from mesh.relay.session_state import HeadSession
from mesh.transport.frames import decode_body, encode_body

HIDDEN = 8
VOCABULARY = 64
DIGEST = "d" * 64


def peer(name: str) -> PeerId:
    return PeerId(f"{name:Q<52}")


class ToyStage:
    """Layers that hash. The hidden state after a layer at a position depends on the hidden states
    before the layer at all positions up to it, so any token lost, doubled or misplaced shows."""

    def __init__(self, first: int, last: int, layers: int, *, blocks: int = 64) -> None:
        self.range = StageRange(first, last, layers)
        self.hidden = HIDDEN
        self.block_size = 16
        self.blocks = blocks
        self.context_length = min(512, blocks * 16)
        self._kv: dict[int, list[list[bytes]]] = {}  # session -> position -> state per layer
        self._prompts: dict[int, int] = {}
        self.positions = 0  # computed in all
        self.largest = 0  # sessions in one step
        self.seconds = 0.0  # that a step takes
        self.broken: set[int] = set()  # sessions that it refuses
        self.failing: str | None = None  # where a step ends in an error: "begin" or "finish"
        self.computing = False

    def __contains__(self, session: int) -> bool:
        return session in self._kv

    @property
    def sessions(self) -> int:
        return len(self._kv)

    def open(self, session: int, prompt: int | None = None) -> None:
        assert not self.computing
        self._kv[session] = []
        self._prompts[session] = prompt or 0

    def close(self, session: int) -> None:
        assert not self.computing
        self._kv.pop(session, None)

    def step(self, batch: StepBatch) -> np.ndarray:
        self.begin(batch)
        return self.finish()

    def finish(self) -> np.ndarray:
        assert self.computing
        if self.seconds:
            time.sleep(self.seconds)
        self.computing = False
        self._fail("finish")
        return self._output

    def _fail(self, where: str) -> None:
        if self.failing == where:
            raise RuntimeError(f"the runtime fails at {where}")

    def begin(self, batch: StepBatch) -> None:
        assert not self.computing
        self._fail("begin")
        used = sum(-(-len(kv) // self.block_size) for kv in self._kv.values())
        self.largest = max(self.largest, len(batch.parts))
        out: list[np.ndarray] = []
        at = 0
        for part in batch.parts:
            self._check(part)
            kv = self._kv[part.session]
            prompt = self._prompts[part.session]
            end = part.past + part.count
            # The rules of the real one about what it may be given at once.
            assert not part.past < prompt < end, "rows of a prompt and of output in one part"
            assert part.count > 1 or part.past >= prompt or prompt == 1, "a lone row of a prompt"
            used -= -(-len(kv) // self.block_size)
            del kv[part.past :]
            for row in batch.rows[at : at + part.count]:
                out.append(self._layers(kv, row))
            used += -(-len(kv) // self.block_size)
            at += part.count
        if used > self.blocks:
            raise StageRefusal("out_of_blocks", "no blocks")
        self.positions += at
        if self.range.is_last:
            out = [self._logits(out[i]) for i in batch.sampled]
        width = VOCABULARY if self.range.is_last else HIDDEN
        self._output = np.array(out, np.float32).reshape(-1, width)
        self.computing = True

    def _check(self, part: Part) -> None:
        if part.session not in self._kv or part.session in self.broken:
            raise StageRefusal("unknown_session", "not open", part.session)
        if part.past > len(self._kv[part.session]):
            raise StageRefusal("bad_past", "too much", part.session)

    def _layers(self, kv: list[list[bytes]], row: Any) -> np.ndarray:
        hidden = (
            np.array([row % 64, row // 64, 1, 2, 3, 4, 5, 6], np.float32)
            if self.range.is_first
            else np.asarray(row, np.float32)
        )
        before = kv[-1] if kv else [b""] * (self.range.last - self.range.first)
        states = []
        for layer, state in zip(range(self.range.first, self.range.last), before, strict=True):
            digest = hashlib.blake2b(
                state + hidden.tobytes() + bytes([layer]), digest_size=2 * HIDDEN
            ).digest()
            states.append(digest)
            # Whole numbers that a half float holds exactly.
            hidden = (np.frombuffer(digest, "<u2") % 2048).astype(np.float32)
        kv.append(states)
        return hidden

    @staticmethod
    def _logits(hidden: np.ndarray) -> np.ndarray:
        seed = hashlib.blake2b(hidden.tobytes(), digest_size=8).digest()
        return np.random.default_rng(list(seed)).normal(size=VOCABULARY).astype(np.float32) * 3


def reference(
    tokens: Sequence[int], prompt: int, length: int, sampling: SamplingParams, layers: int
) -> list[int]:
    """What a session gives: all of its tokens, by a stage that is not cut."""
    stage = ToyStage(0, layers, layers)
    stage.open(1, prompt)
    sampler = Sampler(sampling, tokens[:prompt])
    known = list(tokens)
    for token in known[prompt:]:
        sampler.count(token)
    past = 0
    while len(known) < length:
        # A prompt at once, output one by one.
        end = prompt if past < prompt else past + 1
        rows = np.array(known[past:end], np.int64)
        logits = stage.step(StepBatch([Part(1, past, len(rows))], rows, [len(rows) - 1]))
        past = end
        if past < len(known):
            continue
        [drawn] = sample(logits, [sampler], [len(known) - prompt])
        assert isinstance(drawn, Sampled)
        sampler.count(drawn.token_id)
        known.append(drawn.token_id)
    return known


async def at_once(*_: Any) -> None:
    pass


@dataclass
class MemoryLinks:
    """The links of one node of a :class:`World`."""

    world: World
    me: PeerId

    async def reach(self, peer: PeerId) -> None:
        self.world.check(self.me, peer)

    async def request(
        self, peer: PeerId, kind: str, body: Any, payload: Any = b"", *, timeout: float
    ) -> Any:
        self.world.asked(kind)
        await self.world.leaving(kind)
        self.world.check(self.me, peer)
        wire = encode_body(body)
        answers: list[outcome.Outcome[Any]] = []
        answered = trio.Event()

        async def arrive() -> Any:
            await self.world.pause(peer)
            self.world.check(self.me, peer)
            relay = self.world.relays[peer]
            return await relay.answer(self.me, kind, decode_body(wire), bytes(payload))

        async def serve() -> None:
            answers.append(await outcome.acapture(arrive))
            answered.set()

        # It is on its way, whatever becomes of who has sent it. Requests pass each other there.
        assert self.world.nursery is not None
        self.world.nursery.start_soon(serve)
        with trio.move_on_after(timeout):
            await answered.wait()
            await self.world.pause(self.me)
            await self.world.returning(kind, peer)
            self.world.check(self.me, peer)
            return decode_body(encode_body(answers[0].unwrap()))
        raise PeerLost(peer, "no answer")

    async def send(
        self, peer: PeerId, kind: str, body: Any, payload: Any = b"", *, bulky: bool = False
    ) -> None:
        self.world.check(self.me, peer)
        self.world.post(self.me, peer, bulky, (kind, encode_body(body), bytes(payload)))

    def try_send(
        self, peer: PeerId, kind: str, body: Any, payload: Any = b"", *, bulky: bool = False
    ) -> bool:
        if self.world.rng.random() < 0.5:
            return False  # this link is behind
        try:
            self.world.check(self.me, peer)
        except PeerLost:
            return False
        self.world.post(self.me, peer, bulky, (kind, encode_body(body), bytes(payload)))
        return True

    def serial(self, peer: PeerId) -> int | None:
        return 1


@dataclass
class World:
    """Nodes with one toy stage each. ``delay`` is the longest time a message takes, in seconds."""

    rng: random.Random
    delay: float = 0.0
    relays: dict[PeerId, Relay] = field(default_factory=dict)
    stages: dict[PeerId, ToyStage] = field(default_factory=dict)
    hosts: dict[PeerId, StageHost] = field(default_factory=dict)
    dead: set[PeerId] = field(default_factory=set)
    hung: dict[PeerId, trio.Event] = field(default_factory=dict)
    cuts: set[frozenset[PeerId]] = field(default_factory=set)
    tap: Callable[[PeerId, PeerId, str, Any], None] = lambda *_: None
    asked: Callable[[str], None] = lambda _: None  # hears of requests before they leave
    # Hold up a request before it leaves, and an answer of a peer before it is there.
    leaving: Callable[[str], Awaitable[None]] = at_once
    returning: Callable[[str, PeerId], Awaitable[None]] = at_once
    # After how many seconds a message comes once more, whatever has become of its sender.
    again: Callable[[str], float | None] = lambda _: None
    _queues: dict[tuple[PeerId, PeerId, bool], deque[Any]] = field(default_factory=dict)
    _scopes: dict[PeerId, trio.CancelScope] = field(default_factory=dict)
    _loaded: dict[PeerId, trio.CancelScope] = field(default_factory=dict)
    nursery: trio.Nursery | None = None

    async def add(self, name: str, first: int, last: int, layers: int, **options: Any) -> PeerId:
        me = peer(name)
        kept = {"kept_bytes": options.pop("kept_bytes")} if "kept_bytes" in options else {}
        self.relays[me] = Relay(MemoryLinks(self, me))
        self.stages[me] = ToyStage(first, last, layers, **options)
        assert self.nursery is not None
        await self.nursery.start(self._run, me, kept)
        return me

    async def _run(self, me: PeerId, kept: dict[str, int], task_status: Any) -> None:
        with trio.CancelScope() as scope:
            self._scopes[me] = scope
            async with trio.open_nursery() as nursery:
                relay = self.relays[me]
                await nursery.start(relay.run)
                with trio.CancelScope() as loaded:
                    self._loaded[me] = loaded
                    async with relay.stage(self.stages[me], DIGEST, **kept) as host:
                        self.hosts[me] = host
                        task_status.started()
                        await trio.sleep_forever()
                await trio.sleep_forever()

    def unload(self, node: PeerId) -> None:
        """The node lives on without its stage."""
        self._loaded[node].cancel()
        del self.stages[node]

    def check(self, one: PeerId, other: PeerId) -> None:
        if (
            other not in self.relays
            or other in self.dead
            or one in self.dead
            or frozenset((one, other)) in self.cuts
        ):
            raise PeerLost(other, "no link")

    async def pause(self, to: PeerId) -> None:
        if to in self.hung:
            await self.hung[to].wait()
        await trio.sleep(self.rng.random() * self.delay)

    def post(self, sender: PeerId, to: PeerId, bulky: bool, message: Any) -> None:
        key = (sender, to, bulky)
        assert self.nursery is not None
        if key not in self._queues:
            self._queues[key] = deque()
            self.nursery.start_soon(self._carry, key)
        elif not self._queues[key]:
            self.nursery.start_soon(self._carry, key)
        self._queues[key].append(message)

    async def _carry(self, key: tuple[PeerId, PeerId, bool]) -> None:
        sender, to, _ = key
        queue = self._queues[key]
        while queue:
            await self.pause(to)
            if not queue:
                return
            kind, body, payload = queue[0]
            try:
                self.check(sender, to)
            except PeerLost:
                queue.clear()
                return
            message = decode_body(body)
            self.tap(sender, to, kind, message)
            self.relays[to].take(sender, kind, message, payload)
            if (later := self.again(kind)) is not None and self.nursery is not None:
                self.nursery.start_soon(self._repeat, later, sender, to, (kind, body, payload))
            if queue:
                queue.popleft()

    async def _repeat(self, later: float, sender: PeerId, to: PeerId, message: Any) -> None:
        await trio.sleep(later)
        kind, body, payload = message
        if to not in self.dead:
            self.relays[to].take(sender, kind, decode_body(body), payload)

    def kill(self, victim: PeerId) -> None:
        """The process is gone; every link to it breaks at once."""
        self.dead.add(victim)
        self._scopes[victim].cancel()
        for other, relay in self.relays.items():
            if other not in self.dead:
                relay.link_down(victim)

    def cut(self, one: PeerId, other: PeerId) -> None:
        """The link between two breaks, and neither can dial the other."""
        self.cuts.add(frozenset((one, other)))
        for (sender, to, _), queue in self._queues.items():
            if {sender, to} == {one, other}:
                queue.clear()
        self.relays[one].link_down(other)
        self.relays[other].link_down(one)

    def spare(
        self, model: str, first: int, last: int, unwanted: frozenset[PeerId]
    ) -> PeerId | None:
        found = [
            node
            for node, stage in self.stages.items()
            if (stage.range.first, stage.range.last) == (first, last)
            and node not in unwanted
            and node not in self.dead
        ]
        return min(found, default=None)

    def head(self, *route: PeerId, **options: Any) -> ChainHead:
        hops = [Hop(n, self.stages[n].range.first, self.stages[n].range.last) for n in route]
        layers = hops[-1].last
        return ChainHead(self.relays[route[0]], DIGEST, layers, hops, spare=self.spare, **options)

    async def empty(self) -> None:
        """Wait until no living stage holds anything of a session."""
        with trio.fail_after(5):
            for node, stage in self.stages.items():
                while node not in self.dead and (  # noqa: ASYNC110 (polling is the test's business)
                    stage.sessions
                    or self.hosts[node].table.used
                    or self.hosts[node].kept.bytes
                    or self.hosts[node].table.chains
                ):
                    await trio.sleep(0.005)


@asynccontextmanager
async def open_world(seed: int = 0, delay: float = 0.0) -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        world = World(random.Random(seed), delay, nursery=nursery)
        yield world
        nursery.cancel_scope.cancel()


GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Ask:
    """One generation. Token 63 ends it when ``ends`` says so."""

    prompt: list[int]
    output: int
    sampling: SamplingParams = GREEDY
    resume: list[int] = field(default_factory=list)
    ends: frozenset[int] = frozenset()

    def session(self) -> HeadSession:
        return HeadSession(
            [*self.prompt, *self.resume],
            len(self.prompt),
            len(self.prompt) + self.output,
            self.ends,
            self.sampling,
        )

    def expected(self, layers: int) -> list[int]:
        length = len(self.prompt) + self.output
        tokens = [*self.prompt, *self.resume]
        return reference(tokens, len(self.prompt), length, self.sampling, layers)[len(tokens) :]


async def collect(head: ChainHead, ask: Ask, stop_after: int | None = None) -> list[int]:
    """The tokens that a client gets; with ``stop_after`` it goes away after so many."""
    session = ask.session()
    await head.start(session)
    tokens: list[int] = []
    try:
        while stop_after is None or len(tokens) < stop_after:
            drawn = await session.get()
            tokens.append(drawn.token)
            if drawn.reason is not None:
                break
    finally:
        head.end(session)
    return tokens


class SteadyClock(trio.abc.Clock):
    """Real time without the moments in which this process got no core: whoever is silent for as
    long as that is not taken for lost, and what a few turns of the scheduler bring is there after
    as many."""

    LONGEST = 0.01  # s between two looks

    def start_clock(self) -> None:
        self._now, self._looked = 0.0, time.perf_counter()

    def current_time(self) -> float:
        looked = time.perf_counter()
        self._now += min(looked - self._looked, self.LONGEST)
        self._looked = looked
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return min(deadline - self.current_time(), self.LONGEST)


class Toys:
    """What tests use of this module."""

    open_world = staticmethod(open_world)

    @staticmethod
    def run(main: Callable[[], Awaitable[None]]) -> None:
        trio.run(main, clock=SteadyClock())

    collect = staticmethod(collect)
    Ask = Ask
    peer = staticmethod(peer)


@pytest.fixture(scope="session")
def toys() -> Toys:
    return Toys()
