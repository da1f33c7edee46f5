"""Turning models of the store into engines. The one module of ``mesh`` that loads the runtime.

It is imported when there is something to load: a node that holds nothing stays small.
"""

from __future__ import annotations

import time
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
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer
from mesh.config import NodeConfig
from mesh.gossip.advert import Device
from mesh.holdings import PROBE_PROMPT, PROBE_STEPS

STAGES = ".stages"  # folder in a model's folder, for what was cut from it


def device_facts() -> tuple[Device, ...]:
    """The devices of this machine, as adverts tell of them."""
    return tuple(
        Device(
            name=device.name,
            full_name=device.full_name[:80],
            total_memory=device.memory_total or None,
            free_memory=device.memory_free or None,
        )
        for device in devices.list_devices()[:8]
    )


async def open_tokenizer(manifest: ModelManifest) -> Tokenizer:
    """Raises GenerationError when the model's files cannot be used."""
    return await trio.to_thread.run_sync(Tokenizer, manifest)


async def open_stage(
    manifest: ModelManifest,
    layers: tuple[int, int],
    config: NodeConfig,
    kv_bytes: int | None = None,
) -> tuple[Stage, dict[str, float]]:
    """Load layers ``[first, last)``, cut first if need be, and measure them.

    ``kv_bytes`` bounds the memory for KV; None: the usual amount.

    Raises GenerationError when the model has no such layers, cannot be cut or cannot be loaded.
    """
    first, last = layers
    if last > manifest.layers:
        raise GenerationError(
            "invalid_value",
            f"{manifest.name} has {manifest.layers} layers, so no stage {first}-{last}",
        )

    def load() -> tuple[Stage, dict[str, float]]:
        # The same bytes wherever they are made, so nodes of one machine can share them.
        folder = manifest.path / STAGES / f"{first}-{last}"
        files = (folder / STAGE_FILE, (folder / STAGE_FILE).with_suffix(".bin"))
        if not all(file.exists() for file in files):
            read_splittable(manifest.file(MODEL_FILE)).write(first, last, folder)
        stage = Stage.read(
            files[0],
            _stage_config(config, kv_bytes),
            context_length=manifest.context_length,
        )
        return stage, measure_stage(stage)

    try:
        return await trio.to_thread.run_sync(load)
    except (SplitError, UnsupportedModel, StageRefusal, RuntimeError, OSError) as error:
        raise GenerationError(
            "engine_failed", f"{manifest.name}, layers {first}-{last}: {error}"
        ) from error


def measure_stage(stage: Stage) -> dict[str, float]:
    """As :func:`mesh.holdings.measure`, for a stage that nobody uses yet. Blocks."""
    length = min(PROBE_PROMPT, stage.context_length // 2)
    rng = np.random.default_rng(0)
    is_last = stage.range.is_last

    def rows(count: int) -> NDArray[Any]:
        if stage.range.is_first:
            return rng.integers(1, 32, count, dtype=np.int64)
        return rng.standard_normal((count, stage.hidden), dtype=np.float32)

    def run() -> tuple[float, float]:
        stage.open(0)
        try:
            start = time.perf_counter()
            sampled = (length - 1,) if is_last else ()
            stage.step(StepBatch([Part(0, 0, length)], rows(length), sampled))
            prefilled = time.perf_counter()
            for step in range(PROBE_STEPS):
                sampled = (0,) if is_last else ()
                stage.step(StepBatch([Part(0, length + step, 1)], rows(1), sampled))
            return prefilled - start, time.perf_counter() - prefilled
        finally:
            stage.close(0)

    run()  # first use: memory is touched, kernels are chosen
    prefill, decode = run()
    return {"prefill_seconds": prefill / length, "decode_seconds": decode / PROBE_STEPS}


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
    return await StageTextEngine.open(
        manifest,
        _stage_config(config, kv_bytes),
        EngineOptions(sequences=config.slots, waiting=config.queue),
    )
