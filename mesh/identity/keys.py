"""A node's private key: on disk, and signing with it under a tag for each purpose."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from ca.files import read_bounded, write_atomic

_log = logging.getLogger(__name__)

_MAX_KEY_BYTES = 4096
# Every tag begins like this, and nothing else that an Ed25519 node key signs does: libp2p's texts
# begin with "libp2p-", "noise-" or a varint, a certificate request with the byte 0x30.
_TAG = re.compile(rb"mesh[a-z0-9-]{1,60}")


class KeyFileError(Exception):
    """A key file that is missing, in the way or not usable; one line that names it."""


class SignatureError(Exception):
    """A signature that is not by the key, over the data and under the tag that were given."""


def create_key(path: Path) -> Ed25519PrivateKey:
    """Make a new key in a new file with mode 0600. Raises KeyFileError when there is one."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        write_atomic(path, pem, mode=0o600, replace=False)
    except FileExistsError:
        raise KeyFileError(f"{path} exists: a node's key is never overwritten") from None
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror}") from error
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    """Read a key file (PKCS#8 PEM, Ed25519, not encrypted). Raises KeyFileError.

    A file that other users can read gives a warning in the log: on a memory stick there is no other
    way, elsewhere it is a mistake.
    """
    try:
        pem = read_bounded(path, _MAX_KEY_BYTES)
    except FileNotFoundError:
        raise KeyFileError(f"there is no key at {path}: make one with meshnode init") from None
    except OSError as error:
        raise KeyFileError(f"cannot read the key {path}: {error.strerror}") from error
    except ValueError as error:
        raise KeyFileError(str(error)) from None
    try:
        key = load_pem_private_key(pem, password=None)
    except Exception:  # the library documents three types, and raises what OpenSSL says
        raise KeyFileError(f"{path} is not a private key in PEM without a passphrase") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path} is not an Ed25519 key")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        _log.warning("other users of this machine may read %s: chmod 600 it", path)
    return key


def sign(key: Ed25519PrivateKey, tag: bytes, data: bytes) -> bytes:
    """Sign ``data`` for one purpose, named by ``tag`` (``mesh...``, at most 64 of a-z, 0-9, -).

    A signature under one tag never counts under another. 64 bytes.
    """
    return key.sign(_tagged(tag, data))


def verify_signature(
    public_key: Ed25519PublicKey, tag: bytes, data: bytes, signature: bytes
) -> None:
    """Check a signature made by :func:`sign`. Returns None, or raises SignatureError."""
    try:
        public_key.verify(signature, _tagged(tag, data))
    except InvalidSignature:
        raise SignatureError(f"the {tag.decode()} signature is not valid") from None


def _tagged(tag: bytes, data: bytes) -> bytes:
    if _TAG.fullmatch(tag) is None:
        raise ValueError(f"not a signature tag: {tag!r}")
    return tag + b"\0" + data
