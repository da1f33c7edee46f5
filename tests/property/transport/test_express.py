"""Packets that are built without the engine's builder: the peer's engine takes them as its own."""

from __future__ import annotations

import datetime
import random
from collections import defaultdict
from typing import Any

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import StreamDataReceived
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.transport.quic import core
from mesh.transport.quic.core import MeshQuic, Tuning
from mesh.transport.quic.express import express

STEP = 0.002  # s that a datagram is under way
STREAMS = 3  # that each side has opened


def configurations() -> tuple[QuicConfiguration, QuicConfiguration]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )

    def made(is_client: bool) -> QuicConfiguration:
        made = QuicConfiguration(is_client=is_client, alpn_protocols=["test"], verify_mode=0)
        made.certificate, made.private_key = certificate, key
        return made

    return made(True), made(False)


CLIENT, SERVER = configurations()


class Pair:
    """Two engines and a wire between them, in virtual time."""

    def __init__(self) -> None:
        self.now = 1.0
        self.client = self._engine(CLIENT)
        self.client.connect(("server", 1), now=self.now)
        self.server = self._engine(
            SERVER, original_destination_connection_id=self.client._peer_cid.cid
        )
        self.received: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
        for _ in range(20):
            self.step()
        assert self.client._handshake_confirmed and self.server._handshake_confirmed
        for number, side in enumerate(self.sides):
            for stream in range(STREAMS):  # lower ones that are not used would count as finished
                side._get_or_create_stream_for_send(4 * stream + number)

    def _engine(self, configuration: QuicConfiguration, **kwargs: Any) -> MeshQuic:
        return MeshQuic(
            configuration=configuration, tuning=Tuning(), clock=lambda: self.now, **kwargs
        )

    @property
    def sides(self) -> tuple[MeshQuic, MeshQuic]:
        return self.client, self.server

    def step(self, lost: Any = lambda: False) -> int:
        """Each side sends what it has, which arrives unless it is lost. Returns how much it was."""
        sent = [s.datagrams_to_send(self.now) if s._network_paths else [] for s in self.sides]
        self.now += STEP
        for number, (side, datagrams) in enumerate(zip(self.sides, reversed(sent), strict=True)):
            address = ("server", 1) if side is self.client else ("client", 2)
            for data, _ in datagrams:
                if not lost():
                    side.receive_datagram(data, address, self.now)
            while (event := side.next_event()) is not None:
                if isinstance(event, StreamDataReceived):
                    self.received[number, event.stream_id] += event.data
                    side.consumed(event.stream_id, len(event.data))
            timer = side.get_timer()
            if timer is not None and timer <= self.now:
                side.handle_timer(self.now)
        return sum(map(len, sent))

    def settle(self) -> None:
        """Until nothing is sent for longer than an acknowledgement waits."""
        quiet = 0
        while quiet < 20:
            quiet = 0 if self.step() else quiet + 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that an engine was asked: was it an express packet?"""
    taken: list[bool] = []

    def counting(engine: MeshQuic, now: float) -> Any:
        found = express(engine, now)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(core, "express", counting)
    return taken


def test_a_message_and_its_answer_are_express(counted: list[bool]) -> None:
    pair = Pair()
    pair.client.send_stream_data(0, b"begin")
    pair.settle()
    counted.clear()
    for number in range(50):
        # Acknowledgements ride on what is sent anyway, so one datagram is all.
        pair.sides[number % 2].send_stream_data(0, bytes([number]) * 700)
        assert pair.step() == 1, number
    assert sum(counted) > 45  # now and then the engine has something else to say
    assert pair.received[1, 0] == b"begin" + b"".join(bytes([n]) * 700 for n in range(0, 50, 2))
    assert pair.received[0, 0] == b"".join(bytes([n]) * 700 for n in range(1, 50, 2))


def test_nothing_follows_a_reset(counted: list[bool]) -> None:
    """What was written and not sent yet stays in the engine's buffer for good."""
    pair = Pair()
    pair.client.send_stream_data(0, b"never sent")
    pair.client.reset_stream(0, 7)
    pair.settle()
    assert not any(counted) and not pair.received[1, 0]
    assert all(side._close_event is None for side in pair.sides)
    pair.client.send_stream_data(4, b"the others go on")
    pair.settle()
    assert pair.received[1, 4] == b"the others go on"


writes = st.tuples(
    st.integers(0, 1),  # side
    st.integers(0, STREAMS - 1),
    st.one_of(st.integers(1, 1100), st.integers(1, 9000)),  # bytes
    st.sampled_from(["", "", "", "", "end", "reset"]),  # of the stream, after that
    st.integers(0, 3),  # steps until the next write
)


@settings(max_examples=100)
@given(plan=st.lists(writes, max_size=30), seed=st.integers(0, 1000), loss=st.sampled_from((0, 3)))
def test_all_that_is_written_arrives(
    plan: list[tuple[int, int, int, str, int]], seed: int, loss: int
) -> None:
    chance = random.Random(seed)
    pair = Pair()
    written: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
    over: dict[tuple[int, int], str] = {}

    def lost() -> bool:
        return chance.randrange(10) < loss

    for side, stream, size, after, steps in plan:
        number = 4 * stream + side
        key = 1 - side, number
        if key not in over:
            data = chance.randbytes(size)
            pair.sides[side].send_stream_data(number, data, end_stream=after == "end")
            written[key] += data
        if after and key not in over:
            over[key] = after
            if after == "reset":
                pair.sides[side].reset_stream(number, 7)
        for _ in range(steps):
            pair.step(lost)

    def all_is_there() -> bool:
        return all(pair.received[k] == w for k, w in written.items() if over.get(k) != "reset")

    for _ in range(2000):
        pair.step()
        if all_is_there():
            break
    assert all_is_there()
    pair.settle()
    assert all(whole.startswith(pair.received[key]) for key, whole in written.items())
    assert all(side._close_event is None for side in pair.sides)
