"""Everything the CA has signed, in one SQLite file.

A certificate leaves the CA only after its row is on the disk: signing happens inside the
transaction that records it, and :meth:`Ledger.transaction` has committed before the caller sees the
result. Rows about certificates are never changed or deleted; triggers hold even a person with
``sqlite3`` to it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ca.errors import LedgerError, NotInitialisedError
from ca.naming import PeerId, Role, format_roles, parse_roles

_APPLICATION = 0x6D636131  # marks the file as ours ("mca1"), for `file` and for us
_VERSION = 1
_BUSY_SECONDS = 30.0  # another meshca may be waiting for its disk

_SCHEMA = """
CREATE TABLE authority (
    id INTEGER PRIMARY KEY CHECK (id = 1), network TEXT NOT NULL, certificate BLOB NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE certificates (
    serial TEXT PRIMARY KEY, name TEXT NOT NULL COLLATE NOCASE, peer_id TEXT NOT NULL,
    roles TEXT NOT NULL, not_before REAL NOT NULL, not_after REAL NOT NULL,
    certificate BLOB NOT NULL, issued REAL NOT NULL, key_made_here INTEGER NOT NULL
);
CREATE INDEX certificates_by_name ON certificates (name);
CREATE INDEX certificates_by_peer ON certificates (peer_id);
CREATE TABLE revocations (
    serial TEXT PRIMARY KEY REFERENCES certificates (serial), revoked REAL NOT NULL
);
CREATE TABLE barred (peer_id TEXT PRIMARY KEY, since REAL NOT NULL);
CREATE TABLE crl (
    id INTEGER PRIMARY KEY CHECK (id = 1), number INTEGER NOT NULL, list BLOB NOT NULL
);
"""
_APPEND_ONLY = ("authority", "certificates", "revocations", "barred")

_SELECT = """
SELECT c.serial, c.name, c.peer_id, c.roles, c.not_before, c.not_after, c.certificate, c.issued,
       c.key_made_here, r.revoked
FROM certificates AS c LEFT JOIN revocations AS r USING (serial)
"""


@dataclass(frozen=True)
class Entry:
    """One certificate in the ledger. Times are seconds since the epoch."""

    serial: int
    name: str
    peer_id: PeerId
    roles: frozenset[Role]
    not_before: float
    not_after: float
    issued: float
    key_made_here: bool  # the key was made on the CA's machine
    revoked: float | None
    der: bytes = field(repr=False)

    def state(self, now: float) -> str:
        """``revoked``, ``expired`` or ``valid``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if now > self.not_after else "valid"


class Transaction:
    """Reads and writes inside one transaction that excludes all other writers."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def authority(self) -> tuple[str, bytes] | None:
        """``(network, CA certificate in DER)``, once the CA exists."""
        row = self._connection.execute("SELECT network, certificate FROM authority").fetchone()
        return None if row is None else (row[0], row[1])

    def crl(self) -> tuple[int, bytes] | None:
        """``(number, DER)`` of the newest revocation list."""
        row = self._connection.execute("SELECT number, list FROM crl").fetchone()
        return None if row is None else (row[0], row[1])

    def entries(self) -> list[Entry]:
        """Every certificate, oldest first."""
        return self._entries("ORDER BY c.issued, c.rowid", ())

    def by_serial(self, serial: int) -> list[Entry]:
        return self._entries("WHERE c.serial = ?", (_hex(serial),))

    def by_peer(self, peer_id: str) -> list[Entry]:
        return self._entries("WHERE c.peer_id = ? ORDER BY c.issued, c.rowid", (peer_id,))

    def by_name(self, name: str) -> list[Entry]:
        """Names count without regard to case: two that differ only in it are a trap for people."""
        return self._entries("WHERE c.name = ? ORDER BY c.issued, c.rowid", (name,))

    def is_barred(self, peer_id: str) -> bool:
        """Whether this key belonged to a node that was revoked."""
        query = "SELECT 1 FROM barred WHERE peer_id = ?"
        return self._connection.execute(query, (peer_id,)).fetchone() is not None

    def set_authority(self, network: str, certificate: bytes, now: float) -> None:
        self._connection.execute(
            "INSERT INTO authority VALUES (1, ?, ?, ?)", (network, certificate, now)
        )

    def record(self, entry: Entry) -> None:
        """Add a certificate; its serial is new."""
        self._connection.execute(
            "INSERT INTO certificates VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                _hex(entry.serial),
                entry.name,
                entry.peer_id,
                format_roles(entry.roles),
                entry.not_before,
                entry.not_after,
                entry.der,
                entry.issued,
                int(entry.key_made_here),
            ),
        )

    def revoke(self, serial: int, now: float) -> None:
        self._connection.execute("INSERT INTO revocations VALUES (?, ?)", (_hex(serial), now))

    def bar(self, peer_id: str, now: float) -> None:
        self._connection.execute("INSERT OR IGNORE INTO barred VALUES (?, ?)", (peer_id, now))

    def set_crl(self, number: int, der: bytes) -> None:
        self._connection.execute("INSERT OR REPLACE INTO crl VALUES (1, ?, ?)", (number, der))

    def _entries(self, where: str, values: tuple[str, ...]) -> list[Entry]:
        rows = self._connection.execute(_SELECT + where, values).fetchall()
        return [
            Entry(
                serial=int(row[0], 16),
                name=row[1],
                peer_id=PeerId(row[2]),
                roles=parse_roles(row[3]),
                not_before=row[4],
                not_after=row[5],
                der=row[6],
                issued=row[7],
                key_made_here=bool(row[8]),
                revoked=row[9],
            )
            for row in rows
        ]


class Ledger:
    """The ledger's file. Each transaction opens it anew, so a ledger holds nothing open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the file (mode 0600) and its tables when they are missing. Raises LedgerError."""
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise LedgerError(f"cannot write {self.path}: {error.strerror}") from error
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                for table in _APPEND_ONLY:
                    for action in ("UPDATE", "DELETE"):
                        connection.execute(
                            f"CREATE TRIGGER {table}_keeps_{action} BEFORE {action} ON {table} "
                            "BEGIN SELECT RAISE(ABORT, 'the ledger only grows'); END"
                        )
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One transaction. Leaving it normally commits, durably; an exception undoes all of it.

        A second process waits for the first, up to half a minute. Raises LedgerError,
        NotInitialisedError.
        """
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            marks = [
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("application_id", "user_version")
            ]
            if marks == [0, 0]:  # what a crash in the middle of `create` leaves
                raise NotInitialisedError(f"the ledger {self.path} is empty")
            if marks != [_APPLICATION, _VERSION]:
                raise LedgerError(f"{self.path} is not a ledger of this version of meshca")
            yield Transaction(connection)
            connection.execute("COMMIT")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        connection = None
        try:
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=_BUSY_SECONDS,
                isolation_level=None,  # transactions are begun and ended by hand
            )
            # EXTRA also syncs the folder after the journal is gone, which makes a commit durable.
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA foreign_keys = ON")
            yield connection
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path}: {error}") from error
        finally:
            if connection is not None:
                connection.close()  # undoes what was not committed


def _hex(serial: int) -> str:
    return f"{serial:040x}"
