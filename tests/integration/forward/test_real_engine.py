"""The demo model: forwarded over a real link, lost in the middle, carried on by another replica."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from inference.engines.stage_text import StageTextEngine
from inference.generation import GenerateRequest, SamplingParams, TokenEvent
from inference.store.manifest import ModelManifest
from mesh.forward.answer import answer
from mesh.receipts import Bundle, Expected, ModelIdentity, verify


class Fragile:
    """The engine, on a node whose link to the entry node breaks before a certain token."""

    def __init__(self, engine: StageTextEngine) -> None:
        self.engine = engine
        self.node: Any = None
        self.entry: Any = None
        self.breaks_at: int | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        position = len(request.resume)
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                if position == self.breaks_at:
                    self.node.transport.link(self.entry.peer).down("the cable was pulled")
                position += 1
                yield event


def cases(name: str) -> dict[str, GenerateRequest]:
    chat = ({"role": "user", "content": "Write a short story about a lighthouse in Köln."},)

    def ask(**changes: Any) -> GenerateRequest:
        sampling = SamplingParams(**changes.pop("sampling", {"temperature": 0.0}))
        fields: dict[str, Any] = {"messages": chat, "max_tokens": 24, "sampling": sampling}
        return GenerateRequest(model=name, **{**fields, **changes})

    return {
        "greedy": ask(),
        "sampled": ask(sampling={"temperature": 0.9, "top_p": 0.95, "seed": 11}),
        "penalised": ask(
            sampling={
                "temperature": 0.7,
                "seed": 5,
                "presence_penalty": 0.8,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.2,
            }
        ),
        "logprobs": ask(sampling={"temperature": 0.0, "logprobs": 2}),
        "to its own end": ask(
            messages=({"role": "user", "content": "What is 2 + 2? One word."},), max_tokens=30
        ),
    }


@pytest.mark.slow
def test_lost_replicas_do_not_change_a_word(
    run: Any, start: Any, demo_model: ModelManifest
) -> None:
    run(lambda stack: compare(stack, start, demo_model), seconds=200)


async def compare(stack: AsyncExitStack, start: Any, manifest: ModelManifest) -> None:
    model = ModelIdentity(name=manifest.name, digest=manifest.digest, layers=manifest.layers)
    engines = [await StageTextEngine.open(manifest) for _ in range(2)]
    for engine in engines:
        stack.push_async_callback(engine.aclose)
    fragile = Fragile(engines[0])
    entry = await stack.enter_async_context(start("entry"))
    one = await stack.enter_async_context(start("one", fragile, model))
    two = await stack.enter_async_context(start("two", engines[1], model))
    fragile.node, fragile.entry = one, entry

    async def collect(request: GenerateRequest) -> list[Any]:
        async with aclosing(answer(request, "r", entry.around)) as events:
            return [event async for event in events]

    for name, request in cases(manifest.name).items():
        entry.routes, fragile.breaks_at = [two], None
        whole = await collect(request)
        text = "".join(e.text for e in whole if isinstance(e, TokenEvent))
        variants = [(request, text)]
        if name == "greedy":
            stop = text[len(text) // 2 :][:9]
            stopped = request.model_copy(update={"stop": (stop,)})
            variants.append((stopped, text[: text.index(stop)]))
        for asked, said in variants:
            for position in {1, max(2, len(whole) // 2)}:
                entry.routes, fragile.breaks_at = [one, two], position
                broken = await collect(asked)
                tokens = [e for e in broken if isinstance(e, TokenEvent)]
                assert "".join(e.text for e in tokens) == said, (name, position)
                if asked is request:
                    assert broken[-1].token_ids == whole[-1].token_ids, (name, position)
                    assert broken[-2].finish.reason == whole[-2].finish.reason
                    assert broken[-2].finish.completion_tokens == len(whole[-1].token_ids)
                    assert broken[-2].finish.prompt_tokens == whole[-2].finish.prompt_tokens
                if asked.sampling.logprobs is not None:
                    assert [e.logprob.logprob for e in tokens] == pytest.approx(
                        [e.logprob.logprob for e in whole if isinstance(e, TokenEvent)], abs=0.01
                    )
                verified = verify(
                    Bundle.from_bytes(broken[-1].receipt),
                    entry.trust.roots,
                    network="test",
                    now=entry.around.clock(),
                    expected=Expected(request=asked, token_ids=broken[-1].token_ids, text=said),
                )
                if len(broken[-1].token_ids) > position:
                    assert [s.node for s in verified.segments] == [one.peer, two.peer]
    assert engines[0].load().active == engines[1].load().active == 0
