"""How much of the disk layers of models may take that are here for others' sake.

Peers ask for ranges of layers, which are then cut from a whole model; and when the layout changes,
this node fetches other layers than it had. Both leave files behind, and a peer that asks for ever
new ranges, or has the mesh want ever new models, could fill the disk with them. So what was cut
from a model stays below a multiple of its size, what was fetched below half of what the disk would
have free without it, and some space stays free in any case. What was not used for longest goes
first; what is loaded here, or was used a moment ago, stays.

All functions block on the disk. Files that are mapped live on without a name until they are
unloaded; where the system does not allow that, they are left alone.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from inference.store.errors import StoreError

_log = logging.getLogger(__name__)

STAGES = ".stages"
RESERVE = 1 << 30  # bytes of the disk that stay free
# What was cut from a model takes at most so many times the size of its weights, or so many bytes if
# that is more: of a small model the embedding is the most, and many stages have it.
MOST_CUTS = 4
SMALL = 4 << 30
RECENT = 300.0  # s since its last use in which nothing is removed

Layers = tuple[str, int, int]  # digest of the model, first, last

_GONE = ".gone-"
_RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")


@dataclass(frozen=True, slots=True)
class _Leftover:
    """A folder that may be removed, and the mark that says that it is complete, if it has one."""

    folder: Path
    used: float  # seconds since 1970
    size: int
    mark: Path | None = None


def used(folder: Path) -> bool:
    """Note that a stage is used now. False when it is not there any more."""
    try:
        os.utime(folder)
    except OSError:
        return False
    return True


def mark_of(model: Path, first: int, last: int) -> Path:
    """What says that layers which came from peers are complete."""
    return model / f".complete-{first}-{last}"


def make_room_for_cut(model: Path, digest: str, weights: int, in_use: Collection[Layers]) -> None:
    """Before layers are cut from the model in this folder, whose ``weights`` have so many bytes.

    Raises :class:`StoreError` when there is no room for as much again.
    """
    _sweep(model / STAGES)
    found = _stages(model, digest, in_use)
    cut = sum(leftover.size for leftover, _ in found)
    most = max(MOST_CUTS * weights, SMALL)

    def fits() -> bool:
        return cut + weights <= most and _free(model) >= weights + RESERVE

    for leftover in _oldest([one for one, busy in found if not busy]):
        if fits():
            return
        if _remove(leftover):
            cut -= leftover.size
    if not fits():
        raise StoreError(
            f"no room to cut more layers of this model: {cut >> 20} MB of at most {most >> 20} MB "
            f"are taken, {_free(model) >> 20} MB of the disk are free"
        )


def make_room_for_part(parts: Path, digest: str, size: int, in_use: Collection[Layers]) -> None:
    """Before ``size`` bytes of the model ``digest`` are fetched into a folder in ``parts``.

    Raises :class:`StoreError` when there is no room for them.
    """
    digests = {name for name, _, _ in in_use} | {digest}
    _sweep(parts)
    found: list[_Leftover] = []
    total = 0
    for folder in _folders(parts):
        size_here = _size(folder)
        total += size_here
        if folder.name not in digests:
            found.append(_Leftover(folder, _last_use(folder), size_here))
        else:
            _sweep(folder / STAGES)
            stages = _stages(folder, folder.name, in_use)
            found += [leftover for leftover, busy in stages if not busy]

    def fits() -> bool:
        free = _free(parts)
        return free >= size + RESERVE and total + size <= (total + free) // 2

    for leftover in _oldest(found):
        if fits():
            return
        if _remove(leftover):
            total -= leftover.size
    free = _free(parts)
    if free < size + RESERVE:
        raise StoreError(
            f"{parts} has {free >> 20} MB free, of which {RESERVE >> 20} MB stay so, and these "
            f"layers need {size >> 20} MB"
        )


def _stages(model: Path, digest: str, in_use: Collection[Layers]) -> list[tuple[_Leftover, bool]]:
    """The stages in a model's folder, and whether they are in use."""
    found = []
    for folder in _folders(model / STAGES):
        match = _RANGE.fullmatch(folder.name)
        if match is not None:
            first, last = int(match[1]), int(match[2])
            mark = mark_of(model, first, last)
            leftover = _Leftover(folder, max(_time(folder), _time(mark)), _size(folder), mark)
            found.append((leftover, (digest, first, last) in in_use))
    return found


def _oldest(leftovers: list[_Leftover]) -> list[_Leftover]:
    """Those that were not used a moment ago, the longest unused first."""
    now = time.time()
    rest = [one for one in leftovers if not 0 <= now - one.used < RECENT]
    return sorted(rest, key=lambda one: one.used)


def _remove(leftover: _Leftover) -> bool:
    gone = leftover.folder.with_name(f"{_GONE}{uuid.uuid4().hex}")
    try:
        if leftover.mark is not None:
            leftover.mark.unlink(missing_ok=True)
        os.rename(leftover.folder, gone)
    except OSError as error:
        _log.info("%s cannot be removed: %s", leftover.folder, error)
        return False
    shutil.rmtree(gone, ignore_errors=True)
    _log.info("removed %s (%d MB) to make room", leftover.folder, leftover.size >> 20)
    return True


def _sweep(parent: Path) -> None:
    """Finish what was begun by a process that was killed."""
    for path in parent.glob(f"{_GONE}*"):
        shutil.rmtree(path, ignore_errors=True)


def _folders(parent: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in parent.iterdir() if path.is_dir() and path.name[0] != "."]
    return []


def _last_use(folder: Path) -> float:
    with suppress(OSError):
        paths = [folder, *folder.glob(".complete-*"), *folder.glob(f"{STAGES}/*")]
        return max(_time(path) for path in paths)
    return 0.0


def _time(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            status = path.stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
