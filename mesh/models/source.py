"""Where a node gets the layers that it is to hold: this machine, else peers, else the hub."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from inference.store.errors import StoreError
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh.gossip.advert import Wanted
from mesh.gossip.view import NodeView, View
from mesh.identity import PeerId
from mesh.models.fetching import PeerFetch, Transferred
from mesh.models.shelf import Shelf
from mesh.transport import Link, TransportError

_log = logging.getLogger(__name__)

MAX_ASKED = 8  # holders that are dialled
REPORTS = 10  # lines of progress that are logged


class ModelSource:
    """``reach`` gives a link to a peer or raises TransportError."""

    def __init__(
        self,
        store: ModelStore,
        shelf: Shelf,
        *,
        view: Callable[[], View],
        reach: Callable[[PeerId], Awaitable[Link]],
        transferred: Transferred,
    ) -> None:
        self._store = store
        self._shelf = shelf
        self._view = view
        self._reach = reach
        self._peers = PeerFetch(shelf, transferred=transferred)

    async def get(self, wanted: Wanted, layers: tuple[int, int]) -> ModelManifest:
        """A model with at least these layers on this machine's disk. Raises StoreError."""
        here = await trio.to_thread.run_sync(self._shelf.find, wanted.digest, *layers)
        if here is not None:
            return here
        links = await self._holders(wanted.digest, layers)
        if links:
            what = f"layers {layers[0]}-{layers[1]} of {wanted.name}"
            _log.info("fetching %s from %d peers", what, len(links))
            try:
                return await self._peers.fetch(wanted.digest, layers, links, _Report(what).progress)
            except StoreError as error:
                _log.warning("%s: %s; trying the hub", what, error)
        # Imported here: the hub's client is large, and few nodes ever need it.
        from inference.store.download import pull

        manifest = await trio.to_thread.run_sync(
            pull, self._store, wanted.name, abandon_on_cancel=True
        )
        if manifest.digest != wanted.digest:
            raise StoreError(f"{wanted.name} has other weights here than the mesh is to serve")
        return manifest

    async def _holders(self, digest: str, layers: tuple[int, int]) -> list[Link]:
        view = self._view()
        able = [
            node
            for peer, node in view.nodes.items()
            if peer != view.me and node.status == "alive" and _has(node, digest, layers)
        ]
        able.sort(key=lambda n: (n.link is None, n.link.rtt or 0.0 if n.link else 0.0, n.peer))
        links = []
        for node in able[:MAX_ASKED]:
            try:
                links.append(await self._reach(node.peer))
            except TransportError as error:
                _log.info("%s has these layers and cannot be reached: %s", node.name, error)
        return links


def _has(node: NodeView, digest: str, layers: tuple[int, int]) -> bool:
    if any(stored.digest == digest for stored in node.advert.stored):
        return True
    return any(
        h.digest == digest and h.ready and (h.first, h.last) == layers for h in node.holdings
    )


class _Report:
    """Progress in the log, a few lines of it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = -1

    def progress(self, done: int, total: int) -> None:
        step = done * REPORTS // max(1, total)
        if step > self._told:
            self._told = step
            _log.info("%s: %d of %d MB", self._what, done // 10**6, total // 10**6)
