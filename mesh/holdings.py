"""What this node has loaded, and what its adverts and load reports say of that.

A holding is announced before it is ready, so that others see it coming, and gets its measured speed
when it is: one short generation that also warms the device up.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import trio

from inference.engines import LanguageEngine, Load
from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, SamplingParams
from mesh.gossip.advert import Holding, HoldingLoad
from mesh.receipts import ModelIdentity

_log = logging.getLogger(__name__)

# The measurement is the shape of a small chat: enough tokens to be past the first ones' overhead.
PROBE_PROMPT = 128  # tokens
PROBE_STEPS = 16


class ModelFacts(Protocol):
    """What an announcement says of a model; its files need not be here yet."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def context_length(self) -> int: ...


@dataclass(frozen=True)
class Replica:
    """A whole model that is ready on this node."""

    holding: Holding
    engine: LanguageEngine

    @property
    def identity(self) -> ModelIdentity:
        model = self.engine.model
        return ModelIdentity(name=model.name, digest=model.digest, layers=model.layers)


class Holdings:
    """The models of this node. ``on_change`` is called when what adverts should say has changed,
    ``on_load`` when the load has; both in the trio thread."""

    def __init__(self, *, on_change: Callable[[], None], on_load: Callable[[], None]) -> None:
        self._on_change = on_change
        self._on_load = on_load
        self._changed = trio.Event()  # set, and replaced, at every change of a load
        self._announced: dict[int, Holding] = {}
        self._numbers = itertools.count()
        self._replicas: dict[int, Replica] = {}
        self._stages: dict[int, Callable[[], tuple[int, int]]] = {}

    @property
    def announced(self) -> tuple[Holding, ...]:
        return tuple(self._announced.values())

    @property
    def loads(self) -> tuple[HoldingLoad, ...]:
        replicas = [(n, replica.engine.load()) for n, replica in self._replicas.items()]
        stages = [(n, load()) for n, load in self._stages.items()]
        return (
            *(HoldingLoad(id=n, active=load.active, waiting=load.waiting) for n, load in replicas),
            *(HoldingLoad(id=n, active=active, waiting=waiting) for n, (active, waiting) in stages),
        )

    @property
    def ready(self) -> bool:
        return all(holding.ready for holding in self._announced.values())

    def replica(self, model: str, digest: str | None = None) -> Replica | None:
        """A ready replica of ``model``; of these weights, where a digest is given."""
        for replica in self._replicas.values():
            holding = replica.holding
            if holding.model == model and digest in (None, holding.digest):
                return replica
        return None

    def expect(
        self,
        manifest: ModelFacts,
        *,
        device: str,
        slots: int,
        queue: int,
        layers: tuple[int, int] | None = None,
        claim: int | None = None,
    ) -> int:
        """Announce what is about to be loaded, a replica or a stage of ``layers``; returns its
        number. ``claim``: the sequence of the claim by which placement has put it here."""
        number = next(self._numbers)
        first, last = layers or (0, manifest.layers)
        self._announced[number] = Holding(
            id=number,
            model=manifest.name,
            digest=manifest.digest,
            kind="replica" if layers is None else "stage",
            first=first,
            last=last,
            layers=manifest.layers,
            context_length=manifest.context_length,
            device=device,
            ready=False,
            slots=slots,
            queue=queue,
            claim=claim,
        )
        self._on_change()
        return number

    async def add(self, number: int, engine: LanguageEngine) -> None:
        """Take over an engine for the expected replica ``number``: measure it, announce it."""
        holding = self._ready(number, await measure(engine), engine.context_length)
        self._replicas[number] = Replica(holding, engine)

        def load_changed(_: Load) -> None:
            self.load_changed()

        engine.on_load_change(load_changed)
        self._on_change()
        self.load_changed()

    def add_stage(
        self,
        number: int,
        speed: dict[str, float],
        context_length: int,
        load: Callable[[], tuple[int, int]],
    ) -> None:
        """Announce that the expected stage ``number`` is ready; ``load`` tells how many sessions
        are active and waiting; whoever changes that calls :meth:`load_changed`."""
        self._ready(number, speed, context_length)
        self._stages[number] = load
        self._on_change()
        self.load_changed()

    def _ready(self, number: int, speed: dict[str, float], context_length: int) -> Holding:
        holding = self._announced[number].model_copy(
            update={"ready": True, "context_length": context_length, **speed}
        )
        self._announced[number] = holding
        return holding

    def withdraw(self, number: int) -> None:
        """Let others send it nothing new; what runs goes on."""
        self._update(number, ready=False)

    def restore(self, number: int) -> None:
        """Take that back."""
        self._update(number, ready=True)

    def _update(self, number: int, *, ready: bool) -> None:
        self._announced[number] = self._announced[number].model_copy(update={"ready": ready})
        self._on_change()

    def load_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        self._on_load()

    async def wait_idle(self, number: int | None = None) -> None:
        """Until nothing runs on a holding, or on any."""
        while any(load.active or load.waiting for load in self.loads if number in (None, load.id)):
            await self._changed.wait()

    async def remove(self, number: int) -> None:
        """Forget a holding; an engine is closed, which ends what still runs on it."""
        self._announced.pop(number, None)
        self._stages.pop(number, None)
        replica = self._replicas.pop(number, None)
        self._on_change()
        self.load_changed()
        if replica is not None:
            await replica.engine.aclose()

    async def aclose(self) -> None:
        """End all requests and unload everything."""
        with trio.CancelScope(shield=True):
            for replica in self._replicas.values():
                await replica.engine.aclose()


async def measure(engine: LanguageEngine) -> dict[str, float]:
    """``prefill_seconds`` per prompt token and ``decode_seconds`` per step, of one session alone.

    Raises GenerationError when the engine cannot generate at all.
    """
    manifest = engine.model
    length = min(PROBE_PROMPT, manifest.context_length // 2)
    request = GenerateRequest(
        model=manifest.name,
        # Any tokens do: the time does not depend on which.
        prompt_tokens=tuple(1 + n % 32 for n in range(length)),
        max_tokens=PROBE_STEPS + 1,  # the first comes with the prompt
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.0),
    )
    await _generate(engine, request)  # first use: memory is touched, kernels are chosen
    # Another beginning, or a prefix cache would answer.
    again = request.model_copy(update={"prompt_tokens": tuple(40 + n % 31 for n in range(length))})
    finish = await _generate(engine, again)
    steps = max(1, finish.completion_tokens - 1)
    speed = {
        "prefill_seconds": max(finish.prefill_seconds / length, 1e-7),
        "decode_seconds": max(finish.decode_seconds / steps, 1e-6),
    }
    _log.info(
        "%s on %s: prefill %.0f tokens/s, decode %.1f tokens/s",
        manifest.name,
        engine.device,
        1 / speed["prefill_seconds"],
        1 / speed["decode_seconds"],
    )
    return speed


async def _generate(engine: LanguageEngine, request: GenerateRequest) -> Finish:
    finish: Finish | None = None
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            finish = event.finish
    if finish is None:
        raise GenerationError("engine_failed", f"{engine.model.name} ended without an end")
    return finish
