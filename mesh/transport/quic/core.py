"""aioquic's protocol engine with the settings and repairs that a mesh of long connections needs.

aioquic is the QUIC state machine (bytes and timers in, bytes and events out). What is changed here,
each for a measured reason:

* Receive windows follow what the application has *consumed*. aioquic doubles a window as soon as
  data arrives, so a reader that sleeps is no brake and memory grows without bound.
* 4096 open streams per direction instead of 128.
* No pacer, and no empty packets built to find out that nothing is left (see ``sending``).
* An acknowledgement rides on data that is sent anyway, and goes out alone when a burst has ended or
  a short delay has passed; aioquic sends one a millisecond after every packet.
* Streams have a priority. Without one a bulk transfer takes turns with everything else.
* The datagram size is probed per path (see ``mtu``).
* The back-off of probe timeouts is bounded, so a link comes back soon after a path was silent.

Private attributes of aioquic are used throughout; the version is pinned exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioquic import tls
from aioquic.quic import connection as aioquic_connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicPacketBuilderStop
from aioquic.quic.stream import QuicStream

from mesh.transport.quic.congestion import LossMeter, LossyControl, replace_controller
from mesh.transport.quic.express import express
from mesh.transport.quic.mtu import PathMtu
from mesh.transport.quic.sending import Gate, has_something_to_send
from mesh.transport.quic.streamtable import StreamTable, is_active

Buffer = bytes | bytearray | memoryview

DEFAULT_PRIORITY = 1
_ACK_AFTER_DATAGRAMS = 2  # RFC 9000, section 13.2.2


@dataclass(frozen=True)
class Tuning:
    """Limits of one connection. Sizes in bytes, times in seconds."""

    stream_window: int = 4 << 20  # unread bytes that one stream may hold
    connection_window: int = 32 << 20  # and all streams of one connection together
    max_streams: int = 4096  # open at once, per direction
    initial_packets: int = 32  # first congestion window, in datagrams
    ack_delay: float = 0.008  # an acknowledgement waits this long for data to ride on
    longest_probe_wait: float = 1.0  # bound of the probe timeout's exponential back-off
    congestion: str = "auto"  # cubic, lossy, or auto: chosen by measured loss


class MeshQuic(QuicConnection):
    """One QUIC connection without I/O. ``clock`` gives the readings that are passed as ``now``."""

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        tuning: Tuning,
        clock: Callable[[], float],
        **kwargs: Any,
    ) -> None:
        super().__init__(configuration=configuration, **kwargs)
        self.mtu: PathMtu | None = None  # set once the path is known
        self._loss_at: float | None
        self.datagrams_received = 0
        self.last_received = clock()  # time of the last datagram from the peer
        self.loss_meter = LossMeter(adaptive=tuning.congestion == "auto")
        self._tuning = tuning
        self._clock = clock
        self._consumed: dict[int, int] = {}
        self._consumed_total = 0
        self._priorities: dict[int, int] = {}
        self._queue: list[QuicStream] = []
        self._streams = StreamTable()
        self._look_at_all = False  # a stream may have become active by what the peer sent
        self._unacknowledged = 0
        self._has_written = False
        self._local_max_streams_bidi.value = tuning.max_streams
        self._local_max_streams_bidi.sent = tuning.max_streams
        self._gate = self._loss._pacer = Gate(self)
        self._loss._cc.congestion_window = tuning.initial_packets * self._max_datagram_size
        self._ack_delay = tuning.ack_delay

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if not self._is_client:
            # libp2p authenticates both sides; the engine offers this only as a private switch.
            self.tls._request_client_certificate = True

    # -- order of streams ---------------------------------------------------------------------

    def set_priority(self, stream_id: int, priority: int) -> None:
        """Serve this stream before all with a higher number and after all with a lower one."""
        self._priorities[stream_id] = priority

    @property
    def _streams_queue(self) -> list[QuicStream]:
        """Active streams in the order in which a packet is filled; aioquic reads it afresh for
        every packet."""
        if self._priorities and len(self._queue) > 1:
            priorities = self._priorities
            self._queue.sort(key=lambda s: priorities.get(s.stream_id, DEFAULT_PRIORITY))
        return self._queue

    @_streams_queue.setter
    def _streams_queue(self, queue: list[QuicStream]) -> None:
        self._queue = queue

    def _activate(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream not in self._queue:
            self._queue.append(stream)

    def _activate_all(self) -> None:
        """Find streams that acknowledgements, losses or the peer have given something to do."""
        self._look_at_all = False
        queued = set(self._queue)
        self._queue += [s for s in self._streams.everyone() if is_active(s) and s not in queued]

    def reset_stream(self, stream_id: int, error_code: int) -> None:
        super().reset_stream(stream_id, error_code)
        self._activate(stream_id)

    def stop_stream(self, stream_id: int, error_code: int) -> None:
        super().stop_stream(stream_id, error_code)
        self._activate(stream_id)

    # -- flow control -------------------------------------------------------------------------

    @property
    def data_window(self) -> int:
        """Unread bytes that all streams may hold."""
        return self._tuning.connection_window

    @property
    def wanted_max_data(self) -> int:
        """How many bytes the peer should be allowed to have sent, in all."""
        return self._consumed_total + self._tuning.connection_window

    def consumed(self, stream_id: int, count: int) -> bool:
        """The application has taken ``count`` bytes. True when the peer should be told now."""
        total = self._consumed.get(stream_id, 0) + count
        self._consumed[stream_id] = total
        self._consumed_total += count
        tuning = self._tuning
        stream = self._streams.get(stream_id)
        stream_due = (
            stream is not None
            and not stream.receiver.is_finished
            and total + tuning.stream_window - stream.max_stream_data_local_sent
            >= tuning.stream_window // 2
        )
        connection_due = self.wanted_max_data - self._local_max_data.sent >= self.data_window // 2
        if stream_due:
            self._streams.limits_due[stream_id] = stream
        return bool(stream_due or connection_due)

    def forget_stream(self, stream_id: int) -> None:
        """Drop what is kept here about a stream that the application is done with."""
        self._consumed.pop(stream_id, None)
        self._priorities.pop(stream_id, None)

    def _on_max_stream_data_delivery(self, delivery: Any, stream: QuicStream) -> None:
        super()._on_max_stream_data_delivery(delivery, stream)
        if delivery is not QuicDeliveryState.ACKED:
            self._streams.limits_due[stream.stream_id] = stream

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: Any, stream: QuicStream
    ) -> None:
        due = self._streams.limits_due
        if stream.receiver.is_finished:
            due.pop(stream.stream_id, None)
            return
        window = self._tuning.stream_window
        wanted = self._consumed.get(stream.stream_id, 0) + window
        if wanted - stream.max_stream_data_local >= window // 4:
            stream.max_stream_data_local = wanted
        if stream.max_stream_data_local_sent != stream.max_stream_data_local:
            buffer = builder.start_frame(
                QuicFrameType.MAX_STREAM_DATA,
                capacity=aioquic_connection.MAX_STREAM_DATA_FRAME_CAPACITY,
                handler=self._on_max_stream_data_delivery,
                handler_args=(stream,),
            )
            buffer.push_uint_var(stream.stream_id)
            buffer.push_uint_var(stream.max_stream_data_local)
            stream.max_stream_data_local_sent = stream.max_stream_data_local
        due.pop(stream.stream_id, None)

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: Any) -> None:
        limit = self._local_max_data
        if self.wanted_max_data - limit.value >= self.data_window // 4:
            limit.value = self.wanted_max_data
        used, limit.used = limit.used, 0  # keeps the parent from doubling the window
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    # -- acknowledgements ---------------------------------------------------------------------

    def receive_datagram(self, data: bytes, addr: Any, now: float) -> None:
        space = self._spaces.get(tls.Epoch.ONE_RTT)
        pending = None
        if space is not None:
            pending, space.ack_at = space.ack_at, None
        super().receive_datagram(data, addr, now)
        self._look_at_all = True
        self.datagrams_received += 1
        self.last_received = now
        if space is None:
            return
        if space.ack_at is not None:
            # It wants an acknowledgement. Ones that do not must not count: two peers would answer
            # each other's acknowledgements for ever.
            self._unacknowledged += 1
        if pending is not None and not space.discarded:
            space.ack_at = pending

    def send_stream_data(self, stream_id: int, data: Buffer, end_stream: bool = False) -> None:
        super().send_stream_data(stream_id, data, end_stream)
        self._activate(stream_id)
        self._has_written = True

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Any]]:
        space = self._spaces.get(tls.Epoch.ONE_RTT)
        if space is not None and space.ack_at is not None:
            if self._has_written or self._unacknowledged >= _ACK_AFTER_DATAGRAMS:
                space.ack_at = min(space.ack_at, now)
            if space.ack_at <= now:
                self._unacknowledged = 0
        self._has_written = False
        if self._look_at_all:
            self._activate_all()
        if (datagram := express(self, now)) is not None:
            self._queue.clear()
            return [datagram]
        if not has_something_to_send(self, now):
            return []
        self._gate.sent = False
        datagrams: list[tuple[bytes, Any]] = super().datagrams_to_send(now)
        self._pacing_at = None  # that was the gate's
        self._queue = [stream for stream in self._queue if is_active(stream)]
        if self.mtu is not None and self._handshake_confirmed:
            size = self.mtu.next_probe(now)
            if size is not None:
                datagrams += self._size_probe(size, now)
        return datagrams

    # -- timers and size of datagrams ---------------------------------------------------------

    def get_timer(self) -> float | None:
        timer: float | None = super().get_timer()
        if self._loss._pto_count > 0 and self._state is QuicConnectionState.CONNECTED:
            # The engine doubles its wait with every probe, for minutes on end.
            base = self._loss.get_probe_timeout()
            bound = max(base, self._tuning.longest_probe_wait)
            if base * 2**self._loss._pto_count > bound and self._loss._get_loss_space() is None:
                sooner = self._loss._time_of_last_sent_ack_eliciting_packet + bound
                if self._loss_at is not None and sooner < self._loss_at:
                    self._loss_at = sooner
                    timer = sooner if timer is None else min(timer, sooner)
        return timer

    def handle_timer(self, now: float) -> None:
        super().handle_timer(now)
        self._look_at_all = True
        if self._loss._pto_count >= 3 and self.mtu is not None and self.mtu.black_hole(now):
            self._use_datagram_size(self.mtu.size)

    def _size_probe(self, size: int, now: float) -> list[tuple[bytes, Any]]:
        """A padded PING of exactly ``size`` bytes, outside congestion control (RFC 8899, 3)."""
        builder = QuicPacketBuilder(
            host_cid=self.host_cid,
            is_client=self._is_client,
            max_datagram_size=size,
            packet_number=self._packet_number,
            peer_cid=self._peer_cid.cid,
            spin_bit=self._spin_bit,
            version=self._version,
        )
        try:
            builder.start_packet(QuicPacketType.ONE_RTT, self._cryptos[tls.Epoch.ONE_RTT])
            builder.start_frame(
                QuicFrameType.PING, handler=self._on_size_probe, handler_args=(size,)
            )
        except QuicPacketBuilderStop:
            return []
        builder._packet.in_flight = False
        # Without this the probe timeout would count from older data and declare the probe lost.
        self._loss._time_of_last_sent_ack_eliciting_packet = now
        builder._buffer.push_bytes(bytes(builder.remaining_buffer_space))
        datagrams: list[tuple[bytes, Any]] = self._flush_builder(
            builder=builder,
            network_path=self._network_paths[0],
            peer_cid=self._peer_cid.cid,
            now=now,
        )
        return datagrams

    def _on_size_probe(self, delivery: QuicDeliveryState, size: int) -> None:
        if self.mtu is None:
            return
        if delivery is QuicDeliveryState.ACKED:
            if self.mtu.acknowledged(size):
                self._use_datagram_size(self.mtu.size)
        else:
            self.mtu.lost(size, self._clock())

    def start_path(self, mtu: PathMtu) -> None:
        """A new path: from here on ``mtu`` says how large datagrams may be."""
        self.mtu = mtu
        self._use_datagram_size(mtu.size)

    def _use_datagram_size(self, size: int) -> None:
        self._max_datagram_size = size
        controller = self._loss._cc
        controller._max_datagram_size = size
        if hasattr(controller, "additive_increase_factor"):
            controller.additive_increase_factor = size  # cubic's step is one datagram
        if controller.ssthresh is None:  # still in slow start: the first window is in datagrams
            first = self._tuning.initial_packets * size
            controller.congestion_window = max(controller.congestion_window, first)

    # -- congestion ---------------------------------------------------------------------------

    @property
    def packets(self) -> tuple[int, int]:
        """Packets sent and found lost since the connection began."""
        return self._packet_number, self._loss._cc.packets_lost

    @property
    def datagram_size(self) -> int:
        """Bytes in the largest datagram sent on the current path."""
        return int(self._max_datagram_size)

    @property
    def controller(self) -> str:
        """The congestion controller in use: ``cubic`` or ``lossy``."""
        return "lossy" if isinstance(self._loss._cc, LossyControl) else "cubic"

    def review_congestion(self) -> None:
        """Let measured loss choose the controller (only when it was left to choose)."""
        recovery = self._loss
        wanted = self.loss_meter.choice(
            self._packet_number,
            recovery._cc.packets_lost,
            recovery._rtt_smoothed,
            recovery._rtt_min,
        )
        if wanted is not None:
            recovery._cc = replace_controller(recovery._cc, wanted, self._max_datagram_size)
