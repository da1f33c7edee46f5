"""Which peer probably still has the beginning of a prompt in its KV cache.

A conversation comes back with everything that was said before in front. The node that answered last
time need not compute that again. A prompt is described by *marks*: digests of some of its leading
parts, each with the number of tokens up to there.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from inference.generation import GenerateRequest
from mesh.identity import PeerId
from mesh.routing.route import Mark, RequestFacts, Route

CHARACTERS_PER_TOKEN = 4  # of English text, roughly
MESSAGE_TOKENS = 4  # what a chat template adds to a message
MARK_EVERY = 1024  # characters, in prompts that are one text
MAX_MARKS = 64
MAX_REMEMBERED = 4096
KEPT = 600.0  # s; a busy peer has evicted the blocks by then


def estimate_tokens(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)


def marks_of(request: GenerateRequest) -> tuple[Mark, ...]:
    """Marks of the request's prompt, shortest part first; the last one is the whole prompt."""
    running = hashlib.sha256(request.model.encode())
    marks: list[Mark] = []
    tokens = 0
    for part, length in _parts(request):
        running.update(hashlib.sha256(part).digest())
        tokens += length
        marks.append(Mark(running.digest()[:16], tokens))
    return tuple(marks)


def _parts(request: GenerateRequest) -> list[tuple[bytes, int]]:
    if request.messages is not None:
        texts = [json.dumps(m, sort_keys=True, ensure_ascii=False) for m in request.messages]
        parts = [(t.encode(), estimate_tokens(len(t)) + MESSAGE_TOKENS) for t in texts]
    elif request.prompt is not None:
        cuts = range(0, max(1, len(request.prompt)), MARK_EVERY)
        pieces = [request.prompt[i : i + MARK_EVERY] for i in cuts]
        parts = [(p.encode("utf-8", "surrogatepass"), estimate_tokens(len(p))) for p in pieces]
    else:
        ids = request.prompt_tokens or ()
        step = MARK_EVERY // CHARACTERS_PER_TOKEN
        chunks = [ids[i : i + step] for i in range(0, len(ids), step)]
        parts = [(repr(chunk).encode(), len(chunk)) for chunk in chunks]
    if len(parts) <= MAX_MARKS:
        return parts
    # Early marks are shared by most requests; what lies beyond counts as one part.
    rest = parts[MAX_MARKS - 1 :]
    whole = hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p, _ in rest)).digest()
    return [*parts[: MAX_MARKS - 1], (whole, sum(length for _, length in rest))]


class Affinity:
    """What this entry node remembers of where prompts went. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, PeerId], tuple[int, float]] = OrderedDict()

    def remember(self, marks: Sequence[Mark], route: Route, now: float) -> None:
        """The request with these marks has been prefilled on ``route``."""
        for mark in marks:
            for peer in {hop.peer for hop in route.hops}:
                self._seen[mark.digest, peer] = (mark.tokens, now)
                self._seen.move_to_end((mark.digest, peer))
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def cached(
        self, marks: Sequence[Mark], peers: Sequence[PeerId], now: float
    ) -> Mapping[PeerId, int]:
        """Leading tokens of the prompt that each of the peers probably has."""
        found: dict[PeerId, int] = {}
        for mark in marks:
            for peer in peers:
                tokens, at = self._seen.get((mark.digest, peer), (0, now))
                if tokens and now - at <= KEPT:
                    found[peer] = tokens
        return found


def facts_of(
    request: GenerateRequest,
    *,
    digest: str | None = None,
    exclude: frozenset[PeerId] = frozenset(),
) -> RequestFacts:
    """What routing needs to know of a request."""
    marks = marks_of(request)
    done = len(request.resume)
    return RequestFacts(
        model=request.model,
        prompt_tokens=marks[-1].tokens + done,
        max_tokens=None if request.max_tokens is None else request.max_tokens - done,
        digest=digest,
        exclude=exclude,
        marks=marks,
    )
