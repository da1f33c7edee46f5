"""What travels on a lane: frames with a CBOR body and a raw payload. No I/O here.

A frame is one fragment of a message::

    length   u32   bytes that follow, at most MAX_FRAME
    kind     u8    FrameKind
    flags    u8    FIRST | LAST | END | ABORT
    number   u64   the call (or note, or ping) it belongs to
    -- only in a FIRST fragment:
    body     u32   bytes of the body, at most MAX_BODY
    payload  u32   bytes of the payload, at most MAX_PAYLOAD
    -- then a piece of body + payload

Large messages are cut so that others pass between the pieces; those under way at once on a lane
have at most MAX_IN_PIECES bytes together. Every size is checked before room is made for it, and
room is made only for bytes that have come. The body is CBOR without tags, without
indefinite lengths and of bounded depth; the payload (a tensor, a piece of a file) is left alone: a
message that fits one fragment hands it on as a view of what was received.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import cbor2

from mesh.cbor_items import check_items
from mesh.transport.errors import MalformedFrame

Buffer = bytes | bytearray | memoryview

PIECE = 128 << 10  # bytes of a message in one frame
MAX_BODY = 8 << 20
MAX_PAYLOAD = 32 << 20
MAX_DEPTH = 16  # nesting of a body
MAX_ITEMS = 1 << 20  # in a body
# Under way at once on one lane; a single message always fits.
MAX_MESSAGES_IN_PIECES = 4
MAX_IN_PIECES = MAX_BODY + MAX_PAYLOAD  # bytes
_HEADER = struct.Struct(">IBBQ")
_SIZES = struct.Struct(">II")
_AFTER_LENGTH = _HEADER.size - 4
MAX_FRAME = _AFTER_LENGTH + _SIZES.size + PIECE


class FrameKind(IntEnum):
    """What a message is. Kinds with a number of a call belong to the call's opener unless noted."""

    HELLO = 1  # opens a lane: who, which lane, for which link
    WELCOME = 2  # the lane is accepted
    REFUSE = 3  # it is not; the body says why
    CALL = 4  # opens a call: kind, deadline, body
    ITEM = 5  # from the callee: one message of the answer
    ERROR = 6  # from the callee: the call failed
    CREDIT = 7  # the callee may send this much more
    CANCEL = 8  # the answer is not wanted any more
    NOTE = 9  # one way, no answer
    NOTE_CREDIT = 10  # notes of one kind may use this much more
    PING = 11
    PONG = 12
    SWITCH = 13  # the last frame here; the lane goes on over another connection
    CERTIFICATE = 14  # the sender's certificate was renewed
    END = 15  # from the callee: the answer is complete


_KINDS = {int(kind): kind for kind in FrameKind}


class Flags:
    """Bits; plain numbers, since they are looked at for every message."""

    FIRST = 1
    LAST = 2
    END = 4  # nothing more of this call
    ABORT = 8  # forget the pieces of this message: there will be no more


def _refuse_tag(*_: Any) -> NoReturn:
    raise ValueError("tags are not used")


# Some tags build large or costly objects from few bytes. None has a use here, so all are refused;
# those with a decoder of their own have to be named.
_REFUSED_TAGS = dict.fromkeys(
    (
        *(0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100),
        *(256, 258, 260, 261, 1004, 43000, 55799),
    ),
    _refuse_tag,
)


def encode_body(value: Any) -> bytes:
    """CBOR of plain values: None, bool, int, float, str, bytes, list, dict with text keys."""
    return cbor2.dumps(value)


def decode_body(data: Buffer) -> Any:
    """The inverse, of hostile input. An empty body is None. Raises MalformedFrame."""
    if not data:
        return None
    try:
        if len(data) > MAX_ITEMS:  # no item has less than a byte
            check_items(data, MAX_ITEMS)
        return cbor2.loads(
            data,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
            semantic_decoders=_REFUSED_TAGS,
            tag_hook=_refuse_tag,
        )
    except (cbor2.CBORDecodeError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"body: {error}") from error


class Frame(NamedTuple):
    """One whole message as it was received. ``size`` counts body and payload, in bytes."""

    kind: FrameKind
    number: int
    body: Buffer
    payload: Buffer
    end: bool = False

    @property
    def size(self) -> int:
        return len(self.body) + len(self.payload)

    def detached(self) -> Frame:
        """The same to be kept: one that came in a single piece is a view that holds on to all that
        was read together with it."""
        if self.size > PIECE:
            return self
        return Frame(self.kind, self.number, bytes(self.body), bytes(self.payload), self.end)

    def own_payload(self) -> Buffer:
        """The payload to be kept, likewise."""
        return self.payload if self.size > PIECE else bytes(self.payload)


