"""Commands that need no running node: making a key, checking a saved response."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from mesh.cli.exits import CommandError, Exit
from mesh.config import NodeConfig
from mesh.identity import KeyFileError, init_node
from mesh.receipts import ReceiptError, VerifiedReceipt, verify_response
from mesh.receipts.response import MAX_RESPONSE_BYTES


def init(config: NodeConfig, options: argparse.Namespace) -> int:
    try:
        enrolment = init_node(config.home, options.name)
    except ValueError as error:
        raise CommandError(Exit.USAGE, str(error)) from error
    except KeyFileError as error:
        raise CommandError(Exit.FAILED, str(error)) from error
    # The home keeps its own; the copy is the one to carry to the CA.
    csr = Path(options.csr or f"{options.name}.csr")
    try:
        if csr.resolve() != enrolment.request_path.resolve():
            csr.write_bytes(enrolment.request_path.read_bytes())
    except OSError as error:
        raise CommandError(Exit.FAILED, f"cannot write {csr}: {error.strerror}") from error
    print(enrolment.peer_id)
    kept = "made" if enrolment.key_is_new else "kept"
    print(f"{kept} {enrolment.key_path}; have the CA sign {csr}", file=sys.stderr)
    return Exit.OK


def verify(_: NodeConfig, options: argparse.Namespace) -> int:
    try:
        if options.response == "-":
            data = sys.stdin.buffer.read(MAX_RESPONSE_BYTES + 1)
        else:
            with open(options.response, "rb") as file:
                data = file.read(MAX_RESPONSE_BYTES + 1)
        ca_pem = Path(options.ca).read_bytes()
    except OSError as error:
        raise CommandError(Exit.FAILED, f"{error.filename}: {error.strerror}") from error
    try:
        receipts = verify_response(data, ca_pem, now=time.time())
    except ReceiptError as error:
        raise CommandError(Exit.NOT_VERIFIED, f"the receipt does not hold: {error}") from error
    for verified in receipts:
        _print_receipt(verified)
    return Exit.OK


def _print_receipt(verified: VerifiedReceipt) -> None:
    receipt = verified.receipt
    created = datetime.fromtimestamp(receipt.created / 1000, UTC).isoformat(timespec="seconds")
    print(f"verified: {verified.certificate.name} ({receipt.signer}) signed at {created}")
    print(f"  model {receipt.model.name} (digest {receipt.model.digest[:16]}), {receipt.finish}")
    for segment in verified.segments:
        first, last = segment.tokens
        print(f"  tokens {first}-{last} by {segment.name or segment.node} ({segment.evidence})")
        for part in segment.parts:
            print(f"    layers {part.stage[0]}-{part.stage[1]}: {part.peer}")
    if verified.expired:
        print("  the signer's certificate has expired since then; it was valid when it signed")
