"""``GET /v1/mesh/responses/ID?after=N``: the rest of a stream whose entry node was lost.

The first response says what is needed: ``X-Mesh-Request`` is the id, ``X-Mesh-Resume`` the secret
(sent back in the same header, so that it gets into no log of URLs), and ``mesh_tokens`` of each
chunk counts the tokens up to it.
"""

from __future__ import annotations

import re
import time

import trio
from starlette.requests import Request
from starlette.routing import Route

from inference.errors import GenerationError
from inference.generation import MAX_TOKENS
from mesh.api.errors import ApiError, from_generation
from mesh.api.openai.answering import RESUME_HEADER, Answering
from mesh.api.openai.shapes import make_shape
from mesh.api.openai.translate import Ask
from mesh.api.ports import Node
from mesh.forward.following import NotKept
from mesh.forward.kept import key_of

MAX_SECRET = 128
_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([0-9a-f]{32})")


def kept_routes(node: Node, closing: trio.Event) -> list[Route]:
    async def rest(request: Request) -> Answering:
        named = _ID.fullmatch(request.path_params["response"])
        secret = request.headers.get(RESUME_HEADER.decode(), "")
        if not 1 <= len(secret) <= MAX_SECRET or not secret.isascii():
            raise ApiError(401, "missing_secret", "send X-Mesh-Resume as the first response had it")
        after = _after(request)
        try:
            if named is None:
                raise NotKept("not_found")
            follower = await node.kept(named[1], key_of(secret), after)
        except NotKept as error:
            raise _not_kept(error) from None
        except GenerationError as error:
            raise from_generation(error, {}) from error
        wanted = follower.request
        ask = Ask(
            kind="completion" if wanted.messages is None else "chat",
            model=wanted.model,
            requests=(wanted,),
            n=1,
            stream=True,
            include_usage=True,
            names={},
        )
        shape = make_shape(ask, named[1], int(time.time()))
        return Answering(
            lambda *_: follower.events(),
            ask,
            shape,
            named[1],
            closing,
            secret=secret,
            already=after,
        )

    return [Route("/v1/mesh/responses/{response}", rest, methods=["GET"])]


def _after(request: Request) -> int:
    text = request.query_params.get("after", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_TOKENS):
        raise ApiError(
            400, "invalid_value", "'after' is the number of tokens that have come", param="after"
        )
    return int(text)


def _not_kept(error: NotKept) -> ApiError:
    if error.reason == "gone":
        return ApiError(
            410, "response_gone", "not all that comes after 'after' is kept", param="after"
        )
    return ApiError(
        404,
        "response_not_found",
        "no node keeps this response for this secret; it is kept for a minute after the node that "
        "the client spoke to was lost",
    )
