"""What each ``meshca`` command does: options in, lines out, errors raised.

Results go to standard output; notes and warnings about them to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from ca.authority import LEDGER_FILE, Authority
from ca.errors import (
    AlreadyInitialisedError,
    CertificateError,
    NotInitialisedError,
    RefusedError,
    UnknownCertificateError,
)
from ca.files import (
    CERTIFICATE_FILE,
    KEY_FILE,
    make_private_folder,
    read_bounded,
    write_atomic,
)
from ca.ledger import Entry
from ca.naming import format_roles
from ca.request import MAX_REQUEST_BYTES, make_request, read_request
from ca.secret import existing_secret, new_secret

STANDARD_OUTPUT = Path("-")  # where a file is expected


class UsageError(Exception):
    """Arguments that are each fine and do not go together."""


def init(options: argparse.Namespace) -> None:
    """Make a CA."""
    folder: Path = options.dir
    if (folder / LEDGER_FILE).exists():  # before asking for a passphrase
        with contextlib.suppress(NotInitialisedError):  # what an interrupted init left
            there = Authority.open(folder)
            raise AlreadyInitialisedError(f"{folder} holds the CA of network {there.network}")
    secret = new_secret(options.passphrase_file, options.key_file)
    authority = Authority.create(folder, options.network, secret, now=time.time())
    say(f"The CA of network {authority.network} is in {folder}.")
    say(f"Its certificate, for whoever verifies: {authority.root_path}")
    if options.key_file is not None:
        say(f"Its key opens with {options.key_file}: keep that file apart from the folder.")


def issue(options: argparse.Namespace) -> None:
    """Sign a request, or make key and certificate."""
    if (options.request is None) == (options.name is None):
        raise UsageError("issue takes either a REQUEST or --name")
    if options.name is None:
        _issue_for_request(options)
    else:
        _issue_with_key(options)


def _issue_for_request(options: argparse.Namespace) -> None:
    if options.output is None or options.folder is not None:
        raise UsageError("issue REQUEST takes -o FILE, for the certificate")
    authority = Authority.open(options.dir)
    try:
        request = read_request(_read(options.request, MAX_REQUEST_BYTES))
    except CertificateError as error:
        raise RefusedError(f"{options.request}: {error.message}") from None
    authority.check(request, now=time.time(), days=options.days)
    key = _unlock(authority, options)
    entry = authority.issue(key, request, options.roles, now=time.time(), days=options.days)
    with _recorded(entry):
        _write(options.output, authority.bundle(entry))
    _announce(entry)


def _issue_with_key(options: argparse.Namespace) -> None:
    if options.folder is None or options.output is not None:
        raise UsageError("issue --name takes --out DIR, for key and certificate")
    authority = Authority.open(options.dir)
    node_key = Ed25519PrivateKey.generate()
    request = read_request(make_request(node_key, options.name))
    authority.check(request, now=time.time(), days=options.days)
    key = _unlock(authority, options)
    make_private_folder(options.folder)
    key_path: Path = options.folder / KEY_FILE
    pem = node_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        write_atomic(key_path, pem, mode=0o600, replace=False)
    except FileExistsError:
        raise RefusedError(f"{key_path} exists: a node's key is never overwritten") from None
    try:
        entry = authority.issue(
            key, request, options.roles, now=time.time(), days=options.days, key_made_here=True
        )
    except BaseException:
        key_path.unlink()
        raise
    with _recorded(entry):
        _write(options.folder / CERTIFICATE_FILE, authority.bundle(entry))
    _announce(entry)
    warn(
        f"the private key in {key_path} was made on the CA's machine, so whoever controls this "
        "machine could have kept it. Move the folder, leave no copy; better, run meshnode init "
        "on the node and sign its request."
    )


def list_all(options: argparse.Namespace) -> None:
    """A table of all certificates, oldest first."""
    now = time.time()
    rows = [("NAME", "STATE", "ROLES", "EXPIRES", "PEER", "SERIAL")]
    rows += [
        (
            entry.name,
            entry.state(now),
            format_roles(entry.roles),
            _day(entry.not_after),
            entry.peer_id,
            f"{entry.serial:040x}",
        )
        for entry in Authority.open(options.dir).entries()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show(options: argparse.Namespace) -> None:
    """Everything about some certificates, or one of them as a file."""
    authority = Authority.open(options.dir)
    now = time.time()
    found = authority.find(options.target)
    if options.output is not None:
        valid = [entry for entry in found if entry.state(now) == "valid"]
        if not valid:
            raise UnknownCertificateError(f"no certificate for {options.target!r} is valid")
        _write(options.output, authority.bundle(valid[-1]))
        return
    for position, entry in enumerate(found):
        if position > 0:
            say("")
        say(f"name        {entry.name}")
        say(f"network     {authority.network}")
        say(f"peer        {entry.peer_id}")
        say(f"roles       {format_roles(entry.roles)}")
        say(f"serial      {entry.serial:040x}")
        say(f"not before  {_instant(entry.not_before)}")
        say(f"not after   {_instant(entry.not_after)}")
        say(f"issued      {_instant(entry.issued)}")
        say(f"key made    {'on this machine' if entry.key_made_here else 'by the node'}")
        revoked = "" if entry.revoked is None else f" at {_instant(entry.revoked)}"
        say(f"state       {entry.state(now)}{revoked}")


def revoke(options: argparse.Namespace) -> None:
    """End a node or one certificate."""
    authority = Authority.open(options.dir)
    authority.find(options.target)  # before asking for a passphrase
    key = _unlock(authority, options)
    done = authority.revoke(key, options.target, now=time.time())
    for entry in done.entries:
        say(f"revoked {entry.name} {entry.peer_id} serial {entry.serial:040x}")
    if not done.entries:
        say("nothing left to revoke: that is done already")
    say(
        f"The revocation list has number {done.crl_number}. Write it out with meshca crl and give "
        "it to any node: the mesh spreads it."
    )


def crl(options: argparse.Namespace) -> None:
    """Write the newest revocation list out."""
    number, der = Authority.open(options.dir).crl()
    _write(options.output, x509.load_der_x509_crl(der).public_bytes(Encoding.PEM))
    if options.output != STANDARD_OUTPUT:
        say(f"revocation list {number} is in {options.output}")


def _unlock(authority: Authority, options: argparse.Namespace) -> Ed25519PrivateKey:
    return authority.unlock(
        existing_secret(options.passphrase_file, options.key_file, authority.network)
    )


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_bounded(path, limit)
    except ValueError as error:
        raise RefusedError(str(error)) from None


def _write(path: Path, data: bytes) -> None:
    if path == STANDARD_OUTPUT:
        sys.stdout.buffer.write(data)
    else:
        write_atomic(path, data)


@contextlib.contextmanager
def _recorded(entry: Entry) -> Iterator[None]:
    """Tell where the certificate is when its file cannot be written."""
    try:
        yield
    except OSError:
        warn(f"the certificate is in the ledger: meshca show {entry.serial:040x} -o FILE")
        raise


def _announce(entry: Entry) -> None:
    note(
        f"issued {entry.name} {entry.peer_id} roles {format_roles(entry.roles)} "
        f"until {_instant(entry.not_after)}"
    )


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def say(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")


def note(line: str) -> None:
    """A line about the result."""
    sys.stderr.write(line + "\n")


def warn(line: str) -> None:
    """Something the admin should know although it worked."""
    note(f"meshca: warning: {line}")


def complain(line: str) -> None:
    """Why it did not work."""
    note(f"meshca: error: {line}")
