"""Fetching models by name: the demo model, and OpenVINO models from a Hugging Face hub.

Files of a hub repository are written to a folder that outlives a failure, so the next attempt goes
on where this one stopped, within a file too. What the hub says about a file (size, SHA-256 or git's
digest, all of one commit) is checked before the model is added.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils.tqdm import disable_progress_bars

from inference.store.demo import DEMO_MODEL, fetch_demo
from inference.store.errors import StoreError
from inference.store.manifest import ModelManifest, check_name
from inference.store.store import (
    OPTIONAL,
    REQUIRED,
    ModelStore,
    Progress,
    need_space,
    size_problem,
)

# Names that are known to work. Any other "owner/name" is taken for a hub repository.
KNOWN: Mapping[str, str] = MappingProxyType(
    {
        DEMO_MODEL: "the demo model, 98 MB",
        "OpenVINO/Qwen3-0.6B-int4-ov": "0.4 GB",
        "OpenVINO/Qwen3-8B-int4-ov": "5 GB",
        "OpenVINO/Phi-4-mini-instruct-int4-ov": "2.5 GB",
        "OpenVINO/Mistral-7B-Instruct-v0.3-int4-ov": "4 GB",
    }
)
# The hub's client changed from httpx to httpx2 with its version 2, and exporters still need 1.
_HTTP = "httpx" if version("huggingface-hub").startswith("1.") else "httpx2"
_TRANSPORT_ERROR: type[Exception] = import_module(_HTTP).TransportError
_INFO_TIMEOUT = 30.0  # seconds
_FRUITLESS = 3  # attempts in a row that bring no new byte
_PAUSE = 1.0  # seconds between attempts


def pull(store: ModelStore, name: str, progress: Progress | None = None) -> ModelManifest:
    """The model ``name``, fetched if ``store`` does not have it yet.

    Blocks for as long as it takes; ``progress`` is called in the calling thread, and what it raises
    ends the download, which can be continued later. The hub is the one that ``HF_ENDPOINT`` names,
    with the token of ``HF_TOKEN`` or of the hub's own login. Raises :class:`StoreError`.
    """
    check_name(name)
    if store.has(name):
        return store.get(name)
    if name == DEMO_MODEL:
        return fetch_demo(store, progress)
    if "/" not in name:
        raise StoreError(
            f"{name} is not known; known are {', '.join(KNOWN)}, "
            "and any hub repository 'owner/name' that holds OpenVINO IR"
        )
    with store.adding(name) as incoming:
        if store.has(name):
            return store.get(name)  # someone else was faster
        downloads = incoming.parent / f"{name.replace('/', '--')}.download"
        _fetch(name, downloads, progress)
        for file in (*REQUIRED, *OPTIONAL):
            if (downloads / file).is_file():
                os.rename(downloads / file, incoming / file)
        manifest = store.add(name, incoming)
        shutil.rmtree(downloads, ignore_errors=True)
        return manifest


@dataclass(frozen=True)
class _Remote:
    """A file as the hub describes it. ``sha256`` for large files, else git's ``blob`` digest."""

    name: str
    size: int
    sha256: str | None
    blob: str | None


