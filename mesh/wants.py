"""Models that the mesh is to serve, as this node has published them; kept on disk."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from inference.store.manifest import ModelManifest
from mesh.gossip.advert import MAX_WANTS, Wanted

_log = logging.getLogger(__name__)

MAX_FILE = 64 << 10  # bytes
VALUE_BYTES = 4  # of a key or value in the cache


class OwnWants:
    """What this node has published, by name, as it was last wanted by anybody; a withdrawn one
    stays, so that it is known to be."""

    def __init__(self, path: Path, now: float) -> None:
        """``now`` in seconds since 1970: a version from later, of a clock that was wrong then,
        would not be believed by any peer."""
        self._path = path
        self._wants: dict[str, Wanted] = {}
        try:
            with path.open("rb") as file:
                for fields in json.loads(file.read(MAX_FILE)):
                    wanted = Wanted.model_validate(fields)
                    if wanted.version > now * 1000:
                        wanted = wanted.model_copy(update={"version": max(1, int(now * 1000))})
                    self._wants[wanted.name] = wanted
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, ValidationError) as error:
            _log.warning("%s cannot be read: %s", path, error)

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self._wants.values())

    def put(self, wanted: Wanted) -> None:
        """Raises ValueError when there are too many, OSError when it cannot be kept."""
        wants = {**self._wants, wanted.name: wanted}
        if len(wants) > MAX_WANTS:
            gone = next((name for name, want in wants.items() if want.replicas == 0), None)
            if gone is None:
                raise ValueError(f"one node can publish {MAX_WANTS} models, not more")
            del wants[gone]
        partial = self._path.with_suffix(".new")
        partial.write_text(json.dumps([want.model_dump() for want in wants.values()]), "utf-8")
        os.replace(partial, self._path)
        self._wants = wants


def describe_model(manifest: ModelManifest) -> dict[str, int | str]:
    """The fields of :class:`Wanted` that follow from the model's files. Blocks.

    Raises :class:`inference.split.SplitError` for a model that cannot be cut.
    """
    from inference.split.sizes import read_sizes

    sizes = read_sizes(manifest.file("openvino_model.xml"))
    return {
        "name": manifest.name,
        "digest": manifest.digest,
        "layers": manifest.layers,
        "layer_bytes": max(1, sizes.layer),
        "embedding_bytes": sizes.embedding,
        "head_bytes": sizes.head,
        "shared_bytes": sizes.shared,
        "kv_bytes": max(1, -(-manifest.kv_elements * VALUE_BYTES // manifest.layers)),
        "hidden": sizes.hidden,
        "context_length": manifest.context_length,
    }
