"""The model store: a folder with one folder per model, shared by the nodes of a machine.

A model appears with one rename and disappears with one, so a reader never sees half of one. Those
who add or remove hold a lock file per model name; reading takes no lock::

    ROOT/smollm2-135m-instruct/manifest.json, openvino_model.xml, ...
    ROOT/OpenVINO--Qwen3-8B-int4-ov/...
    ROOT/.locks/       one lock file per name
    ROOT/.incoming/    what is being fetched or imported
    ROOT/.compiled/    what devices have compiled
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout
from pydantic import ValidationError

from inference.store import facts, gguf
from inference.store.errors import ModelMissing, StoreError
from inference.store.ir import MAX_XML
from inference.store.manifest import (
    ModelFile,
    ModelManifest,
    check_name,
    digest_of,
    read_manifest,
    write_manifest,
)

REQUIRED = tuple(
    f"openvino_{part}.{ending}"
    for part in ("model", "tokenizer", "detokenizer")
    for ending in ("xml", "bin")
)
# Nothing else in a folder or repository belongs to the model or changes its digest.
OPTIONAL = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "openvino_config.json",
)
_CHUNK = 4 << 20
# Another node may be fetching the same model: that is worth waiting for.
LOCK_TIMEOUT = 6 * 3600.0  # seconds

Progress = Callable[[str, int, int], None]  # file name, bytes done, bytes in total


class ModelStore:
    """Models under ``root``, which is made when the first model comes.

    All methods block on the disk; call them in a thread from trio. They raise :class:`StoreError`.
    Several processes may use the same root at once.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()

    def list(self) -> list[ModelManifest]:
        """All sound models, by name. Damaged ones are left out (:meth:`get` says what is wrong)."""
        found: list[ModelManifest] = []
        if not self.root.is_dir():
            return found
        for directory in sorted(self.root.iterdir()):
            if directory.name.startswith(".") or not directory.is_dir():
                continue
            with contextlib.suppress(StoreError):
                found.append(read_manifest(directory))
        return found

    def has(self, name: str) -> bool:
        """Whether there is a model ``name``, sound or damaged."""
        return self._directory(name).is_dir()

    def get(self, name: str) -> ModelManifest:
        """The model ``name``; :class:`ModelMissing` names those that there are."""
        directory = self._directory(name)
        if not self.has(name):
            have = ", ".join(model.name for model in self.list()) or "none"
            raise ModelMissing(f"no model {name} in {self.root} (there: {have})")
        manifest = read_manifest(directory)
        if manifest.name != name:
            raise StoreError(f"{directory} holds {manifest.name}, not {name}")
        return manifest

    def import_dir(
        self, source: Path, name: str, progress: Progress | None = None
    ) -> ModelManifest:
        """Copy the OpenVINO model in the folder ``source`` into the store.

        Importing the same content again changes nothing; other content under a name that is taken
        is an error.
        """
        with self.adding(name) as incoming:
            present = [file for file in (*REQUIRED, *OPTIONAL) if (source / file).exists()]
            missing = [file for file in REQUIRED if file not in present]
            if missing:
                raise StoreError(f"{source} is no OpenVINO model: it has no {', '.join(missing)}")
            total = sum((source / file).stat().st_size for file in present)
            need_space(self.root, total)
            done = 0
            for file in present:
                with open_model_file(source, file) as stream:
                    done += _copy(stream, incoming / file, file, done, total, progress)
            return self.add(name, incoming)

    def import_gguf(self, source: Path, name: str) -> ModelManifest:
        """Convert the GGUF file ``source`` to OpenVINO IR and put that into the store."""
        with self.adding(name) as incoming:
            with open_model_file(source.parent, source.name) as stream:
                need_space(self.root, 3 * os.fstat(stream.fileno()).st_size)
                _copy(stream, incoming / gguf.GGUF_SOURCE, source.name, 0, 0, None)
            return self.add(name, incoming)

    def remove(self, name: str) -> None:
        """Delete the model ``name``. Nodes that have it loaded keep running (not on Windows)."""
        directory = self._directory(name)
        with self._lock(name):
            if not self.has(name):
                raise ModelMissing(f"no model {name} in {self.root}")
            gone = self._incoming(name)
            try:
                os.rename(directory, gone)
            except OSError as error:
                raise StoreError(f"cannot remove {name}: {error.strerror or error}") from None
            shutil.rmtree(gone, ignore_errors=True)

    # The rest is for the modules of this package that bring models in.

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[Path]:
        """Hold the lock of ``name`` and lend an empty folder for its files; see :meth:`add`."""
        check_name(name)
        with self._lock(name):
            for stale in self.root.glob(f".incoming/{self._folder(name)}@*"):
                shutil.rmtree(stale, ignore_errors=True)  # of a process that was killed
            incoming = self._incoming(name)
            try:
                incoming.mkdir(parents=True)
            except OSError as error:
                raise StoreError(
                    f"cannot write to {self.root}: {error.strerror or error}"
                ) from None
            try:
                yield incoming
            except OSError as error:
                raise StoreError(f"cannot add {name}: {error}") from None
            finally:
                shutil.rmtree(incoming, ignore_errors=True)

    def add(self, name: str, incoming: Path) -> ModelManifest:
        """Check what is in ``incoming`` (of :meth:`adding`) and make it the model ``name``.

        A GGUF file there is converted first. Everything that does not belong to the model is left
        behind.
        """
        header: gguf.GgufHeader | None = None
        sources: tuple[ModelFile, ...] = ()
        source = incoming / gguf.GGUF_SOURCE
        if source.is_file():
            header = gguf.read_header(source)
            sources = (describe(incoming, gguf.GGUF_SOURCE),)
            gguf.convert(source)
            source.unlink()
        for file in REQUIRED:
            if not (incoming / file).is_file():
                raise StoreError(f"{name} has no {file}")
        files = tuple(
            describe(incoming, file)
            for file in (*REQUIRED, *OPTIONAL)
            if (incoming / file).is_file()
        )
        known = facts.gather(incoming, header)
        directory = self._directory(name)
        try:
            manifest = ModelManifest(
                name=name,
                digest=digest_of(sources or files),
                files=files,
                sources=sources,
                path=incoming,
                **vars(known),
            )
        except ValidationError as error:
            detail = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in detail["loc"])
            raise StoreError(f"{name} is not usable: {where}: {detail['msg']}") from None
        if directory.exists():
            return self._same_as_before(manifest, directory)
        write_manifest(manifest)
        os.rename(incoming, directory)
        return read_manifest(directory)

    def _same_as_before(self, manifest: ModelManifest, directory: Path) -> ModelManifest:
        before = read_manifest(directory)
        if before.digest != manifest.digest:
            raise StoreError(
                f"the store already has another {manifest.name} (digest {before.digest[:12]}, this "
                f"one {manifest.digest[:12]}); remove it first or choose another name"
            )
        return before

    def _folder(self, name: str) -> str:
        return check_name(name).replace("/", "--")

    def _directory(self, name: str) -> Path:
        return self.root / self._folder(name)

    def _incoming(self, name: str) -> Path:
        return self.root / ".incoming" / f"{self._folder(name)}@{uuid.uuid4().hex}"

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        folder = self._folder(name)
        try:
            for part in (".locks", ".incoming"):
                (self.root / part).mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / ".locks" / f"{folder}.lock", timeout=LOCK_TIMEOUT):
                yield
        except Timeout:
            raise StoreError(f"another process has been busy with {name} for too long") from None


