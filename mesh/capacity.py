"""What this machine has for placement: its devices, the memory that it offers, how fast it is.

What there is takes the runtime to find out, so it is not known when the node starts: until then the
device goes by the name that the user gave it. Speeds of models come from what was loaded here, now
or in an earlier run; for other models the device is probed once somebody wants one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import trio

from inference.errors import GenerationError
from mesh.config import NodeConfig, parse_size
from mesh.gossip.advert import Device, Holding, MeasuredSpeed
from mesh.routing.placement.facts import ModelShape, runs_fixed_shapes
from mesh.speeds import Speeds

if TYPE_CHECKING:
    from mesh.hardware import DeviceFacts

_log = logging.getLogger(__name__)

FREE_SHARE = 0.5  # of the memory that is free at start is offered

Announce = Callable[[tuple[Device, ...], tuple[MeasuredSpeed, ...]], None]


class Capacity:
    """``announce`` tells the mesh of devices and speeds; ``serves``: the certificate allows to."""

    def __init__(self, config: NodeConfig, announce: Announce, *, serves: bool) -> None:
        self._config = config
        self._announce = announce
        self._serves = serves
        self._facts: DeviceFacts | None = None
        self._speeds: Speeds | None = None
        self._learnt: set[int] = set()  # holdings whose measurement was taken
        self._offer: int | None = None  # None: all there is
        self.memory = self._offered(psutil.virtual_memory().available) if serves else 0

    @property
    def device(self) -> str:
        """The one that placement uses."""
        return self._facts.chosen.name if self._facts is not None else self._config.device

    @property
    def static(self) -> bool:
        """Whether the device runs stages of fixed shapes only."""
        return runs_fixed_shapes(self.device)

    def _offered(self, free: int) -> int:
        """Bytes that placement may fill here."""
        if self._config.memory is not None:
            return parse_size(self._config.memory)
        return int(free * FREE_SHARE)

    async def discover(self) -> None:
        """Find out what devices there are."""
        if not self._serves:
            return
        self.tell()
        try:
            self._facts = await trio.to_thread.run_sync(_find_devices, self._config.device)
        except GenerationError as error:
            _log.error("placement gets nothing of this machine: %s", error.message)
            self.memory = 0
        else:
            self._speeds = Speeds(self._config.home / "speeds.json", self._facts.surroundings)
            if self._facts.chosen.free_memory:
                self.memory = self._offered(self._facts.chosen.free_memory)
        self.tell()

    async def probe(self) -> None:
        """See what the device can do, unless that is known."""
        speeds = self._speeds
        if speeds is None or speeds.rates is not None or not self.memory:
            return
        from inference.probe import measure_rates

        try:
            rates = await trio.to_thread.run_sync(measure_rates, self.device)
        except RuntimeError as error:
            _log.warning("%s cannot be probed: %s", self.device, error)
            return
        speeds.learn_rates(rates.decode, rates.prefill)
        _log.info("%s works through %.1f GB of weights per second", self.device, rates.decode / 1e9)
        self.tell()

    def offer(self, memory: int | None) -> None:
        """Let placement have so many bytes, None for all that there is."""
        self._offer = memory
        self.tell()

    @property
    def offered(self) -> int:
        return self.memory if self._offer is None else self._offer

    def learn(self, holding: Holding, shape: ModelShape) -> None:
        """Take the speed of something that was loaded and measured, for the plans of all."""
        if self._speeds is None or not holding.ready or holding.id in self._learnt:
            return
        self._learnt.add(holding.id)
        if self._speeds.learn(holding, shape):
            self.tell()

    def tell(self) -> None:
        """Announce what is known."""
        if not self._serves:
            return
        facts, speeds = self._facts, self._speeds
        rates = speeds.rates if speeds is not None else None
        own = facts.chosen if facts is not None else Device(name=self._config.device)
        offering = own.model_copy(
            update={
                "offered": self.offered or None,
                "decode_rate": rates.decode if rates is not None else None,
                "prefill_rate": rates.prefill if rates is not None else None,
            }
        )
        devices = facts.devices if facts is not None else (own,)
        rows = speeds.rows if speeds is not None else ()
        self._announce(tuple(offering if d.name == own.name else d for d in devices), rows)


def _find_devices(device: str) -> DeviceFacts:
    from mesh.hardware import device_facts  # brings the runtime

    return device_facts(device)
