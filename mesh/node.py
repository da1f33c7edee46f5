"""The composition root: builds the parts of a node and runs them in one nursery."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import trio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ca.crl import read_crl_file
from ca.errors import CertificateError
from ca.files import KEY_FILE
from ca.naming import Role
from inference.errors import GenerationError
from inference.generation import GenerateRequest
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh import describe, describe_plan
from mesh.admission.policy import Thresholds
from mesh.admission.service import AdmissionService
from mesh.answering import Answering
from mesh.api import (
    BindError,
    Health,
    ModelInfo,
    create_app,
    open_listeners,
    serve,
)
from mesh.api.control import create_control_app
from mesh.config import NodeConfig, StageRange
from mesh.forward.events import AnswerEvent
from mesh.forward.following import Follower
from mesh.gossip.service import GossipService
from mesh.gossip.view import View
from mesh.holdings import Holdings
from mesh.home import HomeLock, control_file, next_boot, remember_boot
from mesh.identity import (
    CertificateFileError,
    Identity,
    KeyFileError,
    PeerId,
    TrustStore,
    load_identity,
)
from mesh.identity.lifetime import EndNotices
from mesh.models.serving import ModelServer
from mesh.models.shelf import Shelf
from mesh.models.source import ModelSource
from mesh.placing import Placing
from mesh.routing.placement.from_view import wants_in
from mesh.transport import (
    DialError,
    ListenError,
    Transport,
    TransportConfig,
    TransportError,
    measure_link,
)

if TYPE_CHECKING:
    from mesh.stages import StageServer

_log = logging.getLogger(__name__)

_USUAL_DEVICES = ("CPU", "AUTO")  # there is always one
RECHECK_EVERY = 30.0  # s between looks at the dates of live connections' certificates
HAND_OVER_SECONDS = 5.0  # for others' generations when this node stops

StartProblem = Literal["running", "certificate", "address", "model"]


class StartError(Exception):
    """A node that cannot start; the message is one line for the user."""

    def __init__(self, problem: StartProblem, message: str) -> None:
        super().__init__(message)
        self.problem: StartProblem = problem


class ServeRequest(BaseModel):
    """What `meshnode serve` asks. ``replicas`` None: as many as pay; 0: not any more."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: str = Field(min_length=1, max_length=128)
    replicas: int | None = Field(None, ge=0, le=4096)
    max_nodes: int | None = Field(None, ge=1, le=4096)
    context: int = Field(4096, ge=16, lt=1 << 31)
    sessions: int = Field(4, ge=1, le=4096)


@dataclass(frozen=True)
class Ready:
    """Where a node that serves can be reached."""

    api: str
    peer: PeerId
    listen: tuple[str, ...]


def load_credentials(config: NodeConfig, now: float) -> tuple[Identity, TrustStore]:
    """Key, certificate, roots and revocation lists. Raises StartError."""
    try:
        identity = load_identity(config.home / KEY_FILE, config.certificate_path, now=now)
        trust = TrustStore(identity.network, identity.roots, config.home / "revoked")
        trust.verify_peer(identity.certificate.chain_der, identity.peer_id, now)
    except (CertificateFileError, KeyFileError) as error:
        raise StartError("certificate", str(error)) from error
    return identity, trust


