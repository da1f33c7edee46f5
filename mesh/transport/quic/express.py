"""The most frequent packet, built directly: a piece of one stream, perhaps an acknowledgement.

aioquic's packet builder serves every kind of packet, and takes a third of the time that a token
spends between two stages of a chain. This gives the same bytes for the case that nothing else is to
be sent; for all others it leaves the work to the engine. It can go when the engine is as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioquic import tls
from aioquic.buffer import UINT_VAR_MAX_SIZE, Buffer
from aioquic.quic.packet import PACKET_FIXED_BIT, QuicFrameType, QuicPacketType, push_ack_frame
from aioquic.quic.packet_builder import PACKET_NUMBER_SEND_SIZE, QuicSentPacket

from mesh.transport.quic.sending import owes_more_than_streams

if TYPE_CHECKING:
    from aioquic.quic.stream import QuicStream

    from mesh.transport.quic.core import MeshQuic

# Bytes beside the data: header with connection id, tag, and an ACK and a STREAM frame, whose four
# and three numbers may each have the greatest length.
_OVERHEAD = 64 + 8 * UINT_VAR_MAX_SIZE
_OFFSET, _LENGTH = 4, 2  # bits in the type of a STREAM frame: it has them


def express(engine: MeshQuic, now: float) -> tuple[bytes, Any] | None:
    """The datagram with all that ``engine`` has to send at ``now``; None: it has to build it."""
    queue = engine._streams_queue
    if len(queue) != 1 or not _is_piece(engine, stream := queue[0]):
        return None
    space = engine._spaces[tls.Epoch.ONE_RTT]
    acknowledges = space.ack_at is not None and space.ack_at <= now
    if (acknowledges and len(space.ack_queue) != 1) or owes_more_than_streams(engine, now):
        return None
    piece = stream.sender._pending[0]
    frames = Buffer(len(piece) + _OVERHEAD)
    handlers: list[tuple[Any, Any]] = []
    if acknowledges:
        delay = int((now - space.largest_received_time) * 1e6) >> engine._local_ack_delay_exponent
        frames.push_uint_var(QuicFrameType.ACK)
        push_ack_frame(frames, space.ack_queue, delay, _OVERHEAD)
        handlers.append((engine._on_ack_delivery, (space, space.largest_received_packet)))
        space.ack_at = None
    _push_piece(frames, stream, piece)
    handlers.append((stream.sender.on_data_delivery, (piece.start, piece.stop, False)))
    engine._remote_max_data_used += max(0, piece.stop - stream.sender.highest_offset)
    stream.sender.highest_offset = max(stream.sender.highest_offset, piece.stop)
    stream.sender._pending.subtract(piece.start, piece.stop)
    return _sealed(engine, now, space, frames.data, handlers)


def _is_piece(engine: MeshQuic, stream: QuicStream) -> bool:
    """Whether what the stream has to send is one piece that may go, and fits, into one datagram."""
    sender = stream.sender
    if (
        sender.buffer_is_empty
        or len(sender._pending) != 1
        or sender._buffer_fin is not None
        or sender.reset_pending
        or stream.receiver.stop_pending
        or stream.is_blocked
        or engine._cryptos[tls.Epoch.ONE_RTT]._update_key_requested
    ):
        return False
    piece = sender._pending[0]
    size = len(piece) + _OVERHEAD
    fresh = piece.stop - sender.highest_offset
    return bool(
        size <= engine._max_datagram_size
        and size <= engine._loss.congestion_window - engine._loss.bytes_in_flight
        and piece.stop <= stream.max_stream_data_remote
        and fresh <= engine._remote_max_data - engine._remote_max_data_used
    )


def _push_piece(frames: Buffer, stream: QuicStream, piece: range) -> None:
    """A STREAM frame (RFC 9000, section 19.8)."""
    sender = stream.sender
    kind = QuicFrameType.STREAM_BASE | _LENGTH | (_OFFSET if piece.start else 0)
    frames.push_uint_var(kind)
    frames.push_uint_var(stream.stream_id)
    if piece.start:
        frames.push_uint_var(piece.start)
    frames.push_uint_var(len(piece))
    begin = piece.start - sender._buffer_start
    frames.push_bytes(bytes(sender._buffer[begin : begin + len(piece)]))


def _sealed(
    engine: MeshQuic, now: float, space: Any, frames: bytes, handlers: list[tuple[Any, Any]]
) -> tuple[bytes, Any]:
    """A packet of these frames with a short header (RFC 9000, section 17.3.1), counted as sent."""
    crypto = engine._cryptos[tls.Epoch.ONE_RTT]
    number = engine._packet_number
    first = (
        PACKET_FIXED_BIT
        | (engine._spin_bit << 5)
        | (crypto.key_phase << 2)
        | (PACKET_NUMBER_SEND_SIZE - 1)
    )
    short = (number & 0xFFFF).to_bytes(PACKET_NUMBER_SEND_SIZE, "big")
    header = bytes((first,)) + engine._peer_cid.cid + short
    datagram = crypto.encrypt_packet(header, frames, number)
    packet = QuicSentPacket(
        epoch=tls.Epoch.ONE_RTT,
        in_flight=True,
        is_ack_eliciting=True,
        is_crypto_packet=False,
        packet_number=number,
        packet_type=QuicPacketType.ONE_RTT,
        sent_time=now,
        sent_bytes=len(datagram),
        delivery_handlers=handlers,
    )
    engine._packet_number = number + 1
    engine._loss.on_packet_sent(packet=packet, space=space)
    if not engine._ack_eliciting_sent_since_receipt:  # as the engine does (RFC 9000, 10.1)
        engine._ack_eliciting_sent_since_receipt = True
        engine._close_at = now + engine._idle_timeout()
    path = engine._network_paths[0]
    path.bytes_sent += len(datagram)
    return datagram, path.addr
