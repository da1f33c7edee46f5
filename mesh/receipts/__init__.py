"""Receipts: a signed statement of who produced a response, from what, for which request.

The formats are in :mod:`mesh.receipts.record` and :mod:`mesh.receipts.bundle`, signing and
checking in :mod:`mesh.receipts.signing` and :mod:`mesh.receipts.verification`, and the check of a
whole saved HTTP response in :mod:`mesh.receipts.response`. Nothing here does I/O or reads a clock.
"""

from mesh.receipts.bundle import MAX_BUNDLE_BYTES, Bundle, SignedReceipt
from mesh.receipts.digests import request_digest, response_digest
from mesh.receipts.errors import ReceiptError
from mesh.receipts.record import (
    MAX_SEGMENTS,
    Counts,
    Evidence,
    ModelIdentity,
    Part,
    Receipt,
    Segment,
    Timings,
)
from mesh.receipts.response import show_nodes, verify_response
from mesh.receipts.signing import sign
from mesh.receipts.verification import (
    Expected,
    VerifiedReceipt,
    VerifiedSegment,
    verify,
)

__all__ = [
    "MAX_BUNDLE_BYTES",
    "MAX_SEGMENTS",
    "Bundle",
    "Counts",
    "Evidence",
    "Expected",
    "ModelIdentity",
    "Part",
    "Receipt",
    "ReceiptError",
    "Segment",
    "SignedReceipt",
    "Timings",
    "VerifiedReceipt",
    "VerifiedSegment",
    "request_digest",
    "response_digest",
    "show_nodes",
    "sign",
    "verify",
    "verify_response",
]
