"""Loading, serving and unloading of stages and replicas while the node runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import trio

from inference.store.manifest import ModelManifest
from mesh import loading
from mesh.chains import Chains, StagedModel
from mesh.config import NodeConfig
from mesh.gossip.view import View
from mesh.holdings import Holdings
from mesh.identity import Identity, PeerId
from mesh.relay.links import TransportLinks
from mesh.relay.service import Relay
from mesh.relay.serving import serve_relay
from mesh.transport import Transport

_log = logging.getLogger(__name__)

# What was sent before others heard that a holding is withdrawn is still on its way for so long.
STRAGGLERS = 2.0  # s
LONGEST_DRAIN = 600.0  # s that sessions have to finish


class StageServer:
    """What this node holds, and the chains that begin here. :meth:`run` has to be running."""

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        config: NodeConfig,
        holdings: Holdings,
        *,
        view: Callable[[], View],
        addresses: Callable[[PeerId], Sequence[str]],
    ) -> None:
        self._transport = transport
        self._config = config
        self._holdings = holdings
        self._relay = Relay(TransportLinks(transport, addresses))
        self.chains = Chains(
            self._relay,
            identity,
            view=view,
            slots=config.slots,
            queue=config.queue,
            activations=config.activations,
            on_load=holdings.load_changed,
        )
        self._tokenized: set[str] = set()
        self._gone: dict[int, trio.Event] = {}  # set, a stage ends
        self._drains: dict[int, trio.CancelScope] = {}
        self._nursery: trio.Nursery

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(serve_relay, self._relay, self._transport)
            task_status.started()
            await trio.sleep_forever()

    # -- loading ----------------------------------------------------------------------------------

    async def load_stage(
        self,
        number: int,
        manifest: ModelManifest,
        layers: tuple[int, int],
        kv_bytes: int | None = None,
        context: int | None = None,
    ) -> None:
        """Load and serve the announced holding ``number``; sizes as for
        :func:`mesh.loading.open_stage`. Raises GenerationError."""
        # Chains begin where the first layers are, and need text there only.
        if layers[0] == 0 and manifest.digest not in self._tokenized:
            tokenizer = await loading.open_tokenizer(manifest)
            self.chains.add_model(StagedModel(manifest, tokenizer))
            self._tokenized.add(manifest.digest)
        stage, speed = await loading.open_stage(manifest, layers, self._config, kv_bytes, context)
        await trio.lowlevel.checkpoint_if_cancelled()  # the thread could not be: the node stops
        self._gone[number] = trio.Event()

        async def serve(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            on_load = self._holdings.load_changed
            async with self._relay.stage(stage, manifest.digest, on_load=on_load):
                load = partial(self.chains.load, manifest.digest, *layers)
                self._holdings.add_stage(number, speed, stage.context_length, load)
                task_status.started()
                await self._gone[number].wait()

        await self._nursery.start(serve)

    async def load_replica(
        self, number: int, manifest: ModelManifest, kv_bytes: int | None = None
    ) -> None:
        """The same for a whole model."""
        engine = await loading.open_engine(manifest, self._config, kv_bytes)
        await self._holdings.add(number, engine)

    # -- letting go -------------------------------------------------------------------------------

    async def drain(self, number: int) -> None:
        """Send it nothing new, let its sessions finish, and unload it; :meth:`keep` stops that."""
        with trio.CancelScope() as self._drains[number]:
            self._holdings.withdraw(number)
            await trio.sleep(STRAGGLERS)
            with trio.move_on_after(LONGEST_DRAIN):
                await self._holdings.wait_idle(number)
            # :meth:`keep` may have had its turn after the last session's end, and before this one.
            await trio.lowlevel.checkpoint_if_cancelled()
            self._drains.pop(number)
            await self.unload(number)

    def keep(self, number: int) -> None:
        """Go on with a holding that was being drained."""
        scope = self._drains.pop(number, None)
        if scope is not None:
            scope.cancel()
            self._holdings.restore(number)

    async def unload(self, number: int) -> None:
        gone = self._gone.pop(number, None)
        if gone is not None:
            gone.set()
        await self._holdings.remove(number)
        _log.info("holding %d is unloaded", number)
