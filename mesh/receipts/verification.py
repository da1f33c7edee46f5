"""Checking receipts, at the entry node before a response ends and years later from a file.

**Certificates and time.** A signer's certificate must have been valid when the receipt was
created, by the signer's own clock. That it has expired since is normal (certificates live for
days) and proves nothing against the receipt; :attr:`VerifiedReceipt.expired` reports it. A
certificate that is on the revocation list given fails whatever the date: its key may be in other
hands, and whoever has the key can write any date. Without a list, revocation is not checked; a
receipt from the time when the node was in good standing then still verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from ca.certificate import (
    NOTHING_REVOKED,
    SKEW,
    Certificate,
    CertificateError,
    Revoked,
    Root,
    verify_chain,
)
from inference.generation import FinishReason, GenerateRequest
from mesh.identity import SignatureError, verify_signature
from mesh.receipts.bundle import Bundle, SignedReceipt
from mesh.receipts.coverage import find_gap
from mesh.receipts.digests import request_digest, response_digest
from mesh.receipts.encoding import EncodingError
from mesh.receipts.errors import ReceiptError
from mesh.receipts.record import Counts, Evidence, Part, Receipt, Segment, serial_text
from mesh.receipts.signing import TAG


@dataclass(frozen=True)
class Expected:
    """What the receipt ought to be about. What is None is not compared.

    ``token_ids`` and ``text`` belong together: the digest is over both.
    """

    request: GenerateRequest | None = None
    token_ids: Sequence[int] | None = None
    text: str | None = None
    finish: FinishReason | None = None
    counts: Counts | None = None
    entry: str | None = None
    nonce: bytes | None = None
    model_name: str | None = None
    model_digest: str | None = None


@dataclass(frozen=True)
class VerifiedSegment:
    """Who made which tokens, and how well that is proved.

    ``name`` is the node's name in its certificate, None where it did not sign.
    """

    node: str
    name: str | None
    tokens: tuple[int, int]
    evidence: Evidence
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class VerifiedReceipt:
    """A receipt that holds. ``expired``: the signer's certificate has ended since then."""

    receipt: Receipt
    certificate: Certificate
    segments: tuple[VerifiedSegment, ...]
    expired: bool
    request_checked: bool
    response_checked: bool

    @property
    def unsigned(self) -> tuple[VerifiedSegment, ...]:
        """Segments of nodes that were lost: reported by the entry node, proved by nobody."""
        return tuple(segment for segment in self.segments if segment.evidence == "lost")


def verify(
    bundle: Bundle,
    roots: Sequence[Root],
    *,
    network: str,
    now: float,
    expected: Expected | None = None,
    revoked: Revoked = NOTHING_REVOKED,
) -> VerifiedReceipt:
    """Check every receipt of a response; ``now`` is in seconds since 1970.

    Raises :class:`ReceiptError` whose code names the first check that failed.
    """
    expected = expected or Expected()
    receipt, certificate = _open(bundle.last, roots, network, now, revoked)
    earlier = [_open(signed, roots, network, now, revoked) for signed in bundle.earlier]
    _check_earlier(receipt, bundle, [statement for statement, _ in earlier])
    _compare(receipt, expected)
    if expected.token_ids is not None and expected.text is not None:
        for statement, _ in (*earlier, (receipt, certificate)):
            _compare_response(statement, expected.token_ids, expected.text)
        if (receipt.tokens, receipt.text_bytes) != (
            len(expected.token_ids),
            len(expected.text.encode("utf-8", "surrogatepass")),
        ):
            raise ReceiptError("response", "the receipt covers only a part of the response")
    names: dict[str, str] = {
        signer.peer_id: signer.name for _, signer in (*earlier, (receipt, certificate))
    }
    return VerifiedReceipt(
        receipt=receipt,
        certificate=certificate,
        segments=tuple(
            VerifiedSegment(
                segment.node,
                None if segment.evidence == "lost" else names.get(segment.node),
                segment.tokens,
                segment.evidence,
                segment.parts,
            )
            for segment in receipt.segments
        ),
        expired=now > certificate.not_after.timestamp(),
        request_checked=expected.request is not None,
        response_checked=expected.token_ids is not None and expected.text is not None,
    )


