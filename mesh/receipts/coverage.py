"""Do the nodes named in a receipt account for every token and every layer, once each?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mesh.receipts.record import Part, Receipt, Segment


def find_gap(receipt: Receipt) -> str | None:
    """None when everything is accounted for, else what is not, in words.

    Segments must follow each other from token 0 on, the last one being the signer's. Where
    anybody vouches for a segment, its parts must cover all layers of the model for every token.
    A lost segment is a report by the entry node, which may not know who did what.
    """
    due = 0
    for index, segment in enumerate(receipt.segments):
        last = index == len(receipt.segments) - 1
        if last != (segment.evidence == "signer"):
            return "exactly the last segment is the signer's"
        if segment.tokens[0] != due:
            return f"segment {index} begins at token {segment.tokens[0]}, not at {due}"
        if segment.tokens[1] == due and not last:
            return f"segment {index} is empty"
        due = segment.tokens[1]
        outside = [part for part in segment.parts if not _within(part.tokens, segment.tokens)]
        if outside:
            return f"{outside[0].peer} is named for tokens outside segment {index}"
        if segment.evidence != "lost":
            gap = _find_layer_gap(segment, receipt.model.layers)
            if gap is not None:
                return gap
    return None


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _find_layer_gap(segment: Segment, layers: int) -> str | None:
    """Who ran the layers changes only where some part begins or ends, so check between those."""
    edges = sorted({*segment.tokens, *(edge for part in segment.parts for edge in part.tokens)})
    spans = list(pairwise(edges)) or [segment.tokens]
    for span in spans:
        working = [part for part in segment.parts if _within(span, part.tokens)]
        if not _tiles(working, layers):
            return f"layers of tokens {span[0]}-{span[1]} are not covered exactly once"
    return None


def _tiles(parts: Sequence[Part], layers: int) -> bool:
    due = 0
    for first, last in sorted(part.stage for part in parts):
        if first != due:
            return False
        due = last
    return due == layers
