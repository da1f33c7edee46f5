"""How many items bytes of CBOR would become. Bounding the bytes alone does not bound memory: an
empty list is one byte, and takes 64 once it is decoded."""

from __future__ import annotations

Buffer = bytes | bytearray | memoryview


def check_items(data: Buffer, most: int) -> None:
    """Walk over the heads of all items, without building any. Raises ValueError when there are more
    than ``most`` (lists, maps, keys and values altogether), and for what is no CBOR at all."""
    at, due, seen = 0, 1, 0
    while due:
        if at >= len(data):
            raise ValueError("it ends too early")
        kind, size = data[at] >> 5, data[at] & 31
        at += 1
        if size >= 24:
            if size > 27:
                raise ValueError("indefinite lengths are not allowed")
            width = 1 << (size - 24)
            size = int.from_bytes(data[at : at + width], "big")
            at += width
        seen += 1
        due -= 1
        if kind in (2, 3):  # bytes, text
            at += size
        elif kind == 4:  # a list
            due += size
        elif kind == 5:  # a map
            due += 2 * size
        if seen + due > most:
            raise ValueError(f"more than {most} items")
