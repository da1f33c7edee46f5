"""The placement service: what the mesh wants, planned from the view, loaded here.

It waits until the view says something new that matters for the layout, waits a little more for the
rest of the news, and takes the steps that the layout has for this node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from ca.naming import Role
from inference.errors import GenerationError
from inference.store.errors import StoreError
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh.capacity import Capacity
from mesh.config import NodeConfig
from mesh.gossip.advert import MAX_HOLDINGS, MAX_WANTS, StoredModel, Wanted, in_time
from mesh.gossip.service import GossipService
from mesh.gossip.view import View
from mesh.holdings import Holdings
from mesh.identity import Identity
from mesh.routing.placement.claims import Claim, arrange, next_sequence
from mesh.routing.placement.facts import Want
from mesh.routing.placement.from_view import (
    Facts,
    facts_in,
    heard_wants,
    names_of,
    newest_of,
    newest_wants,
    want_of,
    wants_in,
)
from mesh.routing.placement.plan import Plan
from mesh.routing.placement.steps import Drain, Held, Keep, Load, next_steps
from mesh.wants import OwnWants, describe_model

if TYPE_CHECKING:
    from mesh.stages import StageServer

_log = logging.getLogger(__name__)

SETTLE = 1.0  # s without news before planning
LONGEST = 3.0  # s of news after which it is planned anyway
ALONE = 10.0  # s after its start in which a node that knows of peers waits to hear of one
LOOK_GAP = 0.2  # s between looks at a view that keeps changing
BACKOFF = 30.0  # s without offering memory after a load that failed, doubled each time
LONGEST_BACKOFF = 1800.0

Fetch = Callable[[Wanted, tuple[int, int]], Awaitable[ModelManifest]]


class Placing:
    """See the module. ``fetch`` brings layers of a model to this machine. ``knows_peers``: there is
    somebody to hear of before the first plan."""

    def __init__(
        self,
        gossip: GossipService,
        holdings: Holdings,
        identity: Identity,
        config: NodeConfig,
        *,
        stages: Callable[[], Awaitable[StageServer]],
        fetch: Fetch,
        knows_peers: bool = False,
    ) -> None:
        self._gossip = gossip
        self._holdings = holdings
        self._me = identity.peer_id
        self._may_publish = bool({Role.SERVE, Role.ADMIN} & identity.certificate.roles)
        self._config = config
        self._stages = stages
        self._fetch = fetch
        self._knows_peers = knows_peers
        self._store = ModelStore(config.models)
        self._own = OwnWants(config.home / "wants.json", time.time())
        self._capacity = Capacity(
            config,
            lambda devices, speeds: gossip.announce(devices=devices, speeds=speeds),
            serves=Role.SERVE in identity.certificate.roles,
        )
        self._placed: dict[int, Want] = {}  # holdings by placement, and what for
        self._loading: set[int] = set()
        self._leaving: set[int] = set()  # holdings that drain, or will when they are loaded
        self._failures = 0
        self._asked = trio.Lock()  # what people ask for is done in the order in which they ask
        self._nursery: trio.Nursery
        self.plan = Plan(())  # the layout as planned last

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        stored = await trio.to_thread.run_sync(self._store.list)
        self._gossip.announce(wants=self._wants(), stored=_rows(stored))
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._capacity.discover)
            task_status.started()
            # A publisher that starts again sees itself alone, and would take all that it wants
            # upon itself while the mesh serves it already.
            if self._knows_peers:
                with trio.move_on_after(ALONE):
                    await self._gossip.wait_until(lambda view: bool(view.alive))
            known: object = None
            while True:
                known = await self._settled(known)
                await self._act()
                await trio.sleep(LOOK_GAP)

    @property
    def _used(self) -> int:
        return sum(
            self._bytes(h.id, h.first, h.last)
            for h in self._holdings.announced
            if h.id in self._placed
        )

    def _bytes(self, number: int, first: int, last: int) -> int:
        want = self._placed[number]
        return want.stage_bytes(first, last, fixed=self._capacity.static)

    # -- planning ---------------------------------------------------------------------------------

    async def _settled(self, known: object) -> object:
        """Wait until what matters is something else than ``known`` and has stopped changing."""
        await self._gossip.wait_until(lambda view: self._matters(view) != known)
        end = trio.current_time() + LONGEST
        latest = self._matters(self._gossip.view)
        while True:
            with trio.move_on_at(min(trio.current_time() + SETTLE, end)) as limit:
                await self._gossip.wait_until(partial(self._is_news, latest))
            if limit.cancelled_caught:
                return latest
            latest = self._matters(self._gossip.view)

    def _is_news(self, latest: object, view: View) -> bool:
        return self._matters(view) != latest

    def _matters(self, view: View) -> object:
        """What the layout depends on."""
        rows = []
        for peer, node in view.nodes.items():
            advert = node.advert
            rows.append(
                (
                    peer,
                    advert.state,
                    advert.devices,
                    advert.holdings,
                    advert.wants,
                    advert.speeds,
                    advert.links,
                )
            )
        return tuple(rows)

    async def _act(self) -> None:
        working = any(load.active or load.waiting for load in self._holdings.loads)
        if wants_in(self._gossip.view) and not working:
            await self._capacity.probe()
        view = self._gossip.view
        facts = facts_in(view)
        wants = {wanted.name: wanted for wanted in wants_in(view)}
        self._learn(view)
        if facts.wants or self._placed:
            self.plan = await trio.to_thread.run_sync(_arrange, facts)
            held = self._held(facts.claims)
            for step in next_steps(self._me, self._capacity.offered, self.plan, facts.claims, held):
                await self._take(step, facts.claims, wants)
        self._gossip.announce(wants=self._wants())
        # On its own: it waits while somebody publishes, and planning goes on.
        self._nursery.start_soon(self._keep_newer)

    def _held(self, claims: Sequence[Claim]) -> list[Held]:
        return [
            Held(
                id=h.id,
                digest=h.digest,
                first=h.first,
                last=h.last,
                bytes=self._bytes(h.id, h.first, h.last),
                ready=h.ready,
                draining=h.id in self._leaving,
            )
            for h in self._holdings.announced
            if h.id in self._placed
        ]

    def _newest(self) -> dict[str, Wanted]:
        """The last word on each model; this node's own may not be in the view yet. What a clock
        that was ahead has dated is believed by nobody: any other word comes before it."""
        said = (*heard_wants(self._gossip.view), *self._own)
        return newest_of(said) | newest_of(in_time(said, time.time()))

    def _wants(self) -> tuple[Wanted, ...]:
        """What this node repeats: its own, and what it holds a part of."""
        digests = {want.model.digest for want in self._placed.values()}
        newest = self._newest()
        own = [newest.pop(w.name) for w in self._own]
        others = [w for w in newest.values() if w.digest in digests]
        return tuple([*own, *others][:MAX_WANTS])

    async def _keep_newer(self) -> None:
        """Others may have taken back or changed what this node has published: when it starts again
        it may be the only one to know."""
        async with self._asked:  # :meth:`serve` writes too
            newest = self._newest()
            for own in tuple(self._own):
                if newest[own.name] != own:
                    try:
                        await trio.to_thread.run_sync(self._own.put, newest[own.name])
                    except OSError as error:
                        _log.warning("the last word on %s cannot be kept: %s", own.name, error)

    def _learn(self, view: View) -> None:
        """Speeds of what was loaded, for the plans of all."""
        shapes = {w.digest: want_of(w).model for w in newest_wants(view)}
        for holding in self._holdings.announced:
            if holding.digest in shapes:
                self._capacity.learn(holding, shapes[holding.digest])

    # -- steps ------------------------------------------------------------------------------------

    async def _take(
        self, step: Load | Drain | Keep, claims: Sequence[Claim], wants: Mapping[str, Wanted]
    ) -> None:
        match step:
            case Load(want, first, last):
                wanted = wants[want.model.name]  # of the view that was planned from
                number = self._claim(want, first, last, next_sequence(claims, wanted.digest))
                self._nursery.start_soon(self._load, number, wanted, want, (first, last))
            case Drain(number):
                self._leaving.add(number)
                if number not in self._loading:
                    self._nursery.start_soon(self._drain, number)
            case Keep(number):
                stages = await self._stages()
                # In one turn: what drains is kept, and what is about to need not begin.
                self._leaving.discard(number)
                stages.keep(number)

    def _claim(self, want: Want, first: int, last: int, sequence: int) -> int:
        model = want.model
        number = self._holdings.expect(
            model,
            device=self._capacity.device,
            slots=want.sessions,
            queue=self._config.queue,
            layers=None if self._is_replica(model.layers, (first, last)) else (first, last),
            claim=sequence,
        )
        self._placed[number] = want
        self._loading.add(number)
        return number

    def _is_replica(self, layers: int, given: tuple[int, int]) -> bool:
        """Whether it is loaded as a whole model: devices of fixed shapes run it as a stage."""
        return given == (0, layers) and not self._capacity.static

    async def _load(self, number: int, wanted: Wanted, want: Want, layers: tuple[int, int]) -> None:
        first, last = layers
        _log.info("taking layers %d-%d of %s", first, last, wanted.name)
        try:
            manifest = await self._fetch(wanted, layers)
            stages = await self._stages()
            kv = (last - first) * wanted.kv_bytes * want.context * want.sessions
            if self._is_replica(wanted.layers, layers):
                await stages.load_replica(number, manifest, kv)
            else:
                await stages.load_stage(number, manifest, layers, kv, want.context)
        except Exception as error:
            known = isinstance(error, GenerationError | StoreError | OSError)
            _log.error(
                "layers %d-%d of %s cannot be loaded: %s",
                first,
                last,
                wanted.name,
                error,
                exc_info=None if known else error,  # whatever it is, the node goes on without
            )
            self._loading.discard(number)
            await self._failed(number)
            return
        self._failures = 0
        self._loading.discard(number)
        if number in self._leaving:
            self._nursery.start_soon(self._drain, number)
        stored = await trio.to_thread.run_sync(self._store.list)
        self._gossip.announce(stored=_rows(stored))

    async def _failed(self, number: int) -> None:
        """Give the claim back and offer nothing for a while, so that others take it."""
        self._placed.pop(number, None)
        self._leaving.discard(number)
        await self._holdings.remove(number)
        self._capacity.offer(self._used)  # what is loaded stays
        wait = min(BACKOFF * 2**self._failures, LONGEST_BACKOFF)
        self._failures += 1
        await trio.sleep(wait)
        self._capacity.offer(None)

    async def _drain(self, number: int) -> None:
        stages = await self._stages()
        if number not in self._leaving:
            return  # kept already, before there was anything to stop
        await stages.drain(number)
        if number in self._leaving:  # nobody has come to keep it
            self._leaving.discard(number)
            self._placed.pop(number, None)

    # -- what people ask for ----------------------------------------------------------------------

    async def serve(
        self,
        name: str,
        *,
        replicas: int | None,
        max_nodes: int | None,
        context: int,
        sessions: int,
    ) -> Wanted:
        """Publish that the mesh is to serve a model of this machine's store; ``replicas`` 0 takes
        it back. Raises ValueError with what is wrong, StoreError when the model is not here, or
        is none that can be cut."""
        if not self._may_publish:
            raise ValueError("the certificate has neither the role serve nor admin")
        # Reading a model takes a while: who takes it back meanwhile is to have the last word.
        async with self._asked:
            known = self._newest().get(name)
            if replicas == 0 and known is not None:
                wanted = known.model_copy(update={"replicas": 0, "publisher": self._me})
            else:
                wanted = await self.described(name)
                others = names_of(self._gossip.view, wanted.digest) - {name}
                if others:
                    raise ValueError(
                        f"{name} has the weights of {min(others)}, which the mesh serves or is "
                        "still letting go of: take that back first, or wait until it is unloaded"
                    )
                wanted = wanted.model_copy(
                    update={
                        "replicas": replicas,
                        "max_nodes": max_nodes,
                        "context": min(context, wanted.context_length),
                        "sessions": sessions,
                    }
                )
                stored = await trio.to_thread.run_sync(self._store.list)
                self._gossip.announce(stored=_rows(stored))
                known = self._newest().get(name)  # a peer may have published another one meanwhile
            now = time.time()
            before = known.version if known and in_time((known,), now) else 0
            version = max(int(now * 1000), 1 + before)
            wanted = Wanted.model_validate({**wanted.model_dump(), "version": version})
            self._own.put(wanted)
            self._gossip.announce(wants=self._wants())
        return wanted

    async def described(self, name: str) -> Wanted:
        """A model of the store as it would be wanted. Raises StoreError."""
        from inference.split import SplitError

        manifest = await trio.to_thread.run_sync(self._store.get, name)
        try:
            fields = await trio.to_thread.run_sync(describe_model, manifest)
        except SplitError as error:
            raise StoreError(f"{name} cannot be laid out over machines: {error}") from error
        return Wanted.model_validate({**fields, "version": 1, "publisher": self._me})

    async def plan_for(self, change: Callable[[Facts], Facts], extra: Wanted | None) -> Plan:
        """The layout after ``change``, and with a model that is not wanted yet."""
        facts = facts_in(self._gossip.view)
        if extra is not None:
            facts = replace(facts, wants=(*facts.wants, want_of(extra)))
        return await trio.to_thread.run_sync(_arrange, change(facts))


def _arrange(facts: Facts) -> Plan:
    return arrange(facts.wants, facts.machines, facts.network, facts.claims)


def _rows(stored: Sequence[ModelManifest]) -> tuple[StoredModel, ...]:
    return tuple(StoredModel(name=m.name[:128], digest=m.digest) for m in stored[:MAX_HOLDINGS])
