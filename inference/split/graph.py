"""A stateful language model's graph as plain tables, and where the tokens' data flows in it.

Everything that decides where a model can be cut works on these tables and never touches OpenVINO,
so it can be tested with graphs of a few nodes. Nodes are numbered in topological order; a node is
found again in the model (or in a clone of it) by its friendly name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import openvino as ov

from inference.split.errors import SplitError

TOKEN_INPUTS = ("input_ids", "inputs_embeds")


@dataclass(frozen=True, slots=True)
class Source:
    """An output of a node: what an input is connected to."""

    node: int
    port: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operation. ``shape`` and ``element`` describe output 0; -1 is a dynamic dimension and
    ``shape`` is None when even the rank is unknown."""

    name: str
    kind: str
    inputs: tuple[Source, ...]
    outputs: int = 1
    shape: tuple[int, ...] | None = None
    element: str = ""
    variable: str | None = None  # of a ReadValue or an Assign
    tensor_names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order."""

    nodes: tuple[GraphNode, ...]

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each node, who reads it: one entry for each edge."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for source in node.inputs:
                found[source.node].append(number)
        return tuple(tuple(readers) for readers in found)

    @cached_property
    def token_input(self) -> int:
        for number, node in enumerate(self.nodes):
            if node.kind == "Parameter" and node.tensor_names & set(TOKEN_INPUTS):
                return number
        raise SplitError(
            "no_token_input", f"no input is called {' or '.join(TOKEN_INPUTS)}: not a text model"
        )

    @cached_property
    def result(self) -> int:
        found = [number for number, node in enumerate(self.nodes) if node.kind == "Result"]
        if len(found) != 1:
            raise SplitError("not_one_result", f"{len(found)} results where one (logits) is needed")
        return found[0]

    @cached_property
    def flow(self) -> tuple[bool, ...]:
        """Which nodes carry data that was computed from the tokens. A shape carries none."""
        carries = [False] * len(self.nodes)
        carries[self.token_input] = True
        for number, node in enumerate(self.nodes):
            if node.kind not in ("ShapeOf", "Assign") and any(
                carries[source.node] for source in node.inputs
            ):
                carries[number] = True
        return tuple(carries)

    def waists(self) -> list[int]:
        """Nodes that every path of token data from the input to the logits goes through, in order.

        Found by counting paths: a node is a waist when (paths into it) x (paths out of it) equals
        all paths. Python's integers are exact, and the count of a 100-layer model has a few
        hundred digits, so this costs one pass in each direction.
        """
        flow, start, end = self.flow, self.token_input, self.result
        if not flow[end]:
            raise SplitError("no_data_flow", "the logits do not depend on the tokens")
        into = [0] * len(self.nodes)
        into[start] = 1
        for number, node in enumerate(self.nodes):
            if flow[number] and number != start:
                into[number] = sum(into[source.node] for source in node.inputs)
        out_of = [0] * len(self.nodes)
        out_of[end] = 1
        for number in range(len(self.nodes) - 1, -1, -1):
            if flow[number] and number != end:
                out_of[number] = sum(
                    out_of[reader] for reader in self.consumers[number] if flow[reader]
                )
        return [
            number
            for number in range(len(self.nodes))
            if flow[number] and into[number] * out_of[number] == into[end]
        ]


def make_names_unique(model: ov.Model) -> None:
    """Give nodes that share a friendly name different ones (in topological order)."""
    seen: set[str] = set()
    for position, node in enumerate(model.get_ordered_ops()):
        name = node.get_friendly_name()
        if name in seen:
            name = f"{name}#{position}"
            node.set_friendly_name(name)
        seen.add(name)


def read_graph(model: ov.Model) -> Graph:
    """The tables of a model whose friendly names are unique (see :func:`make_names_unique`)."""
    numbers: dict[str, int] = {}
    nodes: list[GraphNode] = []
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        kind = node.get_type_name()
        numbers[name] = len(nodes)
        inputs = []
        for entry in node.inputs():
            source = entry.get_source_output()
            inputs.append(
                Source(numbers[source.get_node().get_friendly_name()], source.get_index())
            )
        shape: tuple[int, ...] | None = None
        element = ""
        if kind not in ("Result", "Assign"):
            partial = node.get_output_partial_shape(0)
            if partial.rank.is_static:
                shape = tuple(-1 if d.is_dynamic else d.get_length() for d in partial)
            element = node.get_output_element_type(0).get_type_name()
        nodes.append(
            GraphNode(
                name=name,
                kind=kind,
                inputs=tuple(inputs),
                outputs=node.get_output_size(),
                shape=shape,
                element=element,
                variable=(
                    node.get_attributes()["variable_id"]
                    if kind in ("ReadValue", "Assign")
                    else None
                ),
                tensor_names=(
                    frozenset(node.output(0).get_names()) if kind == "Parameter" else frozenset()
                ),
            )
        )
    return Graph(tuple(nodes))
