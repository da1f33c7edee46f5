"""How much a sender may have under way in one call: counted in bytes, granted by the reader.

Pure bookkeeping. A message may be sent while any credit is left, so one larger than the window
passes too, and what waits unread stays below the window plus one message.
"""

from __future__ import annotations

from mesh.transport.errors import MalformedFrame

WINDOW = 512 << 10  # bytes
OVERHEAD = 256  # what any message costs beside its bytes: many small ones need room too
MAX_CREDIT = 1 << 40


def cost(size: int) -> int:
    """What a message of ``size`` bytes uses of the credit."""
    return size + OVERHEAD


class SendCredit:
    """The sender's side."""

    def __init__(self, window: int = WINDOW) -> None:
        self._left = window

    @property
    def may_send(self) -> bool:
        return self._left > 0

    def spend(self, size: int) -> None:
        self._left -= cost(size)

    def refund(self, size: int) -> None:
        """A message that was paid for has not been sent after all."""
        self._left += cost(size)

    def grant(self, amount: object) -> None:
        """Take a grant from the peer. Raises MalformedFrame when it is not a sensible one."""
        if (
            not isinstance(amount, int)
            or isinstance(amount, bool)
            or not 0 < amount <= MAX_CREDIT
            or self._left + amount > MAX_CREDIT
        ):
            raise MalformedFrame("not a grant of credit")
        self._left += amount


class ReceiveWindow:
    """The reader's side."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._outstanding = window  # what the sender may still send, as far as we told it
        self._consumed = 0  # not yet granted again

    def received(self, size: int) -> None:
        """A message came. Raises MalformedFrame when the sender had no credit left for it."""
        if self._outstanding <= 0:
            raise MalformedFrame("a message without credit")
        self._outstanding -= cost(size)

    def consumed(self, size: int) -> int:
        """The reader took a message. Returns the amount to grant now, or 0 to wait for more."""
        self._consumed += cost(size)
        if self._consumed < self._window // 2:
            return 0
        amount, self._consumed = self._consumed, 0
        self._outstanding += amount
        return amount
