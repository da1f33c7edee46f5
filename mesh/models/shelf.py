"""Where weights are on this machine: whole models of the store, and parts that came from peers::

    ROOT/.parts/<digest>/manifest.json, tokenizers, .stages/10-20/openvino_model.bin, ...

All methods block on the disk. A part is usable when its folder has a mark for the layers, which is
written after every chunk was verified.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inference.store.errors import StoreError
from inference.store.manifest import MANIFEST_FILE, MAX_MANIFEST, ModelManifest
from inference.store.store import ModelStore
from mesh.models.offer import Offer, OfferError, make_offer

STAGES = ".stages"
MODEL_FILE = "openvino_model.xml"  # of a whole model and of a stage alike
WEIGHTS = (MODEL_FILE, "openvino_model.bin")


class Shelf:
    """What is here of models, for this node and for peers that ask."""

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._offers: dict[tuple[str, int, int], tuple[Path, Offer]] = {}

    def folder(self, digest: str) -> Path:
        """Where parts of the model are put."""
        return self._store.root / ".parts" / digest

    def find(self, digest: str, first: int, last: int) -> ModelManifest | None:
        """The model, whole or with these layers at least, if it is here."""
        whole = next((m for m in self._store.list() if m.digest == digest), None)
        if whole is not None:
            return whole
        folder = self.folder(digest)
        if not self.mark(digest, first, last).exists():
            return None
        try:
            with (folder / MANIFEST_FILE).open("rb") as stream:
                return parse_manifest(stream.read(MAX_MANIFEST), folder, digest)
        except (OSError, StoreError):
            return None

    def mark(self, digest: str, first: int, last: int) -> Path:
        return self.folder(digest) / f".complete-{first}-{last}"

    def made(self, digest: str, first: int, last: int) -> tuple[Path, Offer] | None:
        """What :meth:`offer` has given before."""
        return self._offers.get((digest, first, last))

    def offer(self, digest: str, first: int, last: int) -> tuple[Path, Offer]:
        """What a peer gets that asks for these layers, and the folder that it lies in.

        A stage is cut when that was not done yet. Raises :class:`StoreError` when it is not here.
        """
        key = digest, first, last
        if key not in self._offers:
            manifest = self.find(digest, first, last)
            if manifest is None:
                raise StoreError("the model is not on this machine")
            if last > manifest.layers:
                raise StoreError(f"the model has {manifest.layers} layers")
            try:
                self._offers[key] = manifest.path, self._make(manifest, first, last)
            except (OSError, OfferError) as error:
                raise StoreError(str(error)) from error
        return self._offers[key]

    def _make(self, manifest: ModelManifest, first: int, last: int) -> Offer:
        paths = [f.path for f in manifest.files if f.path not in WEIGHTS]
        if (first, last) == (0, manifest.layers):
            paths += WEIGHTS
        else:
            stage = f"{STAGES}/{first}-{last}"
            if not all((manifest.path / stage / name).exists() for name in WEIGHTS):
                _cut(manifest, first, last, manifest.path / stage)
            paths += [f"{stage}/{name}" for name in WEIGHTS]
        return make_offer(manifest.path, manifest.model_dump_json(), sorted(paths))


def _cut(manifest: ModelManifest, first: int, last: int, folder: Path) -> None:
    """Raises :class:`StoreError`."""
    # The runtime is needed for nothing else here, and a node that only asks does without it.
    from inference.split import SplitError, read_splittable

    try:
        read_splittable(manifest.file(MODEL_FILE)).write(first, last, folder)
    except SplitError as error:
        raise StoreError(str(error)) from error


def parse_manifest(text: str | bytes, folder: Path, digest: str) -> ModelManifest:
    """The manifest in ``text``, as of a model in ``folder``. Raises :class:`StoreError`.

    Its digest must be the one that was asked for, and belong to what it lists.
    """
    try:
        fields: Any = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        fields.pop("path", None)
        manifest = ModelManifest(path=folder, **fields)
    except (ValidationError, ValueError, TypeError, RecursionError) as error:
        raise StoreError("the manifest that came with the model is not valid") from error
    if manifest.digest != digest:
        raise StoreError("the manifest is of another model")
    return manifest
