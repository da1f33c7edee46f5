"""A stage of fixed shapes, for devices that compile nothing else: NPUs.

The keys and values are explicit inputs and outputs here, and there are two compiled models: one
for a chunk of a prompt, padded to its length, and one for a single row of output. Sessions take
turns, each with KV of its own for the whole context, so many sessions are no faster than one after
the other; on a CPU or GPU :class:`inference.stage.Stage` is the better one.

KV is right-aligned: what a session has seen ends where the new rows begin, so that distances
between tokens, which sliding windows go by, are those of the uncut model. What is to the left of it
and the padding to the right of the rows are masked.

This has run on the CPU plugin, and on the CPU through the NPU plugin's own wrapper, token for token
like the paged stage. It has not run on an NPU: f16 arithmetic there will make it differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino._offline_transformations import stateful_to_stateless_transformation

from inference.devices import cache_properties, core, exact_properties
from inference.paged import SAMPLED_ROWS, StageRange, UnsupportedModel, stage_range, vocabulary_of
from inference.split import HIDDEN_INPUT
from inference.stage import Part, StageRefusal, StepBatch, checked_rows

_PAST = "past_key_values."
_INPUTS = ("input_ids", HIDDEN_INPUT, "attention_mask", "position_ids", "beam_idx", SAMPLED_ROWS)


@dataclass(frozen=True, slots=True)
class StaticConfig:
    """How a static stage is compiled.

    A session has at most ``context`` tokens, and its prompt goes through in chunks of ``chunk``.
    ``kv_bytes`` is the memory for KV, of which each session takes that of a whole context.
    ``cache`` is a folder for what the device compiles, which takes an NPU minutes.
    """

    device: str = "NPU"
    context: int = 1024
    chunk: int = 64
    kv_bytes: int = 1 << 30
    cache: Path | None = None

    def properties(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        chosen |= (
            npu_properties()
            if self.device.split(".")[0] == "NPU"
            else exact_properties(self.device)
        )
        if self.cache is not None:
            chosen |= cache_properties(self.device, self.cache)
        return chosen


def npu_properties() -> dict[str, Any]:
    """Compile by way of the plugin's wrapper: it compiles repeated layers once, and knows 4-bit
    weights. What does not run on the NPU is an error and does not move to the CPU unseen."""
    return {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "NPU"}


def check_device(device: str) -> None:
    """Raise :class:`UnsupportedModel` when OpenVINO finds no such device here."""
    have = core().available_devices
    if not any(device in (name, name.split(".")[0]) for name in have):
        raise UnsupportedModel(
            f"this machine has no {device} that OpenVINO can use (is its driver installed?); "
            f"devices here: {', '.join(have) or 'none at all'}"
        )


@dataclass(slots=True)
class _Session:
    """``kv``, ``[1, heads, context, head size]`` by name, is there once rows have come."""

    prompt: int | None
    length: int = 0
    kv: dict[str, NDArray[Any]] | None = None


class StaticStage:
    """A stage with its sessions, used as :class:`inference.stage.Stage` is by chains.

    A block is the KV of one session: ``block_size`` is the whole context.
    """

    def __init__(self, model: ov.Model, config: StaticConfig) -> None:
        """Compile. ``model`` is consumed. Raises :class:`inference.paged.UnsupportedModel`."""
        check_device(config.device)
        self.config = config
        self.range: StageRange = stage_range(model)
        self._vocabulary = vocabulary_of(model) if self.range.is_first else 0
        self._chunk = _Compiled(_stateless(model, self.range, config, config.chunk), config)
        self._single = _Compiled(_stateless(model, self.range, config, 1), config)
        self.width = self._single.width
        self.hidden = self._single.hidden or (0 if self.range.is_last else self.width)
        self.context_length = self.block_size = config.context
        self.block_bytes = self._single.kv_bytes
        self.blocks = config.kv_bytes // self.block_bytes
        if self.blocks < 1:
            raise UnsupportedModel(
                f"{config.kv_bytes} bytes for KV are less than a session's {self.block_bytes}"
            )
        self._sessions: dict[int, _Session] = {}
        self._begun: tuple[StepBatch, NDArray[Any]]

    @classmethod
    def read(cls, path: Path, config: StaticConfig) -> StaticStage:
        """Load a stage, or a whole model, from its ``.xml``."""
        return cls(core().read_model(path), config)

    @property
    def free_blocks(self) -> int:
        return self.blocks - sum(s.kv is not None for s in self._sessions.values())

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def open(self, session: int, prompt: int | None = None) -> None:
        """``prompt`` tokens are the session's prompt and go through in chunks, what comes behind
        them one by one. None: several rows at once are prompt."""
        if session in self._sessions:
            raise ValueError(f"session {session} is open")
        self._sessions[session] = _Session(prompt)

    def close(self, session: int) -> None:
        """Free the session's KV. One that is not open is fine."""
        self._sessions.pop(session, None)

    def length(self, session: int) -> int:
        """Tokens of the session that this stage has seen."""
        return self._sessions[session].length

    def step(self, batch: StepBatch) -> NDArray[Any]:
        """Run a batch. See :meth:`begin` and :meth:`finish`."""
        self.begin(batch)
        return self.finish()

    def begin(self, batch: StepBatch) -> None:
        """Check a batch, which :meth:`finish` runs. Raises :class:`StageRefusal`; then nothing was
        changed."""
        self._check(batch)
        rows = checked_rows(
            batch, self.range, self.hidden, self._vocabulary, self._single.input_dtype
        )
        self._begun = batch, rows

    def finish(self) -> NDArray[Any]:
        """Run what was begun, one session after the other; blocks, in any thread.

        Returns hidden states ``[tokens, hidden]``, or on the last stage logits f32
        ``[len(sampled), vocabulary]``. Raises RuntimeError.
        """
        batch, rows = self._begun
        is_last = self.range.is_last
        sampled = {row: number for number, row in enumerate(batch.sampled)}
        output = np.empty((len(sampled) if is_last else len(rows), self.width), np.float32)
        start = 0
        for part in batch.parts:
            session = self._sessions[part.session]
            kv = session.kv = session.kv or self._single.empty()
            self._forget(kv, session.length, part.past)
            session.length = part.past
            ends = {row - start + 1 for row in sampled if start <= row < start + part.count}
            for model, at, count in self._runs(part, session.prompt, ends):
                first = start + at
                found = model.infer(rows[first : first + count], session.length, kv)
                session.length += count
                if not is_last:
                    output[first : first + count] = found[:count]
                elif first + count - 1 in sampled:
                    output[sampled[first + count - 1]] = found[-1]
            start += part.count
        return output

    def _runs(
        self, part: Part, prompt: int | None, ends: set[int]
    ) -> Iterator[tuple[_Compiled, int, int]]:
        """(model, row of the part, rows): chunks of a prompt, single rows of output.

        A chunk gives logits for its last row only, so it ends where a row is to be sampled.
        """
        single = part.count == 1 if prompt is None else part.past >= prompt
        at = 0
        while at < part.count:
            limit = 1 if single else self.config.chunk
            end = min([at + limit, part.count, *(end for end in ends if end > at)])
            yield self._single if single else self._chunk, at, end - at
            at = end

    def _forget(self, kv: dict[str, NDArray[Any]], length: int, past: int) -> None:
        """Move what is kept of a session, its first ``past`` tokens, to the right end."""
        if past < length:
            end = self.config.context
            for tensor in kv.values():
                kept = tensor[:, :, end - length : end - length + past].copy()
                tensor[:, :, end - past :] = kept

    def _check(self, batch: StepBatch) -> None:
        if not batch.parts:
            raise StageRefusal("bad_count", "a batch without parts")
        seen: set[int] = set()
        new = 0
        for part in batch.parts:
            session = self._sessions.get(part.session)
            if part.session in seen:
                raise StageRefusal("bad_count", "a session twice in a batch", part.session)
            seen.add(part.session)
            if session is None:
                raise StageRefusal(
                    "unknown_session", f"session {part.session} is not open here", part.session
                )
            if not 0 <= part.past <= session.length:
                raise StageRefusal(
                    "bad_past",
                    f"session {part.session} is at {session.length} tokens, not at {part.past}",
                    part.session,
                )
            if part.count < 1:
                raise StageRefusal("bad_count", f"{part.count} rows", part.session)
            if part.past + part.count > self.context_length:
                raise StageRefusal(
                    "context_exceeded",
                    f"session {part.session} would have {part.past + part.count} tokens, "
                    f"more than {self.context_length}",
                    part.session,
                )
            new += session.kv is None
            if new > self.free_blocks:
                raise StageRefusal(
                    "out_of_blocks", f"no KV memory for session {part.session}", part.session
                )


