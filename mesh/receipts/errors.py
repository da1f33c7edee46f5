"""What can be wrong with a receipt, named by the first check that failed."""

from __future__ import annotations

from typing import Literal

ReceiptFailure = Literal[
    "malformed",  # not a receipt: wrong encoding, missing or unknown fields, too large
    "certificate",  # the signer's certificate chain does not hold at the time of signing
    "signature",  # not signed by the key in that certificate, or changed afterwards
    "signer",  # signed by a node other than the one it names
    "created",  # dated in the future
    "segments",  # the nodes named do not cover the response and the model without gap or overlap
    "earlier",  # the receipt of an earlier segment is missing or contradicts this one
    "entry",  # made for another entry node
    "nonce",  # made for another request
    "model",  # made with another model, or with other weights
    "request",  # the request is not the one that was signed
    "response",  # token ids, text, counts or finish reason are not those that were signed
]


class ReceiptError(Exception):
    """A receipt that proves nothing. ``code`` names the first check that failed."""

    def __init__(self, code: ReceiptFailure, message: str) -> None:
        super().__init__(message)
        self.code: ReceiptFailure = code
        self.message = message