def encode(
    kind: FrameKind, number: int, body: bytes = b"", payload: Buffer = b"", *, end: bool = False
) -> Iterator[tuple[Buffer, ...]]:
    """Cut a message into frames. Each item is one frame as buffers to be written back to back.

    The payload is not copied. Raises ValueError for one that is too large.
    """
    view = memoryview(payload)
    if view.ndim != 1 or view.itemsize != 1:
        view = view.cast("B")
    if len(body) > MAX_BODY or len(view) > MAX_PAYLOAD:
        raise ValueError(
            f"message too large: body {len(body)} of {MAX_BODY}, payload {len(view)} of "
            f"{MAX_PAYLOAD} bytes"
        )
    final = Flags.LAST | Flags.END if end else Flags.LAST
    total = len(body) + len(view)
    start = min(PIECE, total)
    flags = Flags.FIRST | (final if start == total else 0)
    head = _HEADER.pack(_AFTER_LENGTH + _SIZES.size + start, kind, flags, number)
    sizes = _SIZES.pack(len(body), len(view))
    if len(body) >= start:
        yield (head + sizes + body[:start],)
    else:
        yield (head + sizes + body, view[: start - len(body)])
    while start < total:
        stop = min(start + PIECE, total)
        head = _HEADER.pack(
            _AFTER_LENGTH + stop - start, kind, final if stop == total else 0, number
        )
        if start < len(body):
            piece = body[start:stop]
            rest = view[: max(0, stop - len(body))]
            yield (head + piece, rest) if rest else (head + piece,)
        else:
            yield head, view[start - len(body) : stop - len(body)]
        start = stop


def encode_abort(kind: FrameKind, number: int) -> bytes:
    """Tells the other side that a message begun will not be finished."""
    return _HEADER.pack(_AFTER_LENGTH, kind, Flags.ABORT, number)


class Fragment(NamedTuple):
    """One frame as it stands in the stream of bytes."""

    kind: FrameKind
    flags: int
    number: int
    content: memoryview  # sizes (in a first one) and a piece


class FrameReader:
    """Bytes of one stream to fragments."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Fragment]:
        """The fragments completed by ``data``. Raises MalformedFrame, and is then useless."""
        if self._buffer:
            self._buffer += data
            source = bytes(self._buffer) if self._has_whole_frame() else None
            if source is None:
                return []
            self._buffer.clear()
        else:
            source = data
        view = memoryview(source)
        fragments = []
        position, total = 0, len(view)
        while total - position >= _HEADER.size:
            length, kind, flags, number = _HEADER.unpack_from(view, position)
            self._check_length(length)
            stop = position + 4 + length
            if stop > total:
                break
            known = _KINDS.get(kind)
            if known is None:
                raise MalformedFrame(f"unknown kind of frame: {kind}")
            fragments.append(Fragment(known, flags, number, view[position + _HEADER.size : stop]))
            position = stop
        if position < total:
            self._buffer += view[position:]
        return fragments

    def _has_whole_frame(self) -> bool:
        if len(self._buffer) < _HEADER.size:
            return False
        length = int.from_bytes(self._buffer[:4], "big")
        self._check_length(length)
        return len(self._buffer) >= 4 + length

    @staticmethod
    def _check_length(length: int) -> None:
        if not _AFTER_LENGTH <= length <= MAX_FRAME:
            raise MalformedFrame(f"a frame of {length} bytes")


class _Unfinished:
    __slots__ = ("body_size", "content", "total")

    def __init__(self, body_size: int, total: int) -> None:
        self.body_size = body_size
        self.total = total
        self.content = bytearray()


class Assembler:
    """Fragments of one lane to whole messages, across a change of the connection below."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[FrameKind, int], _Unfinished] = {}

    @property
    def held(self) -> int:
        """Bytes of unfinished messages."""
        return sum(len(message.content) for message in self._unfinished.values())

    def add(self, fragment: Fragment) -> Frame | None:
        """The message that ``fragment`` completes, if it does. Raises MalformedFrame."""
        key = fragment.kind, fragment.number
        flags = fragment.flags
        if flags & Flags.ABORT:
            self._unfinished.pop(key, None)
            return None
        last, end = bool(flags & Flags.LAST), bool(flags & Flags.END)
        if not flags & Flags.FIRST:
            return self._continue(key, fragment.content, last, end)
        content = fragment.content
        if len(content) < _SIZES.size or key in self._unfinished:
            raise MalformedFrame("a message begins in the wrong place")
        body_size, payload_size = _SIZES.unpack_from(content)
        if body_size > MAX_BODY or payload_size > MAX_PAYLOAD:
            raise MalformedFrame(f"a message of {body_size} + {payload_size} bytes")
        piece = content[_SIZES.size :]
        total = body_size + payload_size
        if last:
            if len(piece) != total:
                raise MalformedFrame("a message has the wrong size")
            return Frame(fragment.kind, fragment.number, piece[:body_size], piece[body_size:], end)
        if len(piece) >= total or len(self._unfinished) >= MAX_MESSAGES_IN_PIECES:
            raise MalformedFrame("too many messages in pieces, or pieces too many")
        under_way = sum(message.total for message in self._unfinished.values())
        if under_way + total > MAX_IN_PIECES:
            raise MalformedFrame(
                f"messages of {under_way + total} bytes in pieces at once, where at most "
                f"{MAX_IN_PIECES} are allowed"
            )
        unfinished = self._unfinished[key] = _Unfinished(body_size, total)
        unfinished.content += piece
        return None

    def _continue(
        self, key: tuple[FrameKind, int], piece: memoryview, last: bool, end: bool
    ) -> Frame | None:
        unfinished = self._unfinished.get(key)
        if unfinished is None:
            raise MalformedFrame("a piece of a message that was not begun")
        if len(unfinished.content) + len(piece) > unfinished.total:
            raise MalformedFrame("a message has the wrong size")
        unfinished.content += piece
        if not last:
            return None
        del self._unfinished[key]
        if len(unfinished.content) != unfinished.total:
            raise MalformedFrame("a message has the wrong size")
        view = memoryview(unfinished.content)
        size = unfinished.body_size
        return Frame(key[0], key[1], view[:size], view[size:], end)
