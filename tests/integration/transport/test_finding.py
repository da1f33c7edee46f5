"""Peers found by configuration, memory and mDNS, and links that come back."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import trio
from zeroconf import ServiceInfo

from mesh.transport import (
    LinkDown,
    LinkUp,
    ListenError,
    LivenessPolicy,
    Transport,
    TransportConfig,
    mdns,
)
from mesh.transport.keeper import MAX_CANDIDATES
from mesh.transport.netwatch import watch_network
from mesh.transport.portmap import PortMapping

LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"


async def wait_linked(transport: Transport, count: int = 1) -> None:
    with trio.fail_after(10):
        async with transport.events() as events:
            while len(transport.links) < count:
                await anext(events)


def test_static_peer_is_linked_and_comes_back(network: Any) -> None:
    async def main() -> None:
        identity = network.identity("b")
        async with network.open("b", identity=identity) as b:
            address = b.addresses[0]
            port = address.split("/")[4]
            config = TransportConfig(listen=(LOOPBACK,), peers=(address,))
            async with network.open("a", config) as a:
                await wait_linked(a)
                async with a.events() as events:
                    b._links.shut()
                    assert isinstance(await anext(events), LinkDown)
                    with trio.fail_after(5):
                        assert isinstance(await anext(events), LinkUp)
                assert (
                    port == a.links[b.peer_id].carrier.connection.get_remote_address()[1].__str__()
                )

    trio.run(main)


def test_peer_that_starts_later_is_found(network: Any, tmp_path: Path) -> None:
    async def main() -> None:
        identity = network.identity("b")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        listen = f"/ip4/127.0.0.1/udp/{port}/quic-v1"
        config = TransportConfig(listen=(LOOPBACK,), peers=(f"{listen}/p2p/{identity.peer_id}",))
        async with network.open("a", config) as a:
            await trio.sleep(0.5)
            async with network.open("b", TransportConfig(listen=(listen,)), identity=identity):
                await wait_linked(a)

    trio.run(main)


def test_remembered_peer_is_dialled_after_a_restart(network: Any, tmp_path: Path) -> None:
    async def main() -> None:
        remember = tmp_path / "a" / "peers.json"
        config = TransportConfig(listen=(LOOPBACK,), remember=remember)
        identity = network.identity("a")
        async with network.open("b") as b:
            async with network.open("a", config, identity=identity) as a:
                await b.connect(a.addresses[0])  # a is dialled, and remembers all the same
                await wait_linked(a)
                await trio.sleep(0.1)
            assert remember.exists()
            async with network.open("a", config, identity=identity) as a:
                await wait_linked(a)
                assert b.peer_id in a.links

    trio.run(main)


def test_mdns_finds_own_network_only(network: Any, make_authority: Any, tmp_path: Path) -> None:
    async def main() -> None:
        config = TransportConfig(listen=(LOOPBACK,), mdns=True, mdns_interfaces=("127.0.0.1",))
        other = type(network)(tmp_path / "other", make_authority("othernet"))
        async with (
            other.open("stranger", config) as stranger,
            network.open("a", config) as a,
            network.open("b", config) as b,
        ):
            await wait_linked(a)
            await wait_linked(b)
            await trio.sleep(0.5)
            assert set(a.links) == {b.peer_id}
            assert set(b.links) == {a.peer_id}
            assert not stranger.links

    trio.run(main)


def test_mdns_announces_the_network_that_is_there_now(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, receive = trio.open_memory_channel[str](16)
    no_multicast = False

    class Recording:
        """In zeroconf's place; called in threads."""

        def __init__(self, **_: object) -> None:
            self.say("fails" if no_multicast else "opens")
            if no_multicast:
                raise OSError("no multicast")

        def say(self, what: str) -> None:
            trio.from_thread.run_sync(send.send_nowait, what)

        def register_service(self, info: ServiceInfo, **_: object) -> None:
            self.say(" ".join(info.parsed_addresses()))

        def close(self) -> None:
            self.say("closes")

    def browse(zeroconf: Recording, *_: object, **__: object) -> Any:
        zeroconf.say("browses")
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(mdns, "Zeroconf", Recording)
    monkeypatch.setattr(mdns, "ServiceBrowser", browse)

    def have(*hosts: str) -> None:
        entries = [SimpleNamespace(family=socket.AF_INET, address=host) for host in hosts]
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"all": entries})

    async def heard(*wanted: str) -> None:
        with trio.fail_after(10):
            assert [await receive.receive() for _ in wanted] == list(wanted)

    async def main() -> None:
        nonlocal no_multicast
        config = TransportConfig(listen=("/ip4/0.0.0.0/udp/0/quic-v1",), mdns=True)
        have("127.0.0.1")
        async with network.open("a", config) as a, trio.open_nursery() as nursery:
            await heard("opens", "browses")
            have("127.0.0.1", "192.0.2.7")
            a._network_changed(nursery)
            await heard("closes", "opens", "192.0.2.7", "browses")
            a._network_changed(nursery)  # not for mDNS: the addresses are those of before
            no_multicast = True
            have("127.0.0.1", "192.0.2.8")
            a._network_changed(nursery)
            await heard("closes", "fails")
            no_multicast = False
            while a._discovery._complete:  # noqa: ASYNC110
                await trio.sleep(0.01)
            a._network_changed(nursery)
            await heard("opens", "192.0.2.8", "browses")

    trio.run(main)


