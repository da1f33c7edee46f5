"""How fast a device works through weights, found out in a second without any model.

For a first estimate of what a device would make of a model that has not been run on it: some matrix
products with 4-bit weights, as decoder layers mostly consist of, once for a single row and once for
many. Attention, small tensors and what the runtime adds to each layer are left out, so small models
are slower than this says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from inference.devices import core, exact_properties

_WIDTH = 2048
_GROUP = 128  # weights that share a scale
_PRODUCTS = 16  # 34 MB of weights together: more than most caches hold
_ROWS = 32
_REPEATS = 3  # at least
_SECONDS = 0.2  # for each of the two, about


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes of weights per second for one row, and bytes times rows per second for many."""

    decode: float
    prefill: float


def measure_rates(device: str) -> Rates:
    """Blocks, and has the device for itself. Raises RuntimeError when it cannot be used."""
    rng = np.random.default_rng(0)
    # Tensors of 4-bit weights are views of these: they have to live as long as the models.
    packed = [rng.integers(0, 256, _WIDTH * _WIDTH // 2, np.uint8) for _ in range(_PRODUCTS)]
    size = sum(weights.nbytes for weights in packed)
    return Rates(size / _seconds(device, 1, packed), size * _ROWS / _seconds(device, _ROWS, packed))


def _seconds(device: str, rows: int, packed: Sequence[NDArray[np.uint8]]) -> float:
    """Of one inference, the fastest of some: whatever else ran meanwhile is not the device's."""
    compiled = core().compile_model(_products(rows, packed), device, exact_properties(device))
    request = compiled.create_infer_request()
    given = ov.Tensor(np.full((rows, _WIDTH), 0.01, np.float32))
    request.infer([given])  # the first one touches the memory
    times: list[float] = []
    while len(times) < _REPEATS or sum(times) < _SECONDS:
        began = time.perf_counter()
        request.infer([given])
        times.append(time.perf_counter() - began)
    return min(times)


def _products(rows: int, packed: Sequence[NDArray[np.uint8]]) -> ov.Model:
    given = ops.parameter([rows, _WIDTH], ov.Type.f32)
    scale = ops.constant(np.full((_WIDTH, _WIDTH // _GROUP, 1), 1e-3, np.float16))
    middle = ops.constant(np.float16(8.0))
    flow: ov.Output = given.output(0)
    for bits in packed:
        grouped = ov.Shape([_WIDTH, _WIDTH // _GROUP, _GROUP])
        weights = ops.constant(ov.Tensor(bits, grouped, ov.Type.u4))
        centred = ops.subtract(ops.convert(weights, ov.Type.f16), middle)
        scaled = ops.reshape(ops.multiply(centred, scale), [_WIDTH, _WIDTH], False)
        matrix = ops.convert(scaled, ov.Type.f32)
        flow = ops.matmul(flow, matrix, False, True).output(0)
    return ov.Model([ops.result(flow)], [given])
