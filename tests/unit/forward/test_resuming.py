"""The I/O around recovery: whose turn it is, how long it may take, what is closed when."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest
import trio
import trio.testing

from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, TokenEvent
from mesh.forward.recovery import Continuation, Recovery, SignedCut, Worker
from mesh.forward.resuming import Patience, ResumingGenerator
from mesh.receipts import Part

REQUEST = GenerateRequest(model="m", prompt="p")
COUNT = 6

Step = Callable[[int], Exception | float | None]


class Scripted:
    """Gives tokens 0 to 5; before each, ``step`` says how long it waits or what goes wrong."""

    def __init__(self, node: str, step: Step) -> None:
        self.node = "12D3KooW" + node * 44
        self._step = step
        self.open = False

    def worker(self) -> Worker:
        part = Part(peer=self.node, serial=None, stage=(0, 9), tokens=(0, 0))
        return Worker(self.node, (part,))

    def cut(self, recovery: Recovery) -> SignedCut | None:
        return None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        self.open = True
        try:
            for i in range(len(request.resume), COUNT):
                what = self._step(i)
                if isinstance(what, Exception):
                    raise what
                await trio.sleep(what or 0.0)
                finish = None
                if i == COUNT - 1:
                    finish = Finish(reason="stop", prompt_tokens=1, completion_tokens=COUNT)
                yield TokenEvent(token_id=i, text=str(i), finish=finish)
        finally:
            self.open = False


class Chooser:
    def __init__(self, *attempts: Scripted) -> None:
        self.left = list(attempts)
        self.continuations: list[Continuation] = []

    async def begin(self, continuation: Continuation) -> Scripted:
        self.continuations.append(continuation)
        if not self.left:
            raise GenerationError("model_not_found", "nobody")
        return self.left.pop(0)


def fine(_: int) -> None:
    return None


def fails_at(position: int, error: Exception) -> Step:
    return lambda i: error if i == position else None


def sleeps_at(position: int, seconds: float) -> Step:
    return lambda i: seconds if i == position else None


async def collect(generator: ResumingGenerator) -> list[TokenEvent]:
    async with aclosing(generator.generate(REQUEST)) as events:
        return [event async for event in events]


def run(main: Callable[[], object]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("code", ["node_lost", "engine_failed", "overloaded"])
def test_it_carries_on_where_the_first_one_ended(code: str) -> None:
    async def main() -> None:
        first = Scripted("A", fails_at(3, GenerationError(code, "oh")))  # type: ignore[arg-type]
        second = Scripted("B", fine)
        chooser = Chooser(first, second)
        generator = ResumingGenerator(chooser.begin)
        events = await collect(generator)
        assert [event.token_id for event in events] == list(range(COUNT))
        assert chooser.continuations[1].request.resume == (0, 1, 2)
        assert chooser.continuations[1].text == "012"
        assert chooser.continuations[1].avoid == {first.node}
        assert generator.attempt is second and not first.open and not second.open

    run(main)


@pytest.mark.parametrize(("position", "seconds"), [(0, 1000.0), (3, 130.0)])
def test_a_node_that_makes_no_progress_is_given_up(position: int, seconds: float) -> None:
    async def main() -> None:
        stuck = Scripted("A", sleeps_at(position, seconds))
        chooser = Chooser(stuck, Scripted("B", fine))
        began = trio.current_time()
        events = await collect(ResumingGenerator(chooser.begin))
        assert len(events) == COUNT and not stuck.open
        assert trio.current_time() - began == pytest.approx(900.0 if position == 0 else 120.0)

    run(main)


def test_a_long_prefill_is_no_reason_to_give_up() -> None:
    async def main() -> None:
        chooser = Chooser(Scripted("A", sleeps_at(0, 600.0)))
        assert len(await collect(ResumingGenerator(chooser.begin))) == COUNT

    run(main)


def test_patience_is_a_budget_per_token() -> None:
    async def main() -> None:
        chooser = Chooser(Scripted("A", lambda _: 0.9))
        patience = Patience(first_token=1.0, next_token=1.0)
        events = await collect(ResumingGenerator(chooser.begin, patience=patience))
        assert len(events) == COUNT

    run(main)


def test_nobody_left_is_an_honest_error() -> None:
    async def main() -> None:
        chooser = Chooser(Scripted("A", fails_at(3, GenerationError("node_lost", "gone"))))
        got = []
        with pytest.raises(GenerationError) as caught:
            async with aclosing(ResumingGenerator(chooser.begin).generate(REQUEST)) as events:
                async for event in events:
                    got.append(event)
        assert caught.value.code == "node_lost"
        assert len(got) == 3 and all(event.finish is None for event in got)

    run(main)


def test_what_nobody_can_do_is_asked_once() -> None:
    async def main() -> None:
        error = GenerationError("invalid_value", "no", param="prompt")
        chooser = Chooser(Scripted("A", fails_at(0, error)), Scripted("B", fine))
        with pytest.raises(GenerationError) as caught:
            await collect(ResumingGenerator(chooser.begin))
        assert caught.value is error and len(chooser.left) == 1

    run(main)


def test_an_output_without_an_end_goes_on_elsewhere() -> None:
    class Short(Scripted):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
            yield TokenEvent(token_id=0, text="0")

    async def main() -> None:
        chooser = Chooser(Short("A", fine), Scripted("B", fine))
        assert len(await collect(ResumingGenerator(chooser.begin))) == COUNT

    run(main)


def test_a_defect_is_not_taken_for_a_loss() -> None:
    async def main() -> None:
        chooser = Chooser(Scripted("A", fails_at(2, RuntimeError("bug"))), Scripted("B", fine))
        with pytest.raises(RuntimeError, match="bug"):
            await collect(ResumingGenerator(chooser.begin))

    run(main)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_leaving_closes_what_is_running(how: str) -> None:
    async def main() -> None:
        attempt = Scripted("A", lambda _: 1.0)
        generator = ResumingGenerator(Chooser(attempt).begin)
        if how == "close":
            async with aclosing(generator.generate(REQUEST)) as events:
                async for _ in events:
                    break
        else:
            with trio.move_on_after(2.5):
                await collect(generator)
        assert not attempt.open

    run(main)
