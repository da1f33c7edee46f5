"""Digests of a request and of a response: SHA-256 over a labelled deterministic CBOR list."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from inference.generation import GenerateRequest
from mesh.receipts.encoding import encode
from mesh.receipts.record import plain_request

_REQUEST = "meshnode-request-v1"
_RESPONSE = "meshnode-response-v1"


def request_digest(request: GenerateRequest) -> bytes:
    """Digest over ``[label, request]`` without ``resume``: the same on every node of a response.

    Raises :class:`mesh.receipts.encoding.EncodingError` (a ValueError) when a message holds
    something that has no encoding, such as half of a surrogate pair.
    """
    return hashlib.sha256(encode([_REQUEST, plain_request(request)])).digest()


def response_digest(token_ids: Sequence[int], text: str) -> bytes:
    """Digest over ``[label, token ids, text]``."""
    return hashlib.sha256(encode([_RESPONSE, list(token_ids), text])).digest()