def test_strangers_on_the_local_network_take_no_places_of_peers(network: Any) -> None:
    nowhere = "/ip4/127.0.0.1/udp/9/quic-v1/p2p/"
    strangers = [network.identity(f"stranger-{n}").peer_id for n in range(MAX_CANDIDATES + 10)]

    async def main() -> None:
        config = TransportConfig(listen=(LOOPBACK,))
        async with (
            network.open("a", config) as a,
            network.open("b", config) as b,
            network.open("c", config) as c,
        ):
            await a.connect(b.addresses[0])
            await wait_linked(a)
            await trio.sleep(0.1)
            for stranger in strangers:
                a._found(stranger, [nowhere + stranger])
            a._found(b.peer_id, [nowhere + b.peer_id])  # passed off as the place of b
            assert set(a.known_peers) == {b.peer_id}, "what was only heard is remembered"
            assert nowhere + b.peer_id not in a.known_peers[b.peer_id]
            assert len(a._keeper._places) == 1 + MAX_CANDIDATES
            while not any(place.failed for place in a._keeper._places.values()):  # noqa: ASYNC110
                await trio.sleep(0.05)
            a._found(c.peer_id, c.addresses)
            await wait_linked(a, 2)
            await trio.sleep(0.1)
            assert {b.peer_id, c.peer_id} == set(a.known_peers)

    trio.run(main)


def test_port_in_use_is_said_clearly(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a:
            listen = a.addresses[0].partition("/p2p/")[0]
            with pytest.raises(ListenError, match="already in use"):
                async with network.open("b", TransportConfig(listen=(listen,))):
                    pass

    trio.run(main)


def test_wildcard_tells_real_addresses(network: Any) -> None:
    async def main() -> None:
        config = TransportConfig(listen=("/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::1/udp/0/quic-v1"))
        async with network.open("a", config) as a, network.open("b", config) as b:
            assert not any(
                "/0.0.0.0/" in address or "/udp/0/" in address for address in a.addresses
            )
            by_ip6 = next(address for address in b.addresses if address.startswith("/ip6/"))
            link = await a.connect(by_ip6)
            assert link.carrier.connection.get_remote_address()[0] == "::1"

    trio.run(main)


def test_kademlia_finds_a_peer_that_nobody_here_is_linked_to(network: Any) -> None:
    async def main() -> None:
        config = TransportConfig(listen=(LOOPBACK,), kademlia=True)
        async with (
            network.open("a", config) as a,
            network.open("b", config) as b,
            network.open("c", config) as c,
            network.open("d", config) as d,
        ):
            for one, other in ((a, b), (b, c), (c, d)):
                await one.connect(other.addresses[0])
            await trio.sleep(1)
            nowhere = f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{d.peer_id}"
            link = await a.link_to(d.peer_id, [nowhere], timeout=4)
            assert link.peer == d.peer_id

    trio.run(main)


class Router(BaseHTTPRequestHandler):
    """As much of an Internet gateway device as a port mapping needs."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        service = "urn:schemas-upnp-org:service:WANIPConnection:1"
        self.answer(
            '<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>'
            "<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>"
            "<deviceList><device>"
            "<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType>"
            f"<serviceList><service><serviceType>{service}</serviceType>"
            "<serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>"
            "<controlURL>/control</controlURL><eventSubURL>/e</eventSubURL>"
            "<SCPDURL>/s</SCPDURL></service></serviceList>"
            "</device></deviceList></device></root>"
        )

    def do_POST(self) -> None:
        action = self.headers["SOAPAction"].strip('"').partition("#")[2]
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        port = re.search(r"<NewExternalPort>(\d+)<", body)
        protocol = re.search(r"<NewProtocol>(\w+)<", body)
        self.asked.append(f"{action} {port and port[1]} {protocol and protocol[1]}")
        inner = {
            "GetStatusInfo": "<NewConnectionStatus>Connected</NewConnectionStatus>"
            "<NewLastConnectionError>ERROR_NONE</NewLastConnectionError><NewUptime>1</NewUptime>",
            "GetExternalIPAddress": "<NewExternalIPAddress>203.0.113.7</NewExternalIPAddress>",
        }.get(action, "")
        self.answer(
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/">'
            f'<s:Body><u:{action}Response xmlns:u="urn:schemas-upnp-org:service:WANIPConnection:1">'
            f"{inner}</u:{action}Response></s:Body></s:Envelope>"
        )

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_router_gives_and_gets_back_a_udp_port() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    Thread(target=server.serve_forever, daemon=True).start()
    heard: list[tuple[str, int]] = []

    async def main() -> None:
        mapped = trio.Event()

        def hear(host: str, port: int) -> None:
            heard.append((host, port))
            mapped.set()

        url = f"http://127.0.0.1:{server.server_port}/root.xml"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(PortMapping(4001, hear, description_url=url).run)
            with trio.fail_after(10):
                await mapped.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    server.shutdown()
    assert heard == [("203.0.113.7", 4001)]
    assert "AddPortMapping 4001 UDP" in Router.asked
    assert "DeletePortMapping 4001 UDP" in Router.asked


def test_change_of_the_network_is_noticed() -> None:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("changing an address needs Linux, root and iproute2")

    async def main() -> None:
        noticed = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_network, noticed.set)
            await trio.sleep(0.1)
            for verb in ("add", "del"):
                await trio.run_process(["ip", "addr", verb, "127.77.0.1/32", "dev", "lo"])
            with trio.fail_after(5):
                await noticed.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_link_that_does_not_survive_a_change_is_given_up(network: Any) -> None:
    async def main() -> None:
        # b pings once: it would be heard, and goes on sending to where a was.
        config = TransportConfig(listen=(LOOPBACK,), liveness=LivenessPolicy(busy_ping=60.0))
        async with network.open("a") as a, network.open("b", config) as b:
            link = await a.connect(b.addresses[0])
            await link.check(1.0)
            assert link.is_up
            connection = b.links[a.peer_id].carrier.connection
            b._quic.endpoint.forget(connection)  # from here on b hears nothing of it
            await link.check(1.0)
            assert not link.is_up

    trio.run(main)