def open_model_file(directory: Path, name: str) -> BinaryIO:
    """Open ``directory/name`` for reading if it is an honest regular file of a sensible size.

    A symbolic link may lead to the same folder or, as in a hub cache, to the ``blobs`` beside
    ``snapshots``; anywhere else it is refused, so that an import cannot be made to copy in what
    does not belong to the model. Raises :class:`StoreError`.
    """
    path = directory / name
    try:
        real = path.resolve(strict=True)
        home = directory.resolve(strict=True)
        if real.parent not in (home, home.parent.parent / "blobs"):
            raise StoreError(f"{path} is a link that leads out of the model's folder")
        status = real.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise StoreError(f"{path} is not a regular file")
        if status.st_size == 0:
            raise StoreError(f"{path} is empty")
        if (problem := size_problem(name, status.st_size)) is not None:
            raise StoreError(f"{path} {problem}")
        return real.open("rb")
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None


def size_problem(name: str, size: int) -> str | None:
    """What is wrong with a model file called ``name`` having ``size`` bytes, if anything."""
    weights = name.endswith((".bin", ".gguf"))
    limit = 1 << 42 if weights else MAX_XML if name.endswith(".xml") else facts.MAX_JSON
    return f"has {size} bytes, more than the {limit} that are sensible" if size > limit else None


def need_space(root: Path, size: int) -> None:
    """Raise :class:`StoreError` when ``size`` bytes do not fit on the disk of ``root``."""
    free = shutil.disk_usage(root).free
    if free < size:
        raise StoreError(f"{root} has {free >> 20} MB free, but the model needs {size >> 20} MB")


def describe(directory: Path, name: str) -> ModelFile:
    """Size and SHA-256 of ``directory/name``."""
    with (directory / name).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return ModelFile(path=name, size=stream.tell(), sha256=digest)


def _copy(
    stream: BinaryIO, target: Path, name: str, before: int, total: int, progress: Progress | None
) -> int:
    """Copy ``stream`` to the new file ``target``; returns its size in bytes."""
    done = 0
    with target.open("xb") as out:
        while chunk := stream.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(name, before + done, total)
    return done
