"""What a receipt says.

A response is a row of tokens ``[0, n)``. Most are made by one node, or by one chain whose rank 0
signs for it. When a node is lost on the way, another carries on, and the row consists of several
*segments*, one per node that held the session. Each receipt covers the response from its beginning
to the end of the signer's own segment, so the last receipt covers all of it.

What can be proved differs by segment, and the receipt says so:

* the signer's own segment carries evidence ``signer``: this very signature vouches for it;
* an earlier segment whose node lived to sign carries ``receipt`` and the digest of
  that node's receipt, which travels in the same bundle and is checked with it;
* a segment whose node was lost carries ``lost``: nobody can sign for it. Its nodes
  are those the entry node reports. The signer vouches only that it was given these token ids
  and this text to carry on from, and that it did.

Ranges are half-open. Times are integers, so that an implementation in any language encodes the
same bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from inference.generation import MAX_TOKENS, FinishReason, GenerateRequest
from mesh.receipts.encoding import EncodingError, decode, encode

MAX_SEGMENTS = 16
MAX_PARTS = 64  # of one segment
MAX_LAYERS = 1 << 12
MAX_RECEIPT_BYTES = 256 << 10
NONCE_BYTES = 16

_Listed = Strict(False)
PeerIdText = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{52}$")]  # of an Ed25519 key
# A serial number has up to 20 bytes, a CBOR integer 8: hexadecimal, all 40 digits.
Serial = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]  # SHA-256
Microseconds = Annotated[int, Field(ge=0, lt=1 << 53)]
_Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
# What stands behind a segment; see above.
Evidence = Literal["signer", "receipt", "lost"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Part(_Frozen):
    """One node's share of a segment: which layers it ran, for which tokens."""

    peer: PeerIdText
    serial: Serial | None  # of the node's certificate; None only where the node was lost
    stage: Annotated[tuple[_Count, _Count], _Listed]  # layers [first, last)
    tokens: Annotated[tuple[_Count, _Count], _Listed]  # token indexes [first, last)

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if not self.stage[0] < self.stage[1] <= MAX_LAYERS:
            raise ValueError("a stage is a range of layers [first, last) that is not empty")
        if self.tokens[0] > self.tokens[1]:
            raise ValueError("tokens end before they begin")
        return self


class Segment(_Frozen):
    """A run of tokens made while one node held the session."""

    node: PeerIdText  # the replica, or rank 0 of the chain
    tokens: Annotated[tuple[_Count, _Count], _Listed]
    evidence: Evidence
    receipt: Digest | None = None  # SHA-256 of that node's own receipt
    parts: Annotated[tuple[Part, ...], _Listed] = Field(min_length=1, max_length=MAX_PARTS)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens[0] > self.tokens[1]:
            raise ValueError("tokens end before they begin")
        if (self.receipt is not None) != (self.evidence == "receipt"):
            raise ValueError("a digest belongs to a segment with a receipt of its own, only")
        if self.evidence != "lost" and any(part.serial is None for part in self.parts):
            raise ValueError("a certificate serial may be missing only where a node was lost")
        if self.node not in (part.peer for part in self.parts):
            raise ValueError("the node of a segment is not among its parts")
        return self


class ModelIdentity(_Frozen):
    """Which weights: the name they were asked for by, their digest, their decoder layers."""

    name: str = Field(min_length=1, max_length=256)
    digest: str = Field(min_length=1, max_length=128)
    layers: int = Field(ge=1, le=MAX_LAYERS)


class Counts(_Frozen):
    """Token counts as in the usage of the response."""

    prompt: int = Field(ge=0, lt=1 << 32)
    completion: int = Field(ge=0, lt=1 << 32)
    cached: int = Field(0, ge=0, lt=1 << 32)


class Timings(_Frozen):
    """How long the signer's own segment took."""

    queue: Microseconds
    prefill: Microseconds
    decode: Microseconds


class Receipt(_Frozen):
    """One signer's statement. See the module's docstring for what it covers."""

    version: Literal[1] = 1
    request: Digest
    response: Digest  # over all token ids and all text up to the end of the last segment
    text_bytes: int = Field(ge=0, lt=1 << 32)  # of that text in UTF-8
    model: ModelIdentity
    entry: PeerIdText
    segments: Annotated[tuple[Segment, ...], _Listed] = Field(min_length=1, max_length=MAX_SEGMENTS)
    # Milliseconds since 1970 by the signer's clock; up to the year 6429.
    created: int = Field(ge=0, lt=1 << 47)
    nonce: Annotated[bytes, Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    counts: Counts
    timings: Timings
    finish: FinishReason | None  # None: handed over before the end

    @property
    def signer(self) -> str:
        """PeerId of the node that is to sign: the one of the last segment."""
        return self.segments[-1].node

    @property
    def tokens(self) -> int:
        """How many token ids the response digest is over."""
        return self.segments[-1].tokens[1]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every PeerId that took part, in order of first appearance."""
        return tuple(
            dict.fromkeys(part.peer for segment in self.segments for part in segment.parts)
        )

    def to_bytes(self) -> bytes:
        """The bytes that are signed."""
        return encode(self.model_dump(mode="python"))

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Raises ValueError (pydantic's or :class:`EncodingError`) for anything else."""
        receipt = cls.model_validate(decode(data, MAX_RECEIPT_BYTES))
        if receipt.to_bytes() != data:  # a missing optional field, an integer for a float
            raise EncodingError("not the one encoding of this receipt")
        return receipt


def serial_text(serial: int) -> str:
    """A certificate's serial number as receipts spell it."""
    return f"{serial:040x}"


def plain_request(request: GenerateRequest) -> dict[str, Any]:
    """The part of a request that is the same on every node that works on it."""
    return request.model_dump(mode="python", exclude={"resume"})
