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


async def until(holds) -> None:
    with trio.fail_after(5):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.005)


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
            refusals = {
                (stranger, number, "wrong_peer"),
                (stranger, number, "unknown_chain"),
                (c, number, "wrong_peer"),
            }
            await until(lambda: refusals <= set(told))
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
            codes = {"unknown_session", "not_finite", "bad_size", "wrong_encoding"}
            await until(lambda: codes <= {code for to, _, code in told if to == a})
            with pytest.raises(Exception, match=r"not_finite|bad_size|wrong_encoding"):
                while True:
                    await victim.get()
            while len(tokens) < 400:
                tokens.append((await session.get()).token)
            assert tokens == good.expected(6)
            head.end(session)
            head.end(victim)
            await world.empty()

    toys.run(main)


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

    toys.run(main)


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

    toys.run(main)


def opening(rank: int, first: int, previous, following, sessions, **changes) -> dict:
    described = {"capacity": 100, "emit_from": 0, "prompt": 1, "history": 0, "sampling": None}
    return {
        "chain": b"h" * 16,
        "epoch": 1,
        "previous": previous,
        "next": following,
        "version": 1,
        "model": "d" * 64,
        "first": first,
        "last": first + 2,
        "layers": 6,
        "rank": rank,
        "stages": 3,
        "activations": "f32",
        "sessions": [{"session": n, **described, **s} for n, s in enumerate(sessions)],
        **changes,
    }


def one_row(*, sample: bool = True, **changes):
    body, payload = frame(b"h" * 16, [(0, 0, 1)], **changes)
    return {**body, "rows": [[0, 0, 1, sample]]}, payload


SAMPLING = {"temperature": 1.0, "seed": 1}


@pytest.mark.parametrize("what", ["times", "history", "bias", "penalty", "replay"])
def test_a_chain_of_a_hostile_head_does_not_end_a_stage(toys, what: str) -> None:
    """It is allowed to serve, so it may open chains, and is the head and the neighbour in them."""

    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 6)
            b = await world.add("b", 2, 4, 6, kept_bytes=8 * 4 * 30)
            c = await world.add("c", 4, 6, 6)
            evil = await world.add("evil", 0, 2, 6)
            told: list[tuple] = []
            world.tap = lambda sender, to, kind, body: (
                told.extend((s["session"], s["code"]) for s in body["sessions"])
                if kind == REFUSED and to == evil
                else None
            )

            async def open_at(node, *where, ids=(), **changes) -> None:
                payload = np.array(ids, "<i4").tobytes()
                body = opening(*where, **changes)
                assert (await world.relays[node].answer(evil, OPEN, body, payload)).get(
                    "refused"
                ) == ()

            def send(node, body, payload) -> None:
                world.relays[node].take(evil, STEP_KIND, body, payload)

            last = (c, 2, 4, evil, evil)
            if what == "times":  # of more stages than there can be
                await open_at(b, 1, 2, evil, c, [{}])
                send(b, *one_row(spent=[0.0] * 64))
                await until(lambda: told)
                assert told == [(0, "malformed")]
            elif what == "history":  # with a token that the model does not have
                wanted = {"history": 1, "sampling": {**SAMPLING, "repetition_penalty": 1.5}}
                await open_at(*last, [wanted], ids=[1 << 20])
                send(c, *one_row())
                await until(lambda: told)
                assert told == [(0, "engine_failed")]
            elif what == "bias":
                await open_at(*last, [{"sampling": {**SAMPLING, "logit_bias": [[64, 1.0]]}}])
                send(c, *one_row())
                await until(lambda: told)
                assert told == [(0, "engine_failed")]
            elif what == "penalty":
                wanted = {"history": 1, "sampling": {**SAMPLING, "repetition_penalty": 1e-40}}
                with pytest.raises(Refusal, match="repetition_penalty"):
                    await open_at(*last, [wanted], ids=[1])
            else:  # of a session whose output is gone, together with another one
                await open_at(b, 1, 2, evil, c, [{"prompt": 25}, {"prompt": 10}])
                for steps, row in enumerate([(0, 0, 25), (1, 0, 10)], 1):
                    send(b, *frame(b"h" * 16, [row]))
                    await until(lambda steps=steps: world.hosts[b].steps == steps)
                again = [
                    {"session": 0, "past": 25, "emit_from": 0, "replay_from": 0},
                    {"session": 1, "past": 0, "emit_from": 0, "replay_from": 0},
                ]
                body = {"chain": b"h" * 16, "epoch": 1, "sessions": again}
                with pytest.raises(Refusal, match="not_kept"):
                    await world.relays[b].answer(evil, REPLAY, body, b"")
                send(b, *frame(b"h" * 16, [(1, 0, 10)]))
                await until(lambda: world.hosts[b].steps == 3)

            ask = toys.Ask([1, 2, 3], 20)
            assert await toys.collect(world.head(a, b, c), ask) == ask.expected(6)

    toys.run(main)


def test_a_peer_that_does_not_read_is_given_up(toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes this node say something for each message of its own, and takes nothing."""
    monkeypatch.setattr("mesh.relay.outbox.MOST", 1 << 20)

    async def main() -> None:
        async with toys.open_world() as world:
            b = await world.add("b", 2, 4, 6)
            relay, links = world.relays[b], world.relays[b].links
            given_up = 0

            async def never(*_, **__) -> None:
                nonlocal given_up
                try:
                    await trio.sleep_forever()
                finally:
                    given_up += 1

            links.send = never
            links.try_send = lambda *_, **__: False
            for _ in range(20_000):
                relay.take(toys.peer("evil"), STEP_KIND, *frame(b"x" * 16, [(1, 0, 1)]))
            waiting = [box for (to, _), box in relay._outboxes.items() if to == toys.peer("evil")]
            assert sum(len(box._parcels) for box in waiting) <= 1024
            await until(lambda: not relay._outboxes)
            assert given_up == 1

    toys.run(main)


def test_a_step_that_fails_unforeseen_costs_its_sessions_only(toys, monkeypatch) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            ask = toys.Ask([1, 2, 3], 20)
            head = world.head(a, b)
            session = ask.session()

            def fail(*_) -> None:
                raise KeyError("unforeseen")

            with monkeypatch.context() as patch:
                patch.setattr(world.hosts[b], "_finish", fail)
                await head.start(session)
                with trio.fail_after(5), pytest.raises(Exception, match="unforeseen"):
                    await session.get()
                head.end(session)
            assert await toys.collect(world.head(a, b), ask) == ask.expected(4)
            await world.empty()

    toys.run(main)
