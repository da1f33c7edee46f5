"""What heads have taken back before it was here. Pure.

Requests of one peer are handled side by side, so a close may be done before the open that it takes
back: that one waits for a link to the next stage, or both come at once when a node that hung goes
on. What was open until then would stay for as long as the head's link lives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mesh.identity import PeerId
from mesh.relay.messages import Close, Open

MAX_MARKS = 1024  # of one head; beyond them the oldest are forgotten


class Closings:
    """A mark for each session, or chain up to an epoch, that was closed and not open here."""

    def __init__(self) -> None:
        self._marks: dict[PeerId, dict[tuple[bytes, int | None], int]] = {}

    def add(self, head: PeerId, message: Close, found: Collection[int]) -> None:
        """A head has closed something; ``found`` are the sessions that were open."""
        marks = self._marks.setdefault(head, {})
        if not message.sessions:  # others may be on their way
            key = (message.chain, None)
            marks[key] = max(message.epoch, marks.get(key, 0))
        for number in set(message.sessions).difference(found):
            marks[message.chain, number] = message.epoch  # for good: numbers are used once
        while len(marks) > MAX_MARKS:
            del marks[next(iter(marks))]

    def sift(
        self, head: PeerId, message: Open, histories: Sequence[list[int]]
    ) -> tuple[Open, list[list[int]]]:
        """What a head opens, each session with its history, without what is closed already."""
        marks = self._marks.get(head)
        if not marks:
            return message, list(histories)
        wanted = [
            (session, history)
            for session, history in zip(message.sessions, histories, strict=True)
            if message.epoch > marks.get((message.chain, None), -1)
            and (message.chain, session.session) not in marks
        ]
        sessions = tuple(session for session, _ in wanted)
        left = message.model_copy(update={"sessions": sessions})
        return left, [history for _, history in wanted]

    def forget(self, head: PeerId) -> None:
        """Its link is gone, and with it whatever was on its way."""
        self._marks.pop(head, None)
