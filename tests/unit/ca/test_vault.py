"""The CA's key at rest, and the secrets that open it."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca import vault
from ca.errors import LockedError, NotInitialisedError
from ca.secret import make_key_file, new_secret, passphrase_secret, read_key_file
from ca.secret import read_passphrase_file as read_passphrase
from ca.vault import seal, unseal


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """The least work that the format allows; the real cost is paid in the command's own tests."""
    monkeypatch.setattr(vault, "_SCRYPT_N", 1 << 14)


def test_round_trip(tmp_path):
    key, path = Ed25519PrivateKey.generate(), tmp_path / "ca.key"
    path.write_bytes(seal(key, b"correct horse"))
    assert unseal(path, b"correct horse").private_bytes_raw() == key.private_bytes_raw()
    assert key.private_bytes_raw().hex() not in path.read_text()
    with pytest.raises(LockedError, match="wrong"):
        unseal(path, b"correct house")


def test_two_seals_of_one_key_have_nothing_in_common():
    key = Ed25519PrivateKey.generate()
    one, two = (json.loads(seal(key, b"the same")) for _ in range(2))
    assert all(one[field] != two[field] for field in ("salt", "nonce", "sealed"))


@pytest.mark.parametrize("field", ["salt", "nonce", "sealed"])
def test_every_part_is_covered(tmp_path, field):
    path = tmp_path / "ca.key"
    content = json.loads(seal(Ed25519PrivateKey.generate(), b"correct horse"))
    content[field] = ("0" if content[field][0] != "0" else "1") + content[field][1:]
    path.write_text(json.dumps(content))
    with pytest.raises(LockedError):
        unseal(path, b"correct horse")


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1 << 30},  # would take 1 TiB
        {"n": 1},
        {"n": (1 << 14) + 1},  # not a power of two
        {"salt": ""},
        {"sealed": "00"},
        {"format": "meshca-key-v9"},
        {"more": 1},
    ],
)
def test_a_damaged_file_is_said_to_be_one(tmp_path, change):
    path = tmp_path / "ca.key"
    content = json.loads(seal(Ed25519PrivateKey.generate(), b"x")) | change
    path.write_text(json.dumps(content))
    with pytest.raises(NotInitialisedError, match="damaged"):
        unseal(path, b"x")


@pytest.mark.parametrize("content", [b"", b"[]", b"{" * 9000, b"\xff\xfe", b"\0" * 100])
def test_any_bytes_at_all(tmp_path, content):
    path = tmp_path / "ca.key"
    path.write_bytes(content)
    with pytest.raises(NotInitialisedError):
        unseal(path, b"x")
    with pytest.raises(NotInitialisedError):
        unseal(tmp_path / "missing", b"x")


def test_passphrase_files(tmp_path):
    path = tmp_path / "pass"
    for content in (b"correct horse", b"correct horse\n", b"correct horse\r\n"):
        path.write_bytes(content)
        assert read_passphrase(path) == b"correct horse"
    for content in (b"", b"\n", b"two\nlines\n", b"\xff", b"x" * 5000):
        path.write_bytes(content)
        with pytest.raises(LockedError):
            read_passphrase(path)
    with pytest.raises(LockedError, match="cannot read"):
        read_passphrase(tmp_path / "missing")


def test_accents_however_they_are_typed():
    assert passphrase_secret("caf\u00e9") == passphrase_secret("cafe\u0301")


def test_key_files(tmp_path):
    path = tmp_path / "stick.key"
    secret = make_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == secret and len(secret) > 40
    with pytest.raises(FileExistsError):
        make_key_file(path)
    assert new_secret(None, path) == secret
    path.write_bytes(b"short")
    with pytest.raises(LockedError, match="too short"):
        read_key_file(path)
    path.write_bytes(b"x" * 5000)
    with pytest.raises(LockedError, match="larger"):
        read_key_file(path)


def test_new_passphrases_have_a_length(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHCA_PASSPHRASE", "seven77")
    with pytest.raises(LockedError, match="at least 8"):
        new_secret(None, None)
    monkeypatch.setenv("MESHCA_PASSPHRASE", "eight888")
    assert new_secret(None, None) == b"eight888"
