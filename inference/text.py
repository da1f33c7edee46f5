"""From token ids to text, one token at a time.

What a client sees must depend on the token ids alone, not on when they arrived or who made them:
only then can another node carry on a generation by feeding the ids that are already out and go on
with exactly the next character. :class:`TextStream` keeps that rule and two others:

* Half a character is never shown. Tokens of byte-level vocabularies end anywhere inside a UTF-8
  sequence; detokenizers either leave the unfinished bytes out or show U+FFFD for them. Both are
  handled by comparing texts of a *window* of recent ids: what the window's text gains is new, and a
  U+FFFD at its end waits until the next token says whether it was meant.
* A stop string is never shown, not even its beginning, wherever token borders fall. A suffix that
  may still become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Decode = Callable[[Sequence[int]], str]

# Detokenizing is linear in the number of ids, so only a window of recent ids is decoded. A
# character spans at most 4 byte tokens; the rest is context for tokenizers whose text
# depends on the neighbour before (a leading space dropped at the start, for instance).
_KEEP = 8
_WINDOW = 24
_REPLACEMENT = "\ufffd"


def texts_of(
    pieces: Sequence[bytes], decode_all: Callable[[list[list[int]]], list[str]]
) -> dict[int, bytes] | None:
    """The bytes that each token adds to a text, where they are the same in any company and those
    that are not UTF-8 are left out; otherwise None.

    ``pieces`` are the bytes of each token by the vocabulary. A detokenizer of the runtime is a
    graph that takes more than a tenth of a millisecond for any text, and that for each token of
    each client. Most vocabularies are of plain bytes, which is found out here by decoding every
    token alone and between two others, and those with parts of characters in a row.
    """
    beside = next((i for i, p in enumerate(pieces) if p[:1] == b" " and p[1:].isalpha()), None)
    if beside is None:
        return None
    single = [[i] for i in range(len(pieces))]
    alone = decode_all(single)
    # A special token adds nothing.
    texts = {i: p if alone[i] or not _is_text(p) else b"" for i, p in enumerate(pieces)}
    parts = [i for i, piece in texts.items() if not _is_text(piece)]
    company = [[beside, i, beside] for i in texts]
    company += [parts[at : at + size] for size in (2, 3, 4) for at in range(len(parts))]
    found = alone + decode_all(company)
    if all(text_of(texts, i) == text for i, text in zip(single + company, found, strict=True)):
        return texts
    return None


def text_of(texts: Mapping[int, bytes], ids: Iterable[int]) -> str:
    """The text of ``ids`` by what :func:`texts_of` has found."""
    return b"".join([texts.get(i, b"") for i in ids]).decode("utf-8", "ignore")


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


class TextStream:
    """Incremental detokenizer that also watches for stop strings.

    ``decode`` turns ids into text and must not depend on anything else. ``stop`` holds non-empty
    strings. After a stop string has appeared, :attr:`stopped` is true and no more text comes out.

    For any ids, the texts returned by :meth:`feed` and then :meth:`finish` concatenate to
    ``decode(ids)``, cut before the stop string that is the first to be complete. (Where two are
    complete with the same character, before the longer one.)
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise ValueError("a stop string must not be empty")
        self._decode = decode
        self._stop = tuple(dict.fromkeys(stop))
        self._window: list[int] = []
        self._seen = 0  # characters of the window's text that went on to the stop filter
        self._held = ""  # text that may be the beginning of a stop string
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string has appeared: the generation is over."""
        return self._stopped

    def feed(self, token_id: int) -> str:
        """The text that became certain with ``token_id``; often one word, sometimes nothing."""
        if self._stopped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = len(text) - _unfinished(text)
        fresh = text[self._seen : certain]
        self._seen = max(self._seen, certain)
        if len(self._window) >= _WINDOW:
            # What is still open lies within the ids that stay, so its length does not change.
            waiting = len(text) - self._seen
            self._window = self._window[-_KEEP:]
            self._seen = max(0, len(self._decode(self._window)) - waiting)
        return self._filter(fresh)

    def finish(self) -> str:
        """The text that was held back and now is certain, because no more tokens come."""
        if self._stopped:
            return ""
        fresh = self._decode(self._window)[self._seen :] if self._window else ""
        text = self._filter(fresh)
        if not self._stopped:
            text += self._held
        self._held = ""
        self._window = []
        self._seen = 0
        return text

    def _filter(self, fresh: str) -> str:
        """Pass ``fresh`` on, up to a stop string or to what may be the beginning of one."""
        if not fresh or not self._stop:
            return fresh
        text = self._held + fresh
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _unfinished(text: str) -> int:
    """How many characters at the end of ``text`` may stand for an unfinished UTF-8 sequence.

    Its first 1 to 3 bytes may be there; some detokenizers show one U+FFFD for all, some one each.
    """
    shown = len(text) - len(text.rstrip(_REPLACEMENT))
    return min(shown, 3)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
