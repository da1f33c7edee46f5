"""Frames and requests of a node that means harm: refused with a reason, and the chain goes on."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from mesh.relay.frames import STEP_KIND
from mesh.relay.messages import CLOSE, FENCE, GROW, LOST, OPEN, PROBE, REFUSED, REPLAY, TOKENS
from mesh.relay.refusal import Refusal


def frame(chain: bytes, rows, *, hidden: int = 8, encoding: str = "f32", value=1.0, **changes):
    tokens = sum(row[2] for row in rows)
    dtype = "<f2" if encoding == "f16" else "<f4"
    payload = np.full((tokens, hidden), value, dtype).tobytes()
    body = {
        "chain": chain,
        "epoch": 1,
        "step": 900,
        "encoding": encoding,
        "rows": [[*row, False] for row in rows],
        "spent": [],
    }
    return {**body, **changes}, payload


def test_frames_of_a_neighbour_and_of_a_stranger(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 6)
            b = await world.add("b", 2, 4, 6)
            c = await world.add("c", 4, 6, 6)
            stranger = await world.add("stranger", 0, 2, 6)
            told: list[tuple] = []

            def tap(sender, to, kind, body) -> None:
                if kind == REFUSED:
                    told.extend((to, s["session"], s["code"]) for s in body["sessions"])

            world.tap = tap
            head = world.head(a, b, c)
            good, bad = toys.Ask([1, 2, 3], 400), toys.Ask([4, 5], 400)
            session, victim = good.session(), bad.session()
            await head.start(session)
            await head.start(victim)
            tokens = [(await session.get()).token]
            chain, relay = head.ring.id, world.relays[b]
            number, at = victim.number, len(victim.tokens)

            # From a node that is not the stage before: to whom it belongs nothing happens.
            for sender in (stranger, c):
                relay.take(sender, STEP_KIND, *frame(chain, [(number, at, 1)]))
            relay.take(stranger, STEP_KIND, *frame(b"x" * 16, [(number, at, 1)]))
            # Not frames at all.
            for body, payload in [
                (None, b""),
                ([], b"x"),
                ({"chain": chain}, b""),
                frame(chain, [(1 << 40, at, 1)]),
                frame(chain, [(number, at, 1)], extra=1),
            ]:
                relay.take(a, STEP_KIND, body, payload)
            # From the stage before, of another epoch.
            relay.take(a, STEP_KIND, *frame(chain, [(number, at, 1)], epoch=0))
            await trio.sleep(0.05)
            assert (stranger, number, "wrong_peer") in told
            assert (stranger, number, "unknown_chain") in told
            assert (c, number, "wrong_peer") in told
            assert head.active == 2

            # From the stage before, and wrong: only the session that it names is given up.
            wrong = [
                frame(chain, [(99, 0, 1)]),
                frame(chain, [(number, at, 1)], value=np.nan),
                frame(chain, [(number, at, 1)], value=np.inf),
                frame(chain, [(number, at, 1)], encoding="f16"),
            ]
            for body, payload in wrong:
                relay.take(a, STEP_KIND, body, payload)
            body, payload = frame(chain, [(number, at, 1)])
            relay.take(a, STEP_KIND, body, payload[:-1])
            await trio.sleep(0.05)
            codes = {code for to, _, code in told if to == a}
            assert {"unknown_session", "not_finite", "bad_size", "wrong_encoding"} <= codes
            with pytest.raises(Exception, match=r"not_finite|bad_size|wrong_encoding"):
                while True:
                    await victim.get()
            while len(tokens) < 400:
                tokens.append((await session.get()).token)
            assert tokens == good.expected(6)
            head.end(session)
            head.end(victim)
            await world.empty()

    trio.run(main)


def test_a_row_out_of_place_is_mended_once_and_not_for_ever(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            head = world.head(a, b)
            ask = toys.Ask([1, 2, 3], 80)
            session = ask.session()
            await head.start(session)
            tokens = [(await session.get()).token]
            # A neighbour says things twice: the state of the two now differs.
            chain, relay = head.ring.id, world.relays[b]
            relay.take(a, STEP_KIND, *frame(chain, [(session.number, 200, 1)]))
            while len(tokens) < 80:
                tokens.append((await session.get()).token)
            assert tokens == ask.expected(4)
            assert head.ring.epoch == 2
            head.end(session)
            await world.empty()

    trio.run(main)


def test_requests_of_a_stranger(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            stranger = toys.peer("stranger")
            head = world.head(a, b)
            ask = toys.Ask([1, 2, 3], 30)
            session = ask.session()
            await head.start(session)
            relay, ring = world.relays[b], head.ring
            described, _ = ring.describe(1, session, 2)
            opening = ring.open(1, [described.model_copy(update={"session": 77})]).model_dump()
            place = {"chain": ring.id, "epoch": 5, "previous": stranger, "next": stranger}
            order = {"session": session.number, "past": 0, "emit_from": 0, "replay_from": 0}
            for kind, body, code in [
                (OPEN, opening, "wrong_peer"),
                (OPEN, {**opening, "model": "f" * 64}, "unknown_model"),
                (OPEN, {**opening, "first": 1}, "wrong_range"),
                (OPEN, {**opening, "sessions": []}, "malformed"),
                (OPEN, {**opening, "chain": b"n" * 16, "next": stranger}, "next_unreachable"),
                (FENCE, place, "wrong_peer"),
                (FENCE, {**place, "chain": b"?" * 16}, "unknown_chain"),
                (REPLAY, {"chain": ring.id, "epoch": 1, "sessions": [order]}, "wrong_peer"),
                (GROW, {"chain": ring.id, "session": 1, "capacity": 64}, "wrong_peer"),
                (CLOSE, {"chain": ring.id, "epoch": 9, "sessions": []}, "wrong_peer"),
                (PROBE, {"chain": b""}, "malformed"),
            ]:
                with pytest.raises(Refusal) as caught:
                    await relay.answer(stranger, kind, body, b"")
                assert caught.value.code == code, kind
            with pytest.raises(Refusal) as caught:  # bytes that no session of the message has
                await relay.answer(a, OPEN, opening, b"1234")
            assert caught.value.code == "bad_size"
            # What only stages of the chain may tell the head.
            token = {
                "session": session.number,
                "position": 2,
                "token": 1,
                "logprob": None,
                "top": [],
            }
            said = {"chain": ring.id, "epoch": 1, "step": 1}
            refused = [{"session": session.number, "code": "x", "message": ""}]
            for kind, body in [
                (TOKENS, {**said, "sampled": [token], "spent": []}),
                (REFUSED, {**said, "ended": True, "sessions": refused}),
                (LOST, {"chain": ring.id, "epoch": 1, "peer": b}),
            ]:
                world.relays[a].take(stranger, kind, body)
                world.relays[a].take(stranger, kind, {**body, "chain": b"?" * 16})
                world.relays[a].take(stranger, kind, None)
            tokens = [(await session.get()).token for _ in range(30)]
            assert tokens == ask.expected(4)
            assert head.ring.epoch == 1
            head.end(session)
            await world.empty()

    trio.run(main)
