"""The OpenVINO devices of this machine and what they can do.

Drivers are where things go wrong, and asking a plugin whose driver is missing raises. So a device
counts as present only when OpenVINO lists it, and each property is asked for on its own: one that
cannot be had is left out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino
import psutil

from inference.errors import GenerationError

_CHOICES = ("CPU", "GPU", "NPU", "AUTO")
# What AUTO prefers. An NPU runs only static shapes, so it must be asked for.
_AUTO_ORDER = ("GPU", "CPU")

_core: openvino.Core | None = None
_core_lock = threading.Lock()


@dataclass(frozen=True)
class Device:
    """A device that can compute.

    ``kind`` is CPU, GPU or NPU; ``name`` adds a number where there are several (``GPU.1``).
    ``memory_total`` and ``memory_free`` are bytes, of the machine for what shares its memory; 0
    when unknown. ``gops`` is the vendor's peak in 10^9 operations per second for its best
    precision, 0 when unknown. ``integrated`` devices use the machine's memory.
    """

    name: str
    kind: str
    full_name: str
    integrated: bool
    capabilities: tuple[str, ...]
    memory_total: int
    memory_free: int
    gops: float
    driver: str


def core() -> openvino.Core:
    """The one ``openvino.Core`` of this process: plugins are loaded once and stay."""
    global _core
    with _core_lock:
        if _core is None:
            _core = openvino.Core()
        return _core


def list_devices() -> tuple[Device, ...]:
    """All devices that OpenVINO finds here, in its order; never raises for a broken driver."""
    return tuple(_describe(name) for name in _names())


def resolve(device: str) -> str:
    """The OpenVINO device for what a user asked: ``CPU``, ``GPU``, ``NPU``, ``AUTO``, ``GPU.1``.

    AUTO is the GPU where there is one, else the CPU: one device, decided here, because OpenVINO's
    own AUTO moves a model between devices and touches drivers that may be missing. Raises
    :class:`GenerationError` (``invalid_value``) that lists what exists.
    """
    wanted = device.strip().upper()
    names = _names()
    if wanted == "AUTO":
        for kind in _AUTO_ORDER:
            for name in names:
                if name.split(".")[0] == kind:
                    return name
    for name in names:
        # "GPU" means the first one; with several OpenVINO calls them GPU.0, GPU.1, ...
        if name == wanted or ("." not in wanted and name.split(".")[0] == wanted):
            return name
    have = ", ".join(names) or "none at all"
    if wanted.split(".")[0] not in _CHOICES:
        problem = f"{device[:40]!r} is not a device; choose from {', '.join(_CHOICES)}"
    else:
        problem = f"this machine has no {wanted} that OpenVINO can use (is its driver installed?)"
    raise GenerationError("invalid_value", f"{problem}; devices here: {have}", param="device")


def exact_properties(device: str) -> dict[str, Any]:
    """Properties to compile a language model with so that a token depends on its text alone.

    Without them the rows of a batch influence each other's rounding, and a generation that another
    node resumes, or that merely has other company in its batch, takes another turn after some
    tokens:

    * f32 arithmetic, where CPUs with bf16 would use that;
    * no dynamic quantization of activations to int8: CPUs with VNNI do that, others cannot, and its
      result for one row differs from that for several (seen on the former: alone and in a batch,
      prompts diverge within 3 to 43 tokens; without it never). It would halve the time of prompts
      and of large batches there;
    * keys and values in f16 and not in u8.
    """
    properties: dict[str, Any] = {
        "KV_CACHE_PRECISION": "f16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    if device.split(".")[0] == "CPU":
        properties["INFERENCE_PRECISION_HINT"] = "f32"
        # By default every model pins its threads to the same first cores, across processes too.
        properties["ENABLE_CPU_PINNING"] = False
    return properties


def cache_properties(device: str, directory: Path) -> dict[str, Any]:
    """Properties that keep compiled models in ``directory`` for the next start.

    Empty for a CPU: for models with paged attention it writes the cache, but never reads it.
    """
    if device.split(".")[0] == "CPU":
        return {}
    return {"CACHE_DIR": str(directory), "CACHE_MODE": "OPTIMIZE_SIZE"}


def _names() -> tuple[str, ...]:
    try:
        return tuple(core().available_devices)
    except RuntimeError:
        return ()


def _describe(name: str) -> Device:
    kind = name.split(".")[0]
    memory = psutil.virtual_memory()
    # CPUs and integrated GPUs are both "INTEGRATED" to OpenVINO, and so are NPUs.
    integrated = kind != "GPU" or "DISCRETE" not in str(_property(name, "DEVICE_TYPE")).upper()
    total, free = memory.total, memory.available
    if kind == "GPU":
        own = _number(_property(name, "GPU_DEVICE_TOTAL_MEM_SIZE"))
        used = _property(name, "GPU_MEMORY_STATISTICS")
        taken = sum(_number(v) for v in used.values()) if isinstance(used, dict) else 0
        if not integrated:
            total, free = own, max(0, own - taken)
        elif own:
            total, free = min(own, total), min(max(0, own - taken), free)
    elif kind == "NPU" and (own := _number(_property(name, "NPU_DEVICE_TOTAL_MEM_SIZE"))):
        total, free = min(own, total), min(own, free)
    capabilities = _property(name, "OPTIMIZATION_CAPABILITIES")
    gops = _property(name, "DEVICE_GOPS")
    peaks = gops.values() if isinstance(gops, dict) else ()
    driver = None if kind == "CPU" else _property(name, f"{kind}_DRIVER_VERSION")
    return Device(
        name=name,
        kind=kind,
        full_name=str(_property(name, "FULL_DEVICE_NAME") or kind).strip()[:200],
        integrated=integrated,
        capabilities=tuple(str(c) for c in capabilities) if capabilities else (),
        memory_total=total,
        memory_free=free,
        gops=max((float(peak) for peak in peaks), default=0.0),
        driver="" if driver is None else str(driver),
    )


def _property(device: str, name: str) -> Any:
    """A property of a device, or None: whatever a plugin may raise is no reason to fail."""
    try:
        return core().get_property(device, name)
    except (RuntimeError, TypeError, ValueError):
        return None


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
