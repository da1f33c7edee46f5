"""What is known about a model on disk, and the digest that names its content.

The digest is what nodes compare, so it must be the same on every machine that holds the same
weights. For a model that was published as OpenVINO IR it covers the files themselves. A GGUF model
is turned into IR by the runtime on the machine: the IR names the version of the runtime that wrote
it and changes with it, although the weights are the same. So the digest of such a model covers the
GGUF file that it was made from (under a fixed name) and not what was made of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from inference.store.errors import StoreError

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST = 4 << 20  # bytes
MAX_FILES = 64
MAX_TEMPLATE = 1 << 20  # characters

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_Listed = Strict(False)  # a tuple here is a list in JSON; its items stay strict
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def check_name(name: str) -> str:
    """``name`` if it can name a model: ``word`` or ``owner/word``, as on the hub.

    Raises :class:`StoreError`.
    """
    if not _sound(name):
        raise StoreError(
            f"{name[:120]!r} cannot be a model's name: use letters, digits, '.', '_' and "
            "single '-', with at most one '/'"
        )
    return name


def _sound(name: str) -> bool:
    # ".." must not reach a path, and "--" stands for the slash in names of folders.
    return bool(_NAME.fullmatch(name)) and ".." not in name and "--" not in name


class ModelFile(BaseModel):
    """One file of a model. ``path`` is a bare file name; ``size`` is in bytes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    path: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    size: int = Field(ge=0, lt=1 << 50)
    sha256: Digest


class ModelManifest(BaseModel):
    """A language model in the store.

    ``kv_elements`` is the number of key and value elements that one token adds to the KV cache,
    over all layers: times 2 it is the bytes per token of an f16 cache. ``sources`` is empty unless
    the model was converted here; then it names what it was converted from.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    name: str = Field(max_length=200)
    digest: Digest
    architecture: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    layers: int = Field(ge=1, le=4096)
    context_length: int = Field(ge=1, le=1 << 28)
    hidden_size: int = Field(ge=1, le=1 << 20)
    vocabulary_size: int = Field(ge=1, le=1 << 24)
    kv_elements: int = Field(ge=1, le=1 << 28)
    eos_token_ids: Annotated[tuple[TokenId, ...], _Listed] = Field(max_length=64)
    chat_template: str | None = Field(None, max_length=MAX_TEMPLATE)
    files: Annotated[tuple[ModelFile, ...], _Listed] = Field(min_length=1, max_length=MAX_FILES)
    sources: Annotated[tuple[ModelFile, ...], _Listed] = Field((), max_length=MAX_FILES)
    # Where the files are on this machine; not part of what is written.
    path: Path = Field(exclude=True)

    @model_validator(mode="after")
    def _consistent(self) -> ModelManifest:
        if not _sound(self.name):
            raise ValueError("the name is not one that a model can have")
        for listed in (self.files, self.sources):
            if len({file.path for file in listed}) != len(listed):
                raise ValueError("a file is listed twice")
        if self.digest != digest_of(self.sources or self.files):
            raise ValueError("the digest does not belong to the files")
        return self

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk, which is about what they take in memory."""
        return sum(file.size for file in self.files if file.path == "openvino_model.bin")

    def file(self, name: str) -> Path:
        """Full path of one of the model's files; :class:`StoreError` when it has none such."""
        if not any(file.path == name for file in self.files):
            raise StoreError(f"model {self.name} has no file {name}")
        return self.path / name


def digest_of(files: Sequence[ModelFile]) -> str:
    """SHA-256, in hex, over the sorted (path, size, sha256) of ``files``."""
    state = hashlib.sha256(b"meshnode-model-v1\n")
    for file in sorted(files, key=lambda f: f.path):
        state.update(f"{file.path}\0{file.size}\0{file.sha256}\n".encode())
    return state.hexdigest()


def write_manifest(manifest: ModelManifest) -> None:
    """Write ``manifest`` beside the files that it describes."""
    text = manifest.model_dump_json(indent=1) + "\n"
    (manifest.path / MANIFEST_FILE).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> ModelManifest:
    """The manifest of the model in ``directory``.

    Checks that its files are there with their sizes, not their content. Raises :class:`StoreError`.
    """
    path = directory / MANIFEST_FILE
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_MANIFEST + 1)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_MANIFEST:
        raise StoreError(f"{path} is too large to be a manifest")
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        fields.pop("path", None)
        manifest = ModelManifest(path=directory, **fields)
    except (ValidationError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"{path} is not a valid manifest: {_first_line(error)}") from None
    for file in manifest.files:
        try:
            size = (directory / file.path).stat().st_size
        except OSError:
            raise StoreError(
                f"model {manifest.name} is damaged ({file.path} is missing): "
                "remove it and fetch it again"
            ) from None
        if size != file.size:
            raise StoreError(
                f"model {manifest.name} is damaged ({file.path} has {size} bytes, not "
                f"{file.size}): remove it and fetch it again"
            )
    return manifest


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        detail = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        return f"{where}: {detail['msg']}" if where else detail["msg"]
    return str(error).splitlines()[0] if str(error) else type(error).__name__
