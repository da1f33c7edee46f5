"""Opening the lanes of a link over a fresh connection, on either side."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from pydantic import ValidationError

from mesh.transport.carrier import Carrier, lane_stream, prioritise
from mesh.transport.errors import DialError, MalformedFrame, TransportError
from mesh.transport.frames import Assembler, Frame, FrameKind, decode_body, encode, encode_body
from mesh.transport.lanes import BROKEN, BufferedLaneStream, Lane, LaneStream
from mesh.transport.pairing import Hello, Welcome

logger = logging.getLogger(__name__)

LINK_PROTOCOL = TProtocol("/meshnode/link/1")
_TIMEOUT = 10  # seconds for all three lanes, negotiation included
_MOST_OFFERS = 256  # incomplete, from all peers


class Refused(DialError):
    """The other side did not accept the lanes; ``code`` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(f"the peer refused the link: {code}")
        self.code = code


async def _first_frame(stream: LaneStream) -> Frame:
    """The first message on a stream, a short one; what came with it stays there."""
    first, *rest = await stream.receive()
    frame = Assembler().add(first)
    if frame is None:
        raise MalformedFrame("the first message comes in pieces")
    stream.push_back(rest)
    return frame


# -- the side that dialled ------------------------------------------------------------------------


async def open_lanes(net_connection: Any, hello: Hello, *, path: str) -> tuple[Carrier, Welcome]:
    """Offer ``hello.link`` over a connection. Raises Refused, DialError."""
    streams: dict[Lane, LaneStream] = {}
    welcomes: list[Welcome] = []
    failure: list[DialError] = []

    async def open_one(lane: Lane) -> None:
        try:
            net_stream = await net_connection.new_stream()
            await MultiselectClient().select_one_of(
                [LINK_PROTOCOL], MultiselectCommunicator(net_stream), _TIMEOUT
            )
            prioritise(net_stream.muxed_stream, lane)
            streams[lane] = stream = lane_stream(net_stream.muxed_stream)
            if isinstance(stream, BufferedLaneStream):
                nursery.start_soon(stream.run)
            body = encode_body(hello.model_copy(update={"lane": int(lane)}).model_dump())
            for frame in encode(FrameKind.HELLO, 0, body):
                stream.write_now(frame)
            welcomes.append(_read_welcome(await _first_frame(stream)))
        except DialError as error:
            failure.append(error)
        except (MultiselectClientError, MalformedFrame, *BROKEN) as error:
            reason = getattr(net_connection.muxed_conn, "close_reason", "")
            failure.append(DialError(reason or f"the peer did not open the link: {error!r}"))
        except Exception as error:
            # The library does not turn all that it cannot read into errors of its own.
            logger.warning("a link was not opened: %r", error)
            failure.append(DialError(f"the peer did not open the link: {error!r}"))
        if failure or len(welcomes) == len(Lane):
            nursery.cancel_scope.cancel()

    with trio.move_on_after(_TIMEOUT):
        async with trio.open_nursery() as nursery:
            for lane in Lane:
                nursery.start_soon(open_one, lane)
    if failure:
        raise failure[0]
    if len(welcomes) != len(Lane):
        raise DialError("the peer did not open the link in time")
    return Carrier(net_connection.muxed_conn, streams, path=path, offered_here=True), welcomes[0]


def _read_welcome(frame: Frame) -> Welcome:
    body = decode_body(frame.body)
    if frame.kind is FrameKind.REFUSE:
        raise Refused(str(body)[:64])
    try:
        return Welcome.model_validate(body)
    except ValidationError as error:
        raise MalformedFrame("not an answer to an offer") from error


# -- the side that was dialled --------------------------------------------------------------------


class Offer:
    """The three lanes of one offer, once all are here. Answer it with one of the two methods."""

    def __init__(self, connection: Any, hello: Hello) -> None:
        self.connection = connection
        self.hello = hello
        self.streams: dict[Lane, LaneStream] = {}

    def welcome(self, boot: bytes, *, path: str) -> Carrier:
        """Accept: from here on the link's frames follow. Raises DialError when it is too late."""
        body = encode_body(Welcome(boot=boot).model_dump())
        self._answer(FrameKind.WELCOME, body)
        return Carrier(self.connection, self.streams, path=path, offered_here=False)

    def refuse(self, code: str) -> None:
        try:
            self._answer(FrameKind.REFUSE, encode_body(code))
        except DialError:
            return  # gone: that is answer enough

    def _answer(self, kind: FrameKind, body: bytes) -> None:
        try:
            for stream in self.streams.values():
                for frame in encode(kind, 0, body):
                    stream.write_now(frame)
        except BROKEN as error:
            raise DialError("the peer gave the connection up") from error


class Door:
    """Collects lanes that peers open into offers, and hands each complete one on."""

    def __init__(self, on_offer: Callable[[Offer], Awaitable[None]]) -> None:
        self._on_offer = on_offer
        self._offers: dict[tuple[int, bytes], Offer] = {}

    async def lane_opened(self, net_stream: Any) -> None:
        """Handles one stream of LINK_PROTOCOL, from a peer that is admitted already."""
        muxed = net_stream.muxed_stream
        stream = lane_stream(muxed)
        key: tuple[int, bytes] | None = None
        try:
            with trio.fail_after(_TIMEOUT):
                frame = await _first_frame(stream)
            hello = _read_hello(frame)
            prioritise(muxed, Lane(hello.lane))
            key = id(net_stream.muxed_conn), hello.link
            offer = self._collect(key, net_stream.muxed_conn, hello, stream)
            if offer is not None:
                await self._on_offer(offer)
        except (TransportError, trio.TooSlowError, *BROKEN) as error:
            logger.debug("a lane was not opened: %r", error)
            if key is not None:
                self._offers.pop(key, None)
            await net_stream.reset()

    def _collect(
        self, key: tuple[int, bytes], connection: Any, hello: Hello, stream: LaneStream
    ) -> Offer | None:
        """Add a lane to its offer; the offer when that was the last one."""
        offer = self._offers.get(key)
        if offer is None:
            for stale in [k for k, o in self._offers.items() if o.connection.is_closed]:
                del self._offers[stale]
            if len(self._offers) >= _MOST_OFFERS:
                raise MalformedFrame("too many links are being opened")
            offer = self._offers[key] = Offer(connection, hello)
        lane = Lane(hello.lane)
        if (
            lane in offer.streams
            or hello.model_copy(update={"lane": offer.hello.lane}) != offer.hello
        ):
            raise MalformedFrame("the lanes of an offer contradict each other")
        offer.streams[lane] = stream
        if len(offer.streams) < len(Lane):
            return None
        return self._offers.pop(key)


def _read_hello(frame: Frame) -> Hello:
    if frame.kind is not FrameKind.HELLO:
        raise MalformedFrame("a lane begins without a greeting")
    try:
        return Hello.model_validate(decode_body(frame.body))
    except ValidationError as error:
        raise MalformedFrame("not a greeting") from error
