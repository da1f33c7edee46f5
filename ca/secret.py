"""The secret that opens the CA's key: asked for at the terminal, or from a file or the environment.

A passphrase is never an argument, because other users see the arguments of a process.
"""

from __future__ import annotations

import getpass
import os
import secrets
import sys
import unicodedata
from pathlib import Path

from ca.errors import LockedError
from ca.files import read_bounded, write_atomic

PASSPHRASE_VARIABLE = "MESHCA_PASSPHRASE"
MIN_PASSPHRASE = 8  # characters
_MAX_SECRET_BYTES = 4096
_MIN_KEY_FILE_BYTES = 16


def existing_secret(passphrase_file: Path | None, key_file: Path | None, network: str) -> bytes:
    """The secret of a CA that exists. Raises LockedError when there is no way to get one."""
    if key_file is not None:
        return read_key_file(key_file)
    given = _given_passphrase(passphrase_file)
    return _ask(f"Passphrase of the CA of {network}: ") if given is None else given


def new_secret(passphrase_file: Path | None, key_file: Path | None) -> bytes:
    """The secret for a new CA; a key file that is missing is made. Raises LockedError, OSError."""
    if key_file is not None:
        try:
            return make_key_file(key_file)
        except FileExistsError:
            return read_key_file(key_file)
    secret = _given_passphrase(passphrase_file)
    if secret is None:
        secret = _ask("Passphrase for the new CA: ")
        if secret != _ask("The same again: "):
            raise LockedError("the two passphrases differ")
    if len(secret.decode()) < MIN_PASSPHRASE:
        raise LockedError(f"a passphrase has at least {MIN_PASSPHRASE} characters")
    return secret


def passphrase_secret(text: str) -> bytes:
    """A typed passphrase as bytes, the same however the keyboard composes its accents.

    Raises LockedError for bytes that are no text.
    """
    try:
        return unicodedata.normalize("NFC", text).encode()
    except UnicodeEncodeError:
        raise LockedError("the passphrase is not UTF-8 text") from None


def read_passphrase_file(path: Path) -> bytes:
    """The passphrase in the first and only line of a file. Raises LockedError."""
    try:
        text = read_bounded(path, _MAX_SECRET_BYTES).decode()
    except OSError as error:
        raise LockedError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise LockedError(f"{path} does not hold a passphrase: one line of UTF-8 text") from None
    line = text.removesuffix("\n").removesuffix("\r")
    if not line or "\n" in line:
        raise LockedError(f"{path} does not hold a passphrase: one line of UTF-8 text")
    return passphrase_secret(line)


def read_key_file(path: Path) -> bytes:
    """The content of a key file, which seals like a passphrase. Raises LockedError."""
    try:
        secret = read_bounded(path, _MAX_SECRET_BYTES)
    except OSError as error:
        raise LockedError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise LockedError(str(error)) from None
    if len(secret) < _MIN_KEY_FILE_BYTES:
        raise LockedError(f"{path} is too short for a key file: {_MIN_KEY_FILE_BYTES} bytes")
    return secret


def make_key_file(path: Path) -> bytes:
    """Write a new key file (mode 0600) with 256 random bits and return its content.

    Raises FileExistsError, OSError.
    """
    secret = secrets.token_urlsafe(32).encode() + b"\n"
    write_atomic(path, secret, mode=0o600, replace=False)
    return secret


def _given_passphrase(file: Path | None) -> bytes | None:
    if file is not None:
        return read_passphrase_file(file)
    text = os.environ.get(PASSPHRASE_VARIABLE)
    return passphrase_secret(text) if text else None


def _ask(prompt: str) -> bytes:
    if not sys.stdin.isatty():
        raise LockedError(
            "there is no terminal to ask for the passphrase: use --passphrase-file, --key-file or "
            + PASSPHRASE_VARIABLE
        )
    try:
        return passphrase_secret(getpass.getpass(prompt))
    except EOFError:
        raise LockedError("no passphrase given") from None
