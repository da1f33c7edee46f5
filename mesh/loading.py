"""Turning models of the store into engines.

It brings all of the runtime, so it is imported when there is something to load: a node that holds
nothing stays small.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from inference import devices
from inference.engines import LanguageEngine
from inference.engines.genai_text import GenaiOptions, GenaiTextEngine
from inference.engines.stage_text import MODEL_FILE, EngineOptions, StageTextEngine
from inference.errors import GenerationError
from inference.paged import StageConfig, UnsupportedModel
from inference.split import STAGE_FILE, SplitError, read_splittable
from inference.stage import Part, Stage, StageRefusal, StepBatch
from inference.static_stage import StaticConfig, StaticStage
from inference.store.errors import StoreError
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer
from mesh.config import NodeConfig
from mesh.holdings import PROBE_PROMPT, PROBE_STEPS
from mesh.models import disk
from mesh.relay.compute import StageEngine
from mesh.routing.placement.facts import runs_fixed_shapes

# A stage of a chain rests between its turns, and is slower after that than when it computes all the
# time: its threads sleep, and the caches fill with other things.
TURN = 0.005  # s
COMPILED = "compiled"  # folder beside a stage, for what an NPU needs minutes to compile


async def open_tokenizer(manifest: ModelManifest) -> Tokenizer:
    """Raises GenerationError when the model's files cannot be used."""
    return await trio.to_thread.run_sync(Tokenizer, manifest)


async def open_stage(
    manifest: ModelManifest,
    layers: tuple[int, int],
    config: NodeConfig,
    kv_bytes: int | None = None,
    context: int | None = None,
) -> tuple[StageEngine, dict[str, float]]:
    """Load layers ``[first, last)``, cut first if need be, and measure them.

    ``kv_bytes`` bounds the memory for KV; None: the usual amount. ``context`` is how many tokens a
    session is to have at least, which a stage of fixed shapes has to know.

    Raises GenerationError when the model has no such layers, cannot be cut or cannot be loaded.
    """
    first, last = layers
    if last > manifest.layers:
        raise GenerationError(
            "invalid_value",
            f"{manifest.name} has {manifest.layers} layers, so no stage {first}-{last}",
        )

    def load() -> tuple[StageEngine, dict[str, float]]:
        # The same bytes wherever they are made, so nodes of one machine can share them.
        folder = manifest.path / disk.STAGES / f"{first}-{last}"
        files = (folder / STAGE_FILE, (folder / STAGE_FILE).with_suffix(".bin"))
        if all(file.exists() for file in files):
            disk.used(folder)
        else:
            weights = (manifest.path / STAGE_FILE).with_suffix(".bin").stat().st_size
            # Older ones may go, loaded ones too, which live on without their files; this one is
            # wanted in any case.
            with suppress(StoreError):
                disk.make_room_for_cut(manifest.path, manifest.digest, weights, ())
            read_splittable(manifest.file(MODEL_FILE)).write(first, last, folder)
        stage = _read_stage(files[0], manifest, config, kv_bytes, context)
        return stage, measure_stage(stage)

    try:
        return await trio.to_thread.run_sync(load)
    except (SplitError, UnsupportedModel, StageRefusal, RuntimeError, OSError) as error:
        raise GenerationError(
            "engine_failed", f"{manifest.name}, layers {first}-{last}: {error}"
        ) from error


def measure_stage(stage: StageEngine) -> dict[str, float]:
    """As :func:`mesh.holdings.measure`, for a stage that nobody uses yet. Blocks."""
    length = min(PROBE_PROMPT, stage.context_length // 2)
    rng = np.random.default_rng(0)
    is_last = stage.range.is_last

    def rows(count: int) -> NDArray[Any]:
        if stage.range.is_first:
            return rng.integers(1, 32, count, dtype=np.int64)
        return rng.standard_normal((count, stage.hidden), dtype=np.float32)

    def run(count: int) -> tuple[float, list[float]]:
        stage.open(0)
        try:
            start = time.perf_counter()
            sampled = (length - 1,) if is_last else ()
            stage.step(StepBatch([Part(0, 0, length)], rows(length), sampled))
            prefilled = time.perf_counter() - start
            steps = []
            for step in range(count):
                sampled = (0,) if is_last else ()
                row = rows(1)
                time.sleep(TURN)
                start = time.perf_counter()
                stage.step(StepBatch([Part(0, length + step, 1)], row, sampled))
                steps.append(time.perf_counter() - start)
            return prefilled, steps
        finally:
            stage.close(0)

    run(2)  # first use: memory is touched, kernels are chosen
    prefill, steps = run(PROBE_STEPS)
    # The middle one: the machine may be doing other things for some of them.
    return {"prefill_seconds": prefill / length, "decode_seconds": statistics.median(steps)}


def _read_stage(
    path: Path,
    manifest: ModelManifest,
    config: NodeConfig,
    kv_bytes: int | None,
    context: int | None,
) -> StageEngine:
    paged = _stage_config(config, kv_bytes)
    if not runs_fixed_shapes(paged.device):
        return Stage.read(path, paged, context_length=manifest.context_length)
    static = StaticConfig(paged.device, kv_bytes=paged.kv_bytes, cache=path.parent / COMPILED)
    length = min(manifest.context_length, context or static.context)
    return StaticStage.read(path, replace(static, context=length))


def _stage_config(config: NodeConfig, kv_bytes: int | None) -> StageConfig:
    device = devices.resolve(config.device)
    return StageConfig(device) if kv_bytes is None else StageConfig(device, kv_bytes=kv_bytes)


async def open_engine(
    manifest: ModelManifest, config: NodeConfig, kv_bytes: int | None = None
) -> LanguageEngine:
    """Load a whole model. Raises GenerationError when the device or the model cannot be used.

    ``kv_bytes`` as in :func:`open_stage`.
    """
    if config.engine == "genai":
        return await GenaiTextEngine.open(
            manifest, config.device, GenaiOptions(sequences=config.slots, waiting=config.queue)
        )
    paged = _stage_config(config, kv_bytes)
    if runs_fixed_shapes(paged.device):
        raise GenerationError(
            "invalid_value",
            "an NPU runs ranges of layers only; serve the whole model as one: "
            f"--stage {manifest.name}:0-{manifest.layers}",
            param="device",
        )
    return await StageTextEngine.open(
        manifest,
        paged,
        EngineOptions(sequences=config.slots, waiting=config.queue),
    )
