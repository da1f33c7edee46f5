"""Shapes of tensors upstream of a cut, as expressions of the hidden state's shape.

A later stage sometimes asks for the shape of a tensor that it does not hold, such as that of the
token ids. Two static shape inferences of what that tensor is computed from, with sizes chosen so
that no two quantities coincide, tell what each dimension is made of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from inference.split.errors import SplitError
from inference.split.graph import TOKEN_INPUTS
from inference.split.plan import Plan

# (batch, tokens), twice: distinct primes, so that products and sums are told apart.
_PROBES = ((3, 7), (5, 11))


class UpstreamShapes:
    """Expressions for one stage, made as they are asked for."""

    def __init__(self, model: ov.Model, plan: Plan, hidden: ov.Node) -> None:
        self._model = model
        self._plan = plan
        self._hidden = hidden
        self._made = 0

    def expression(self, number: int, port: int, element: ov.Type) -> ov.Node:
        """A node that gives the shape, of ``element`` type, of output ``port`` of a graph node."""
        node = self._plan.graph.nodes[number]
        if number == self._plan.graph.token_input and len(node.shape or ()) == 2:
            parts = [self._of_hidden(0), self._of_hidden(1)]
        else:
            small, large = (self._probe(node.name, port, *sizes) for sizes in _PROBES)
            parts = [self._dimension(node.name, a, b) for a, b in zip(small, large, strict=True)]
        whole = parts[0] if len(parts) == 1 else self._name(ops.concat(parts, 0))
        return self._name(ops.convert(whole, element.get_type_name()))

    def _dimension(self, name: str, small: int, large: int) -> ov.Node:
        (batch_a, tokens_a), (batch_b, tokens_b) = _PROBES
        if small >= 0 and large >= 0:
            if small == large:
                return self._constant([small])
            if (small, large) == (batch_a, batch_b):
                return self._of_hidden(0)
            if (small, large) == (batch_a * tokens_a, batch_b * tokens_b):
                return self._name(ops.multiply(self._of_hidden(0), self._of_hidden(1)))
            if small - tokens_a == large - tokens_b:
                if small == tokens_a:
                    return self._of_hidden(1)
                offset = self._constant([small - tokens_a])
                return self._name(ops.add(self._of_hidden(1), offset))
        raise SplitError(
            "unknown_shape", f"a stage needs a dimension of '{name}' ({small}/{large})"
        )

    def _of_hidden(self, axis: int) -> ov.Node:
        shape = self._name(ops.shape_of(self._hidden, "i64"))
        return self._name(ops.gather(shape, self._constant([axis]), self._constant(0)))

    def _constant(self, value: Any) -> ov.Node:
        return self._name(ops.constant(np.array(value, np.int64)))

    def _name(self, node: ov.Node) -> ov.Node:
        """Names that do not depend on what else this process has built."""
        node.set_friendly_name(f"upstream_shape/{self._made}")
        self._made += 1
        return node

    def _probe(self, name: str, port: int, batch: int, tokens: int) -> tuple[int, ...]:
        """The tensor's shape for a given batch and number of tokens; -1 where still unknown."""
        model = self._model.clone()
        node = next(n for n in model.get_ordered_ops() if n.get_friendly_name() == name)
        above = _ancestors(node)
        wanted: dict[Any, ov.PartialShape] = {}
        parameters = [p for p in model.get_parameters() if p.get_friendly_name() in above]
        for parameter in parameters:
            output = parameter.output(0)
            names = output.get_names()
            rest = list(output.get_partial_shape())[2:]
            if names & {*TOKEN_INPUTS, "position_ids"}:
                wanted[output] = ov.PartialShape([batch, tokens, *rest])
            elif "attention_mask" in names:
                wanted[output] = ov.PartialShape([batch, -1])
            elif "beam_idx" in names:
                wanted[output] = ov.PartialShape([batch])
        variables = [v for v in model.get_variables() if v.get_info().variable_id in above.values()]
        part = ov.Model([ops.result(node.output(port))], [], parameters, variables, "probe")
        try:
            part.reshape(wanted)
        except RuntimeError as error:
            raise SplitError("unknown_shape", f"a stage needs the shape of '{name}'") from error
        partial = node.output(port).get_partial_shape()
        if partial.rank.is_dynamic:
            raise SplitError("unknown_shape", f"a stage needs the shape of '{name}', of any rank")
        return tuple(-1 if d.is_dynamic else d.get_length() for d in partial)


def _ancestors(node: ov.Node) -> dict[str, str | None]:
    """Everything a node is computed from, itself included, with the state variable it reads."""
    found: dict[str, str | None] = {}
    stack = [node]
    while stack:
        node = stack.pop()
        if node.get_friendly_name() in found:
            continue
        reads = node.get_type_name() == "ReadValue"
        found[node.get_friendly_name()] = node.get_attributes()["variable_id"] if reads else None
        stack.extend(entry.get_source_output().get_node() for entry in node.inputs())
    return found
