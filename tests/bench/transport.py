"""What the transport costs: this one, py-libp2p's own QUIC, its TCP with Noise and yamux, and TCP.

Each has its server in a process of its own on loopback; paths with delay and loss go through a
proxy in userspace. Times are wall clock, CPU is of both sides together. Ours is measured as it is
used, as requests on a link; the others as bare streams.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HERE = Path(__file__).resolve()
PROXY = HERE.parents[1] / "fault" / "transport" / "udp_proxy.py"
KINDS = ("stock", "mesh", "noise", "tcp")
NAMES = {
    "stock": "libp2p QUIC as shipped",
    "mesh": "ours",
    "noise": "libp2p TCP+Noise+yamux",
    "tcp": "plain TCP",
}
PROTOCOL = "/bench/1"
PIECE = 256 << 10


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Peer(Protocol):
    """A connection to a server of this program."""

    async def round_trip(self, payload: bytes) -> None: ...
    async def many(self, count: int, payload: bytes) -> None: ...
    async def up(self, size: int) -> None: ...
    async def down(self, size: int) -> None: ...
    async def server_cpu(self) -> float: ...


# -- bare streams: one byte says what is wanted, eight say how much ------------------------------


async def read_exactly(stream: Any, size: int) -> bytes:
    parts, left = [], size
    while left:
        data = await stream.read(left)
        if not data:
            raise EOFError
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


async def serve_stream(stream: Any) -> None:
    try:
        while True:
            wanted, size = struct.unpack("!cQ", await read_exactly(stream, 9))
            if wanted == b"e":
                await stream.write(await read_exactly(stream, size))
            elif wanted == b"u":
                left = size
                while left:
                    left -= len(await stream.read(min(left, PIECE)))
                await stream.write(b"k")
            elif wanted == b"d":
                piece = bytes(PIECE)
                for _ in range(size // PIECE):
                    await stream.write(piece)
            else:
                await stream.write(struct.pack("!d", cpu()))
    except Exception:
        return


class StreamPeer:
    def __init__(self, open_stream: Any) -> None:
        self._open = open_stream
        self._stream: Any = None

    async def _main(self) -> Any:
        if self._stream is None:
            self._stream = await self._open()
        return self._stream

    async def round_trip(self, payload: bytes) -> None:
        stream = await self._main()
        await stream.write(struct.pack("!cQ", b"e", len(payload)) + payload)
        await read_exactly(stream, len(payload))

    async def many(self, count: int, payload: bytes) -> None:
        async def one() -> None:
            stream = await self._open()
            for _ in range(5):
                await stream.write(struct.pack("!cQ", b"e", len(payload)) + payload)
                await read_exactly(stream, len(payload))

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)

    async def up(self, size: int) -> None:
        stream = await self._main()
        await stream.write(struct.pack("!cQ", b"u", size))
        piece = bytes(PIECE)
        for _ in range(size // PIECE):
            await stream.write(piece)
        await read_exactly(stream, 1)

    async def down(self, size: int) -> None:
        stream = await self._main()
        await stream.write(struct.pack("!cQ", b"d", size))
        left = size
        while left:
            left -= len(await stream.read(min(left, PIECE)))

    async def server_cpu(self) -> float:
        stream = await self._main()
        await stream.write(struct.pack("!cQ", b"c", 0))
        seconds: float = struct.unpack("!d", await read_exactly(stream, 8))[0]
        return seconds


class TrioStream:
    """trio's stream with the names of libp2p's."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def read(self, size: int) -> bytes:
        return bytes(await self._stream.receive_some(min(size, PIECE)))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)


