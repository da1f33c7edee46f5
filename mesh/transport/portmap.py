"""A port of the router for this node, where a router offers it by UPnP (UDP, not TCP as in
py-libp2p). Renewed while the node runs, given back at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable

import miniupnpc  # type: ignore[import-not-found]
import trio

logger = logging.getLogger(__name__)

_DISCOVER = 2000  # milliseconds
_LEASE = 3600  # seconds
_RENEW = 1800.0
_DESCRIPTION = "meshnode"


class PortMapping:
    """``port`` is the local UDP port; ``mapped`` hears of the public host and port.

    ``description_url`` names the router's description when it need not be looked for.
    """

    def __init__(
        self, port: int, mapped: Callable[[str, int], None], *, description_url: str | None = None
    ) -> None:
        self._port = port
        self._mapped = mapped
        self._url = description_url
        self._router: miniupnpc.UPnP | None = None

    async def run(self) -> None:
        """Keep the mapping until cancelled. Without a router that does this, end at once."""
        try:
            while True:
                try:
                    public = await trio.to_thread.run_sync(self._map)
                except Exception as error:
                    # The library raises bare Exceptions for all that a router may do wrong.
                    logger.info("no port of the router: %s", error)
                    return
                logger.info("the router maps %s:%d to port %d", *public, self._port)
                self._mapped(*public)
                await trio.sleep(_RENEW)
        finally:
            if self._router is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(3):
                    await trio.to_thread.run_sync(self._unmap)

    def _map(self) -> tuple[str, int]:
        """In a thread: find the router and ask for the port. Returns host and port outside."""
        router = miniupnpc.UPnP()
        router.discoverdelay = _DISCOVER
        if self._url is None:
            router.discover()
            router.selectigd()
        else:
            router.selectigd(self._url)
        done = router.addportmapping(
            self._port, "UDP", router.lanaddr, self._port, _DESCRIPTION, "", _LEASE
        )
        if not done:
            raise OSError("the router refused")
        self._router = router
        return str(router.externalipaddress()), self._port

    def _unmap(self) -> None:
        if self._router is None:
            return
        try:
            self._router.deleteportmapping(self._port, "UDP")
        except Exception as error:
            logger.debug("the router keeps its mapping: %s", error)
