"""The CA's private key at rest: sealed with a passphrase or with the content of a key file.

The library's own encrypted PKCS#8 derives its key with 2048 rounds of PBKDF2, which is cheap to
attack, so the key is sealed here: scrypt (RFC 7914) makes a key from the secret, AES-256-GCM seals
the 32 bytes of the Ed25519 key with everything else in the file as associated data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from pydantic import BaseModel, ConfigDict, Field

from ca.errors import LockedError, NotInitialisedError
from ca.files import read_bounded

MAX_SEALED_BYTES = 4096

# 128 MiB and about a third of a second for each guess.
_SCRYPT_N = 1 << 17
_SCRYPT_R = 8


class _Sealed(BaseModel):
    """The key file's JSON. ``n`` is bounded, so that a damaged file cannot ask for all memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["meshca-key-v1"]
    kdf: Literal["scrypt"]
    n: int = Field(ge=1 << 14, le=1 << 20)
    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    nonce: str = Field(pattern=r"^[0-9a-f]{24}$")
    sealed: str = Field(pattern=r"^[0-9a-f]{96}$")


def seal(key: Ed25519PrivateKey, secret: bytes) -> bytes:
    """The content of the sealed key's file."""
    salt, nonce = os.urandom(16), os.urandom(12)
    sealed = _cipher(secret, _SCRYPT_N, salt).encrypt(
        nonce, key.private_bytes_raw(), _bound(_SCRYPT_N, salt)
    )
    content = {
        "format": "meshca-key-v1",
        "kdf": "scrypt",
        "n": _SCRYPT_N,
        "salt": salt.hex(),
        "nonce": nonce.hex(),
        "sealed": sealed.hex(),
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def unseal(path: Path, secret: bytes) -> Ed25519PrivateKey:
    """Open a sealed key. Raises LockedError for a wrong secret, NotInitialisedError for a file that
    is missing or damaged."""
    try:
        file = _Sealed.model_validate_json(read_bounded(path, MAX_SEALED_BYTES))
        salt = bytes.fromhex(file.salt)
        cipher = _cipher(secret, file.n, salt)
    except (OSError, ValueError):
        raise NotInitialisedError(f"the CA's key {path} is missing or damaged") from None
    try:
        raw = cipher.decrypt(
            bytes.fromhex(file.nonce), bytes.fromhex(file.sealed), _bound(file.n, salt)
        )
    except InvalidTag:
        raise LockedError("the passphrase or key file is wrong, or the CA's key damaged") from None
    return Ed25519PrivateKey.from_private_bytes(raw)


def _cipher(secret: bytes, n: int, salt: bytes) -> AESGCM:
    return AESGCM(Scrypt(salt=salt, length=32, n=n, r=_SCRYPT_R, p=1).derive(secret))


def _bound(n: int, salt: bytes) -> bytes:
    """What the seal covers besides the key."""
    return b"meshca-key-v1 scrypt %d " % n + salt
