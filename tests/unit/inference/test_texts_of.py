"""Which vocabularies are of plain bytes, so that text is put together without the runtime."""

from __future__ import annotations

from inference.text import texts_of

PIECES = [b"<end>", b" the", b"a", b" ", b"\xc3", b"\xa9", b"", b"."]
SPECIAL = 0


def plain(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids if i != SPECIAL).decode("utf-8", "ignore")


def texts(decode: object) -> dict[int, bytes] | None:
    return texts_of(PIECES, lambda many: [decode(ids) for ids in many])  # type: ignore[operator]


def test_plain_bytes() -> None:
    assert texts(plain) == dict(enumerate([b"", *PIECES[1:]]))


def test_text_that_depends_on_its_neighbours() -> None:
    assert texts(lambda ids: plain(ids).lstrip()) is None  # as SentencePiece does
    assert texts(lambda ids: plain(ids).rstrip()) is None
    assert texts(lambda ids: plain(ids).replace("e.", "e")) is None
    assert texts(lambda ids: plain(ids).replace("a", "▁a")) is None
    assert texts(lambda ids: plain(ids) if ids != [4, 5] else "?") is None  # not UTF-8, but one é
    assert texts(lambda ids: plain(ids) if ids != [4] else "\ufffd") is None


def test_without_a_word_to_try_them_beside() -> None:
    assert texts_of([b"a", b"b"], lambda many: ["" for _ in many]) is None