async def serve_tcp() -> None:
    async def handler(stream: trio.SocketStream) -> None:
        stream.setsockopt(6, 1, 1)  # TCP_NODELAY
        await serve_stream(TrioStream(stream))

    async with trio.open_nursery() as nursery:
        serve = functools.partial(trio.serve_tcp, handler, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        print(listener.socket.getsockname()[1], flush=True)


@asynccontextmanager
async def tcp_peer(where: str) -> AsyncIterator[Peer]:
    async def open_stream() -> TrioStream:
        return TrioStream(await trio.open_tcp_stream("127.0.0.1", int(where)))

    yield StreamPeer(open_stream)


# -- py-libp2p as shipped -------------------------------------------------------------------------


def libp2p_host(kind: str) -> tuple[Any, str]:
    from libp2p import new_host
    from libp2p.transport.quic.config import QUICTransportConfig

    if kind == "stock":
        config = QUICTransportConfig(min_connections=0, low_watermark=0)
        return new_host(enable_quic=True, quic_transport_opt=config), "udp/0/quic-v1"
    return new_host(), "tcp/0"


async def serve_libp2p(kind: str) -> None:
    from libp2p.custom_types import TProtocol
    from multiaddr import Multiaddr

    host, tail = libp2p_host(kind)
    host.set_stream_handler(TProtocol(PROTOCOL), serve_stream)
    async with host.run([Multiaddr(f"/ip4/127.0.0.1/{tail}")]):
        print(host.get_addrs()[0], flush=True)
        await trio.sleep_forever()


@asynccontextmanager
async def libp2p_peer(kind: str, where: str) -> AsyncIterator[Peer]:
    from libp2p.custom_types import TProtocol
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    host, tail = libp2p_host(kind)
    async with host.run([Multiaddr(f"/ip4/127.0.0.1/{tail}")]):
        info = info_from_p2p_addr(Multiaddr(where))
        await host.get_network().dial_addr(info.addrs[0], info.peer_id)
        yield StreamPeer(lambda: host.new_stream(info.peer_id, [TProtocol(PROTOCOL)]))
        await host.close()


# -- ours -----------------------------------------------------------------------------------------


@asynccontextmanager
async def mesh_transport(name: str) -> AsyncIterator[Any]:
    from ca.certificate import load_root
    from ca.issue import issue, make_root
    from ca.naming import Role
    from mesh.identity import TrustStore, identity_of
    from mesh.transport import Transport, TransportConfig

    now = time.time()
    ca_key = Ed25519PrivateKey.from_private_bytes(b"benchmark authority".ljust(32, b"."))
    root = load_root(make_root(ca_key, "bench", serial=1, now=now - 3600))
    key = Ed25519PrivateKey.generate()
    certificate = issue(
        ca_key,
        root.der,
        network="bench",
        name=name,
        public_key=key.public_key(),
        roles=[Role.SERVE, Role.USE],
        serial=int(now),
        now=now,
    )
    identity = identity_of(key, [certificate], [root], now=now)
    config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))
    with tempfile.TemporaryDirectory() as folder:
        trust = TrustStore("bench", [root], Path(folder))
        async with Transport.open(config, identity, trust) as transport:
            yield transport


