"""Measures a link: round trips, throughput both ways, loss. What ``meshnode bench PEER`` shows.

Every node answers the small services that this needs; they cost what they carry and no more, and a
peer may run one measurement at a time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from typing import Any

import trio

from mesh.transport.errors import RemoteError, TransportError
from mesh.transport.lanes import Lane
from mesh.transport.link import Link
from mesh.transport.messages import Message, Request
from mesh.transport.quic.connection import MeshConnection

ECHO, SINK, SOURCE = "transport.echo", "transport.sink", "transport.source"
_PIECE = 128 << 10
_LARGEST = 1 << 30  # bytes that one measurement may move each way
_LARGEST_ECHO = 64 << 10
_TIMEOUT = 120.0

Progress = Callable[[float, str], None]  # fraction done, what is being measured


@dataclass(frozen=True)
class RoundTrips:
    """Of one size of message, in milliseconds."""

    bytes: int
    count: int
    median_ms: float
    p99_ms: float


@dataclass(frozen=True)
class LinkFigures:
    """What was measured. Rates in megabytes (10^6) per second."""

    peer: str
    path: str  # direct, punched or relayed
    round_trips: tuple[RoundTrips, ...]
    up_mb_s: float
    down_mb_s: float
    loss: float | None  # fraction of packets sent that were lost; None where it cannot be seen
    datagram_bytes: int | None
    congestion: str | None  # the controller in use at the end

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class BenchServices:
    """The answering side."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    async def echo(self, request: Request) -> Message:
        if len(request.message.payload) > _LARGEST_ECHO:
            raise RemoteError("bad_request", "too large")
        return Message(None, request.message.payload)

    async def sink(self, request: Request) -> Message:
        return Message(len(request.message.payload))

    async def source(self, request: Request) -> AsyncGenerator[Message, None]:
        size = request.message.body
        if not isinstance(size, int) or not 0 < size <= _LARGEST:
            raise RemoteError("bad_request", f"a size of at most {_LARGEST} bytes")
        if request.peer in self._busy:
            raise RemoteError("busy", "one measurement at a time")
        self._busy.add(request.peer)
        try:
            piece = os.urandom(_PIECE)
            for _ in range(-(-size // _PIECE)):
                yield Message(None, piece)
        finally:
            self._busy.discard(request.peer)


async def measure_link(
    link: Link,
    *,
    megabytes: int = 16,
    round_trips: int = 100,
    seconds: float = 10.0,
    progress: Progress | None = None,
) -> LinkFigures:
    """Measure. Each of the two transfers moves ``megabytes`` (2^20) or runs for ``seconds``.

    Raises LinkClosed, RemoteError, DeadlineExceeded.
    """
    report = progress or (lambda fraction, what: None)
    before = packets_of(link)
    trips = []
    for index, size in enumerate((1024, 10_240)):
        report(0.3 * index / 2, f"round trips of {size // 1024} KB")
        trips.append(await _round_trips(link, size, round_trips))
    up = await _up(link, megabytes << 20, seconds, lambda f: report(0.3 + 0.35 * f, "up"))
    down = await _down(link, megabytes << 20, seconds, lambda f: report(0.65 + 0.35 * f, "down"))
    report(1.0, "done")
    after = packets_of(link)
    loss = None
    if before is not None and after is not None and after[0] > before[0]:
        loss = (after[1] - before[1]) / (after[0] - before[0])
    connection = link.carrier.connection
    direct = connection.engine if isinstance(connection, MeshConnection) else None
    return LinkFigures(
        peer=link.peer,
        path=link.path,
        round_trips=tuple(trips),
        up_mb_s=up,
        down_mb_s=down,
        loss=loss,
        datagram_bytes=direct.datagram_size if direct is not None else None,
        congestion=direct.controller if direct is not None else None,
    )


def packets_of(link: Link) -> tuple[int, int] | None:
    """Packets sent and lost so far on the connection below."""
    connection = link.carrier.connection
    return connection.engine.packets if isinstance(connection, MeshConnection) else None


async def _round_trips(link: Link, size: int, count: int) -> RoundTrips:
    payload = os.urandom(size)
    await link.request(ECHO, None, payload, timeout=_TIMEOUT)
    times = []
    for _ in range(count):
        began = trio.current_time()
        await link.request(ECHO, None, payload, timeout=_TIMEOUT)
        times.append((trio.current_time() - began) * 1e3)
    times.sort()
    worst = times[min(len(times) - 1, int(len(times) * 0.99))]
    return RoundTrips(size, count, statistics.median(times), worst)


async def _up(
    link: Link, size: int, seconds: float, report: Callable[[float], None], at_once: int = 16
) -> float:
    """Requests with large payloads, enough at once to fill the path."""
    piece = os.urandom(_PIECE)
    began = trio.current_time()
    left, done = -(-size // _PIECE), 0
    failures: list[TransportError] = []

    async def send() -> None:
        nonlocal left, done
        while left > 0 and trio.current_time() - began < seconds:
            left -= 1
            try:
                await link.request(SINK, None, piece, lane=Lane.BULK, timeout=_TIMEOUT)
            except TransportError as error:
                # Not out of the nursery, where it would be in a group that nobody expects.
                failures.append(error)
                nursery.cancel_scope.cancel()
                return
            done += _PIECE
            report(min(done / size, 1.0))

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(send)
    if failures:
        raise failures[0]
    return done / (trio.current_time() - began) / 1e6


async def _down(link: Link, size: int, seconds: float, report: Callable[[float], None]) -> float:
    began = trio.current_time()
    done = 0
    async with link.stream(SOURCE, size, lane=Lane.BULK) as call:
        async for message in call:
            done += len(message.payload)
            report(min(done / size, 1.0))
            if trio.current_time() - began >= seconds:
                break
    return done / (trio.current_time() - began) / 1e6
