"""Measured speeds of this machine, kept on disk: the same model on the same device, driver and
runtime need not be measured again to be planned with."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh.gossip.advert import MAX_SPEEDS, Holding, MeasuredSpeed
from mesh.routing.placement.facts import ModelShape

_log = logging.getLogger(__name__)

MAX_FILE = 64 << 10  # bytes
MAX_DEVICES = 8
NOISE = 0.3  # a measurement that is off by less says nothing new


class Surroundings(BaseModel):
    """What a measurement depends on besides the model: the device as OpenVINO names it, and what it
    is, its driver, processor and runtime in ``made_with``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(min_length=1, max_length=32)
    made_with: str = Field(max_length=512)


class _Known(BaseModel):
    """Seconds per layer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    on: Surroundings
    prefill: float = Field(gt=0, le=3600)
    decode: float = Field(gt=0, le=3600)


class Rates(BaseModel):
    """Of a device, as :mod:`inference.probe` finds them: bytes of weights per second in a step, and
    bytes times prompt tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on: Surroundings
    decode: int = Field(ge=1, lt=1 << 50)
    prefill: int = Field(ge=1, lt=1 << 60)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    speeds: tuple[_Known, ...] = ()
    rates: tuple[Rates, ...] = ()


class Speeds:
    """What was measured anywhere on this machine, the newest first; told is what counts ``on`` the
    device in use."""

    def __init__(self, path: Path, on: Surroundings) -> None:
        self._path = path
        self._on = on
        self._file = _File()
        try:
            with path.open("rb") as file:
                self._file = _File.model_validate_json(file.read(MAX_FILE))
        except FileNotFoundError:
            pass
        except (OSError, ValidationError) as error:
            _log.warning("%s cannot be read: %s", path, error)

    @property
    def rows(self) -> tuple[MeasuredSpeed, ...]:
        return tuple(
            MeasuredSpeed(digest=k.digest, device=k.on.device, prefill=k.prefill, decode=k.decode)
            for k in self._file.speeds
            if k.on == self._on
        )

    @property
    def rates(self) -> Rates | None:
        """None when the device has not been probed."""
        return next((rates for rates in self._file.rates if rates.on == self._on), None)

    def learn_rates(self, decode: float, prefill: float) -> None:
        fresh = Rates(on=self._on, decode=max(1, int(decode)), prefill=max(1, int(prefill)))
        others = [rates for rates in self._file.rates if rates.on != self._on]
        self._write(_File(speeds=self._file.speeds, rates=(fresh, *others)[:MAX_DEVICES]))

    def learn(self, holding: Holding, shape: ModelShape) -> bool:
        """Take what was measured on a holding. False when it says nothing new."""
        if holding.prefill_seconds is None or holding.decode_seconds is None:
            return False
        width = holding.last - holding.first
        head = shape.head_layers if holding.last == shape.layers else 0.0
        fresh = _Known(
            digest=shape.digest,
            on=self._on,
            prefill=holding.prefill_seconds / width,
            decode=holding.decode_seconds / (width + head),
        )
        same = [k for k in self._file.speeds if (k.digest, k.on) == (fresh.digest, fresh.on)]
        if same and (
            abs(same[0].decode / fresh.decode - 1) < NOISE
            and abs(same[0].prefill / fresh.prefill - 1) < NOISE
        ):
            return False  # noise must not set the mesh in motion
        if same:
            # A short measurement on a busy machine can be far off: half way there is enough.
            fresh = fresh.model_copy(
                update={
                    "prefill": math.sqrt(fresh.prefill * same[0].prefill),
                    "decode": math.sqrt(fresh.decode * same[0].decode),
                }
            )
        others = [k for k in self._file.speeds if k not in same]
        self._write(_File(speeds=(fresh, *others)[:MAX_SPEEDS], rates=self._file.rates))
        return True

    def _write(self, file: _File) -> None:
        self._file = file
        try:
            partial = self._path.with_suffix(".new")
            partial.write_text(json.dumps(file.model_dump(mode="json")), "utf-8")
            os.replace(partial, self._path)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)
