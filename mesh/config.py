"""The one configuration of a node: a TOML file, then the environment, then flags; later ones win.

The file is ``config.toml`` in the node's home. Its keys are the field names below; the environment
uses ``MESHNODE_`` and the field name in capitals (lists are separated by commas). An unknown key is
an error, so that a misspelt setting does not silently do nothing.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

ENVIRONMENT_PREFIX = "MESHNODE_"
CONFIG_FILE = "config.toml"
DEFAULT_LISTEN = "/ip4/0.0.0.0/udp/4001/quic-v1"


class ConfigError(Exception):
    """A setting that is unknown or impossible; the message names it and where it came from."""


def default_home() -> Path:
    return platformdirs.user_data_path("meshnode", appauthor=False)


def default_models() -> Path:
    return platformdirs.user_cache_path("meshnode", appauthor=False) / "models"


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of ``16GB``, ``512MiB``, ``1.5G`` or a plain number. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.strip().upper())
    if found is None:
        raise ValueError(f"{text!r} is not a size, as in 16GB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


class StageRange(BaseModel):
    """``MODEL:FIRST-LAST``: the decoder layers ``[first, last)`` of a model."""

    model_config = ConfigDict(frozen=True)

    model: str
    first: int = Field(ge=0)
    last: int = Field(ge=1)

    @classmethod
    def parse(cls, text: str) -> StageRange:
        model, colon, layers = text.rpartition(":")
        first, dash, last = layers.partition("-")
        if not (colon and dash and model and first.isdecimal() and last.isdecimal()):
            raise ValueError(f"{text!r} is not MODEL:FIRST-LAST, as in smollm2-135m-instruct:0-15")
        if int(first) >= int(last):
            raise ValueError(f"{text!r} holds no layer: ranges are half-open, FIRST < LAST")
        return cls(model=model, first=int(first), last=int(last))


class NodeConfig(BaseModel):
    """Settings of one node. Paths are absolute after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path = Field(default_factory=default_home)
    models: Path = Field(default_factory=default_models)
    cert: Path | None = None  # default: node.pem in the home
    api: str = "127.0.0.1:8000"  # HOST:PORT of the HTTP endpoint; port 0 means any
    api_key: str | None = Field(None, min_length=16)  # demanded unless the API is on loopback
    listen: tuple[str, ...] = (DEFAULT_LISTEN,)
    peer: tuple[str, ...] = ()  # multiaddrs of peers to dial
    mdns: bool = True
    model: tuple[str, ...] = ()  # models to serve whole
    stage: tuple[StageRange, ...] = ()  # layer ranges to serve
    device: str = "CPU"
    engine: Literal["stage", "genai"] = "stage"  # what runs whole models
    slots: Annotated[int, Field(ge=1, le=1024)] = 16  # sessions an engine runs at once
    queue: Annotated[int, Field(ge=0, le=65536)] = 64  # requests that may wait for a slot
    # How activations go between the machines of a chain that begins here: f32 gives exactly the
    # tokens of the uncut model, the others take half (f16, bf16) or a quarter (int8) of the bytes
    # and are approximate.
    activations: Literal["f32", "f16", "bf16", "int8"] = "f32"
    # Memory that the mesh may fill here with layers it places, as in "8GB"; "0" for none, None for
    # half of what is free at start.
    memory: str | None = None
    # What a peer must reach to be given a place in chains.
    min_bandwidth_mbps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    max_rtt_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 500.0
    max_jitter_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 200.0
    max_loss: Annotated[float, Field(gt=0, le=1)] = 0.1  # share of packets
    min_tokens_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    log: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @field_validator("stage", mode="before")
    @classmethod
    def _parse_stages(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(StageRange.parse(v) if isinstance(v, str) else v for v in value)
        return value

    @field_validator("log", mode="before")
    @classmethod
    def _log(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("home", "models", "cert")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @property
    def certificate_path(self) -> Path:
        return self.cert if self.cert is not None else self.home / "node.pem"


_LISTS = frozenset({"listen", "peer", "model", "stage"})


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NodeConfig.model_fields:
        value = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if value:
            found[name] = [v for v in value.split(",") if v] if name in _LISTS else value
    return found


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def load_config(
    flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> NodeConfig:
    """Merge flags (None or empty: not given), environment and the home's ``config.toml``.

    Raises :class:`ConfigError` with one line that names the setting at fault.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [], ())}
    from_environment = _from_environment(environment)
    home = Path(given.get("home") or from_environment.get("home") or default_home())
    from_file = _from_file(home / CONFIG_FILE)
    if "home" in from_file:
        raise ConfigError(f"{home / CONFIG_FILE}: home cannot be set in a file that lies in it")
    try:
        return NodeConfig.model_validate({**from_file, **from_environment, **given, "home": home})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"no such setting; there are {', '.join(sorted(NodeConfig.model_fields))}"
        raise ConfigError(f"setting {name!r}: {message}") from error
