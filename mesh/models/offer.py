"""What one node offers another of a model: files by content, in chunks. Pure but for reading files.

An offer names every file with its size and the SHA-256 of each of its chunks. Its digest covers all
of that, so two peers that offer the same bytes offer the same digest, and a chunk can be had from
any of them and be checked on its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.store.manifest import MAX_MANIFEST, ModelManifest

CHUNK = 1 << 20  # bytes
MAX_FILES = 80
MAX_CHUNKS = 1 << 20  # of all files: a tebibyte
HASH = 32

OFFER_KIND = "models.offer"
CHUNK_KIND = "models.chunk"
# A stage's files lie in a folder of their own, beside the small ones that belong to the model.
PATH = r"^(\.stages/\d{1,4}-\d{1,4}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

Layer = Annotated[int, Field(ge=0, le=4096)]


class OfferError(Exception):
    """An offer or a question for one that makes no sense."""


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class OfferCall(_Wire):
    """Layers ``[first, last)`` of the model with this digest; all of them: the whole model."""

    version: Literal[1] = 1
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    first: Layer
    last: Layer

    @model_validator(mode="after")
    def _range(self) -> OfferCall:
        if self.first >= self.last:
            raise ValueError("no layer")
        return self


class ChunkCall(OfferCall):
    """One chunk of one file of the offer."""

    file: int = Field(ge=0, lt=MAX_FILES)
    index: int = Field(ge=0, lt=MAX_CHUNKS)


_Call = TypeVar("_Call", bound=OfferCall)


class OfferedFile(_Wire):
    path: str = Field(pattern=PATH)
    size: int = Field(ge=0, lt=1 << 50)

    @property
    def chunks(self) -> int:
        return -(-self.size // CHUNK)


class OfferBody(_Wire):
    """The answer to :class:`OfferCall`. Hashes of all chunks, in order, are the payload."""

    version: Literal[1] = 1
    manifest: str = Field(max_length=MAX_MANIFEST)
    files: Annotated[
        tuple[OfferedFile, ...], Field(strict=False, min_length=1, max_length=MAX_FILES)
    ]

    @model_validator(mode="after")
    def _distinct(self) -> OfferBody:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("a file twice")
        if sum(file.chunks for file in self.files) > MAX_CHUNKS:
            raise ValueError("too many chunks")
        return self


@dataclass(frozen=True, slots=True)
class Offer:
    """``hashes[i]`` are those of the chunks of ``body.files[i]``."""

    body: OfferBody
    hashes: tuple[tuple[bytes, ...], ...]

    @property
    def digest(self) -> str:
        state = hashlib.sha256(b"meshnode-offer-v1\n")
        for file, hashes in zip(self.body.files, self.hashes, strict=True):
            state.update(f"{file.path}\0{file.size}\n".encode())
            state.update(b"".join(hashes))
        return state.hexdigest()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.body.files)

    def payload(self) -> bytes:
        return b"".join(b"".join(hashes) for hashes in self.hashes)


def parse_call(kind: type[_Call], body: Any) -> _Call:
    """Raises :class:`OfferError`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise OfferError(f"{kind.__name__}: {error.error_count()} fields are wrong") from error


def parse_offer(body: Any, payload: bytes) -> Offer:
    """Raises :class:`OfferError`."""
    try:
        found = OfferBody.model_validate(body)
    except ValidationError as error:
        raise OfferError(f"the offer has {error.error_count()} wrong fields") from error
    if len(payload) != HASH * sum(file.chunks for file in found.files):
        raise OfferError("the offer has not one hash for each chunk")
    hashes = []
    at = 0
    for file in found.files:
        end = at + HASH * file.chunks
        hashes.append(tuple(payload[i : i + HASH] for i in range(at, end, HASH)))
        at = end
    return Offer(found, tuple(hashes))


def check_offer(offer: Offer, manifest: ModelManifest) -> None:
    """Raises :class:`OfferError` when a file of the model is promised to be another one, as far as
    can be told before it is here: hashes of the whole are those of files of a single chunk."""
    listed = {file.path: file for file in manifest.files}
    for file, hashes in zip(offer.body.files, offer.hashes, strict=True):
        known = listed.get(file.path)
        if known is not None and (
            file.size != known.size or (len(hashes) == 1 and hashes[0].hex() != known.sha256)
        ):
            raise OfferError(f"{file.path} is not the one of the model")


def make_offer(folder: Path, manifest: str, paths: Sequence[str]) -> Offer:
    """Of the files ``paths`` in ``folder``. Reads all of them: blocks. Raises OSError."""
    files = []
    hashes = []
    for path in paths:
        found = []
        size = 0
        with (folder / path).open("rb") as stream:
            while chunk := stream.read(CHUNK):
                found.append(hashlib.sha256(chunk).digest())
                size += len(chunk)
        files.append(OfferedFile(path=path, size=size))
        hashes.append(tuple(found))
    return Offer(OfferBody(manifest=manifest, files=tuple(files)), tuple(hashes))


def read_chunk(folder: Path, file: OfferedFile, index: int) -> bytes:
    """Blocks. Raises OSError."""
    with (folder / file.path).open("rb") as stream:
        stream.seek(index * CHUNK)
        return stream.read(CHUNK)


def is_chunk(offer: Offer, file: int, index: int, data: bytes | memoryview) -> bool:
    return hashlib.sha256(data).digest() == offer.hashes[file][index]