class Node:
    """One node. :meth:`run` is its life; the rest is what the HTTP endpoints ask of it."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        trust: TrustStore,
        models: Sequence[ModelManifest],
        stages: Sequence[tuple[ModelManifest, StageRange]] = (),
    ) -> None:
        self._config = config
        self._identity = identity
        self._trust = trust
        self._models = models
        self._stages = stages
        self._stage_serving: StageServer | None = None
        self._rng = random.Random()
        self._holdings = Holdings(on_change=self._announce, on_load=self._report)
        self._started_at = time.time()
        self._stop = trio.Event()
        self._closing = trio.Event()
        self._serving = False
        self._api_url = config.api
        # Set by `run`; nothing is served before.
        self._transport: Transport
        self._gossip: GossipService
        self._placing: Placing
        self._admission: AdmissionService
        self._answering: Answering

    # -- life ---------------------------------------------------------------------------------

    async def run(self, ready: Callable[[Ready], None]) -> None:
        """Start everything, call ``ready``, and run until :meth:`stop`.

        Raises StartError, with everything that had been started closed again.
        """
        if (self._models or self._stages) and Role.SERVE not in self._identity.certificate.roles:
            raise StartError(
                "certificate", "the certificate lacks the role serve: no model can be served"
            )
        with HomeLock(self._config.home) as lock:
            if not lock.held:
                raise StartError("running", f"a node is running in {self._config.home} already")
            transport_config = TransportConfig(
                listen=self._config.listen,
                peers=self._config.peer,
                remember=self._config.home / "peers.json",
                mdns=self._config.mdns,
            )
            try:
                async with Transport.open(
                    transport_config, self._identity, self._trust
                ) as self._transport:
                    await self._run_services(ready)
            except* (ListenError, DialError) as group:
                raise StartError("address", str(_first(group))) from None
            except* BindError as group:
                raise StartError("address", str(_first(group))) from None
            except* GenerationError as group:
                raise StartError("model", str(_first(group))) from None
            except* StartError as group:
                raise _first(group) from None

    async def _run_services(self, ready: Callable[[Ready], None]) -> None:
        config = self._config
        listeners = await open_listeners([config.api], api_key=config.api_key)
        control_listeners = await open_listeners(["127.0.0.1:0"], api_key=None)
        self._gossip = GossipService(
            self._transport,
            self._identity,
            self._trust,
            boot=next_boot(config.home, time.time()),
            rng=self._rng,
            on_boot=partial(remember_boot, config.home),
        )
        self._answering = Answering(
            self._identity,
            self._trust,
            self._transport,
            self._gossip,
            self._holdings,
            chains=lambda: self._stage_serving.chains if self._stage_serving else None,
            rejected=lambda: self._admission.those("rejected"),
            began=lambda: self._admission.work_began(),
            used=lambda peers: self._admission.used(peers),
            rng=self._rng,
        )
        self._forward = self._answering.forward
        self._admission = AdmissionService(
            self._transport,
            _thresholds(config),
            view=lambda: self._gossip.view,
            is_idle=self._is_idle,
            announce=lambda links: self._gossip.announce(links=tuple(links)),
            rng=self._rng,
        )
        token = secrets.token_urlsafe(24)
        api = create_app(self, api_key=config.api_key, closing=self._closing)
        # The control endpoint is behind a token of its own, so its copy of the API has no key.
        control = create_control_app(self, create_app(self, closing=self._closing), token)
        async with self._forward.serving(self._transport), trio.open_nursery() as nursery:
            await nursery.start(self._gossip.run)
            nursery.start_soon(self._recheck)
            await self._load(nursery)
            store = ModelStore(config.models)
            shelf = Shelf(
                store,
                in_use=lambda: {(h.digest, h.first, h.last) for h in self._holdings.announced},
            )
            source = ModelSource(
                store,
                shelf,
                view=lambda: self._gossip.view,
                reach=self._answering.reach,
                transferred=lambda *facts: self._admission.downloaded(*facts),
            )
            await nursery.start(self._answering.run)
            if Role.SERVE in self._identity.certificate.roles:
                ModelServer(shelf).serve(self._transport)
            self._placing = Placing(
                self._gossip,
                self._holdings,
                self._identity,
                config,
                stages=partial(self._stage_server, nursery),
                fetch=source.get,
                knows_peers=bool(config.peer or self._transport.known_peers),
            )
            await nursery.start(self._admission.run)
            await nursery.start(self._placing.run)
            serving = partial(serve, stop=self._stop, closing=self._closing)
            async with trio.open_nursery() as endpoints:
                urls = await endpoints.start(serving, api, listeners)
                control_urls = await endpoints.start(serving, control, control_listeners)
                with control_file(config.home, url=control_urls[0], token=token):
                    self._serving = True
                    self._api_url = urls[0]
                    ready(Ready(urls[0], self._identity.peer_id, tuple(self._transport.addresses)))
                    await self._stop.wait()
                    _log.info("stopping")
                    self._gossip.announce(state="draining")
                    last = trio.current_time() + HAND_OVER_SECONDS
                    await self._forward.leave(HAND_OVER_SECONDS)
                    with trio.move_on_at(last):
                        await self._holdings.wait_idle()  # stages in chains of other heads
            await self._gossip.leave()
            nursery.cancel_scope.cancel()
        await self._holdings.aclose()

    async def _load(self, nursery: trio.Nursery) -> None:
        """Load what this node is to serve. Raises GenerationError."""
        config = self._config
        if not (self._models or self._stages or config.device not in _USUAL_DEVICES):
            return
        await _bring("inference.devices")
        from inference import devices

        device = await trio.to_thread.run_sync(devices.resolve, config.device)
        expect = partial(
            self._holdings.expect, device=device, slots=config.slots, queue=config.queue
        )
        if not (self._models or self._stages):
            return
        stages = await self._stage_server(nursery)
        for manifest in self._models:
            await stages.load_replica(expect(manifest), manifest)
        for manifest, wanted in self._stages:
            layers = wanted.first, wanted.last
            await stages.load_stage(expect(manifest, layers=layers), manifest, layers)

    async def _stage_server(self, nursery: trio.Nursery) -> StageServer:
        """What loads and serves here; made when it is first needed."""
        await _bring("mesh.stages")
        from mesh.stages import StageServer

        if self._stage_serving is None:
            self._stage_serving = StageServer(
                self._transport,
                self._identity,
                self._config,
                self._holdings,
                view=lambda: self._gossip.view,
                addresses=self._answering.addresses,
            )
            await nursery.start(self._stage_serving.run)
        return self._stage_serving

    async def _recheck(self) -> None:
        """Certificates end while connections live, and this node's own."""
        ends = self._identity.certificate.not_after
        own = EndNotices(ends.timestamp())
        while True:
            left = own.due(time.time())
            if left is not None:
                verb, how = ("ends", logging.WARNING) if left > 0 else ("has ended", logging.ERROR)
                _log.log(
                    how,
                    "this node's certificate %s on %s UTC; peers then refuse it: have the CA sign "
                    "its request again and start the node with the new certificate",
                    verb,
                    f"{ends:%Y-%m-%d %H:%M}",
                )
            await trio.sleep(RECHECK_EVERY)
            self._transport.recheck(time.time())

    # -- what gossip and routing hear -----------------------------------------------------------

    def _announce(self) -> None:
        self._gossip.announce(holdings=self._holdings.announced)

    def _report(self) -> None:
        self._gossip.report(self._holdings.loads)
        if not self._is_idle():
            self._admission.work_began()

    def _is_idle(self) -> bool:
        """Whether nothing runs here, neither for this node's own clients nor for peers."""
        working = any(load.active or load.waiting for load in self._holdings.loads)
        return not (working or self._answering.active or self._forward.active)

    # -- the HTTP port ----------------------------------------------------------------------------

    def answer(
        self, request: GenerateRequest, request_id: str, *, keep: bytes | None = None
    ) -> AsyncGenerator[AnswerEvent, None]:
        return self._answering.answer(request, request_id, keep=keep)

    async def explain(self, response: str) -> dict[str, Any]:
        return await self._answering.explain(response)

    async def kept(self, response: str, key: bytes, after: int) -> Follower:
        return await self._answering.kept(response, key, after)

    def models(self) -> Sequence[ModelInfo]:
        return describe.api_models(self._gossip.view, created=int(self._started_at))

    def view(self) -> Mapping[str, Any]:
        return describe.view(self._gossip.view)

    def capabilities(self) -> Mapping[str, Any]:
        view = self._gossip.view
        return describe.node(view.nodes[view.me])

    def plan(self) -> Mapping[str, Any]:
        return describe_plan.plan(self._gossip.view, self._placing.plan)

    def health(self) -> Health:
        waiting = [] if self._serving else ["starting"]
        # What placement loads or lets go of keeps no client from asking.
        waiting += [
            f"loading {h.model}"
            for h in self._holdings.announced
            if not h.ready and h.claim is None
        ]
        if self._stop.is_set():
            waiting.append("stopping")
        return Health(self._identity.peer_id, not waiting, waiting)

    # -- the control port -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        view = self._gossip.view
        return describe.status(
            view,
            self._identity,
            listen=self._transport.addresses,
            api=self._api_url,
            home=str(self._config.home),
            uptime=time.time() - self._started_at,
        )

    def peer_table(self) -> list[dict[str, Any]]:
        return describe.peers(self._gossip.view, self._admission.standings)

    def model_table(self) -> list[dict[str, Any]]:
        return describe.models(self._gossip.view)

    def discovered_table(self) -> list[dict[str, Any]]:
        return describe.sightings(self._transport.sightings, self._transport.links)

    def revoke(self, crl: bytes) -> bool:
        try:
            return self._trust.apply_crl(read_crl_file(crl))
        except CertificateError as error:
            raise ValueError(error.message) from error

    async def serve_model(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        try:
            asked = ServeRequest.model_validate(wanted)
            await self._placing.serve(
                asked.model,
                replicas=asked.replicas,
                max_nodes=asked.max_nodes,
                context=asked.context,
                sessions=asked.sessions,
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ValueError(f"{name}: {first['msg']}") from error
        except OSError as error:
            raise ValueError(str(error)) from error
        return await self.plan_of(asked.model, "")

    async def plan_of(self, model: str | None, what_if: str) -> dict[str, Any]:
        view = self._gossip.view
        extra = None
        if model is not None and all(w.name != model for w in wants_in(view)):
            extra = await self._placing.described(model)
        layout = await self._placing.plan_for(partial(describe_plan.what_if, view, what_if), extra)
        return describe_plan.plan(view, layout, model)

    def stop(self) -> None:
        self._stop.set()

    async def drain(self, timeout: float) -> bool:
        self._gossip.announce(state="draining")
        with trio.move_on_after(timeout) as limit:
            await self._holdings.wait_idle()
        self._stop.set()
        return not limit.cancelled_caught

    async def bench(self, peer: str, report: Callable[[float, str], None]) -> dict[str, Any]:
        named = [n.peer for n in self._gossip.view.nodes.values() if peer in (n.peer, n.name)]
        if not named:
            raise ValueError(f"no node is called {peer!r}")
        try:
            link = await self._answering.reach(named[0])
            return (await measure_link(link, progress=report)).as_json()
        except TransportError as error:
            raise ValueError(f"{peer}: {error}") from error

    async def wait(self, *, peers: int, model: str | None, timeout: float) -> bool:
        def holds(view: View) -> bool:
            return len(view.alive) >= peers and (model is None or view.can_use(model))

        with trio.move_on_after(timeout) as limit:
            await self._gossip.wait_until(holds)
        return not limit.cancelled_caught


async def _bring(module: str) -> None:
    """Import what needs the runtime, which a node that only asks is without. In a thread: meanwhile
    the node gets to know the mesh, and the mesh the node."""
    await trio.to_thread.run_sync(import_module, module)


def _thresholds(config: NodeConfig) -> Thresholds:
    return Thresholds(
        min_bandwidth=config.min_bandwidth_mbps * 1e6 / 8,
        max_rtt=config.max_rtt_ms / 1e3,
        max_jitter=config.max_jitter_ms / 1e3,
        max_loss=config.max_loss,
        min_tokens_per_second=config.min_tokens_per_s,
    )


def _first(group: BaseExceptionGroup[Any]) -> Exception:
    error: Any = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error  # type: ignore[no-any-return]
