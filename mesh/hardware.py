"""The devices of this machine, as the mesh is told of them.

It brings the runtime's core, so a node that may not serve does without.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

from inference import devices
from mesh.gossip.advert import Device
from mesh.speeds import MAX_DEVICES, Surroundings


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """``devices`` of this machine, as adverts tell of them; ``chosen`` is the one to use, with what
    its speed depends on besides the model."""

    devices: tuple[Device, ...]
    chosen: Device
    surroundings: Surroundings


def device_facts(device: str) -> DeviceFacts:
    """``device`` as users name it. Blocks. Raises GenerationError when there is none such."""
    name = devices.resolve(device)
    found = {one.name: one for one in devices.list_devices()}
    rows = {
        one.name: Device(
            name=one.name,
            full_name=one.full_name[:80],
            total_memory=one.memory_total or None,
            free_memory=one.memory_free or None,
        )
        for one in found.values()
    }
    runtime = f"openvino {version('openvino')}"
    own = found[name]
    made_with = " | ".join(
        (platform.machine(), platform.processor(), own.full_name, own.driver, runtime)
    )
    chosen = rows[name]
    others = [row for row in rows.values() if row is not chosen]
    return DeviceFacts(
        (chosen, *others)[:MAX_DEVICES],
        chosen,
        Surroundings(device=name, made_with=made_with[:512]),
    )
