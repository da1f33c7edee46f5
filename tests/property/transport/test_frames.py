"""Frames survive any cutting of the stream, and nothing that a peer sends does harm."""

from __future__ import annotations

import itertools
from typing import Any, cast

import cbor2
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.transport.credit import ReceiveWindow, SendCredit, cost
from mesh.transport.errors import MalformedFrame
from mesh.transport.frames import (
    MAX_BODY,
    MAX_DEPTH,
    MAX_FRAME,
    MAX_IN_PIECES,
    MAX_ITEMS,
    MAX_MESSAGES_IN_PIECES,
    MAX_PAYLOAD,
    PIECE,
    Assembler,
    Frame,
    FrameKind,
    FrameReader,
    decode_body,
    encode,
    encode_abort,
    encode_body,
)
from mesh.transport.lanes import Lane, LanePort
from mesh.transport.notes import MAX_UNREAD, NoteDesk

kinds = st.sampled_from([FrameKind.ITEM, FrameKind.CALL, FrameKind.NOTE])
numbers = st.integers(0, 2**64 - 1)
sizes = st.one_of(st.integers(0, 300), st.integers(PIECE - 40, PIECE + 40), st.integers(0, 400_000))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def wire(*messages: tuple[Any, ...]) -> bytes:
    return b"".join(bytes(part) for m in messages for frame in encode(*m) for part in frame)


def receive(data: bytes, cuts: list[int]) -> list[Frame]:
    reader, assembler = FrameReader(), Assembler()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    frames = []
    for start, stop in itertools.pairwise(edges):
        for fragment in reader.feed(data[start:stop]):
            frame = assembler.add(fragment)
            if frame is not None:
                frames.append(frame)
    assert assembler.held == 0
    return frames


@given(plain)
def test_body_round_trip(value: Any) -> None:
    assert decode_body(encode_body(value)) == value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(kinds, numbers, sizes, sizes), max_size=4), st.lists(st.integers(0)))
def test_messages_survive_any_cutting(
    shapes: list[tuple[FrameKind, int, int, int]], cuts: list[int]
) -> None:
    messages = [
        (kind, number, bytes([index + 1]) * body, bytes([index + 101]) * payload)
        for index, (kind, number, body, payload) in enumerate(shapes)
    ]
    frames = receive(wire(*messages), cuts[:20])
    assert [(f.kind, f.number, bytes(f.body), bytes(f.payload)) for f in frames] == messages


def test_pieces_of_several_messages_interleave() -> None:
    payloads = [bytes([n]) * (PIECE * 3) for n in range(MAX_MESSAGES_IN_PIECES)]
    cut = [list(encode(FrameKind.ITEM, n, b"", p)) for n, p in enumerate(payloads)]
    data = b"".join(bytes(part) for turn in zip(*cut, strict=True) for f in turn for part in f)
    frames = receive(data, [])
    assert [bytes(f.payload) for f in sorted(frames, key=lambda f: f.number)] == payloads


def test_messages_in_pieces_are_bounded_together() -> None:
    assembler = Assembler()

    def begin(number: int, size: int) -> None:
        first = next(encode(FrameKind.ITEM, number, b"", bytes(size)))
        (fragment,) = FrameReader().feed(b"".join(map(bytes, first)))
        assert assembler.add(fragment) is None

    begin(1, MAX_PAYLOAD)
    begin(2, MAX_BODY)
    with pytest.raises(MalformedFrame, match=f"at most {MAX_IN_PIECES} are allowed"):
        begin(3, PIECE + 1)


def test_a_sender_keeps_to_what_is_taken_in_pieces() -> None:
    payloads = [bytes([n]) * (12 << 20) for n in range(6)]
    reader, assembler = FrameReader(), Assembler()
    came: list[Frame] = []

    class Stream:
        def has_room(self) -> bool:
            return False  # so that every message waits for its turn with every piece

        async def wait_room(self) -> None:
            await trio.lowlevel.checkpoint()

        def write_now(self, parts: Any) -> None:
            for fragment in reader.feed(b"".join(parts)):
                frame = assembler.add(fragment)
                if frame is not None:
                    came.append(frame)

    async def main() -> None:
        port = LanePort(Lane.BULK, cast(Any, Stream()))
        async with trio.open_nursery() as nursery:
            for number, payload in enumerate(payloads):
                nursery.start_soon(port.send, FrameKind.ITEM, number, b"", payload)

    trio.run(main)
    assert [bytes(f.payload) for f in sorted(came, key=lambda f: f.number)] == payloads


def test_aborted_message_leaves_nothing() -> None:
    first, *_ = encode(FrameKind.ITEM, 7, b"", bytes(PIECE * 2))
    reader, assembler = FrameReader(), Assembler()
    data = b"".join(map(bytes, first)) + encode_abort(FrameKind.ITEM, 7)
    assert [assembler.add(f) for f in reader.feed(data)] == [None, None]
    assert assembler.held == 0


