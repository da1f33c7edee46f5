"""The CA of one network: a folder with its sealed key, its certificate and its ledger.

Whoever opens the folder can read; signing takes the key, which :meth:`Authority.unlock` opens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import load_root
from ca.crl import MAX_CRL_BYTES, build_crl
from ca.errors import (
    AlreadyInitialisedError,
    CertificateError,
    LockedError,
    NotInitialisedError,
    RefusedError,
    UnknownCertificateError,
)
from ca.files import make_private_folder, write_atomic
from ca.form import Root
from ca.issue import DEFAULT_DAYS, issue, make_root
from ca.ledger import Entry, Ledger, Transaction
from ca.naming import NETWORK_RULE, Role, is_network, is_node_name, public_key_of
from ca.pem import write_bundle
from ca.request import Request
from ca.vault import seal, unseal

SEALED_KEY_FILE = "ca.key"
ROOT_FILE = "ca.pem"
LEDGER_FILE = "ledger.sqlite3"
MAX_DAYS = 3650.0

_SERIAL = re.compile(r"[0-9a-f]{40}")
_DAY = 86400.0


@dataclass(frozen=True)
class Revoked:
    """What a revocation did: the certificates that it ended, and the list that says so."""

    entries: tuple[Entry, ...]
    crl_number: int
    crl_der: bytes


class Authority:
    """A CA that exists; see :meth:`create` and :meth:`open`."""

    def __init__(self, folder: Path, root: Root, ledger: Ledger) -> None:
        self.folder = folder
        self.root = root
        self._ledger = ledger

    @property
    def network(self) -> str:
        return self.root.network

    @property
    def root_path(self) -> Path:
        """The CA's certificate in PEM, for whoever verifies."""
        return self.folder / ROOT_FILE

    @classmethod
    def create(cls, folder: Path, network: str, secret: bytes, *, now: float) -> Authority:
        """Make a CA: key, certificate, ledger and an empty revocation list.

        The ledger's commit is the moment from which the CA exists; what a crash before it leaves is
        overwritten by the next attempt. Raises AlreadyInitialisedError, ValueError for a bad
        network name, LedgerError, OSError.
        """
        if not is_network(network):
            raise ValueError(f"{network!r} cannot be a network's name: it is {NETWORK_RULE}")
        key = Ed25519PrivateKey.generate()
        sealed = seal(key, secret)
        root_der = make_root(key, network, serial=x509.random_serial_number(), now=now)
        make_private_folder(folder)
        ledger = Ledger(folder / LEDGER_FILE)
        ledger.create()
        with ledger.transaction() as transaction:
            there = transaction.authority()
            if there is not None:
                raise AlreadyInitialisedError(f"{folder} holds the CA of network {there[0]}")
            write_atomic(folder / SEALED_KEY_FILE, sealed, mode=0o600)
            transaction.set_authority(network, root_der, now)
            _renew_crl(transaction, key, root_der, now)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Open a CA's folder. Raises NotInitialisedError, LedgerError, OSError."""
        ledger = Ledger(folder / LEDGER_FILE)
        if not ledger.path.exists():
            raise NotInitialisedError(f"there is no CA in {folder}: make one with meshca init")
        with ledger.transaction() as transaction:
            there = transaction.authority()
        if there is None:
            raise NotInitialisedError(f"there is no CA in {folder}: make one with meshca init")
        try:
            authority = cls(folder, load_root(there[1]), ledger)
        except CertificateError as error:
            raise NotInitialisedError(f"the ledger in {folder} is damaged: {error}") from None
        if not authority.root_path.exists():
            write_atomic(authority.root_path, write_bundle([authority.root.der]))
        return authority

    def unlock(self, secret: bytes) -> Ed25519PrivateKey:
        """The CA's key. Raises LockedError, NotInitialisedError; takes a third of a second."""
        key = unseal(self.folder / SEALED_KEY_FILE, secret)
        if key.public_key().public_bytes_raw() != self.root.key:
            raise LockedError(f"the key in {self.folder} is that of another CA")
        return key

    def check(self, request: Request, *, now: float, days: float = DEFAULT_DAYS) -> None:
        """Say whether :meth:`issue` would refuse, before asking anybody for a passphrase."""
        with self._ledger.transaction() as transaction:
            self._check(transaction, request, now=now, days=days)

    def issue(
        self,
        key: Ed25519PrivateKey,
        request: Request,
        roles: Iterable[Role],
        *,
        now: float,
        days: float = DEFAULT_DAYS,
        key_made_here: bool = False,
    ) -> Entry:
        """Sign a request. When this returns, the certificate is in the ledger, on the disk.

        Raises RefusedError: the key belonged to a revoked node; another node holds the name; the
        certificate would outlive the CA; the clock is before the CA's beginning. LedgerError.
        """
        granted = frozenset(roles)
        if not granted:
            raise RefusedError("a certificate needs at least one role")
        with self._ledger.transaction() as transaction:
            self._check(transaction, request, now=now, days=days)
            serial = x509.random_serial_number()
            der = issue(
                key,
                self.root.der,
                network=self.network,
                name=request.name,
                public_key=request.public_key,
                roles=granted,
                serial=serial,
                now=now,
                days=days,
            )
            parsed = x509.load_der_x509_certificate(der)
            entry = Entry(
                serial=serial,
                name=request.name,
                peer_id=request.peer_id,
                roles=granted,
                not_before=parsed.not_valid_before_utc.timestamp(),
                not_after=parsed.not_valid_after_utc.timestamp(),
                issued=now,
                key_made_here=key_made_here,
                revoked=None,
                der=der,
            )
            transaction.record(entry)
        return entry

    def bundle(self, entry: Entry) -> bytes:
        """``node.pem`` for a certificate: itself, then the CA's."""
        return write_bundle([entry.der, self.root.der])

    def entries(self) -> list[Entry]:
        """Every certificate, oldest first."""
        with self._ledger.transaction() as transaction:
            return transaction.entries()

    def find(self, target: str) -> list[Entry]:
        """Certificates by serial (40 hex digits), PeerId or name, oldest first.

        Raises UnknownCertificateError when there is none.
        """
        with self._ledger.transaction() as transaction:
            found = _find(transaction, target)
        if not found:
            raise UnknownCertificateError(f"the ledger has no certificate for {target!r}")
        return found

    def revoke(self, key: Ed25519PrivateKey, target: str, *, now: float) -> Revoked:
        """Revoke, and sign the list that says so, in one transaction.

        A serial ends that certificate alone. A PeerId or a name ends the node: all its
        certificates, and its key is never signed again. (A name means who holds it now.) Doing it
        twice changes nothing. Raises UnknownCertificateError, RefusedError, LedgerError.
        """
        with self._ledger.transaction() as transaction:
            found = _find(transaction, target)
            if not found:
                raise UnknownCertificateError(f"the ledger has no certificate for {target!r}")
            if not _SERIAL.fullmatch(target):
                found = _whole_nodes(transaction, found, target, now)
            ended = tuple(entry for entry in found if entry.revoked is None)
            for entry in ended:
                transaction.revoke(entry.serial, now)
            if ended:
                _renew_crl(transaction, key, self.root.der, now)
            number, der = _crl(transaction)
        return Revoked(ended, number, der)

    def crl(self) -> tuple[int, bytes]:
        """``(number, DER)`` of the newest revocation list."""
        with self._ledger.transaction() as transaction:
            return _crl(transaction)

    def _check(
        self, transaction: Transaction, request: Request, *, now: float, days: float
    ) -> None:
        if not (math.isfinite(days) and 0 < days <= MAX_DAYS):
            raise RefusedError(f"a certificate lasts more than 0 and at most {MAX_DAYS:g} days")
        if now < self.root.not_before.timestamp():
            raise RefusedError("this machine's clock is before the CA's beginning: set it")
        left = (self.root.not_after.timestamp() - now) / _DAY
        if days > left:
            raise RefusedError(
                f"the CA itself lasts only {max(left, 0):.1f} days more: ask for fewer days, or "
                "make a new CA and have the nodes trust both"
            )
        if transaction.is_barred(request.peer_id):
            raise RefusedError(
                f"the key {request.peer_id} belonged to a node that was revoked: make a new key "
                "on that machine"
            )
        for entry in transaction.by_name(request.name):
            if entry.peer_id != request.peer_id and entry.state(now) == "valid":
                raise RefusedError(
                    f"the name {entry.name} belongs to {entry.peer_id}: choose another name, or "
                    f"revoke {entry.name} first"
                )


