"""CBOR with one spelling per value.

What is signed must have exactly one encoding, or two byte strings could stand for one receipt.
:func:`encode` writes the deterministic form (RFC 8949, section 4.2: shortest lengths, sorted keys,
no indefinite lengths) and :func:`decode` accepts only that form: it encodes what it read and
compares. Tags are refused before they are interpreted, because some of them make a decoder work
hard for a few bytes (regular expressions, big floats, shared references).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import cbor2

from mesh.cbor_items import check_items

MAX_DEPTH = 128
MAX_ITEMS = 1 << 19  # lists, maps, keys and values altogether

# Every tag for which the library has a decoder of its own.
_KNOWN_TAGS = (
    *(0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100),
    *(256, 258, 260, 261, 1004, 43000, 55799),
)


class EncodingError(ValueError):
    """Bytes that are not the one encoding of a plain value, or a value that has none."""


def _refuse_tag(*_: Any) -> NoReturn:
    raise EncodingError("tags are not allowed")


_NO_TAGS: dict[int, Callable[..., Any]] = dict.fromkeys(_KNOWN_TAGS, _refuse_tag)


def encode(value: object) -> bytes:
    """The deterministic encoding of maps, lists, text, bytes, integers, floats, booleans, null.

    Raises :class:`EncodingError` for anything else: text that is not Unicode (lone surrogates),
    integers of more than 64 bits, nesting that is too deep.
    """
    _check_plain(value, MAX_DEPTH)
    try:
        return cbor2.dumps(value, canonical=True)
    except (cbor2.CBOREncodeError, UnicodeEncodeError, ValueError, TypeError) as error:
        raise EncodingError(str(error)) from error


def decode(data: bytes, limit: int) -> Any:
    """The value that ``data`` (at most ``limit`` bytes) encodes. Raises :class:`EncodingError`."""
    if len(data) > limit:
        raise EncodingError(f"{len(data)} bytes, at most {limit} are allowed")
    try:
        check_items(data, MAX_ITEMS)
        value = cbor2.loads(
            data,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            tag_hook=_refuse_tag,
            semantic_decoders=_NO_TAGS,
        )
    except (cbor2.CBORError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise EncodingError(str(error)) from error
    if encode(value) != data:
        raise EncodingError("not the deterministic encoding, or bytes after the end")
    return value


def _check_plain(value: object, depth: int) -> None:
    if depth < 0:
        raise EncodingError(f"nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | bytes | float | str):
        return
    if isinstance(value, int):
        if not -(1 << 64) <= value < 1 << 64:
            raise EncodingError("an integer of more than 64 bits")
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise EncodingError(f"a {type(key).__name__} as a key")
            _check_plain(key, depth)
            _check_plain(item, depth - 1)
    elif isinstance(value, list | tuple):
        if set(map(type, value)) == {int}:  # token ids
            value = (min(value), max(value))
        for item in value:
            _check_plain(item, depth - 1)
    else:
        raise EncodingError(f"a {type(value).__name__} has no place here")
