"""Files that are whole or not there."""

from __future__ import annotations

import errno
import os

import pytest

from ca.files import read_bounded, write_atomic


def test_replaces_in_one_step_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_modes(tmp_path):
    write_atomic(tmp_path / "public", b"x")
    write_atomic(tmp_path / "private", b"x", mode=0o600)
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("hard_links", [True, False])
def test_an_existing_file_can_be_kept(tmp_path, monkeypatch, hard_links):
    if not hard_links:

        def refuse(*_):
            raise PermissionError(errno.EPERM, "no hard links on FAT")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "key"
    write_atomic(path, b"first", mode=0o600, replace=False)
    with pytest.raises(FileExistsError):
        write_atomic(path, b"second", mode=0o600, replace=False)
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_failing_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomic(path, b"old")

    def fail(_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "missing" / "node.pem"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(path, b"x")
    assert caught.value.filename == str(path)


def test_reading_is_bounded(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4"):
        read_bounded(path, 4)
    with pytest.raises(ValueError, match="larger"):
        read_bounded(type(path)("/dev/zero"), 1000)