def _find(transaction: Transaction, target: str) -> list[Entry]:
    if _SERIAL.fullmatch(target):
        return transaction.by_serial(int(target, 16))
    if _is_peer_id(target):
        return transaction.by_peer(target)
    return transaction.by_name(target) if is_node_name(target) else []


def _whole_nodes(
    transaction: Transaction, found: list[Entry], target: str, now: float
) -> list[Entry]:
    """Bar the node that ``target`` means, and return all its certificates."""
    if not _is_peer_id(target):
        # A name may have had other holders before; only who holds it now is meant.
        holders = [entry for entry in found if entry.state(now) == "valid"]
        if not holders and all(entry.revoked is None for entry in found):
            raise UnknownCertificateError(
                f"every certificate for {target!r} has expired; to bar its key, give the PeerId"
            )
        found = holders
    peers = sorted({entry.peer_id for entry in found})
    for peer_id in peers:
        transaction.bar(peer_id, now)
    return [entry for peer_id in peers for entry in transaction.by_peer(peer_id)]


def _is_peer_id(text: str) -> bool:
    try:
        public_key_of(text)
    except ValueError:
        return False
    return True


def _crl(transaction: Transaction) -> tuple[int, bytes]:
    crl = transaction.crl()
    if crl is None:
        raise NotInitialisedError("the ledger is damaged: it has no revocation list")
    return crl


def _renew_crl(
    transaction: Transaction, key: Ed25519PrivateKey, root_der: bytes, now: float
) -> None:
    """Sign and keep the list that follows from the revocations, under the next number.

    The number is the time in seconds where that goes up: a CA that was restored from a backup then
    does not give a number out again that nodes have seen.
    """
    last = transaction.crl()
    number = max(int(now), 0 if last is None else last[0] + 1)
    revoked = {
        entry.serial: entry.revoked
        for entry in transaction.entries()
        # A day more than needed, for clocks.
        if entry.revoked is not None and entry.not_after + _DAY > now
    }
    der = build_crl(key, root_der, number=number, now=now, revoked=revoked)
    if len(der) > MAX_CRL_BYTES:
        raise RefusedError("the revocation list is full: make a new CA, or wait for expiries")
    transaction.set_crl(number, der)