@given(st.binary(max_size=200))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    reader, assembler = FrameReader(), Assembler()
    try:
        for fragment in reader.feed(data):
            frame = assembler.add(fragment)
            if frame is not None:
                decode_body(frame.body)
    except MalformedFrame:
        pass
    assert assembler.held <= len(data)


@settings(max_examples=200)
@given(st.binary(max_size=120), st.integers(0, 60))
def test_changed_frames_do_no_harm(noise: bytes, at: int) -> None:
    data = bytearray(wire((FrameKind.CALL, 1, encode_body({"k": "x", "b": [1, 2, 3]}), b"abc")))
    data[at : at + len(noise)] = noise
    reader, assembler = FrameReader(), Assembler()
    try:
        for fragment in reader.feed(bytes(data)):
            frame = assembler.add(fragment)
            if frame is not None:
                decode_body(frame.body)
    except MalformedFrame:
        pass


def test_size_is_refused_before_it_is_read() -> None:
    huge = (MAX_FRAME + 1).to_bytes(4, "big") + bytes(10)
    with pytest.raises(MalformedFrame):
        FrameReader().feed(huge)


def test_announced_sizes_are_bounded() -> None:
    frame = bytearray(wire((FrameKind.ITEM, 1, b"", b"")))
    frame[14:18] = (MAX_BODY + 1).to_bytes(4, "big")
    (fragment,) = FrameReader().feed(bytes(frame))
    with pytest.raises(MalformedFrame):
        Assembler().add(fragment)


def test_nothing_is_held_for_what_is_only_announced() -> None:
    first, *_ = encode(FrameKind.ITEM, 1, b"", bytes(PIECE + 1))
    assembler = Assembler()
    (fragment,) = FrameReader().feed(b"".join(map(bytes, first)))
    assembler.add(fragment)
    assert assembler.held == PIECE


@pytest.mark.parametrize(
    "data",
    [
        b"\x81" * (MAX_DEPTH + 1) + b"\x00",  # too deep
        bytes.fromhex("9b00000000ffffffff"),  # a list of 4 billion
        bytes.fromhex("5b00000000ffffffff"),  # a string of 4 GB
        bytes.fromhex("c11a514b67b0"),  # a date
        bytes.fromhex("c24a01000000000000000000"),  # a big number
        bytes.fromhex("d81c80"),  # a shared reference
        bytes.fromhex("d8c800"),  # an unknown tag
        bytes.fromhex("9fff"),  # indefinite length
        bytes.fromhex("a2616101616102"),  # the same key twice
        bytes.fromhex("a10101"),  # a key that is no text
        bytes.fromhex("ff"),
        b"\x9a" + MAX_ITEMS.to_bytes(4, "big") + b"\x80" * MAX_ITEMS,  # 64 MB of empty lists
    ],
)
def test_bodies_that_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_body(data)


@given(st.binary(max_size=64))
def test_random_bodies_do_no_harm(data: bytes) -> None:
    try:
        decode_body(data)
    except MalformedFrame:
        return
    assert not data or cbor2.dumps(cbor2.loads(data)) is not None


@given(st.lists(st.integers(0, 900_000), max_size=60), st.integers(1, 1 << 20))
def test_credit_never_blocks_and_never_overruns(messages: list[int], window: int) -> None:
    """A sender that keeps to its credit is never taken for a cheat, and a reader that reads
    always sets it free again."""
    sender, reader = SendCredit(window), ReceiveWindow(window)
    waiting: list[int] = []
    for size in messages:
        while not sender.may_send:
            grant = reader.consumed(waiting.pop(0))
            if grant:
                sender.grant(grant)
        sender.spend(size)
        reader.received(size)
        waiting.append(size)
        assert sum(map(cost, waiting[:-1])) <= window + window // 2 + cost(900_000)


def test_message_without_credit_is_refused() -> None:
    reader = ReceiveWindow(1000)
    reader.received(1000)
    with pytest.raises(MalformedFrame):
        reader.received(1)


@pytest.mark.parametrize("amount", [0, -1, 1.5, None, True, "1", 1 << 60])
def test_senseless_grants_are_refused(amount: object) -> None:
    with pytest.raises(MalformedFrame):
        SendCredit().grant(amount)


def test_what_nobody_reads_is_bounded_over_all_kinds() -> None:
    class Hearing:
        def tell(self, *_: object) -> None:
            """Of grants of credit."""

    desk = NoteDesk(Hearing())  # type: ignore[arg-type]
    payload = memoryview(bytes(MAX_UNREAD // 2))
    desk.put(Frame(FrameKind.NOTE, 1, encode_body({"k": "one"}), payload))
    with pytest.raises(MalformedFrame):
        desk.put(Frame(FrameKind.NOTE, 2, encode_body({"k": "two"}), payload))
    notes = desk._of("one")
    taken = notes.take_now()
    assert taken is not None
    assert (taken.body, len(taken.payload)) == (None, MAX_UNREAD // 2)
    desk.put(Frame(FrameKind.NOTE, 3, encode_body({"k": "two"}), payload))
