"""Measured speeds of this machine, kept on disk: the same model on the same device and runtime need
not be measured again to be planned with."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh.gossip.advert import MAX_SPEEDS, Holding, MeasuredSpeed
from mesh.routing.placement.facts import ModelShape

_log = logging.getLogger(__name__)

MAX_FILE = 64 << 10  # bytes
NOISE = 0.3  # a measurement that is off by less says nothing new


class _Known(BaseModel):
    """Seconds per layer, and what that is per byte of weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    device: str = Field(min_length=1, max_length=32)
    made_with: str = Field(max_length=256)
    prefill: float = Field(gt=0, le=3600)
    decode: float = Field(gt=0, le=3600)
    layer_bytes: int = Field(ge=1)


def made_with() -> str:
    """What a measurement depends on besides model and device."""
    return f"{platform.machine()} {platform.processor()} openvino {version('openvino')}"[:256]


class Speeds:
    """The newest first. Others of another runtime or processor are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: list[_Known] = []
        try:
            with path.open("rb") as file:
                found = [_Known.model_validate(f) for f in json.loads(file.read(MAX_FILE))]
            self._known = [one for one in found if one.made_with == made_with()]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, ValidationError) as error:
            _log.warning("%s cannot be read: %s", path, error)

    def learn(self, holding: Holding, shape: ModelShape) -> bool:
        """Take what was measured on a holding. False when it says nothing new."""
        if holding.prefill_seconds is None or holding.decode_seconds is None:
            return False
        width = holding.last - holding.first
        head = shape.head_layers if holding.last == shape.layers else 0.0
        known = _Known(
            digest=shape.digest,
            device=holding.device,
            made_with=made_with(),
            prefill=holding.prefill_seconds / width,
            decode=holding.decode_seconds / (width + head),
            layer_bytes=shape.layer_bytes,
        )
        same = [k for k in self._known if (k.digest, k.device) == (known.digest, known.device)]
        if same and (
            abs(same[0].decode / known.decode - 1) < NOISE
            and abs(same[0].prefill / known.prefill - 1) < NOISE
        ):
            return False  # noise must not set the mesh in motion
        if same:
            # A short measurement on a busy machine can be far off: half way there is enough.
            known = known.model_copy(
                update={
                    "prefill": math.sqrt(known.prefill * same[0].prefill),
                    "decode": math.sqrt(known.decode * same[0].decode),
                }
            )
        rest = [k for k in self._known if k not in same]
        self._known = [known, *rest][:MAX_SPEEDS]
        try:
            partial = self._path.with_suffix(".new")
            partial.write_text(json.dumps([k.model_dump() for k in self._known]), "utf-8")
            os.replace(partial, self._path)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)
        return True

    @property
    def rows(self) -> tuple[MeasuredSpeed, ...]:
        return tuple(
            MeasuredSpeed(digest=k.digest, device=k.device, prefill=k.prefill, decode=k.decode)
            for k in self._known
        )

    def rates(self, device: str) -> tuple[int | None, int | None]:
        """Bytes of weights per second in a step, and times prompt tokens, on a device."""
        known = next((k for k in self._known if k.device == device), None)
        if known is None:
            return None, None
        return int(known.layer_bytes / known.decode), int(known.layer_bytes / known.prefill)
