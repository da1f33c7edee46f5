"""After a loss: what each stage of a chain has to do so that a session goes on. Pure.

When the head has fenced the chain, each surviving stage says how many tokens of a session it holds,
and a replacement holds none. Rows that were under way are gone, so neighbours may differ anywhere,
and a loss that happens during a recovery leaves a replacement half filled. One rule covers all:

* a stage that is ahead of the next one sends the difference again, from the output that it kept;
* a stage that is behind the next one computes what it lacks and passes on only what is new there.

So each stage computes exactly the positions that it lacks, which for the survivors are none that
they have computed before.

The last stage may be ahead of what the head knows, when it drew a token and the message was lost.
It is cut back to draw the token again, which gives the same one; by two tokens if that is the last
of the prompt, since a stage computes a single row of a prompt otherwise in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.relay.messages import Held


@dataclass(frozen=True, slots=True)
class Marks:
    """Orders for one stage: hold ``past`` tokens, send kept output again from ``replay_from``
    (<= past), and of later rows pass on only those from ``emit_from`` on."""

    past: int
    replay_from: int
    emit_from: int


def plan(known: int, prompt: int, held: Sequence[Held | None]) -> tuple[Marks, ...] | None:
    """Orders for the stages of one session, in the order of the chain.

    ``known`` is the number of its tokens that the head knows, of which ``prompt`` are the prompt.
    ``held[rank]`` is what that stage holds, None for a replacement. The answer None means that
    output is needed that is no longer kept: the session must begin anew from its token ids.
    """
    past = [0 if stage is None else stage.past for stage in held]
    if past[-1] >= known:
        past[-1] = max(0, known - (2 if known == prompt else 1))
    orders = []
    for rank, stage in enumerate(held):
        if rank == len(held) - 1:
            orders.append(Marks(past[rank], past[rank], known - 1))
            continue
        replay_from = min(past[rank], past[rank + 1])
        if stage is not None and replay_from < past[rank] and stage.kept_from > replay_from:
            return None
        orders.append(Marks(past[rank], replay_from, past[rank + 1]))
    return tuple(orders)
