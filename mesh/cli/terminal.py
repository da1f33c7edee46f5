"""Text from other machines on its way to our terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` without control characters but line ends and tabs.

    A peer or a model must not be able to move our cursor, change colours or set the window title.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
