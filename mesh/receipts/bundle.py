"""How receipts travel: each with its signature and its signer's certificates, the last one last."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from mesh.receipts.encoding import EncodingError, decode, encode
from mesh.receipts.errors import ReceiptError
from mesh.receipts.record import MAX_RECEIPT_BYTES, MAX_SEGMENTS

MAX_CERTIFICATE_BYTES = 16 << 10
MAX_CHAIN = 8
MAX_BUNDLE_BYTES = 1 << 20
_Listed = Strict(False)


class _SignedModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    receipt: bytes = Field(max_length=MAX_RECEIPT_BYTES)
    signature: bytes = Field(min_length=64, max_length=64)  # Ed25519
    chain: Annotated[
        tuple[Annotated[bytes, Field(min_length=1, max_length=MAX_CERTIFICATE_BYTES)], ...], _Listed
    ] = Field(min_length=1, max_length=MAX_CHAIN)


class _BundleModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    receipts: Annotated[tuple[_SignedModel, ...], _Listed] = Field(
        min_length=1, max_length=MAX_SEGMENTS
    )


@dataclass(frozen=True)
class SignedReceipt:
    """The bytes of a receipt, their signature, and the signer's certificates (DER, leaf first).

    The key that checks the signature comes from the certificate, never from the receipt.
    """

    receipt: bytes
    signature: bytes
    chain: tuple[bytes, ...]

    @property
    def digest(self) -> bytes:
        """What a later receipt names this one by."""
        return hashlib.sha256(self.receipt).digest()


@dataclass(frozen=True)
class Bundle:
    """All receipts of one response: of the earlier segments that could be signed, then the last."""

    receipts: tuple[SignedReceipt, ...]

    @property
    def last(self) -> SignedReceipt:
        return self.receipts[-1]

    @property
    def earlier(self) -> tuple[SignedReceipt, ...]:
        return self.receipts[:-1]

    def to_bytes(self) -> bytes:
        """What ``mesh.receipt`` of a response holds, in base64."""
        return encode(
            {
                "receipts": [
                    {"receipt": r.receipt, "signature": r.signature, "chain": list(r.chain)}
                    for r in self.receipts
                ]
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Bundle:
        """Raises :class:`ReceiptError` ``malformed``."""
        try:
            model = _BundleModel.model_validate(decode(data, MAX_BUNDLE_BYTES))
        except (EncodingError, ValidationError) as error:
            raise ReceiptError("malformed", f"not a bundle of receipts: {error}") from error
        return cls(
            tuple(SignedReceipt(r.receipt, r.signature, tuple(r.chain)) for r in model.receipts)
        )
