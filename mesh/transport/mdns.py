"""Finding peers on the local network by multicast DNS (RFC 6762, 6763).

The service type is our own and the network's name is in the TXT record, so that nodes of other
networks are seen and left alone. What an answer says is hostile until a handshake has proved it;
it only leads to a dial.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import trio
from zeroconf import (
    InterfaceChoice,
    IPVersion,
    ServiceBrowser,
    ServiceInfo,
    ServiceStateChange,
    Zeroconf,
)

from mesh.identity import PeerId
from mesh.transport.addresses import parse_address
from mesh.transport.errors import DialError
from mesh.transport.quic.listen import endpoint_of, interface_addresses

logger = logging.getLogger(__name__)

SERVICE = "_meshnode._udp.local."
_ASK_TIMEOUT = 1500  # milliseconds for the details of one service
_MOST_ADDRESSES = 8

Found = Callable[[PeerId, Sequence[str]], None]


class LocalDiscovery:
    """Announces this node and reports others of the same network.

    ``interfaces`` limits it to the interfaces with these addresses; empty means all. Addresses of
    loopback are announced only when these name loopback.
    """

    def __init__(
        self,
        *,
        network: str,
        peer_id: PeerId,
        found: Found,
        interfaces: Sequence[str] = (),
    ) -> None:
        self._network = network
        self._peer_id = peer_id
        self._found = found
        self._interfaces = list(interfaces)
        self._on_loopback = any(ipaddress.ip_address(each).is_loopback for each in interfaces)
        self._addresses: Sequence[str] = ()
        self._network_was: tuple[set[str], set[str]] | None = None
        self._anew = trio.Event()  # set when all this has to begin anew
        self._complete = False  # announced, and looking for others
        self._send, self._receive = trio.open_memory_channel[str](256)
        self._token: trio.lowlevel.TrioToken | None = None

    def network_changed(self, addresses: Sequence[str]) -> None:
        """Announce ``addresses`` and look for others on the interfaces that there are now.

        Nothing is done when neither is new, unless something has failed before.
        """
        network = (set(addresses), set(interface_addresses(socket.AF_INET)))
        if not self._complete or network != self._network_was:
            self._network_was = network
            self._addresses = addresses
            self._anew.set()

    async def run(self, addresses: Sequence[str]) -> None:
        """Announce ``addresses`` and look for others until cancelled.

        Without multicast (a VPN, a container) it logs that and waits for another network: peers
        from elsewhere still work.
        """
        self._token = trio.lowlevel.current_trio_token()
        self.network_changed(addresses)
        while True:
            # Zeroconf has sockets for the interfaces that it finds when it is opened, and a search
            # asks for those it does not know only when it begins.
            self._anew = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve)
                await self._anew.wait()
                nursery.cancel_scope.cancel()

    async def _serve(self) -> None:
        self._complete = True
        try:
            zeroconf = await trio.to_thread.run_sync(self._open)
        except Exception as error:  # OSError mostly, and RuntimeError where no interface is up
            logger.warning("no discovery on the local network: %r", error)
            self._complete = False
            return
        browser: ServiceBrowser | None = None
        try:
            browser = await trio.to_thread.run_sync(self._begin, zeroconf, self._addresses)
            async for name in self._receive:
                await self._look_at(zeroconf, name)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(5):
                await trio.to_thread.run_sync(
                    self._close, zeroconf, browser, abandon_on_cancel=True
                )

    def _open(self) -> Zeroconf:
        interfaces: Any = self._interfaces or InterfaceChoice.All
        return Zeroconf(interfaces=interfaces, ip_version=IPVersion.V4Only)

    def _begin(self, zeroconf: Zeroconf, addresses: Sequence[str]) -> ServiceBrowser | None:
        """What the network and zeroconf make of it ends no node."""
        try:
            if (info := self._own_info(addresses)) is not None:
                # Who we are is in the TXT record: somebody who has our name already, or says so,
                # only makes us take another.
                zeroconf.register_service(info, allow_name_change=True)
        except Exception as error:
            logger.warning("not announced on the local network: %r", error)
            self._complete = False
        try:
            return ServiceBrowser(zeroconf, SERVICE, handlers=[self._changed])
        except Exception as error:
            logger.warning("no search on the local network: %r", error)
            self._complete = False
            return None

    @staticmethod
    def _close(zeroconf: Zeroconf, browser: ServiceBrowser | None) -> None:
        try:
            if browser is not None:
                browser.cancel()
            zeroconf.close()  # says goodbye for what is registered
        except Exception as error:
            logger.debug("mDNS did not close: %r", error)

    def _own_info(self, addresses: Sequence[str]) -> ServiceInfo | None:
        hosts: list[str] = []
        port = 0
        for text in addresses:
            try:
                host, port_here = endpoint_of(parse_address(text)[1])
            except (DialError, ValueError):
                continue
            address = ipaddress.ip_address(host)
            if address.version != 4 or (address.is_loopback and not self._on_loopback):
                continue
            if not port or port_here == port:
                port = port_here
                hosts.append(host)
        if not hosts:
            return None
        return ServiceInfo(
            SERVICE,
            f"{self._peer_id}.{SERVICE}",
            port=port,
            parsed_addresses=hosts[:_MOST_ADDRESSES],
            properties={"network": self._network, "peer": self._peer_id},
            server=f"{self._peer_id[-16:].lower()}.local.",
        )

    def _changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Called in a thread of zeroconf's own."""
        if state_change is ServiceStateChange.Removed or self._token is None:
            return
        try:
            self._token.run_sync_soon(self._note, name)
        except trio.RunFinishedError:
            return

    def _note(self, name: str) -> None:
        try:
            self._send.send_nowait(name)
        except (trio.WouldBlock, trio.BrokenResourceError):
            logger.debug("too many services on the local network")

    async def _look_at(self, zeroconf: Zeroconf, name: str) -> None:
        try:
            # The name is what somebody said: zeroconf refuses some of those that it reports.
            info = await trio.to_thread.run_sync(
                lambda: zeroconf.get_service_info(SERVICE, name, timeout=_ASK_TIMEOUT)
            )
            sighting = None if info is None else self._read(info)
        except Exception as error:
            logger.debug("%r on the local network cannot be looked at: %r", name, error)
            return
        if sighting is not None:
            logger.debug("found %s on the local network", sighting[0])
            self._found(*sighting)

    def _read(self, info: ServiceInfo) -> tuple[PeerId, list[str]] | None:
        details = info.decoded_properties
        peer = details.get("peer") or ""
        if details.get("network") != self._network or peer == self._peer_id:
            return None
        addresses = []
        for host in info.parsed_addresses(IPVersion.V4Only)[:_MOST_ADDRESSES]:
            text = f"/ip4/{host}/udp/{info.port}/quic-v1/p2p/{peer}"
            try:
                named, _ = parse_address(text)
            except DialError:
                continue
            addresses.append(text)
            peer = named
        return (PeerId(peer), addresses) if addresses else None