def _open(
    signed: SignedReceipt,
    roots: Sequence[Root],
    network: str,
    now: float,
    revoked: Revoked,
) -> tuple[Receipt, Certificate]:
    """One receipt by itself: encoding, date, certificate, signature, signer, coverage."""
    try:
        receipt = Receipt.from_bytes(signed.receipt)
    except (EncodingError, ValidationError) as error:
        raise ReceiptError("malformed", f"not a receipt: {error}") from error
    created = receipt.created / 1000
    if created > now + SKEW:
        raise ReceiptError("created", f"created {created - now:.0f} s in the future")
    try:
        certificate = verify_chain(
            signed.chain, roots, network=network, now=created, revoked=revoked
        )
    except CertificateError as error:
        raise ReceiptError("certificate", f"the signer's certificate: {error}") from error
    if certificate.chain_der != signed.chain:  # one form only: nothing may be added unnoticed
        raise ReceiptError("malformed", "the certificates hold more than the path to the root")
    try:
        verify_signature(certificate.public_key, TAG, signed.receipt, signed.signature)
    except SignatureError as error:
        raise ReceiptError(
            "signature", f"the signature is not that of {certificate.name}"
        ) from error
    if receipt.signer != certificate.peer_id:
        raise ReceiptError("signer", f"{certificate.peer_id} signed for {receipt.signer}")
    serial = serial_text(certificate.serial)
    own = [part for part in receipt.segments[-1].parts if part.peer == certificate.peer_id]
    if any(part.serial != serial for part in own):
        raise ReceiptError("signer", f"signed with certificate {serial}, which it does not name")
    gap = find_gap(receipt)
    if gap is not None:
        raise ReceiptError("segments", gap)
    return receipt, certificate


def _check_earlier(receipt: Receipt, bundle: Bundle, earlier: Sequence[Receipt]) -> None:
    """Each segment that claims a receipt of its own has it, and both tell the same story."""
    claimed = [i for i, segment in enumerate(receipt.segments) if segment.evidence == "receipt"]
    digests = [receipt.segments[i].receipt for i in claimed]
    if digests != [signed.digest for signed in bundle.earlier]:
        raise ReceiptError("earlier", "the receipts of earlier segments are not those it names")
    for index, before in zip(claimed, earlier, strict=True):
        same = (
            before.request == receipt.request
            and before.model == receipt.model
            and before.entry == receipt.entry
            and before.nonce == receipt.nonce
            and before.finish is None
            and before.text_bytes <= receipt.text_bytes
            and before.segments[:-1] == receipt.segments[:index]
            and _statement(before.segments[-1]) == _statement(receipt.segments[index])
        )
        if not same:
            raise ReceiptError(
                "earlier", f"the receipt of segment {index} tells of another response"
            )


def _statement(segment: Segment) -> tuple[object, ...]:
    return segment.node, segment.tokens, segment.parts


def _compare(receipt: Receipt, expected: Expected) -> None:
    if expected.entry is not None and receipt.entry != expected.entry:
        raise ReceiptError("entry", f"made for entry node {receipt.entry}, not {expected.entry}")
    if expected.nonce is not None and receipt.nonce != expected.nonce:
        raise ReceiptError("nonce", "the nonce is not the one that was given")
    if expected.model_name is not None and receipt.model.name != expected.model_name:
        raise ReceiptError(
            "model", f"made with {receipt.model.name!r}, not {expected.model_name!r}"
        )
    if expected.model_digest is not None and receipt.model.digest != expected.model_digest:
        raise ReceiptError("model", f"other weights: digest {receipt.model.digest}")
    if expected.request is not None and receipt.request != request_digest(expected.request):
        raise ReceiptError("request", "the request is not the one that was signed")
    if expected.finish is not None and receipt.finish != expected.finish:
        raise ReceiptError("response", f"finish reason {receipt.finish!r} was signed")
    if expected.counts is not None and receipt.counts != expected.counts:
        raise ReceiptError("response", f"other token counts were signed: {receipt.counts}")


def _compare_response(receipt: Receipt, token_ids: Sequence[int], text: str) -> None:
    """The signed digest is over the beginning of the response, as long as the receipt says."""
    data = text.encode("utf-8", "surrogatepass")
    try:
        covered = data[: receipt.text_bytes].decode("utf-8")
        digest = response_digest(token_ids[: receipt.tokens], covered)
    except ValueError as error:  # cut within a character, or no Unicode at all
        raise ReceiptError("response", "the text is not the one that was signed") from error
    if digest != receipt.response:
        raise ReceiptError("response", "token ids or text are not those that were signed")