class _Compiled:
    """One of the two models: ``tokens`` rows of one session at a time."""

    def __init__(self, model: ov.Model, config: StaticConfig) -> None:
        try:
            compiled = core().compile_model(model, config.device, config.properties())
        except RuntimeError as error:
            raise UnsupportedModel(f"{config.device} cannot compile the stage: {error}") from error
        inputs = {_name(port): port for port in compiled.inputs}
        self._names = frozenset(inputs)
        self._input = HIDDEN_INPUT if HIDDEN_INPUT in inputs else "input_ids"
        port = inputs[self._input]
        self.tokens = int(port.shape[1])
        self.hidden = int(port.shape[2]) if self._input == HIDDEN_INPUT else 0
        self.input_dtype = np.dtype(port.get_element_type().to_dtype())
        self.width = int(compiled.outputs[0].shape[-1])
        self._context = config.context
        self._kv = {
            name: (tuple(port.shape), np.dtype(port.get_element_type().to_dtype()))
            for name, port in inputs.items()
            if name.startswith(_PAST)
        }
        self._present = {name: number for number, name in enumerate(_continued(model), 1)}
        if self._present.keys() != self._kv.keys() or not self._kv:
            raise UnsupportedModel("the stage does not give back the KV that it takes")
        self._request = compiled.create_infer_request()

    @property
    def kv_bytes(self) -> int:
        """Of one session."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._kv.values())

    def empty(self) -> dict[str, NDArray[Any]]:
        """KV of a session that has seen nothing."""
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._kv.items()}

    def infer(self, rows: NDArray[Any], past: int, kv: dict[str, NDArray[Any]]) -> NDArray[Any]:
        """Run up to ``tokens`` rows behind ``past`` ones and bring ``kv`` up to date.

        Returns ``[tokens, width]`` or, on a last stage, ``[1, width]`` for the last of the rows:
        memory of the runtime, valid until the next call.
        """
        count, context = len(rows), self._context
        padded = np.zeros((1, self.tokens, *rows.shape[1:]), rows.dtype)
        padded[0, :count] = rows
        mask = np.zeros((1, context + self.tokens), np.int64)
        mask[0, context - past : context + count] = 1
        # Padding takes the last position: it must not lie outside the model's range of them.
        positions = np.minimum(np.arange(past, past + self.tokens), past + count - 1)
        feed: dict[str, NDArray[Any]] = {
            self._input: padded,
            "attention_mask": mask,
            "position_ids": positions[None].astype(np.int64),
            "beam_idx": np.zeros(1, np.int32),
            SAMPLED_ROWS: np.array([count - 1], np.int64),
            **kv,
        }
        for name in self._names:
            self._request.set_tensor(name, ov.Tensor(feed[name], shared_memory=True))
        self._request.infer()
        for name, number in self._present.items():
            # Old KV and then the new rows, of which `count` are real: the context that ends there.
            kv[name][:] = self._request.get_output_tensor(number).data[
                :, :, count : count + context
            ]
        output: NDArray[Any] = self._request.get_output_tensor(0).data
        return output.reshape(-1, self.width)


def _stateless(source: ov.Model, layers: StageRange, config: StaticConfig, tokens: int) -> ov.Model:
    """A copy of ``source`` with explicit KV in which every shape is fixed."""
    model = source.clone()
    try:
        stateful_to_stateless_transformation(model)
        _fill_empty_broadcasts(model)
        if layers.is_last:
            _gather_before_head(model)
        model.reshape(
            {
                port: _shape(_name(port), port.get_partial_shape(), config.context, tokens)
                for port in model.inputs
            }
        )
    except RuntimeError as error:
        raise UnsupportedModel(f"the stage cannot be given fixed shapes: {error}") from error
    ports = [*model.inputs, *model.outputs]
    dynamic = [_name(port) for port in ports if port.get_partial_shape().is_dynamic]
    if dynamic:
        raise UnsupportedModel(f"{dynamic[0]} of the stage has no fixed shape")
    return model


def _shape(name: str, given: ov.PartialShape, context: int, tokens: int) -> ov.PartialShape:
    sizes = [-1 if size.is_dynamic else size.get_length() for size in given]
    if name.startswith(_PAST):
        if len(sizes) != 4 or sizes[2] != -1 or -1 in (sizes[1], sizes[3]):
            raise UnsupportedModel(f"{name} is not [sessions, heads, tokens, head size]: {given}")
        return ov.PartialShape([1, sizes[1], context, sizes[3]])
    if name == "attention_mask":
        return ov.PartialShape([1, context + tokens])
    if name in ("input_ids", "position_ids", HIDDEN_INPUT):
        return ov.PartialShape([1, tokens, *sizes[2:]])
    if name in ("beam_idx", SAMPLED_ROWS):
        return ov.PartialShape([1])
    raise UnsupportedModel(f"the stage has an input {name}, which is not known here")


def _continued(model: ov.Model) -> list[str]:
    """Of each output behind the first, the KV input that it goes on from. By topology: names of
    outputs come from the state variables, and OpenVINO's GGUF reader names two of those alike."""
    found = []
    for result in model.get_results()[1:]:
        node = result.input_value(0).get_node()
        while node.get_type_name() != "Parameter" and node.get_input_size():
            node = node.input_value(0).get_node()
        name = _name(node.output(0))
        if not name.startswith(_PAST) or name in found:
            raise UnsupportedModel(f"KV that goes on from {name}")
        found.append(name)
    return found


