"""How large the parts of a model are: what planning which machine takes which layers needs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import openvino as ov

from inference.split.write import Splittable, read_splittable


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of weights. ``layer`` is the largest decoder layer; ``embedding`` and ``head`` are what
    the first and the last stage have besides their layers, ``shared`` the part of both that is
    there once when one stage has both ends."""

    layer: int
    embedding: int
    head: int
    shared: int
    hidden: int


def read_sizes(path: Path) -> Sizes:
    """Of the model with this ``.xml``. Weights are not read. Raises :class:`SplitError` for a model
    that cannot be cut."""
    model = read_splittable(path)
    layers = model.layers
    whole = _weights(model.model)
    if layers == 1:
        return Sizes(whole, 0, 0, 0, model.plan.hidden)
    first = _weights(model.cut(0, 1))
    last = _weights(model.cut(layers - 1, layers))
    layer = _largest_middle(model, max(1, whole // (2 * layers)))
    embedding, head = max(0, first - layer), max(0, last - layer)
    shared = max(0, embedding + head + layers * layer - whole)
    return Sizes(layer, embedding, head, min(shared, embedding, head), model.plan.hidden)


def _largest_middle(model: Splittable, least: int) -> int:
    """Of layers away from the ends; in models that mix kinds of layers they differ."""
    layers = model.layers
    picked = {layers // 2, layers // 2 + 1, layers - 2, 1} & set(range(1, layers - 1))
    return max((_weights(model.cut(at, at + 1)) for at in sorted(picked)), default=least)


def _weights(model: ov.Model) -> int:
    return sum(
        prod(node.get_output_shape(0)) * int(node.get_output_element_type(0).bitwidth) // 8
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant"
    )
