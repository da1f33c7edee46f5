"""Giving peers the weights that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import trio

from ca.certificate import Role
from inference.store.errors import StoreError
from mesh.models.offer import (
    CHUNK_KIND,
    OFFER_KIND,
    ChunkCall,
    Offer,
    OfferCall,
    OfferError,
    parse_call,
    read_chunk,
)
from mesh.models.shelf import Shelf
from mesh.transport import Message, RemoteError, Request, Transport

NOT_HERE = "not_here"
_Call = TypeVar("_Call", bound=OfferCall)


class ModelServer:
    """Peers with the role ``serve`` may ask: they are the ones that hold stages."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._cutting = trio.Lock()  # one at a time: it needs the memory of a model's graph

    def serve(self, transport: Transport) -> None:
        transport.serve(OFFER_KIND, self._offer)
        transport.serve(CHUNK_KIND, self._chunk)

    async def _find(self, call: OfferCall) -> tuple[Path, Offer]:
        made = self._shelf.made(call.digest, call.first, call.last)
        if made is not None:
            return made
        async with self._cutting:
            try:
                return await trio.to_thread.run_sync(
                    self._shelf.offer, call.digest, call.first, call.last
                )
            except StoreError as error:
                raise RemoteError(NOT_HERE, str(error)) from error

    async def _offer(self, request: Request) -> Message:
        _, offer = await self._find(_checked(request, OfferCall))
        return Message(offer.body.model_dump(mode="json"), offer.payload())

    async def _chunk(self, request: Request) -> Message:
        call = _checked(request, ChunkCall)
        folder, offer = await self._find(call)
        if call.file >= len(offer.body.files):
            raise RemoteError("malformed", "there is no such file")
        file = offer.body.files[call.file]
        if call.index >= file.chunks:
            raise RemoteError("malformed", "there is no such chunk")
        try:
            data = await trio.to_thread.run_sync(read_chunk, folder, file, call.index)
        except OSError as error:
            raise RemoteError(NOT_HERE, str(error)) from error
        return Message(None, data)


def _checked(request: Request, kind: type[_Call]) -> _Call:
    if Role.SERVE not in request.certificate.roles:
        raise RemoteError("forbidden", "the certificate does not allow to hold models")
    try:
        return parse_call(kind, request.message.body)
    except OfferError as error:
        raise RemoteError("malformed", str(error)) from error