async def serve_mesh() -> None:
    from mesh.transport import Lane, LinkUp, Message, Request

    async with mesh_transport("server") as transport, transport.events() as events:

        async def echo(request: Request) -> Message:
            return request.message

        async def used(request: Request) -> Message:
            return Message(cpu())

        async def source(request: Request) -> AsyncGenerator[Message, None]:
            piece = bytes(PIECE)
            for _ in range(request.message.body // PIECE):
                yield Message(None, piece)

        async def drain(link: Any) -> None:
            async with link.subscribe("piece") as pieces:
                async for piece in pieces:
                    if piece.body == "last":
                        await link.send("all here", lane=Lane.CONTROL)

        transport.serve("echo", echo)
        transport.serve("cpu", used)
        transport.serve_stream("source", source)
        print(transport.addresses[0], flush=True)
        async with trio.open_nursery() as nursery:
            async for event in events:
                if isinstance(event, LinkUp):
                    nursery.start_soon(drain, event.link)


class MeshPeer:
    def __init__(self, link: Any, done: Any) -> None:
        self._link = link
        self._done = done

    async def round_trip(self, payload: bytes) -> None:
        await self._link.request("echo", None, payload)

    async def many(self, count: int, payload: bytes) -> None:
        async def one() -> None:
            for _ in range(5):
                await self._link.request("echo", None, payload)

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)

    async def up(self, size: int) -> None:
        from mesh.transport import Lane

        piece = bytes(PIECE)
        for _ in range(size // PIECE - 1):
            await self._link.send("piece", None, piece, lane=Lane.BULK)
        await self._link.send("piece", "last", piece, lane=Lane.BULK)
        await anext(self._done)

    async def down(self, size: int) -> None:
        from mesh.transport import Lane

        async with self._link.stream("source", size, lane=Lane.BULK) as call:
            async for _ in call:
                pass

    async def server_cpu(self) -> float:
        seconds: float = (await self._link.request("cpu")).body
        return seconds


@asynccontextmanager
async def mesh_peer(where: str) -> AsyncIterator[Peer]:
    async with mesh_transport("client") as transport:
        link = await transport.connect(where)
        async with link.subscribe("all here") as done:
            await trio.sleep(0.1)  # the datagram size of the path is being found
            yield MeshPeer(link, done)


# -- running --------------------------------------------------------------------------------------


@asynccontextmanager
async def peer_of(kind: str, path: str = "") -> AsyncIterator[Peer]:
    """A connection to a server that was started for it, through a proxy when ``path`` says how."""
    with AsyncProcesses() as processes:
        where = processes.start(sys.executable, str(HERE), "--serve", kind)
        if path:
            port = where.split("/")[4]
            proxy = processes.start(
                sys.executable, str(PROXY), "--to", f"127.0.0.1:{port}", *path.split()
            )
            where = where.replace(f"/udp/{port}/", f"/udp/{proxy}/")
        async with AsyncExitStack() as stack:
            if kind == "tcp":
                context = tcp_peer(where)
            elif kind == "mesh":
                context = mesh_peer(where)
            else:
                context = libp2p_peer(kind, where)
            yield await stack.enter_async_context(context)


class AsyncProcesses:
    def __enter__(self) -> AsyncProcesses:
        self._processes: list[subprocess.Popen[str]] = []
        return self

    def start(self, *command: str) -> str:
        """Start one and return the first line it prints."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._processes.append(process)
        if process.stdout is None:
            raise RuntimeError("no pipe")
        return process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()


async def measure_round_trips(peer: Peer, size: int, count: int) -> dict[str, float]:
    payload = os.urandom(size)
    for _ in range(max(3, count // 10)):
        await peer.round_trip(payload)
    own, theirs = cpu(), await peer.server_cpu()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await peer.round_trip(payload)
        times.append(time.perf_counter() - began)
    used = cpu() - own + await peer.server_cpu() - theirs
    times.sort()
    return {
        "median": statistics.median(times) * 1e3,
        "p99": times[int(len(times) * 0.99) - 1] * 1e3,
        "cpu": used / count * 1e3,
    }


async def measure_bulk(peer: Peer, way: str, size: int) -> dict[str, float]:
    own, theirs = cpu(), await peer.server_cpu()
    began = time.perf_counter()
    await (peer.up(size) if way == "up" else peer.down(size))
    took = time.perf_counter() - began
    used = cpu() - own + await peer.server_cpu() - theirs
    return {"rate": size / took / 1e6, "cpu": used / (size / 1e6) * 1e3}


async def measure_many(peer: Peer, count: int) -> dict[str, float]:
    payload = os.urandom(1024)
    began = time.perf_counter()
    await peer.many(count, payload)
    return {"rate": count * 5 / (time.perf_counter() - began)}


async def run_kind(kind: str, quick: bool, say: Any) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    slow = kind == "stock"
    async with peer_of(kind) as peer:
        for size, count in ((1024, 300), (10_240, 300), (1 << 20, 20)):
            say(f"{NAMES[kind]}: round trips of {size} bytes")
            few = count // (10 if quick or (slow and size > 1 << 19) else 1)
            results[f"rtt {size}"] = await measure_round_trips(peer, size, max(few, 2))
        for way in ("up", "down"):
            say(f"{NAMES[kind]}: bulk {way}")
            megabytes = 4 if slow else 32 if quick else 128
            results[f"bulk {way}"] = await measure_bulk(peer, way, megabytes << 20)
        say(f"{NAMES[kind]}: 100 at once")
        with trio.move_on_after(60) as scope:
            results["many"] = await measure_many(peer, 100)
        if scope.cancelled_caught:
            results["many"] = {"rate": 0.0}
    if kind in ("stock", "mesh"):
        for loss in (0, 1):
            say(f"{NAMES[kind]}: 50 ms round trip, {loss} % loss")
            async with peer_of(kind, f"--delay 25 --loss {loss}") as peer:
                results[f"far rtt {loss}"] = await measure_round_trips(peer, 10_240, 10)
                megabytes = (1 if loss else 4) if slow else (8 if quick else 16)
                results[f"far bulk {loss}"] = await measure_bulk(peer, "up", megabytes << 20)
    return results


def figure(
    name: str,
    unit: str,
    ours: float,
    reference: float,
    *,
    against: str,
    target: float | None,
    higher: bool,
    runs: int,
) -> dict[str, Any]:
    ratio = (ours / reference if higher else reference / ours) if ours and reference else 0.0
    return {
        "figure": name,
        "unit": unit,
        "ours": round(ours, 3),
        "reference": against,
        "reference_value": round(reference, 3),
        "ratio": round(ratio, 2),
        "target": target,
        "runs": runs,
    }


SHOWN = (
    # name, key, field, unit, target ratio against the stock transport, higher is better
    ("1 KB round trip", "rtt 1024", "median", "ms", None, False),
    ("1 KB round trip, CPU of both sides", "rtt 1024", "cpu", "ms", None, False),
    ("10 KB round trip", "rtt 10240", "median", "ms", 5.0, False),
    ("10 KB round trip, p99", "rtt 10240", "p99", "ms", None, False),
    ("10 KB round trip, CPU of both sides", "rtt 10240", "cpu", "ms", None, False),
    ("1 MB round trip", "rtt 1048576", "median", "ms", None, False),
    ("bulk up", "bulk up", "rate", "MB/s", 10.0, True),
    ("bulk down", "bulk down", "rate", "MB/s", 10.0, True),
    ("bulk up, CPU of both sides", "bulk up", "cpu", "ms/MB", None, False),
    ("100 at once, 1 KB", "many", "rate", "round trips/s", None, True),
    ("10 KB round trip at 50 ms", "far rtt 0", "median", "ms", None, False),
    ("10 KB round trip at 50 ms, 1 % loss", "far rtt 1", "median", "ms", None, False),
    ("bulk at 50 ms", "far bulk 0", "rate", "MB/s", None, True),
    ("bulk at 50 ms, 1 % loss", "far bulk 1", "rate", "MB/s", 4.0, True),
)


def report(runs: dict[str, list[dict[str, dict[str, float]]]]) -> list[dict[str, Any]]:
    def value(kind: str, key: str, part: str) -> float | None:
        values = [run[key][part] for run in runs.get(kind, []) if key in run]
        return statistics.median(values) if values else None

    figures = []
    for name, key, part, unit, target, higher in SHOWN:
        ours = value("mesh", key, part)
        if ours is None:
            continue
        for kind in KINDS:
            other = value(kind, key, part)
            if kind == "mesh" or other is None:
                continue
            figures.append(
                figure(
                    name,
                    unit,
                    ours,
                    other,
                    against=NAMES[kind],
                    target=target if kind == "stock" else None,
                    higher=higher,
                    runs=len(runs["mesh"]),
                )
            )
    one_kilobyte = value("mesh", "rtt 1024", "median")
    if one_kilobyte is not None:
        figures.append(
            figure(
                "1 KB round trip against the bound of 1.5 ms",
                "ms",
                one_kilobyte,
                1.5,
                against="bound",
                target=1.0,
                higher=False,
                runs=len(runs["mesh"]),
            )
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.serve == "tcp":
        trio.run(serve_tcp)
    elif options.serve == "mesh":
        trio.run(serve_mesh)
    elif options.serve:
        trio.run(serve_libp2p, options.serve)
    if options.serve:
        return

    def say(text: str) -> None:
        print(f"… {text}", file=sys.stderr, flush=True)

    kinds = [kind for kind in options.kinds.split(",") if kind in KINDS]
    runs: dict[str, list[dict[str, dict[str, float]]]] = {}
    for _ in range(1 if options.quick else 3):
        for kind in kinds:
            runs.setdefault(kind, []).append(trio.run(run_kind, kind, options.quick, say))
    figures = report(runs)
    for row in figures:
        missed = row["target"] is not None and row["ratio"] < row["target"]
        aim = "" if row["target"] is None else f"  target {row['target']:g}x"
        print(
            f"{row['figure']:<44} {row['ours']:>9.2f} {row['unit']:<14} "
            f"{row['reference']:<24} {row['reference_value']:>9.2f}  "
            f"{row['ratio']:>6.1f}x{aim}{'  MISSED' if missed else ''}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
