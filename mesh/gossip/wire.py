"""CBOR for what gossip sends: bounded, without tags, and compact rows for repeated records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import cbor2
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    Strict,
    StringConstraints,
    model_serializer,
    model_validator,
)

from mesh.cbor_items import check_items

MAX_ITEMS = 1 << 16
MAX_DEPTH = 8  # nothing that gossip sends nests deeper than a record in a list in an advert

# Given as `context` to pydantic's model_dump, this asks for the compact form.
WIRE = "wire"

# A tuple here is a list on the wire; its items stay strict.
Listed = Strict(False)


class WireError(ValueError):
    """Bytes from a peer that are not what they should be."""


def _refuse_tag(*_: object) -> Any:
    raise WireError("CBOR tags are not allowed here")


# Left alone, cbor2 turns tagged items into dates, regular expressions, big numbers, shared
# references: work and types that nobody asked for.
_KNOWN_TAGS = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004)
_NO_TAGS: Mapping[int, Any] = dict.fromkeys((*_KNOWN_TAGS, 43000, 55799), _refuse_tag)


def encode(value: object) -> bytes:
    return cbor2.dumps(value)


def decode(data: bytes, limit: int) -> Any:
    """The value in ``data``, which must be at most ``limit`` bytes and hold exactly one item.

    Raises :class:`WireError`. Memory stays within a small multiple of ``len(data)``: declared
    lengths are not believed, tags and deep nesting are refused.
    """
    if len(data) > limit:
        raise WireError(f"{len(data)} bytes where at most {limit} are allowed")
    try:
        if len(data) > MAX_ITEMS:  # no item has less than a byte
            check_items(data, MAX_ITEMS)
        value = cbor2.loads(
            data,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            semantic_decoders=_NO_TAGS,
            tag_hook=_refuse_tag,
        )
        # One encoding per value: rules out bytes after the item and second spellings of it.
        if cbor2.dumps(value) != data:
            raise WireError("not in the encoding that this protocol uses")
    except WireError:
        raise
    except (cbor2.CBORError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"not CBOR: {error}") from error
    return value


class Frozen(BaseModel):
    """Immutable and strict: these objects are built from what peers sent."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Row(Frozen):
    """A record that travels as a list of its fields in order, because there are many of it."""

    @model_validator(mode="before")
    @classmethod
    def _from_row(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            if len(value) > len(cls.model_fields):
                raise ValueError(f"a row of {cls.__name__} has {len(cls.model_fields)} fields")
            return dict(zip(cls.model_fields, value, strict=False))
        return value

    @model_serializer(mode="wrap")
    def _to_row(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        fields = handler(self)
        return list(fields.values()) if info.context == WIRE else fields


def _digest_to_text(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _digest_to_wire(value: str, info: SerializationInfo) -> str | bytes:
    return bytes.fromhex(value) if info.context == WIRE else value


# A SHA-256 digest: 64 hexadecimal digits here, 32 bytes on the wire.
Digest = Annotated[
    str,
    BeforeValidator(_digest_to_text),
    StringConstraints(pattern=r"^[0-9a-f]{64}$", strict=True),
    PlainSerializer(_digest_to_wire),
]
