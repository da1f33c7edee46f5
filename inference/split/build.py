"""Build the stage [first, last) of a model: its layers only, fed by a hidden state.

A stage starts from what it must compute (its output and its layers' stored state) and goes
backwards. Whatever is met belongs to it: weights, the mask, position tables that several layers
share. Two things must not be followed: the shape of a tensor upstream of the cut, and the length of
another layer's cache. Both are rewired to something the stage has. Anything else upstream that is
met means that the cut does not carry everything, and is refused.
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from inference.split.errors import SplitError
from inference.split.plan import Plan
from inference.split.shapes import UpstreamShapes

HIDDEN_INPUT = "hidden_states"
HIDDEN_OUTPUT = "next_hidden_states"
STAGE_INFO = "meshnode_stage"  # rt_info: first, last, layers


def cut(model: ov.Model, plan: Plan, first: int, last: int) -> ov.Model:
    """Layers ``[first, last)`` as a model of their own; ``model`` stays as it is.

    The first stage keeps the embedding and takes ``input_ids``; others take ``hidden_states``
    ``[batch, tokens, hidden]``. The last one keeps the head and gives ``logits``; others give
    ``next_hidden_states``. Runtime hints of the source (``rt_info``) are kept: without them a
    plugin may choose another precision. Weights are shared with ``model`` until they are saved.
    """
    plan.check_range(first, last)
    return _Cutter(model, plan, first, last).build()


class _Cutter:
    def __init__(self, model: ov.Model, plan: Plan, first: int, last: int) -> None:
        self.source = model
        self.model = model.clone()
        self.plan = plan
        self.first, self.last = first, last
        self.nodes = {node.get_friendly_name(): node for node in self.model.get_ordered_ops()}
        self.numbers = {node.name: i for i, node in enumerate(plan.graph.nodes)}
        self.reads: dict[str, ov.Node] = {}
        self.stores: dict[str, ov.Node] = {}
        for node in plan.graph.nodes:
            if node.variable is not None:
                table = self.reads if node.kind == "ReadValue" else self.stores
                table[node.variable] = self.nodes[node.name]
        self.role = {
            variable: (number, index)
            for number, layer in enumerate(plan.layers)
            for index, variable in enumerate(layer.variables)
        }
        self.own = [v for layer in plan.layers[first:last] for v in layer.variables]
        self.hidden: ov.Node | None = None
        self.shapes: UpstreamShapes | None = None

    def build(self) -> ov.Model:
        parameters: list[ov.Node] = []
        if self.first > 0:
            entry = self.nodes[self.plan.layers[self.first].entry]
            hidden = ops.parameter(
                entry.output(0).get_partial_shape(),
                entry.output(0).get_element_type(),
                name=HIDDEN_INPUT,
            )
            hidden.output(0).set_names({HIDDEN_INPUT})
            for target in list(entry.output(0).get_target_inputs()):
                target.replace_source_output(hidden.output(0))
            self.hidden = hidden
            self.shapes = UpstreamShapes(self.source, self.plan, hidden)
            parameters.append(hidden)
        sinks = [self.stores[variable] for variable in self.own]
        result = self._result()
        reached = self._collect([result, *sinks])
        parameters += [p for p in self.model.get_parameters() if p.get_friendly_name() in reached]
        own = set(self.own)
        variables = [v for v in self.model.get_variables() if v.get_info().variable_id in own]
        name = f"layers-{self.first}-{self.last}"
        stage = ov.Model([result], sinks, parameters, variables, name)
        stage.validate_nodes_and_infer_types()
        self._copy_runtime_info(stage)
        return stage

    def _result(self) -> ov.Node:
        if self.last == len(self.plan.layers):
            return self.model.get_results()[0]
        leave = self.nodes[self.plan.layers[self.last].entry].output(0)
        leave.set_names({HIDDEN_OUTPUT})
        result = ops.result(leave)
        result.set_friendly_name(HIDDEN_OUTPUT)
        return result

    def _collect(self, roots: list[ov.Node]) -> set[str]:
        """Names of everything the roots need, rewiring shapes of what the stage lacks."""
        seen: set[str] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            name = node.get_friendly_name()
            if name in seen:
                continue
            seen.add(name)
            if node.get_type_name() == "ShapeOf" and self._rewire(node, stack):
                continue
            for entry in node.inputs():
                source = entry.get_source_output().get_node()
                self._check_inside(source)
                stack.append(source)
        return seen

    def _check_inside(self, node: ov.Node) -> None:
        number = self.numbers.get(node.get_friendly_name())
        if number is None:
            return  # made here: the hidden state or what a shape was rewired to
        graph_node = self.plan.graph.nodes[number]
        foreign_state = graph_node.kind == "ReadValue" and graph_node.variable not in self.own
        if foreign_state or self._is_upstream(number):
            raise SplitError(
                "not_layered",
                f"layers {self.first}-{self.last} need {graph_node.kind} "
                f"'{graph_node.name}' of another stage besides the hidden state",
            )

    def _is_upstream(self, number: int) -> bool:
        """On the tokens' data flow before the cut (the cut tensor itself has been replaced)."""
        if self.first == 0 or not self.plan.graph.flow[number]:
            return False
        entry_depth = self.plan.entry_depth[self.first]
        entry = self.plan.layers[self.first].entry
        return self.plan.depth[number] < entry_depth or self.plan.graph.nodes[number].name == entry

    def _rewire(self, shape_of: ov.Node, stack: list[ov.Node]) -> bool:
        """Replace the shape of a tensor that this stage does not have. True when it was."""
        source = shape_of.input(0).get_source_output()
        number = self.numbers.get(source.get_node().get_friendly_name())
        if number is None:
            return False
        counterpart = self._own_cache(number)
        if counterpart is not None:
            shape_of.input(0).replace_source_output(counterpart.output(source.get_index()))
            stack.append(counterpart)
            return True
        if not self._is_upstream(number) or self.shapes is None:
            return False
        replacement = self.shapes.expression(
            number, source.get_index(), shape_of.get_output_element_type(0)
        )
        for target in list(shape_of.output(0).get_target_inputs()):
            target.replace_source_output(replacement.output(0))
        stack.append(replacement)
        return True

    def _own_cache(self, number: int) -> ov.Node | None:
        """What corresponds in an own layer to a tensor of another layer's cache, if it is one.

        All layers' caches have the same length. The tensor is the cache as read, or after the
        reordering for beam search, or with the new rows behind it.
        """
        graph = self.plan.graph
        for variable, store in self.stores.items():
            if variable in self.own:
                continue
            grown = graph.nodes[self.numbers[store.get_friendly_name()]].inputs[0].node
            if number == grown:
                own = self._same_role(variable)
                return None if own is None else self.stores[own].input_value(0).get_node()
        path: list[str] = []
        while graph.nodes[number].kind != "ReadValue":
            if len(path) == 4 or not graph.nodes[number].inputs or graph.flow[number]:
                return None
            path.append(graph.nodes[number].kind)
            number = graph.nodes[number].inputs[0].node
        variable = graph.nodes[number].variable or ""
        if variable in self.own:
            return None
        own = self._same_role(variable)
        if own is None:
            return None
        here = self.numbers[self.reads[own].get_friendly_name()]
        for kind in reversed(path):
            following = [
                reader
                for reader in graph.consumers[here]
                if graph.nodes[reader].kind == kind and graph.nodes[reader].inputs[0].node == here
            ]
            if not following:
                return None
            here = following[0]
        return self.nodes[graph.nodes[here].name]

    def _same_role(self, variable: str) -> str | None:
        """The variable of an own layer with the role and shape of another layer's."""
        _, index = self.role[variable]
        shape = self._shape_of_state(variable)
        for layer in self.plan.layers[self.first : self.last]:
            if index < len(layer.variables):
                own = layer.variables[index]
                if self._shape_of_state(own) == shape:
                    return own
        return None

    def _shape_of_state(self, variable: str) -> tuple[int, ...] | None:
        return self.plan.graph.nodes[self.numbers[self.reads[variable].get_friendly_name()]].shape

    def _copy_runtime_info(self, stage: ov.Model) -> None:
        for key in self.source.get_rt_info():
            _set_runtime_info(stage, [key], self.source.get_rt_info([key]))
        for key, value in (
            ("first", self.first),
            ("last", self.last),
            ("layers", len(self.plan.layers)),
            ("hidden", self.plan.hidden),
        ):
            stage.set_rt_info(str(value), [STAGE_INFO, key])


def _set_runtime_info(stage: ov.Model, path: list[str], value: object) -> None:
    value = getattr(value, "value", value)
    if isinstance(value, dict):
        for key in sorted(value):
            _set_runtime_info(stage, [*path, key], value[key])
    else:
        stage.set_rt_info(value, path)
