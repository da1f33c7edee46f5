"""Reading files that may be anything, and writing files that are whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

# What a node's folder holds; ``meshca issue --name`` writes the same names, so that the folder it
# makes can be used as it is.
KEY_FILE = "node.key"
CERTIFICATE_FILE = "node.pem"


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most ``limit`` bytes.

    Raises OSError when it cannot be read, ValueError (with a message that names the file) when it
    is larger; no more than ``limit`` + 1 bytes are ever read.
    """
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return data


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, replace: bool = True) -> None:
    """Write ``path`` so that a crash leaves the old file or the new one, on the disk, in full.

    The file never exists with wider permissions than ``mode``, where the filesystem has any. With
    ``replace=False`` an existing file is left alone and FileExistsError raised, also when two
    processes try at once. Raises OSError.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    except OSError as error:
        error.filename = str(path)  # what the user asked for, not our temporary file
        raise
    temporary = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode != 0o600:
            with contextlib.suppress(PermissionError):  # FAT has no permissions to set
                temporary.chmod(mode)
        if replace:
            temporary.replace(path)
        else:
            _place_new(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _sync_folder(path.parent)


def make_private_folder(path: Path) -> None:
    """Make ``path`` and its parents when missing; a new one is for its owner only."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _place_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here, as on the FAT of a memory stick
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # folders cannot be opened there
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network filesystems cannot
            raise
    finally:
        os.close(handle)
