"""Signing a receipt with the node key."""

from __future__ import annotations

from mesh.identity import Identity
from mesh.receipts.bundle import SignedReceipt
from mesh.receipts.record import MAX_RECEIPT_BYTES, Receipt

TAG = b"meshnode-receipt-v1"


def sign(receipt: Receipt, identity: Identity) -> SignedReceipt:
    """Raises ValueError when the receipt is another node's to sign, or too large to be read."""
    if receipt.signer != identity.peer_id:
        raise ValueError(f"{identity.peer_id} cannot sign for {receipt.signer}")
    data = receipt.to_bytes()
    if len(data) > MAX_RECEIPT_BYTES:
        raise ValueError(f"a receipt of {len(data)} bytes; at most {MAX_RECEIPT_BYTES} are read")
    return SignedReceipt(data, identity.sign(TAG, data), identity.certificate.chain_der)
