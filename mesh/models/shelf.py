"""Where weights are on this machine: whole models of the store, and parts that came from peers::

    ROOT/.parts/<digest>/manifest.json, tokenizers, .stages/10-20/openvino_model.bin, ...

All methods block on the disk. A part is usable when its folder has a mark for the layers, which is
written after every chunk was verified.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inference.store.errors import StoreError
from inference.store.manifest import MANIFEST_FILE, MAX_MANIFEST, ModelManifest
from inference.store.store import ModelStore
from mesh.models import disk
from mesh.models.disk import STAGES, Layers
from mesh.models.offer import Offer, OfferError, make_offer

MODEL_FILE = "openvino_model.xml"  # of a whole model and of a stage alike
WEIGHTS = (MODEL_FILE, "openvino_model.bin")
MAX_OFFERS = 256  # that are remembered, with the hashes of all chunks


class Shelf:
    """What is here of models, for this node and for peers that ask.

    ``in_use`` says which layers this node holds: they are not removed to make room for others.
    """

    def __init__(
        self, store: ModelStore, *, in_use: Callable[[], Collection[Layers]] = tuple
    ) -> None:
        self._store = store
        self._in_use = in_use
        self._offers: OrderedDict[Layers, tuple[Path, Offer]] = OrderedDict()

    def folder(self, digest: str) -> Path:
        """Where parts of the model are put."""
        return self._parts / digest

    @property
    def _parts(self) -> Path:
        return self._store.root / ".parts"

    def make_room(self, digest: str, size: int) -> None:
        """Before so many bytes of the model are fetched. Raises :class:`StoreError`."""
        disk.make_room_for_part(self._parts, digest, size, self._in_use())

    def find(self, digest: str, first: int, last: int) -> ModelManifest | None:
        """The model, whole or with these layers at least, if it is here."""
        whole = next((m for m in self._store.list() if m.digest == digest), None)
        if whole is not None:
            return whole
        folder = self.folder(digest)
        mark = self.mark(digest, first, last)
        if not mark.exists():
            return None
        with suppress(OSError):
            os.utime(mark)  # it is used
        try:
            with (folder / MANIFEST_FILE).open("rb") as stream:
                return parse_manifest(stream.read(MAX_MANIFEST), folder, digest)
        except (OSError, StoreError):
            return None

    def mark(self, digest: str, first: int, last: int) -> Path:
        return disk.mark_of(self.folder(digest), first, last)

    def made(self, digest: str, first: int, last: int) -> tuple[Path, Offer] | None:
        """What :meth:`offer` has given before, if it is still here."""
        key = digest, first, last
        found = self._offers.get(key)
        if found is None:
            return None
        folder, offer = found
        stage = folder / STAGES / f"{first}-{last}"
        cut = any(file.path.startswith(STAGES) for file in offer.body.files)
        if cut and not disk.used(stage):
            del self._offers[key]
            return None
        self._offers.move_to_end(key)
        return found

    def offer(self, digest: str, first: int, last: int) -> tuple[Path, Offer]:
        """What a peer gets that asks for these layers, and the folder that it lies in.

        A stage is cut when that was not done yet. Raises :class:`StoreError` when it is not here.
        """
        made = self.made(digest, first, last)
        if made is None:
            manifest = self.find(digest, first, last)
            if manifest is None:
                raise StoreError("the model is not on this machine")
            if last > manifest.layers:
                raise StoreError(f"the model has {manifest.layers} layers")
            try:
                made = manifest.path, self._make(manifest, first, last)
            except (OSError, OfferError) as error:
                raise StoreError(str(error)) from error
            self._offers[digest, first, last] = made
            if len(self._offers) > MAX_OFFERS:
                self._offers.popitem(last=False)
        return made

    def _make(self, manifest: ModelManifest, first: int, last: int) -> Offer:
        paths = [f.path for f in manifest.files if f.path not in WEIGHTS]
        if (first, last) == (0, manifest.layers):
            paths += WEIGHTS
        else:
            stage = f"{STAGES}/{first}-{last}"
            if not all((manifest.path / stage / name).exists() for name in WEIGHTS):
                weights = manifest.file(WEIGHTS[1]).stat().st_size
                disk.make_room_for_cut(manifest.path, manifest.digest, weights, self._in_use())
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