def _fetch(repository: str, target: Path, progress: Progress | None) -> None:
    """Have all files of ``repository`` that matter, checked, in ``target``."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    api = HfApi(endpoint=endpoint)
    with _explained(repository, api.endpoint):
        info = api.model_info(repository, files_metadata=True, timeout=_INFO_TIMEOUT)
    files = _wanted(repository, info)
    total = sum(file.size for file in files)
    # A new commit upstream must not be mixed with files of an older one.
    commit = target / f"commit-{info.sha}"
    if target.exists() and not commit.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True, exist_ok=True)
    commit.touch()
    need_space(target, total - sum(p.stat().st_size for p in target.iterdir()))
    done = 0
    for file in files:
        if not (target / file.name).exists():
            url = hf_hub_url(repository, file.name, revision=info.sha, endpoint=endpoint)
            with _explained(repository, api.endpoint):
                _download(url, file, target, done, total, progress)
        done += file.size
        if progress is not None:
            progress(file.name, done, total)


def _wanted(repository: str, info: ModelInfo) -> list[_Remote]:
    present = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    missing = [name for name in REQUIRED if name not in present]
    if missing:
        reason = f"it has no {missing[0]}"
        if any(name.endswith(".gguf") for name in present):
            reason = "it holds GGUF files, which can be downloaded and imported"
        elif "openvino_language_model.xml" in present:
            reason = "it is a model for more than text"
        elif any(name.endswith((".safetensors", "pytorch_model.bin")) for name in present):
            reason = "it holds original weights, which must be exported first"
        raise StoreError(f"{repository} is not an OpenVINO language model: {reason}")
    if not info.sha:
        raise StoreError(f"the hub does not say which commit of {repository} it has")
    files = []
    for name in (*REQUIRED, *OPTIONAL):
        if (sibling := present.get(name)) is None:
            continue
        size = sibling.size
        if size is None or size < 0:
            raise StoreError(f"the hub does not say how large {name} of {repository} is")
        if (problem := size_problem(name, size)) is not None:
            raise StoreError(f"{name} of {repository} {problem}")
        sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
        if sha256 is None and sibling.blob_id is None:
            raise StoreError(f"the hub gives no digest for {name} of {repository}")
        files.append(_Remote(name, size, sha256, sibling.blob_id))
    return files


def _download(
    url: str, file: _Remote, target: Path, before: int, total: int, progress: Progress | None
) -> None:
    """Fetch one file, going on with what an earlier attempt left."""
    disable_progress_bars("huggingface_hub.http_get")
    part = target / f"{file.name}.part"
    fruitless = 0
    while True:
        with part.open("ab") as raw:
            start = raw.tell()
            out = _Bounded(raw, file, before, total, progress)
            try:
                if start < file.size:
                    http_get(
                        url,
                        out,  # type: ignore[arg-type]  # the few methods of a file that it uses
                        resume_size=start,
                        headers=build_hf_headers(),
                        expected_size=file.size,
                        displayed_filename=file.name,
                    )
                break
            except HfHubHTTPError as error:
                if error.response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    part.unlink()  # it belongs to something that the hub no longer has
                raise
            except _TRANSPORT_ERROR:
                fruitless = 0 if raw.tell() > start else fruitless + 1
                if fruitless == _FRUITLESS:
                    raise
        time.sleep(_PAUSE)
    if _digest(part, file) != (file.sha256 or file.blob):
        part.unlink()
        raise StoreError(f"what came for {file.name} is not what the hub announced; try again")
    os.replace(part, target / file.name)


class _Bounded:
    """The file that a download is written to: refuses more than was announced, tells progress."""

    def __init__(
        self, raw: BinaryIO, file: _Remote, before: int, total: int, progress: Progress | None
    ) -> None:
        self._raw = raw
        self._file = file
        self._before = before
        self._total = total
        self._progress = progress

    def write(self, data: bytes) -> int:
        if self._raw.tell() + len(data) > self._file.size:
            raise StoreError(f"{self._file.name} is longer than the hub announced")
        written = self._raw.write(data)
        if self._progress is not None:
            self._progress(self._file.name, self._before + self._raw.tell(), self._total)
        return written

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int) -> int:
        return self._raw.seek(offset)

    def truncate(self) -> int:
        return self._raw.truncate()


def _digest(path: Path, file: _Remote) -> str:
    """SHA-256 of ``path``, or its digest as a git blob where the hub gives that."""
    with path.open("rb") as stream:
        if file.sha256 is not None:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        state = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        while chunk := stream.read(1 << 20):
            state.update(chunk)
        return state.hexdigest()


@contextmanager
def _explained(repository: str, endpoint: str) -> Iterator[None]:
    """Turn what the hub client raises into a :class:`StoreError` that says what to do."""
    try:
        yield
    except GatedRepoError:
        raise StoreError(
            f"{repository} is gated: accept its terms at {endpoint}/{repository} and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise StoreError(
            f"{endpoint} has no model {repository}, or it is private and HF_TOKEN gives no access"
        ) from None
    except OfflineModeIsEnabled:
        raise StoreError("HF_HUB_OFFLINE is set, so nothing can be downloaded") from None
    except HfHubHTTPError as error:
        raise StoreError(f"{endpoint} refused {repository}: {_line(error)}") from None
    except _TRANSPORT_ERROR as error:
        raise StoreError(
            f"the download of {repository} from {endpoint} broke off ({_line(error)}); "
            "run it again to go on"
        ) from None
    except (HFValidationError, ValueError, KeyError, TypeError, OSError) as error:
        raise StoreError(f"cannot fetch {repository} from {endpoint}: {_line(error)}") from None


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
