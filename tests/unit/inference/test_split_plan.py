"""Finding layers in graphs of a few nodes."""

from __future__ import annotations

import pytest

from inference.split import SplitError
from inference.split.graph import Graph, GraphNode, Source
from inference.split.plan import plan

HIDDEN = (-1, -1, 8)
CACHE = (-1, 2, -1, 4)


class Builder:
    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []

    def add(
        self,
        kind: str,
        *inputs: int,
        shape: tuple[int, ...] = HIDDEN,
        variable: str | None = None,
        names: frozenset[str] = frozenset(),
    ) -> int:
        sources = tuple(Source(number, 0) for number in inputs)
        name = f"n{len(self.nodes)}"
        node = GraphNode(name, kind, sources, 1, shape, "f32", variable, names)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def layer(self, hidden: int, variable: str, *, appends: bool = True) -> int:
        """Attention with a residual connection around it, over keys and values."""
        read = []
        for role in ("key", "value"):
            past = self.add("ReadValue", shape=CACHE, variable=variable + role)
            fresh = self.add("MatMul", hidden, shape=CACHE)
            grown = self.add("Concat" if appends else "Slice", past, fresh, shape=CACHE)
            self.add("Assign", grown, variable=variable + role)
            read.append(grown)
        attended = self.add("ScaledDotProductAttention", hidden, *read)
        return self.add("Add", hidden, attended)

    def begin(self) -> int:
        tokens = self.add("Parameter", shape=(-1, -1), names=frozenset({"input_ids"}))
        return self.add("Gather", tokens)

    def end(self, hidden: int) -> Graph:
        logits = self.add("MatMul", hidden, shape=(-1, -1, 50))
        self.add("Result", logits)
        return Graph(tuple(self.nodes))


def test_layers_and_the_tensors_between_them() -> None:
    build = Builder()
    entries = [build.begin()]
    for number in range(3):
        entries.append(build.layer(entries[-1], f"{number}."))
    found = plan(build.end(entries[-1]))
    assert [layer.entry for layer in found.layers] == [f"n{entry}" for entry in entries[:3]]
    assert found.layers[1].variables == ("1.key", "1.value")
    assert found.hidden == 8


def test_layers_that_share_more_than_one_tensor_are_one() -> None:
    """The first layer's output skips over the second layer: no single tensor lies between."""
    build = Builder()
    start = build.begin()
    first = build.layer(start, "0.")
    second = build.layer(first, "1.")
    joined = build.add("Add", second, start)
    found = plan(build.end(build.layer(joined, "2.")))
    assert [layer.variables for layer in found.layers] == [
        ("0.key", "0.value", "1.key", "1.value"),
        ("2.key", "2.value"),
    ]


@pytest.mark.parametrize("reason", ["state_not_kv", "not_stateful", "no_token_input"])
def test_reasons(reason: str) -> None:
    build = Builder()
    start = build.add("Parameter") if reason == "no_token_input" else build.begin()
    if reason != "not_stateful":
        start = build.layer(start, "0.", appends=reason != "state_not_kv")
    with pytest.raises(SplitError) as refused:
        plan(build.end(start))
    assert refused.value.reason == reason


def test_a_range_must_lie_in_the_model() -> None:
    build = Builder()
    found = plan(build.end(build.layer(build.begin(), "0.")))
    found.check_range(0, 1)
    for first, last in ((0, 2), (-1, 1), (1, 1), (1, 0)):
        with pytest.raises(SplitError):
            found.check_range(first, last)
