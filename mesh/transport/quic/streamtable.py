"""The streams of one connection, kept so that thousands of idle ones cost nothing."""

from __future__ import annotations

from typing import Any

from aioquic.quic.stream import QuicStream


class StreamTable(dict[int, QuicStream]):
    """The engine's table of streams, made cheap to walk.

    For every packet the engine walks all streams to see whose window is to be announced, which
    with a thousand of them costs more than the packet. ``values`` gives it only those; nothing else
    uses it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limits_due: dict[int, QuicStream] = {}

    def values(self) -> Any:
        return list(self.limits_due.values())

    def everyone(self) -> Any:
        return super().values()


def is_active(stream: QuicStream) -> bool:
    """Whether the engine has something to do for a stream when it sends.

    The sender's ``buffer_is_empty`` alone does not tell: it becomes true when an empty buffer has
    been looked into, one packet late, or when the stream is reset, and what was left stays there.
    """
    sender = stream.sender
    return bool(
        (not sender.buffer_is_empty and (len(sender._pending) or sender._pending_eof))
        or sender.reset_pending
        or stream.receiver.stop_pending
        or stream.is_finished
    )
