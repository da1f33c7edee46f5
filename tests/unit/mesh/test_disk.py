"""Layers that are here for others' sake: what goes to make room, what stays, when there is none."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from inference.store.errors import StoreError
from mesh.models import disk

MB = 1 << 20
GB = 1 << 30


@pytest.fixture
def free_space(monkeypatch):
    """How much the disk has free."""

    def free(size):
        usage = shutil.disk_usage("/")._replace(free=size)
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)

    free(100 * disk.RESERVE)
    return free


def put_stage(model: Path, first: int, last: int, *, age: float, size: int = GB, mark=False):
    folder = model / disk.STAGES / f"{first}-{last}"
    folder.mkdir(parents=True)
    with (folder / "openvino_model.bin").open("wb") as file:
        file.truncate(size)
    when = time.time() - age
    os.utime(folder, (when, when))
    if mark:
        disk.mark_of(model, first, last).touch()
        os.utime(disk.mark_of(model, first, last), (when, when))
        os.utime(model, (when, when))
    return folder


def ranges(model: Path) -> set[str]:
    return {path.name for path in (model / disk.STAGES).iterdir()}


def test_of_what_was_cut_the_longest_unused_goes_and_what_is_loaded_stays(tmp_path, free_space):
    for number, age in enumerate((900, 800, 700, 600)):
        put_stage(tmp_path, number, number + 1, age=age)
    disk.make_room_for_cut(tmp_path, "d", GB, {("d", 0, 1), ("other", 1, 2)})
    assert ranges(tmp_path) == {"0-1", "2-3", "3-4"}
    assert disk.used(tmp_path / disk.STAGES / "2-3")
    assert not disk.used(tmp_path / disk.STAGES / "1-2")
    put_stage(tmp_path, 4, 5, age=400)
    disk.make_room_for_cut(tmp_path, "d", GB, {("d", 0, 1)})
    assert ranges(tmp_path) == {"0-1", "2-3", "4-5"}, "what was used just now stays"


def test_who_asks_for_ever_new_ranges_gets_no_more_room(tmp_path, free_space):
    for number in range(disk.MOST_CUTS):
        disk.make_room_for_cut(tmp_path, "d", GB, ())
        put_stage(tmp_path, number, number + 1, age=0)
    with pytest.raises(StoreError, match="4096 MB of at most 4096 MB are taken"):
        disk.make_room_for_cut(tmp_path, "d", GB, ())
    assert len(ranges(tmp_path)) == disk.MOST_CUTS


def test_some_of_the_disk_stays_free(tmp_path, free_space):
    free_space(disk.RESERVE + MB - 1)
    with pytest.raises(StoreError, match="1024 MB of the disk are free"):
        disk.make_room_for_cut(tmp_path, "d", MB, ())
    with pytest.raises(StoreError, match="of which 1024 MB stay so, and these layers need 1 MB"):
        disk.make_room_for_part(tmp_path / "not" / "yet", "d", MB, ())
    free_space(disk.RESERVE + MB)
    disk.make_room_for_cut(tmp_path, "d", MB, ())
    disk.make_room_for_part(tmp_path / "not" / "yet", "d", MB, ())


def test_parts_that_nobody_uses_any_more_go(tmp_path, free_space):
    size = 40 * disk.RESERVE
    for name, age in (("old", 900), ("older", 1000), ("held", 2000)):
        put_stage(tmp_path / name, 0, 1, age=age, size=size, mark=True)
    put_stage(tmp_path / "held", 1, 2, age=2000, size=size, mark=True)
    free_space(200 * disk.RESERVE)  # so that 180 may be taken
    disk.make_room_for_part(tmp_path, "new", size, {("held", 1, 2)})
    assert {path.name for path in tmp_path.iterdir()} == {"old", "older", "held"}
    assert ranges(tmp_path / "held") == {"1-2"}
    assert not disk.mark_of(tmp_path / "held", 0, 1).exists()
    disk.make_room_for_part(tmp_path, "new", 3 * size // 2, {("held", 1, 2)})
    assert {path.name for path in tmp_path.iterdir()} == {"old", "held"}


def test_what_a_process_that_was_killed_had_begun_to_remove_is_removed(tmp_path, free_space):
    put_stage(tmp_path / "d", 0, 1, age=0).rename(tmp_path / ".gone-1")
    disk.make_room_for_part(tmp_path, "d", MB, ())
    assert not (tmp_path / ".gone-1").exists()
