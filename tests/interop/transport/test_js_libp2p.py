"""With js-libp2p over QUIC: an implementation of the protocols that shares no code with ours.

It cannot carry an admission certificate, so the node it talks to here has a trust store that admits
anybody; the last test has a real one, which refuses it. The packages are kept in the user's cache;
without npm, or when they cannot be fetched, the tests are skipped.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService, handle_ping
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from mesh.identity import Identity, TrustStore
from mesh.transport import Transport, TransportConfig

LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"
PROTOCOL = TProtocol("/interop/upper/1")
PING = TProtocol("/ipfs/ping/1.0.0")
PACKAGES = (
    "node@22",
    "libp2p@2",
    "@chainsafe/libp2p-quic@1.1.8",
    "@chainsafe/libp2p-gossipsub@14",
    "@libp2p/identify@3",
    "@libp2p/ping@2",
    "@multiformats/multiaddr@12",
)
SCRIPT = Path(__file__).with_name("js_peer.mjs")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def packages() -> Path:
    """A folder with the packages installed."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not here")
    folder = Path(platformdirs.user_cache_dir("meshnode-tests")) / "js-libp2p"
    if not (folder / "node_modules" / "@chainsafe" / "libp2p-gossipsub").exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                [npm, "install", "--no-audit", "--no-fund", *PACKAGES],
                cwd=folder,
                check=True,
                capture_output=True,
                timeout=180,
            )
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"the packages of js-libp2p cannot be installed: {error}")
    return folder


class JsPeer:
    """The process, and the lines it says."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._buffer = b""
        self.peer = ""
        self.addresses: list[str] = []

    async def read(self, **wanted: Any) -> dict[str, Any]:
        """The next line that has these keys (with these values, unless they are ...)."""
        with trio.fail_after(20):
            while True:
                while b"\n" not in self._buffer:
                    if self._process.stdout is None:
                        raise RuntimeError("no pipe")
                    data = await self._process.stdout.receive_some()
                    if not data:
                        raise RuntimeError("the process ended")
                    self._buffer += data
                line, _, self._buffer = self._buffer.partition(b"\n")
                message: dict[str, Any] = json.loads(line)
                if "error" in message and "error" not in wanted:
                    raise RuntimeError(message["error"])
                if all(
                    key in message and (value is ... or message[key] == value)
                    for key, value in wanted.items()
                ):
                    return message

    async def tell(self, command: str, **arguments: Any) -> None:
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        line = json.dumps({"command": command, **arguments}) + "\n"
        await self._process.stdin.send_all(line.encode())


@asynccontextmanager
async def js_peer(packages: Path) -> AsyncIterator[JsPeer]:
    script = packages / SCRIPT.name  # node looks for packages beside the script
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    node = packages / "node_modules" / ".bin" / "node"
    command = [str(node if node.exists() else shutil.which("node")), str(script)]
    async with trio.open_nursery() as nursery:
        run = functools.partial(
            trio.run_process,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            env=dict(os.environ),
        )
        process = await nursery.start(run)
        peer = JsPeer(process)
        hello = await peer.read(peer=...)
        peer.peer, peer.addresses = hello["peer"], hello["addresses"]
        yield peer
        process.kill()


class AdmitsAnybody:
    """Takes every peer, whatever it shows."""

    network = "interop"

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def verify_peer(self, chain: Sequence[bytes] | None, peer: str, now: float) -> Any:
        return replace(self._identity.certificate, peer_id=peer)

    def on_revocation(self, listener: Any) -> Callable[[], None]:
        return lambda: None


@asynccontextmanager
async def our_node(authority: Any) -> AsyncIterator[Transport]:
    identity = authority.identity("ours", now=time.time())
    trust: Any = AdmitsAnybody(identity)
    async with Transport.open(TransportConfig(listen=(LOOPBACK,)), identity, trust) as transport:

        async def upper(stream: Any) -> None:
            text = await stream.read(1000)
            await stream.write(text.upper())
            await stream.close()

        transport._host.set_stream_handler(PROTOCOL, upper)
        transport._host.set_stream_handler(PING, handle_ping)
        yield transport


def test_js_dials_us(packages: Path, authority: Any) -> None:
    async def main() -> None:
        async with our_node(authority) as ours, js_peer(packages) as js:
            address = ours.addresses[0]
            await js.tell("dial", address=address)
            await js.read(dialled=ours.peer_id)
            identified = await js.read(identified=ours.peer_id)
            assert str(PROTOCOL) in identified["protocols"]
            await js.tell("ping", address=address)
            assert (await js.read(ping=...))["ping"] < 1000
            await js.tell("ask", address=address, text="from the other side")
            assert (await js.read(answer=...))["answer"] == "FROM THE OTHER SIDE"

    trio.run(main)


def test_we_dial_js(packages: Path, authority: Any) -> None:
    async def main() -> None:
        async with our_node(authority) as ours, js_peer(packages) as js:
            address = next(a for a in js.addresses if "/127.0.0.1/" in a)
            connection = await ours._quic.dial(Multiaddr(address))
            await ours._host.get_network().add_conn(connection, direction="outbound")
            them = ID.from_string(js.peer)
            await js.read(identified=ours.peer_id)
            (rtt,) = await PingService(ours._host).ping(them, 1)
            assert rtt < 1_000_000  # microseconds
            stream = await ours._host.new_stream(them, [PROTOCOL])
            await stream.write(b"hello")
            await stream.close_write()
            assert await stream.read(100) == b"HELLO"
            await stream.close()

    trio.run(main)


def test_gossip_goes_both_ways(packages: Path, authority: Any) -> None:
    async def main() -> None:
        async with (
            our_node(authority) as ours,
            js_peer(packages) as js,
            ours.subscribe("news", lambda author, data: True) as news,
        ):
            await js.tell("subscribe", topic="news")
            await js.read(subscribed="news")
            await js.tell("dial", address=ours.addresses[0])
            await js.read(dialled=ours.peer_id)
            await trio.sleep(2.5)  # a heartbeat on each side
            await ours.publish("news", b"from here")
            heard = await js.read(gossip="from here")
            assert heard["from"] == ours.peer_id
            await js.tell("publish", topic="news", text="from there")
            with trio.fail_after(10):
                assert await anext(news) == (js.peer, b"from there")

    trio.run(main)


def test_foreign_peer_without_a_certificate_is_refused(
    packages: Path, authority: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        identity = authority.identity("strict", now=time.time())
        trust = TrustStore(authority.network, [authority.root], tmp_path)
        config = TransportConfig(listen=(LOOPBACK,))
        async with Transport.open(config, identity, trust) as strict, js_peer(packages) as js:
            await js.tell("ask", address=strict.addresses[0], text="anything")
            assert "error" in await js.read(error=...)
            await trio.sleep(1)
            assert not strict._host.get_network().connections
            assert not strict._quic.endpoint.connections
            await js.tell("peers")
            assert (await js.read(peers=...))["peers"] == []

    trio.run(main)
