"""Getting the layers that this node is to hold from peers that have them.

Several peers are asked for their offer; the one that most of them make is taken, and chunks come
from all who make it. A chunk that does not have the promised hash is refused, and its sender is not
asked again. What was written survives: the next attempt keeps every chunk that is right.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from inference.store.errors import StoreError
from inference.store.ir import inspect
from inference.store.manifest import MANIFEST_FILE, ModelManifest
from mesh.identity import PeerId
from mesh.models.offer import (
    CHUNK,
    CHUNK_KIND,
    OFFER_KIND,
    ChunkCall,
    Offer,
    OfferCall,
    OfferError,
    check_offer,
    is_chunk,
    parse_offer,
)
from mesh.models.shelf import MODEL_FILE, Shelf, parse_manifest
from mesh.transport import Lane, Link, TransportError

_log = logging.getLogger(__name__)

ASKED = 3  # peers whose offers are compared
OFFER_TIME = 300.0  # s: the layers may have to be cut first
CHUNK_TIME = 60.0
AT_ONCE = 4  # chunks on their way from one peer
REPORTS = 10  # lines of progress

Progress = Callable[[int, int], None]  # bytes done, bytes in total
Transferred = Callable[[PeerId, int, float], None]  # peer, bytes, seconds


@dataclass(frozen=True, slots=True)
class _Piece:
    file: int
    index: int


class PeerFetch:
    """Fetches into a :class:`Shelf`. ``transferred`` is told how fast peers sent."""

    def __init__(
        self, shelf: Shelf, *, transferred: Transferred = lambda peer, size, seconds: None
    ) -> None:
        self._shelf = shelf
        self._transferred = transferred
        # By digest: several ranges of one model may be fetched at once, and share files. None looks
        # at them while another gives them their names.
        self._turns: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    async def fetch(
        self,
        digest: str,
        layers: tuple[int, int],
        links: Sequence[Link],
        progress: Progress = lambda done, total: None,
    ) -> ModelManifest:
        """The model with at least these layers, from the peers at ``links``.

        Raises :class:`StoreError` when none of them can give it.
        """
        first, last = layers
        here = await trio.to_thread.run_sync(self._shelf.find, digest, first, last)
        if here is not None:
            return here
        call = OfferCall(digest=digest, first=first, last=last)
        rest = list(links)
        while True:
            offer, able = await self._agree(call, rest)
            try:
                return await self._get(call, offer, able, progress)
            except StoreError as error:
                rest = [link for link in rest if link not in able]
                if not rest:
                    raise
                _log.warning("what %d peers offer is no good: %s", len(able), error)

    async def _get(
        self, call: OfferCall, offer: Offer, able: Sequence[Link], progress: Progress
    ) -> ModelManifest:
        """What an offer promises, from those who make it. Raises :class:`StoreError`."""
        folder = self._shelf.folder(call.digest)
        manifest = parse_manifest(offer.body.manifest, folder, call.digest)
        try:
            await trio.to_thread.run_sync(self._shelf.make_room, call.digest, offer.size)
            async with self._turns[call.digest]:
                missing = await trio.to_thread.run_sync(_prepare, folder, offer, manifest)
            await self._download(call, offer, able, folder, missing, progress)
            async with self._turns[call.digest]:
                await trio.to_thread.run_sync(_finish, folder, offer, manifest)
            self._shelf.mark(call.digest, call.first, call.last).touch()
        except OSError as error:
            raise StoreError(f"cannot write to {folder}: {error.strerror or error}") from error
        return manifest

    # -- offers -----------------------------------------------------------------------------------

    async def _agree(self, call: OfferCall, links: Sequence[Link]) -> tuple[Offer, list[Link]]:
        folder = self._shelf.folder(call.digest)
        offers: list[tuple[Link, Offer]] = []
        problems: list[str] = []
        rest = list(links)
        while rest and not offers:
            now, rest = rest[:ASKED], rest[ASKED:]
            async with trio.open_nursery() as nursery:
                for link in now:
                    nursery.start_soon(_ask, link, call, folder, offers, problems)
        if not offers:
            raise StoreError(
                "no peer can give these layers" + "".join(f"; {p}" for p in problems[:3])
            )
        counts = Counter(offer.digest for _, offer in offers)
        # As many as any; of equals the same one everywhere.
        chosen = min(counts, key=lambda d: (-counts[d], d))
        able = [link for link, offer in offers if offer.digest == chosen]
        return next(offer for _, offer in offers if offer.digest == chosen), able

    # -- chunks -----------------------------------------------------------------------------------

    async def _download(
        self,
        call: OfferCall,
        offer: Offer,
        links: Sequence[Link],
        folder: Path,
        missing: list[_Piece],
        progress: Progress,
    ) -> None:
        """Raises :class:`StoreError`, and OSError when the disk does not take it."""
        total = offer.size
        done = total - sum(_length(offer, piece) for piece in missing)
        queue = list(reversed(missing))
        progress(done, total)
        bad: set[PeerId] = set()
        failures: list[OSError] = []

        async def work(link: Link, workers: trio.CancelScope) -> None:
            nonlocal done
            while queue and link.peer not in bad:
                piece = queue.pop()
                began = trio.current_time()
                try:
                    data = await _chunk(link, call, offer, piece)
                except (TransportError, OfferError) as error:
                    queue.append(piece)
                    bad.add(link.peer)
                    _log.warning("%s gives no sound chunk: %s", link.peer, error)
                    return
                except BaseException:
                    queue.append(piece)
                    raise
                try:
                    await trio.to_thread.run_sync(_write, folder, offer, piece, data)
                except OSError as error:
                    # Not out of the nursery, where it would be in a group that nobody expects.
                    failures.append(error)
                    workers.cancel()
                    return
                self._transferred(link.peer, len(data), trio.current_time() - began)
                done += len(data)
                progress(done, total)

        while queue:
            able = [link for link in links if link.peer not in bad]
            if not able:
                raise StoreError("no peer is left that gives sound chunks of these layers")
            async with trio.open_nursery() as nursery:
                for link in able:
                    for _ in range(AT_ONCE):
                        nursery.start_soon(work, link, nursery.cancel_scope)
            if failures:
                raise failures[0]


async def _ask(
    link: Link,
    call: OfferCall,
    folder: Path,
    offers: list[tuple[Link, Offer]],
    problems: list[str],
) -> None:
    try:
        answer = await link.request(
            OFFER_KIND, call.model_dump(), lane=Lane.BULK, timeout=OFFER_TIME
        )
        offer = parse_offer(answer.body, bytes(answer.payload))
        check_offer(offer, parse_manifest(offer.body.manifest, folder, call.digest))
    except (TransportError, OfferError, StoreError) as error:
        problems.append(f"{link.peer}: {error}")
    else:
        offers.append((link, offer))


async def _chunk(link: Link, call: OfferCall, offer: Offer, piece: _Piece) -> bytes:
    """Raises TransportError, OfferError."""
    body = ChunkCall(**call.model_dump(), file=piece.file, index=piece.index).model_dump()
    answer = await link.request(CHUNK_KIND, body, lane=Lane.BULK, timeout=CHUNK_TIME)
    data = bytes(answer.payload)
    if len(data) > CHUNK or not await trio.to_thread.run_sync(
        is_chunk, offer, piece.file, piece.index, data
    ):
        path = offer.body.files[piece.file].path
        raise OfferError(f"chunk {piece.index} of {path} has another digest than was promised")
    return data


def _length(offer: Offer, piece: _Piece) -> int:
    return min(CHUNK, offer.body.files[piece.file].size - piece.index * CHUNK)


# -- on the disk ----------------------------------------------------------------------------------


def _partial(folder: Path, path: str) -> Path:
    target = folder / path
    return target.with_name(f".{target.name}.part")


def _prepare(folder: Path, offer: Offer, manifest: ModelManifest) -> list[_Piece]:
    """Make the files; the pieces that are not here yet, or not right.

    Raises :class:`StoreError` when what is offered is not a file of the model that is here: other
    layers that are in use share it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = {file.path: file.sha256 for file in manifest.files}
    missing = []
    for number, file in enumerate(offer.body.files):
        target, partial = folder / file.path, _partial(folder, file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        present = target if target.exists() else partial
        bad = [_Piece(number, index) for index in _wrong(present, offer, number)]
        if target.exists() and (bad or target.stat().st_size != file.size):
            if _sha256(target) == listed.get(file.path):
                raise StoreError(f"the {file.path} that is offered is not the one of the model")
            os.replace(target, partial)
        if not target.exists():
            with partial.open("ab") as stream:
                stream.truncate(file.size)
        missing += bad
    return missing


def _wrong(path: Path, offer: Offer, number: int) -> Iterator[int]:
    """Chunks of a file that are not what was promised."""
    try:
        with path.open("rb") as stream:
            for index in range(offer.body.files[number].chunks):
                if not is_chunk(offer, number, index, stream.read(CHUNK)):
                    yield index
    except FileNotFoundError:
        yield from range(offer.body.files[number].chunks)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(folder: Path, offer: Offer, piece: _Piece, data: bytes) -> None:
    path = offer.body.files[piece.file].path
    try:
        with _partial(folder, path).open("r+b") as stream:
            stream.seek(piece.index * CHUNK)
            stream.write(data)
    except FileNotFoundError:
        # A fetch of other layers may have been faster with a file of both: it is whole and right.
        if not (folder / path).exists():
            raise


def _finish(folder: Path, offer: Offer, manifest: ModelManifest) -> None:
    """Every chunk is what was promised: give the files their names, the manifest last, unless they
    are not what they should be. Raises :class:`StoreError`."""
    _check_files(folder, offer, manifest)
    for file in offer.body.files:
        partial = _partial(folder, file.path)
        if partial.exists():
            os.replace(partial, folder / file.path)
    fresh = folder / f".{MANIFEST_FILE}.part"
    fresh.write_text(offer.body.manifest, encoding="utf-8")
    os.replace(fresh, folder / MANIFEST_FILE)


def _check_files(folder: Path, offer: Offer, manifest: ModelManifest) -> None:
    """What a whole model consists of is in its manifest; what was cut from it is not, but no graph
    may be one that an import would not take. Raises :class:`StoreError`."""
    listed = {file.path: file.sha256 for file in manifest.files}
    sizes = {file.path: file.size for file in offer.body.files}
    for file in offer.body.files:
        target, partial = folder / file.path, _partial(folder, file.path)
        present = partial if partial.exists() else target
        whole = file.chunks > 1 and file.path in listed
        if whole and _sha256(present) != listed[file.path]:
            raise StoreError(f"{file.path} is not the one of the model")
        if target.suffix == ".xml":
            weights = sizes.get(file.path.removesuffix(".xml") + ".bin", 0)
            inspect(present, weights=weights, extensions=target.name != MODEL_FILE)