def _fill_empty_broadcasts(model: ov.Model) -> None:
    """Repair what OpenVINO's GGUF reader writes where keys and values are repeated for groups of
    heads: as the number of tokens it gives 0, which only works where attention is fused before
    anyone looks at it. 1 is what means "as many as there are"."""
    for node in model.get_ordered_ops():
        if (
            node.get_type_name() != "Broadcast"
            or "BIDIR" not in node.get_attributes()["mode"].upper()
        ):
            continue
        target = node.input_value(1).get_node()
        for entry in target.inputs() if target.get_type_name() == "Concat" else ():
            size = entry.get_source_output().get_node()
            if size.get_type_name() == "Constant" and size.get_data().tolist() == [0]:
                entry.replace_source_output(ops.constant(np.ones(1, np.int64)).output(0))


def _gather_before_head(model: ov.Model) -> None:
    """Compute logits only for one row of the chunk."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            raise UnsupportedModel("no matrix product in front of the logits")
        node = node.input_value(0).get_node()
    if node.input_value(0).get_partial_shape().rank.get_length() != 3:
        raise UnsupportedModel("the rows in front of the logits are not [1, tokens, hidden]")
    rows = ops.parameter(ov.PartialShape([1]), ov.Type.i64, name=SAMPLED_ROWS)
    rows.output(0).set_names({SAMPLED_ROWS})
    gathered = ops.gather(node.input_value(0), rows, ops.constant(np.int64(1)))
    node.input(0).replace_source_output(gathered.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def _name(port: Any) -> str:
    """The port's name that says what it is, among those that the exporter gave it."""
    names = sorted(port.get_names())
    told = [name for name in names if name in _INPUTS or name.startswith(_PAST)]
    return str((told or names or [""])[0])
