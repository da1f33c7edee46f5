"""What two nodes say to each other over their link: the messages of gossip besides the topics.

``gossip.sync``   digest -> the adverts and revocation lists that the caller lacks, and what to push
``gossip.push``   adverts and revocation lists -> nothing
``gossip.alive``  a nonce -> proof that the callee lives
``gossip.probe``  a peer and a nonce -> that peer's proof, asked for by the callee
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field, ValidationError

from ca.crl import MAX_CRL_BYTES
from mesh.gossip.advert import MAX_ADVERT, Boot
from mesh.gossip.anti_entropy import MAX_TRANSFER, MAX_WANTED, Record
from mesh.gossip.membership import MAX_NODES
from mesh.gossip.revocation import MAX_ROOTS
from mesh.gossip.wire import Frozen, WireError, decode, encode
from mesh.identity import Identity, SignatureError, verify_signature

SYNC = "gossip.sync"
PUSH = "gossip.push"
ALIVE = "gossip.alive"
PROBE = "gossip.probe"

ALIVE_TAG = b"meshnode-alive-v1"
NONCE_BYTES = 16
_PROOF = struct.Struct(f">{NONCE_BYTES}sQ")
_MAX_PAYLOAD = MAX_TRANSFER + MAX_ROOTS * (MAX_CRL_BYTES + 16) + 1024

Nonce = Annotated[bytes, Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class SyncCall(Frozen):
    """The caller's boot and the numbers of its revocation lists. The payload: its digest."""

    version: Literal[1] = 1
    boot: Boot
    lists: list[Any] = Field(max_length=MAX_ROOTS)


class SyncAnswer(Frozen):
    """The callee's boot and list numbers, and what it wants (digest keys, one after the
    other). The payload: what the caller lacks. ``more``: not all of that fitted."""

    version: Literal[1] = 1
    boot: Boot
    lists: list[Any] = Field(max_length=MAX_ROOTS)
    want: bytes = Field(max_length=MAX_WANTED)
    more: bool


class AliveCall(Frozen):
    nonce: Nonce


class ProbeCall(Frozen):
    peer: str = Field(min_length=1, max_length=128)
    nonce: Nonce


class AliveAnswer(Frozen):
    """Proof of life: the author's signature over the caller's nonce and its own boot."""

    boot: Boot
    signature: bytes = Field(min_length=64, max_length=64)


_Body = TypeVar("_Body", bound=Frozen)


def parse(kind: type[_Body], body: Any) -> _Body:
    """Raises :class:`~mesh.gossip.wire.WireError`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise WireError(f"{kind.__name__}: {error.error_count()} fields are wrong") from error


def prove_alive(identity: Identity, nonce: bytes, boot: int) -> AliveAnswer:
    return AliveAnswer(boot=boot, signature=identity.sign(ALIVE_TAG, _PROOF.pack(nonce, boot)))


def is_proof(answer: AliveAnswer, nonce: bytes, public_key: Ed25519PublicKey) -> bool:
    """Whether the owner of ``public_key`` answered this nonce, whoever passed the answer on."""
    signed = _PROOF.pack(nonce, answer.boot)
    try:
        verify_signature(public_key, ALIVE_TAG, signed, answer.signature)
    except SignatureError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Transfer:
    """Adverts and revocation lists (DER) on their way; none of it is verified yet."""

    records: tuple[Record, ...]
    lists: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.records or self.lists)


def encode_transfer(records: Sequence[Record], lists: Sequence[bytes]) -> bytes:
    return encode([[[r.age, r.envelope] for r in records], list(lists)])


def decode_transfer(data: bytes | bytearray | memoryview) -> Transfer:
    """Raises :class:`~mesh.gossip.wire.WireError`."""
    if len(data) > _MAX_PAYLOAD:
        raise WireError(f"a transfer of {len(data)} bytes")
    match decode(bytes(data), _MAX_PAYLOAD):
        case [list(rows), list(lists)] if len(rows) <= MAX_NODES and len(lists) <= MAX_ROOTS:
            pass
        case _:
            raise WireError("not a transfer of adverts and revocation lists")
    if not all(isinstance(der, bytes) and len(der) <= MAX_CRL_BYTES for der in lists):
        raise WireError("not a revocation list")
    return Transfer(tuple(_record(row) for row in rows), tuple(lists))


def _record(row: Any) -> Record:
    match row:
        case [float(age), bytes(envelope)] if 0.0 <= age < math.inf and len(envelope) <= MAX_ADVERT:
            return Record(age, envelope)
        case _:
            raise WireError("not an [age, advert]")
