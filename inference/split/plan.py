"""Find the decoder layers of a model and the points where it can be cut. Pure.

The tokens' data flow is cut at its waists: tensors that everything computed from the tokens passes
through. Between two decoder layers the residual stream is such a tensor, and inside a layer it is
not the only one (attention and residual run beside each other). Each pair of state variables (keys
and values) belongs to the waist-to-waist segment that first uses it; a segment with state is a
layer, and the waist that opens it is where the model is cut before that layer. Names of operations
play no part.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from inference.split.errors import SplitError
from inference.split.graph import Graph

FLOATS = frozenset({"f32", "f16", "bf16"})


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: the node whose output 0 feeds it, and its state variables in the order in
    which they are stored (the same role at the same index in every layer)."""

    entry: str
    variables: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Where a model can be cut. ``depth[i]`` is the segment of node ``i`` of ``graph`` (-1: not on
    the tokens' data flow); a node lies upstream of a cut when its depth is below the cut's."""

    graph: Graph
    layers: tuple[Layer, ...]
    hidden: int
    depth: tuple[int, ...]
    entry_depth: tuple[int, ...]  # of each layer

    def check_range(self, first: int, last: int) -> None:
        if not 0 <= first < last <= len(self.layers):
            raise SplitError(
                "bad_range", f"layers {first}-{last} of a model with {len(self.layers)} layers"
            )


def plan(graph: Graph) -> Plan:
    """Raises :class:`SplitError` with the reason when the model cannot be cut into layers."""
    _ = graph.token_input  # first of all: is it a text model?
    reads, stores = _state(graph)
    waists = _tensor_waists(graph)
    depth = _depths(graph, waists)
    by_segment: dict[int, list[str]] = defaultdict(list)
    for variable, number in reads.items():
        by_segment[_first_use(graph, depth, variable, number)].append(variable)
    segments = sorted(by_segment)
    if segments and segments[0] < 0:
        raise SplitError("not_layered", "state is used before any tensor that could be cut")
    layers = []
    for segment in segments:
        variables = sorted(by_segment[segment], key=lambda name: stores[name])
        if len(variables) % 2:
            raise SplitError(
                "not_layered", f"{len(variables)} state variables where keys and values are needed"
            )
        layers.append(Layer(graph.nodes[waists[segment]].name, tuple(variables)))
    hidden = _hidden_size(graph, [waists[segment] for segment in segments])
    return Plan(graph, tuple(layers), hidden, depth, tuple(segments))


def _state(graph: Graph) -> tuple[dict[str, int], dict[str, int]]:
    """(ReadValue, Assign) node of each state variable; all of them must be a KV cache."""
    reads = {n.variable: i for i, n in enumerate(graph.nodes) if n.kind == "ReadValue"}
    stores = {n.variable: i for i, n in enumerate(graph.nodes) if n.kind == "Assign"}
    if not reads:
        raise SplitError(
            "not_stateful", "the model keeps no state: export it as a stateful one, with past"
        )
    found: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for variable, number in reads.items():
        if variable is None or variable not in stores:
            raise SplitError("state_not_kv", f"state {variable} is read but never stored")
        if not _is_appended(graph, number, stores[variable]):
            raise SplitError(
                "state_not_kv",
                f"state {variable} is not a KV cache that grows by the new tokens (convolution or "
                "linear attention): such a model runs whole only",
            )
        found[0][variable] = number
        found[1][variable] = stores[variable]
    return found


def _is_appended(graph: Graph, read: int, store: int) -> bool:
    """True when what is stored is the old content with new rows behind it: a KV cache."""
    shape = graph.nodes[read].shape
    if shape is None or len(shape) != 4:
        return False
    concat = graph.nodes[graph.nodes[store].inputs[0].node]
    if concat.kind != "Concat":
        return False
    node = concat.inputs[0].node
    for _ in range(4):  # Gather by beam_idx, a Convert or a Transpose may stand between
        if node == read:
            return True
        if not graph.nodes[node].inputs:
            return False
        node = graph.nodes[node].inputs[0].node
    return False


def _tensor_waists(graph: Graph) -> list[int]:
    """Waists that are one float tensor [batch, tokens, features]."""
    found = [
        number
        for number in graph.waists()
        if (node := graph.nodes[number]).kind != "Result"
        and node.element in FLOATS
        and node.outputs == 1
        and node.shape is not None
        and len(node.shape) == 3
        and node.shape[2] > 0
    ]
    if not found:
        raise SplitError("not_layered", "no tensor [batch, tokens, hidden] carries everything")
    return found


def _hidden_size(graph: Graph, entries: list[int]) -> int:
    """Features of the tensor between layers. What feeds layer 0 is never cut and may differ."""
    sizes = {(graph.nodes[number].shape or (0,))[-1] for number in entries[1:] or entries}
    if len(sizes) != 1:
        raise SplitError("not_layered", f"layers are fed by tensors of unequal sizes: {sizes}")
    return sizes.pop()


def _depths(graph: Graph, waists: list[int]) -> tuple[int, ...]:
    index = {number: position for position, number in enumerate(waists)}
    depth = [-1] * len(graph.nodes)
    for number, node in enumerate(graph.nodes):
        if graph.flow[number]:
            depth[number] = index.get(
                number, max((depth[source.node] for source in node.inputs), default=-1)
            )
    return tuple(depth)


def _first_use(graph: Graph, depth: tuple[int, ...], variable: str, read: int) -> int:
    """The lowest segment in which data of a state variable meets the tokens' data."""
    best: int | None = None
    stack, seen = [read], {read}
    while stack:
        for reader in graph.consumers[stack.pop()]:
            if reader in seen or graph.nodes[reader].kind in ("ShapeOf", "Assign"):
                continue
            seen.add(reader)
            if not graph.flow[reader]:
                stack.append(reader)
            elif best is None or depth[reader] < best:
                best = depth[reader]
    if best is None:
        raise SplitError("state_not_kv", f"state {variable} never meets the tokens' data")
    return best
