"""Turn a stateful stage into a paged one and compile it.

OpenVINO's PagedAttention transformation replaces the state by KV blocks that the caller owns, and
the batch dimension by one flat row of tokens of any number of sequences. It is applied at load:
a transformed model cannot be read back from disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from inference.devices import exact_properties
from inference.split import HIDDEN_INPUT, STAGE_INFO

SAMPLED_ROWS = "sampled_rows"
TABLE_INPUTS = (
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
)
KvPrecision = Literal["f16", "f32", "u8"]


class UnsupportedModel(Exception):
    """The model cannot be run paged on this device; the message says why."""


@dataclass(frozen=True, slots=True)
class StageRange:
    """Layers ``[first, last)`` of ``layers``; a whole model is ``[0, layers)``."""

    first: int
    last: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.layers


@dataclass(frozen=True, slots=True)
class StageConfig:
    """How a stage is compiled.

    ``kv_precision`` f32 gives the same tokens alone, in any batch, after a resume and cut anywhere.
    f16 takes half of the memory and does so for greedy generation, but a seeded one may take
    another turn when its company changes. u8 takes half of that and is approximate.
    ``kv_bytes`` is the memory for KV blocks, taken as it fills.
    ``threads`` limits inference threads on a CPU (None: the runtime's choice).
    """

    device: str = "CPU"
    threads: int | None = None
    kv_precision: KvPrecision = "f32"
    kv_bytes: int = 1 << 30

    def properties(self) -> dict[str, Any]:
        chosen = {**exact_properties(self.device), "PERFORMANCE_HINT": "LATENCY"}
        chosen["KV_CACHE_PRECISION"] = self.kv_precision
        if self.threads is not None and self.device.split(".")[0] == "CPU":
            chosen["INFERENCE_NUM_THREADS"] = self.threads
        return chosen


class PagedModel:
    """A compiled stage with its KV blocks. One batch at a time is computed.

    ``input_name`` is ``input_ids`` (int64 ``[tokens]``) or ``hidden_states`` (``[tokens, hidden]``
    of ``input_dtype``). ``vocabulary`` is what token ids must stay below. ``width`` is the last
    dimension of the output: hidden size or vocabulary.
    """

    def __init__(self, model: ov.Model, config: StageConfig) -> None:
        self.range = stage_range(model)
        self.input_name = _to_paged(model, self.range)
        self.vocabulary = vocabulary_of(model) if self.range.is_first else 0
        core = ov.Core()
        try:
            compiled = core.compile_model(model, config.device, config.properties())
        except RuntimeError as error:
            raise UnsupportedModel(f"{config.device} cannot compile the stage: {error}") from error
        inputs = {port.get_any_name(): port for port in compiled.inputs}
        caches = {name: port for name, port in inputs.items() if "_cache." in name}
        known = {self.input_name, "position_ids", SAMPLED_ROWS, *TABLE_INPUTS}
        unknown = inputs.keys() - caches.keys() - known
        if unknown or not caches:
            raise UnsupportedModel(f"after paging the stage needs {sorted(unknown) or 'no cache'}")
        self._names = [name for name in inputs if name in known]
        self.input_dtype = np.dtype(inputs[self.input_name].get_element_type().to_dtype())
        # [blocks, kv heads, tokens of a block, head size] on every device; keys differ by device.
        self.block_size = int(caches["value_cache.0"].get_partial_shape()[2].get_length())
        self.block_bytes = sum(_bytes_of_block(port) for port in caches.values())
        self.blocks = config.kv_bytes // self.block_bytes
        if self.blocks < 1:
            raise UnsupportedModel(
                f"{config.kv_bytes} bytes for KV are less than a block of {self.block_bytes}"
            )
        self.width = int(compiled.outputs[0].get_partial_shape()[-1].get_length())
        self.hidden = _hidden_size(model, self.range, self.width)
        self._request = compiled.create_infer_request()
        on_cpu = config.device.split(".")[0] == "CPU"
        context = None if on_cpu else core.get_default_context(config.device)
        self._caches: dict[str, Any] = {}
        for name, port in caches.items():
            shape = [self.blocks, *(d.get_length() for d in list(port.get_partial_shape())[1:])]
            if context is None:
                cache = ov.Tensor(port.get_element_type(), ov.Shape(shape))
            else:
                cache = context.create_tensor(port.get_element_type(), ov.Shape(shape), {})
            self._caches[name] = cache
            self._request.set_tensor(name, cache)
        self._fed: dict[str, NDArray[Any]] = {}  # the memory of the other inputs' tensors

    def start(self, feed: dict[str, NDArray[Any]]) -> None:
        """Begin to compute one batch; :meth:`wait` has to follow.

        Every array must be contiguous and of the right type: nothing is checked. They are copied.
        """
        for name in self._names:
            values, held = feed[name], self._fed.get(name)
            if held is not None and held.shape == values.shape:
                # Steps that decode are alike, and a new tensor costs ten times what they hold.
                np.copyto(held, values)
            else:
                held = values.copy()
                self._request.set_tensor(name, ov.Tensor(held, shared_memory=True))
                self._fed[name] = held  # not before the runtime has taken it
        self._request.start_async()

    def wait(self) -> NDArray[Any]:
        """The output of what was started last, ``[rows, width]``: memory of the runtime, valid
        until the next start. Raises RuntimeError. May be called from another thread."""
        self._request.wait()
        output: NDArray[Any] = self._request.get_output_tensor(0).data
        return output.reshape(-1, self.width)


def stage_range(model: ov.Model) -> StageRange:
    if model.has_rt_info([STAGE_INFO, "first"]):
        first, last, layers = (
            int(model.get_rt_info([STAGE_INFO, key]).astype(str))
            for key in ("first", "last", "layers")
        )
        return StageRange(first, last, layers)
    layers = len(model.get_sinks()) // 2
    return StageRange(0, layers, layers)


def _to_paged(model: ov.Model, stage: StageRange) -> str:
    """Transform in place; returns the name of the input that carries tokens or hidden states."""
    hidden = None
    for parameter in model.get_parameters():
        if HIDDEN_INPUT in parameter.output(0).get_names():
            hidden = parameter
            # What the pass looks for: this name, and rows of tokens without a batch dimension.
            size = parameter.get_partial_shape()[2].get_length()
            parameter.output(0).set_names({"inputs_embeds"})
            parameter.set_partial_shape(ov.PartialShape([-1, size]))
    try:
        paged_attention_transformation(model)
        if hidden is not None:
            hidden.output(0).set_names({HIDDEN_INPUT})
        model.validate_nodes_and_infer_types()
    except RuntimeError as error:
        raise UnsupportedModel(f"PagedAttention does not apply to this model: {error}") from error
    if stage.is_last:
        _gather_before_head(model)
    return "input_ids" if hidden is None else HIDDEN_INPUT


def _gather_before_head(model: ov.Model) -> None:
    """Compute logits only for the rows that are to be sampled."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            raise UnsupportedModel("no matrix product in front of the logits")
        node = node.input_value(0).get_node()
    rows = ops.parameter(ov.PartialShape([-1]), ov.Type.i64, name=SAMPLED_ROWS)
    rows.output(0).set_names({SAMPLED_ROWS})
    gathered = ops.gather(node.input_value(0), rows, ops.constant(np.int64(0)))
    node.input(0).replace_source_output(gathered.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def vocabulary_of(model: ov.Model) -> int:
    """Rows of the embedding table."""
    stack = [p for p in model.get_parameters() if "input_ids" in p.output(0).get_names()]
    while stack:
        for target in stack.pop().output(0).get_target_inputs():
            node = target.get_node()
            if node.get_type_name() == "Gather" and target.get_index() == 1:
                table = node.input_value(0).get_partial_shape()
                if table.rank.is_static and len(table) == 2:
                    return int(table[0].get_length())
            elif node.get_type_name() in ("Convert", "Reshape", "Unsqueeze"):
                stack.append(node)
    raise UnsupportedModel("the table that token ids are looked up in was not found")


def _bytes_of_block(port: Any) -> int:
    count = int(port.get_element_type().bitwidth)
    for dimension in list(port.get_partial_shape())[1:]:
        count *= dimension.get_length()
    return -(-count // 8)


def _hidden_size(model: ov.Model, stage: StageRange, width: int) -> int:
    """Features of the rows that cross a stage's borders (of a whole model: 0, none do)."""
    if not stage.is_first:
        for parameter in model.get_parameters():
            if HIDDEN_INPUT in parameter.output(0).get_names():
                return int(parameter.get_partial_shape()[1].get_length())
    return 0 if stage.is_last else width
