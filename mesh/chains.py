"""The chains that begin at this node, put together from routes, view and relay."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from inference.errors import GenerationError
from inference.generation import GenerateRequest, TokenEvent
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer
from mesh.forward.wire import ChainHop
from mesh.gossip.view import View
from mesh.identity import Identity, PeerId
from mesh.receipts import ModelIdentity, Part
from mesh.receipts.record import serial_text
from mesh.relay.activations import Encoding
from mesh.relay.chain import ChainHead
from mesh.relay.generator import ChainGenerator, ChainRun, Course
from mesh.relay.ring import Hop
from mesh.relay.service import Relay

MAX_CHAINS = 32  # that one node is the head of at a time


@dataclass(frozen=True)
class StagedModel:
    """What the head of a chain needs of a model besides the stage that it holds."""

    manifest: ModelManifest
    tokenizer: Tokenizer


class Chains:
    """Makes a chain when a route first asks for it and drops it when it is of no use any more.

    A chain that was mended has another route than it was made for, and is from then on the chain
    of that route: a request goes over the nodes that were chosen for it, unless they are lost.
    ``on_load`` is called when a session of any chain starts or ends.
    """

    def __init__(
        self,
        relay: Relay,
        identity: Identity,
        *,
        view: Callable[[], View],
        slots: int,
        queue: int,
        activations: Encoding,
        on_load: Callable[[], None],
    ) -> None:
        self._relay = relay
        self._identity = identity
        self._view = view
        self._slots = slots
        self._queue = queue
        self._activations: Encoding = activations
        self._on_load = on_load
        self._models: dict[str, StagedModel] = {}
        self._generators: list[ChainGenerator] = []

    def add_model(self, model: StagedModel) -> None:
        self._models[model.manifest.digest] = model

    def load(self, digest: str, first: int, last: int) -> tuple[int, int]:
        """``(active, waiting)`` sessions of a stage that is loaded here, whoever their head is."""
        host = self._relay.host(digest, first, last)
        active = 0 if host is None else sum(len(c.sessions) for c in host.table.chains.values())
        heads = [g.head for g in self._generators if g.model.digest == digest]
        waiting = sum(head.waiting for head in heads if head.route[0].first == first)
        return active, waiting

    def run(self, model: str, digest: str | None, hops: Sequence[ChainHop]) -> StagedRun:
        """One generation on the chain ``hops``. Raises GenerationError."""
        staged = next(
            (
                found
                for found in self._models.values()
                if found.manifest.name == model and digest in (None, found.manifest.digest)
            ),
            None,
        )
        if staged is None:
            raise GenerationError(
                "model_not_found", f"no stage of {model!r} is loaded here", param="model"
            )
        generator = self._generator(staged, tuple(hops))
        return StagedRun(generator, staged.manifest, tuple(hops), self._serial)

    def _generator(self, staged: StagedModel, hops: tuple[ChainHop, ...]) -> ChainGenerator:
        route = tuple(Hop(PeerId(hop.peer), hop.first, hop.last) for hop in hops)
        for generator in self._generators:
            head = generator.head
            mine = generator.model.digest == staged.manifest.digest and head.route == route
            if mine and head.whole:
                return generator
        self._drop_idle()
        if len(self._generators) >= MAX_CHAINS:
            raise GenerationError("overloaded", "this node heads too many chains", retry_after=1.0)
        try:
            head = ChainHead(
                self._relay,
                staged.manifest.digest,
                staged.manifest.layers,
                route,
                spare=self._spare,
                slots=self._slots,
                queue=self._queue,
                activations=self._activations,
                changed=self._changed,
            )
        except ValueError as error:
            raise GenerationError("node_lost", f"this chain cannot be: {error}") from error
        generator = ChainGenerator(head, staged.manifest, staged.tokenizer)
        self._generators.append(generator)
        return generator

    def _drop_idle(self) -> None:
        """Chains that are not whole, and those that nobody uses when there are too many."""
        for generator in list(self._generators):
            full = len(self._generators) >= MAX_CHAINS
            if generator.head.idle and (full or not generator.head.whole):
                self._drop(generator)

    def _drop(self, generator: ChainGenerator) -> None:
        self._generators.remove(generator)
        generator.head.close()

    def _changed(self) -> None:
        # A chain that has failed is not waited for: it would keep the memory of its first stage,
        # which may have been unloaded.
        for generator in list(self._generators):
            if generator.head.idle and generator.head.failed:
                self._drop(generator)
        self._on_load()

    def _spare(
        self, digest: str, first: int, last: int, unwanted: frozenset[PeerId]
    ) -> PeerId | None:
        """Who else holds exactly these layers; the least busy one."""
        places = [
            place
            for model in self._view().models
            if model.digest == digest
            for place in model.stages
            if (place.holding.first, place.holding.last) == (first, last)
            and place.node.peer not in unwanted
        ]
        if not places:
            return None
        return min(places, key=lambda p: (p.node.load_of(p.holding).active, p.node.peer)).node.peer

    def _serial(self, peer: PeerId) -> str | None:
        own = peer == self._identity.peer_id
        serial = self._identity.certificate.serial if own else self._relay.links.serial(peer)
        node = self._view().nodes.get(peer)
        if serial is None and node is not None:
            serial = node.serial
        return None if serial is None else serial_text(serial)


class StagedRun:
    """One generation on a chain, as what is executed and signed for on this node."""

    def __init__(
        self,
        generator: ChainGenerator,
        manifest: ModelManifest,
        hops: tuple[ChainHop, ...],
        serial: Callable[[PeerId], str | None],
    ) -> None:
        self._run: ChainRun = generator.run()
        self._hops = hops
        self._serial = serial
        self.model = ModelIdentity(
            name=manifest.name, digest=manifest.digest, layers=manifest.layers
        )

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        return self._run.generate(request)

    @property
    def seconds(self) -> Callable[[], tuple[tuple[str, int, int, float], ...]]:
        """Tells each stage (peer, first, last) with the seconds it has computed in steps of this
        one so far. It may be kept for long: it refers to nothing of the chain."""
        return partial(_seconds, self._run.course)

    def parts(self, tokens: tuple[int, int]) -> tuple[Part, ...]:
        # The serial that was noted while the peer was there: it may have gone since.
        first, last = tokens
        shares = [
            (share.hop.peer, share.serial, (share.hop.first, share.hop.last), (begin, end))
            for share in self._run.shares()
            if (begin := max(first, share.tokens[0])) < (end := min(last, share.tokens[1]))
        ] or [(PeerId(hop.peer), None, (hop.first, hop.last), tokens) for hop in self._hops]
        return tuple(
            Part(
                peer=peer,
                serial=self._serial(peer) if serial is None else serial_text(serial),
                stage=stage,
                tokens=made,
            )
            for peer, serial, stage, made in shares
        )


def _seconds(course: Course) -> tuple[tuple[str, int, int, float], ...]:
    return tuple((h.peer, h.first, h.last, spent) for h, spent in course.seconds)
