"""The text that is streamed depends on the token ids alone, and adds up to the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inference.text import TextStream

# A vocabulary as byte-level models have it: every byte, some words, a character and a half, and
# two special tokens without text.
SPECIAL = (b"", b"")
VOCABULARY: tuple[bytes, ...] = (
    *(bytes([value]) for value in range(256)),
    *SPECIAL,
    b" the",
    b"\n\n",
    b"ab",
    b"abc",
    "é".encode(),
    "日本".encode(),
    "日".encode() + "本".encode()[:1],
    "本".encode()[1:] + b"!",
    "\ufffd".encode(),
)
EMOJI = list("🏳️‍🌈".encode())


def lossy(ids: Sequence[int]) -> str:
    """As most detokenizers do it: U+FFFD for bytes that are not UTF-8."""
    return b"".join(VOCABULARY[i] for i in ids).decode("utf-8", "replace")


def silent(ids: Sequence[int]) -> str:
    """As OpenVINO's does it: such bytes are left out."""
    return b"".join(VOCABULARY[i] for i in ids).decode("utf-8", "ignore")


def bytewise(ids: Sequence[int]) -> str:
    """As some do it: U+FFFD for each byte of an unfinished character."""
    data = b"".join(VOCABULARY[i] for i in ids)
    text = ""
    while data:
        try:
            return text + data.decode()
        except UnicodeDecodeError as error:
            text += data[: error.start].decode() + "\ufffd" * (error.end - error.start)
            data = data[error.end :]
    return text


def words(ids: Sequence[int]) -> str:
    """As SentencePiece does it: a word brings its space along, except at the very beginning."""
    return "".join((" the", " cat", "s", ",", " ")[i % 5] for i in ids).removeprefix(" ")


Decode = Callable[[Sequence[int]], str]

token_ids = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=120)
mostly_text = st.lists(
    st.one_of(
        st.sampled_from([*range(97, 101), *range(256, len(VOCABULARY))]),
        st.sampled_from(EMOJI),
    ),
    max_size=120,
)


def stream(
    decode: Decode, ids: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], TextStream]:
    text = TextStream(decode, stop)
    return [*(text.feed(token) for token in ids), text.finish()], text


def longest_special_run(ids: Sequence[int]) -> int:
    longest = run = 0
    for token in ids:
        run = run + 1 if not VOCABULARY[token] else 0
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize("decode", [lossy, silent, bytewise, words])
@given(ids=st.one_of(token_ids, mostly_text))
@example(ids=EMOJI * 12)
@example(ids=[0xF0] * 100)
@example(ids=[256] * 3 + EMOJI)
def test_pieces_add_up_to_the_whole_text(decode: Decode, ids: list[int]) -> None:
    # A character whose bytes lie further apart than the window is not promised to survive.
    if longest_special_run(ids) > 4:
        return
    pieces, _ = stream(decode, ids)
    assert "".join(pieces) == decode(ids)


@given(ids=mostly_text)
def test_half_a_character_is_never_shown(ids: list[int]) -> None:
    ids = [token for token in ids if token != len(VOCABULARY) - 1]  # no U+FFFD of its own
    data = b""
    text = TextStream(lossy)
    shown = ""
    for token in ids:
        shown += text.feed(token)
        data += VOCABULARY[token]
        complete = data.decode("utf-8", "replace")
        assert complete.startswith(shown)


@pytest.mark.parametrize("decode", [lossy, silent])
@given(
    ids=mostly_text,
    stop=st.lists(st.text("abcd the日本!\n", min_size=1, max_size=5), max_size=4),
)
@example(ids=[97, 98, 99, 100], stop=["bcd", "abcz", "c"])
@example(ids=[97, 98, 99, 100], stop=["bc", "c"])
def test_stop_strings_cut_at_the_first_that_is_complete(
    decode: Decode, ids: list[int], stop: list[str]
) -> None:
    if longest_special_run(ids) > 4:
        return
    whole = decode(ids)
    expected, stopped = whole, False
    for end in range(1, len(whole) + 1):
        starts = [end - len(s) for s in stop if whole[:end].endswith(s)]
        if starts:
            expected, stopped = whole[: min(starts)], True
            break
    pieces, text = stream(decode, ids, stop)
    assert "".join(pieces) == expected
    assert text.stopped == stopped


@given(ids=mostly_text, stop=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3))
def test_no_stop_string_is_ever_shown_in_pieces(ids: list[int], stop: list[str]) -> None:
    shown = ""
    text = TextStream(silent, stop)
    for token in ids:
        shown += text.feed(token)
        assert not any(s in shown for s in stop)


@given(ids=mostly_text, cut=st.integers(0, 120), stop=st.sampled_from([[], ["ab"], ["the", "日"]]))
def test_resuming_gives_the_same_events(ids: list[int], cut: int, stop: list[str]) -> None:
    unbroken, _ = stream(lossy, ids, stop)
    resumed = TextStream(lossy, stop)
    for token in ids[:cut]:
        resumed.feed(token)
    rest = [*(resumed.feed(token) for token in ids[cut:]), resumed.finish()]
    assert rest == unbroken[min(cut, len(ids)) :]


def test_after_a_stop_string_nothing_comes() -> None:
    text = TextStream(lossy, ["b"])
    assert [text.feed(t) for t in (97, 98, 99)] == ["a", "", ""]
    assert text.stopped
    assert text.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(lossy, [""])


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    longest = 0

    def measured(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return lossy(ids)

    stream(measured, [0xF0] * 5000)
    stream(measured, [97] * 5000)
    assert longest < 40
