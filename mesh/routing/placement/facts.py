"""What placement is computed from. Times in seconds, memory in bytes.

Everything here comes from adverts, never from what one node alone has measured: nodes with the same
view must compute the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mesh.identity import PeerId

# Per byte of weights, of a machine that has measured nothing: a laptop's CPU.
DEFAULT_DECODE_RATE = 10e9  # bytes of weights read per second in a step of one session
DEFAULT_PREFILL_RATE = 100e9  # bytes of weights times prompt tokens per second
# Between machines that have not measured each other and share no neighbour that both have.
DEFAULT_DELAY = 0.025  # s one way
DEFAULT_BANDWIDTH = 2.5e6  # bytes/s
# What a loaded stage takes besides weights and KV: the runtime's buffers, activations of a batch.
WORKSPACE = 16 << 20
# A device of fixed shapes has a stage compiled twice: for chunks of a prompt, and for single rows.
FIXED_MODELS = 2


def runs_fixed_shapes(device: str) -> bool:
    """Whether a device, by the name that OpenVINO has for it, runs fixed shapes only."""
    return device.split(".")[0] == "NPU"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What matters of a model for where its layers go. Layers are taken as equally large.

    ``shared_bytes`` is the part of embedding and head that is one table where both are in one
    stage. ``kv_bytes`` is of one token in one layer, ``hidden`` features cross between stages.
    """

    name: str
    digest: str
    layers: int
    layer_bytes: int
    embedding_bytes: int
    head_bytes: int
    shared_bytes: int
    kv_bytes: int
    hidden: int
    context_length: int

    @property
    def head_layers(self) -> float:
        """What the head costs in a step, in layers: weights are read once in both."""
        return self.head_bytes / self.layer_bytes

    def weights(self, first: int, last: int) -> int:
        """Bytes of the weights of layers ``[first, last)``, with the ends that belong to them."""
        size = (last - first) * self.layer_bytes
        if first == 0:
            size += self.embedding_bytes
        if last == self.layers:
            size += self.head_bytes
        if first == 0 and last == self.layers:
            size -= self.shared_bytes
        return size


@dataclass(frozen=True, slots=True)
class Want:
    """A model that the mesh is to serve.

    ``replicas`` is how many chains are wanted (a whole replica is a chain of one), None for as many
    as pay. ``max_nodes`` bounds the nodes that take part, all chains together. KV memory is
    reserved for ``sessions`` of ``context`` tokens on every stage.
    """

    model: ModelShape
    replicas: int | None = None
    max_nodes: int | None = None
    context: int = 4096
    sessions: int = 4

    def stage_bytes(self, first: int, last: int, *, fixed: bool = False) -> int:
        """Memory that layers ``[first, last)`` take when loaded; ``fixed``: on a device that runs
        fixed shapes only."""
        layers, weights = last - first, self.model.weights(first, last)
        return self.copies(fixed) * weights + layers * self.layer_kv(fixed) + WORKSPACE

    def copies(self, fixed: bool) -> int:
        """How many times the weights are in memory: every compiled model has its own."""
        return FIXED_MODELS if fixed else 1

    def layer_kv(self, fixed: bool) -> int:
        """Bytes of KV in one layer. Models of fixed shapes give back the KV that they take, each in
        memory of its own, besides that of the sessions."""
        sessions = self.sessions + (FIXED_MODELS if fixed else 0)
        return self.model.kv_bytes * self.context * sessions


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per layer of one model on one machine: per prompt token, per step of one session."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A node that may hold stages, with one device for them.

    ``memory`` is what it offers to placement in all, what is loaded there already included.
    ``speeds`` are by model digest, measured or estimated from those of others; the rates are for
    other models. ``busy`` is the share of its time that other models on it take. ``stored``:
    digests of models on its disk.
    ``alone``: it may hold whole models, and has no place in chains of several.
    ``fixed``: its device runs fixed shapes only, which takes more memory.
    """

    peer: PeerId
    memory: int
    speeds: Mapping[str, Speed] = field(default_factory=lambda: MappingProxyType({}))
    decode_rate: float = DEFAULT_DECODE_RATE
    prefill_rate: float = DEFAULT_PREFILL_RATE
    busy: float = 0.0
    stored: frozenset[str] = frozenset()
    alone: bool = False
    fixed: bool = False

    def bytes_of(self, want: Want, first: int, last: int) -> int:
        """Memory that layers ``[first, last)`` take when loaded here."""
        return want.stage_bytes(first, last, fixed=self.fixed)

    def speed(self, model: ModelShape) -> Speed:
        left = max(0.05, 1.0 - self.busy)
        known = self.speeds.get(model.digest)
        if known is None:
            known = Speed(
                model.layer_bytes / self.prefill_rate, model.layer_bytes / self.decode_rate
            )
        return Speed(known.prefill / left, known.decode / left)


@dataclass(frozen=True, slots=True)
class Connection:
    """Between two machines: one-way seconds and bytes per second."""

    delay: float = DEFAULT_DELAY
    bandwidth: float = DEFAULT_BANDWIDTH


_NOWHERE = Connection(0.0, float("inf"))
_UNKNOWN = Connection()


class Network:
    """Connections that were measured, and estimates for the others.

    A pair that was not measured is taken to be as far apart as the shortest detour over one machine
    that both have measured.
    """

    def __init__(self, measured: Mapping[tuple[PeerId, PeerId], Connection]) -> None:
        self._neighbours: dict[PeerId, dict[PeerId, Connection]] = {}
        for (one, other), connection in sorted(measured.items()):
            for a, b in ((one, other), (other, one)):
                known = self._neighbours.setdefault(a, {}).get(b)
                if known is not None:  # both sides have measured: the worse of the two
                    connection = Connection(
                        max(known.delay, connection.delay),
                        min(known.bandwidth, connection.bandwidth),
                    )
                self._neighbours[a][b] = connection
        self._found: dict[tuple[PeerId, PeerId], Connection] = {}

    def between(self, one: PeerId, other: PeerId) -> Connection:
        if one == other:
            return _NOWHERE
        key = (one, other) if one < other else (other, one)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._look_up(*key)
        return found

    def _look_up(self, one: PeerId, other: PeerId) -> Connection:
        near = self._neighbours.get(one, {})
        if other in near:
            return near[other]
        far = self._neighbours.get(other, {})
        detours = [
            (near[via].delay + far[via].delay, min(near[via].bandwidth, far[via].bandwidth))
            for via in sorted(near.keys() & far.keys())
        ]
        if not detours:
            return _UNKNOWN
        delay, bandwidth = min(detours, key=lambda found: (found[0], -found[1]))
        return Connection(delay, bandwidth)
