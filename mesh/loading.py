"""Turning models of the store into engines. The one module of ``mesh`` that loads the runtime.

It is imported when there is something to load: a node that holds nothing stays small.
"""

from __future__ import annotations

from inference import devices
from inference.engines import LanguageEngine
from inference.engines.genai_text import GenaiOptions, GenaiTextEngine
from inference.engines.stage_text import EngineOptions, StageTextEngine
from inference.paged import StageConfig
from inference.store.manifest import ModelManifest
from mesh.config import NodeConfig
from mesh.gossip.advert import Device


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


async def open_engine(manifest: ModelManifest, config: NodeConfig) -> LanguageEngine:
    """Load a whole model. Raises GenerationError when the device or the model cannot be used."""
    if config.engine == "genai":
        return await GenaiTextEngine.open(
            manifest, config.device, GenaiOptions(sequences=config.slots, waiting=config.queue)
        )
    return await StageTextEngine.open(
        manifest,
        StageConfig(device=devices.resolve(config.device)),
        EngineOptions(sequences=config.slots, waiting=config.queue),
    )
