"""Whether the engine has anything to send, found out at a tenth of what asking it costs.

aioquic finds out by building a packet and seeing that it is empty: after everything that has come
in, and once more after every packet that it sends. The list here is that of its
``QuicConnection._write_application``, item by item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioquic import tls

from mesh.transport.quic.streamtable import is_active

if TYPE_CHECKING:
    from mesh.transport.quic.core import MeshQuic


def has_something_to_send(engine: MeshQuic, now: float) -> bool:
    """True also where only the engine itself can tell."""
    space = engine._spaces.get(tls.Epoch.ONE_RTT)
    return (
        any(is_active(stream) for stream in engine._streams_queue)
        or (space is not None and space.ack_at is not None and space.ack_at <= now)
        or owes_more_than_streams(engine, now)
    )


def owes_more_than_streams(engine: MeshQuic, now: float) -> bool:
    """Whether there may be something beside streams' data and an acknowledgement."""
    if not engine._handshake_confirmed or engine._close_pending:
        return True
    path = engine._network_paths[0]
    return bool(
        len(engine._network_paths) > 1
        or not path.is_validated
        or path.remote_challenges
        or engine._handshake_done_pending
        or engine._retire_connection_ids
        or engine._streams_blocked_pending
        or engine._streams.limits_due
        or engine._ping_pending
        or engine._probe_pending
        or engine._datagrams_pending
        or not engine._crypto_streams[tls.Epoch.ONE_RTT].sender.buffer_is_empty
        or not all(host_cid.was_sent for host_cid in engine._host_cids)
        or _owes_connection_limits(engine)
        or (engine.mtu is not None and engine.mtu.wants_probe(now))
        or (engine._is_client and engine._remote_preferred_address is not None)
    )


def _owes_connection_limits(engine: MeshQuic) -> bool:
    data = engine._local_max_data
    if engine.wanted_max_data - data.value >= engine.data_window // 4 or data.value != data.sent:
        return True
    # More streams are told of when the peer has fewer left than the telling would grant it.
    return any(
        limit.value != limit.sent and limit.sent - limit.used < limit.value - limit.sent
        for limit in (engine._local_max_streams_bidi, engine._local_max_streams_uni)
    )


class Gate:
    """Takes the place of aioquic's pacer, which the engine asks before every packet when it may
    send it. Never later, as long as there is something to send: a pacer costs a timer per packet
    and holds a 10 KB reply back for milliseconds."""

    def __init__(self, engine: MeshQuic) -> None:
        self._engine = engine
        self.sent = False  # a packet, since the engine was last asked for its datagrams

    def next_send_time(self, now: float) -> float | None:
        return now if self.sent and not has_something_to_send(self._engine, now) else None

    def update_after_send(self, now: float) -> None:
        self.sent = True

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        return None
