"""Write a stage to disk: its own weights only, and the same bytes on every machine.

The digest of a stage is over these bytes, so nothing in them may depend on the process: names that
the runtime made up from a counter are replaced by ones made from the topological position, and the
order of inputs, results and runtime information is fixed.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

from inference.split.build import cut
from inference.split.graph import make_names_unique, read_graph
from inference.split.plan import Plan, plan

STAGE_FILE = "openvino_model.xml"
_COUNTED = re.compile(r"[A-Za-z][A-Za-z0-9]*_\d+")


@dataclass(frozen=True, slots=True)
class StageFiles:
    """A stage on disk. ``digest`` is hex sha-256 over the digests of both files."""

    model: Path
    weights: Path
    first: int
    last: int
    layers: int
    hidden: int
    bytes: int
    digest: str


class Splittable:
    """A model read from disk and found to be one that can be cut."""

    def __init__(self, model: ov.Model, found: Plan) -> None:
        self.model = model
        self.plan = found

    @property
    def layers(self) -> int:
        return len(self.plan.layers)

    def cut(self, first: int, last: int) -> ov.Model:
        """See :func:`inference.split.build.cut`."""
        return cut(self.model, self.plan, first, last)

    def write(self, first: int, last: int, directory: Path) -> StageFiles:
        """Cut ``[first, last)`` and write it into ``directory``, which is made when missing.

        Raises :class:`SplitError` before anything is written.
        """
        stage = self.cut(first, last)
        _fix_names(stage)
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / STAGE_FILE
        # Written beside and renamed, so that a stage on disk is always a whole one.
        partial = directory / f".{os.getpid()}.{STAGE_FILE}"
        ov.save_model(stage, partial, compress_to_fp16=False)
        os.replace(partial.with_suffix(".bin"), target.with_suffix(".bin"))
        os.replace(partial, target)
        files = (target, target.with_suffix(".bin"))
        return StageFiles(
            model=target,
            weights=files[1],
            first=first,
            last=last,
            layers=self.layers,
            hidden=self.plan.hidden,
            bytes=sum(path.stat().st_size for path in files),
            digest=_digest(files),
        )


def read_splittable(path: Path) -> Splittable:
    """Read a stateful OpenVINO IR (``.xml``) and find its layers.

    Raises :class:`SplitError` with the reason when it cannot be cut. Weights are mapped, not read:
    only those of a stage that is written are ever touched.
    """
    model = ov.Core().read_model(path)
    make_names_unique(model)
    return Splittable(model, plan(read_graph(model)))


def _fix_names(stage: ov.Model) -> None:
    for position, node in enumerate(stage.get_ordered_ops()):
        if _COUNTED.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}.{position}")


def _digest(files: tuple[Path, ...]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()
