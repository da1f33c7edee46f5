"""Which devices there are, on machines that this one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference import devices
from inference.errors import GenerationError


class Core:
    """Answers as ``openvino.Core`` does on a machine with the given devices."""

    def __init__(self, properties: dict[str, dict[str, Any]]) -> None:
        self.available_devices = list(properties)
        self._properties = properties

    def get_property(self, device: str, name: str) -> Any:
        value = self._properties[device].get(name, RuntimeError(f"unsupported {name}"))
        if isinstance(value, Exception):
            raise value
        return value


LAPTOP = {
    "CPU": {"FULL_DEVICE_NAME": "A CPU ", "OPTIMIZATION_CAPABILITIES": ["FP32", "INT8"]},
    "GPU.0": {
        "FULL_DEVICE_NAME": "An integrated GPU",
        "DEVICE_TYPE": "Type.INTEGRATED",
        "GPU_DEVICE_TOTAL_MEM_SIZE": 1 << 34,
        "DEVICE_GOPS": {"f16": 2000.0, "i8": 4000.0},
    },
    "GPU.1": {
        "FULL_DEVICE_NAME": "A card",
        "DEVICE_TYPE": "Type.DISCRETE",
        "GPU_DEVICE_TOTAL_MEM_SIZE": 16 << 30,
        "GPU_MEMORY_STATISTICS": {"usm_device": 1 << 30, "usm_host": 0},
    },
    "NPU": {"FULL_DEVICE_NAME": TypeError("no conversion"), "NPU_DRIVER_VERSION": 1688},
}


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_core", Core(LAPTOP))


@pytest.mark.usefixtures("laptop")
def test_describes_each_and_survives_what_plugins_raise() -> None:
    cpu, shared, card, npu = devices.list_devices()
    assert (cpu.full_name, cpu.capabilities) == ("A CPU", ("FP32", "INT8"))
    assert cpu.memory_total > cpu.memory_free > 0
    assert shared.integrated and shared.memory_free <= cpu.memory_total
    assert shared.gops == 4000.0
    assert not card.integrated
    assert (card.memory_total, card.memory_free) == (16 << 30, 15 << 30)
    assert (npu.kind, npu.full_name, npu.driver) == ("NPU", "NPU", "1688")


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize(
    ("wanted", "got"),
    [("AUTO", "GPU.0"), ("gpu", "GPU.0"), ("GPU.1", "GPU.1"), (" cpu ", "CPU"), ("NPU", "NPU")],
)
def test_resolves(wanted: str, got: str) -> None:
    assert devices.resolve(wanted) == got


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("wanted", ["GPU.2", "TPU", "", "CPU.GPU", "AUTO:GPU,CPU"])
def test_what_is_not_there_lists_what_is(wanted: str) -> None:
    with pytest.raises(GenerationError, match=r"devices here: CPU, GPU\.0, GPU\.1, NPU") as caught:
        devices.resolve(wanted)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "device")


def test_a_runtime_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_core", Core({}))
    assert devices.list_devices() == ()
    with pytest.raises(GenerationError, match="none at all"):
        devices.resolve("AUTO")


def test_this_machine() -> None:
    found = {device.name: device for device in devices.list_devices()}
    assert found["CPU"].full_name
    assert devices.resolve("AUTO") in found
    assert devices.exact_properties("CPU")["INFERENCE_PRECISION_HINT"] == "f32"
    assert "INFERENCE_PRECISION_HINT" not in devices.exact_properties("GPU.1")


def test_compiled_models_are_cached_where_that_helps(tmp_path: Path) -> None:
    assert devices.cache_properties("CPU", tmp_path) == {}
    assert devices.cache_properties("GPU.1", tmp_path)["CACHE_DIR"] == str(tmp_path)
