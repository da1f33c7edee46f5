"""Whom this node trusts: the roots, and the newest revocation list of each."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from ca.certificate import (
    Certificate,
    CertificateError,
    Reason,
    Root,
    TrustedPath,
    check_now,
    trusted_path,
)
from ca.crl import MAX_CRL_BYTES, RevocationList, verify_crl
from ca.files import make_private_folder, read_bounded, write_atomic
from mesh.identity.node import CertificateFileError

_log = logging.getLogger(__name__)

# Verified chains kept, so that checking the certificates of live connections again costs no
# signature. Only what a trusted CA signed gets in, at about 2 KB each.
_KEPT_PATHS = 4096


class AdmissionError(CertificateError):
    """A peer that is not admitted."""


class TrustStore:
    """Verifies peers' certificates; keeps revocation lists in ``folder``, one file for each root.

    Not thread-safe: use it from the node's event loop. Verification does no I/O;
    :meth:`apply_crl` writes a small file.
    """

    def __init__(self, network: str, roots: Sequence[Root], folder: Path) -> None:
        """Load the lists kept in ``folder``. Raises CertificateFileError for one that is damaged:
        going on without it would admit the revoked again."""
        self.network = network
        self.roots: tuple[Root, ...] = tuple(root for root in roots if root.network == network)
        self._folder = folder
        self._lists: dict[bytes, RevocationList] = {}
        self._revoked: dict[bytes, Mapping[int, float]] = {}
        self._listeners: list[Callable[[RevocationList], None]] = []
        self._paths: OrderedDict[tuple[bytes, ...], TrustedPath] = OrderedDict()
        for root in self.roots:
            kept = self._load(root)
            if kept is not None:
                self._take(kept)

    @property
    def revocation_lists(self) -> Mapping[bytes, RevocationList]:
        """The newest list of each root that has one, by the root's raw public key. Live."""
        return MappingProxyType(self._lists)

    def verify(self, chain_der: Sequence[bytes], now: float) -> Certificate:
        """The certificate at the head of a chain, if it counts at ``now`` (epoch seconds).

        Raises CertificateError as :func:`ca.certificate.verify_chain` does.
        """
        chain = tuple(chain_der)
        path = self._paths.get(chain)
        if path is None:
            path = trusted_path(chain, self.roots, network=self.network)
            self._paths[chain] = path
            if len(self._paths) > _KEPT_PATHS:
                self._paths.popitem(last=False)
        else:
            self._paths.move_to_end(chain)
        check_now(path, now=now, revoked=self._revoked)
        return path.certificate

    def verify_peer(
        self, chain_der: Sequence[bytes] | None, peer_id: str, now: float
    ) -> Certificate:
        """Decide whether the peer that has proved to be ``peer_id`` is admitted.

        For every connection, in its handshake and again while it lives. ``chain_der`` is what the
        peer showed, leaf first, or None. Raises AdmissionError.
        """
        if not chain_der:
            raise AdmissionError(Reason.MISSING, "the peer showed no certificate")
        try:
            certificate = self.verify(chain_der, now)
        except CertificateError as error:
            raise AdmissionError(error.reason, error.message) from None
        if certificate.peer_id != peer_id:
            raise AdmissionError(
                Reason.WRONG_KEY,
                f"the peer shows the certificate of {certificate.name}, which is for another key",
            )
        return certificate

    def apply_crl(self, der: bytes) -> bool:
        """Take a revocation list, from wherever it came; True when it is news.

        A newer list is in force, and on disk, when the listeners hear of it. (When it cannot be
        written it is in force all the same, and the log says so.) An older one, or the one in
        force, changes nothing. Raises CertificateError: MALFORMED, UNKNOWN_CA, NOT_A_CA, or
        ROLLED_BACK when the CA signed two lists with one number.
        """
        if any(kept.der == der for kept in self._lists.values()):
            return False
        new = verify_crl(der, self.roots)
        old = self._lists.get(new.root_key)
        if old is not None and new.number < old.number:
            return False
        if old is not None and new.number == old.number:
            raise CertificateError(
                Reason.ROLLED_BACK, f"the CA signed two revocation lists with number {new.number}"
            )
        self._take(new)
        try:
            make_private_folder(self._folder)
            write_atomic(self._file(new.root_key), new.der)
        except OSError as error:
            _log.error(
                "revocation list %d is in force but cannot be kept in %s: %s",
                new.number,
                self._folder,
                error.strerror,
            )
        for listener in tuple(self._listeners):
            listener(new)
        return True

    def on_revocation(self, listener: Callable[[RevocationList], None]) -> Callable[[], None]:
        """Have ``listener`` called, at once and in the caller of :meth:`apply_crl`, with each newer
        list. Returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _take(self, crl: RevocationList) -> None:
        self._lists[crl.root_key] = crl
        self._revoked[crl.root_key] = crl.revoked

    def _file(self, root_key: bytes) -> Path:
        return self._folder / f"{sha256(root_key).hexdigest()[:32]}.crl"

    def _load(self, root: Root) -> RevocationList | None:
        path = self._file(root.key)
        try:
            return verify_crl(read_bounded(path, MAX_CRL_BYTES), [root])
        except FileNotFoundError:
            return None
        except CertificateError as error:
            raise CertificateFileError(
                f"{path}: {error.message}; get the list again from the CA", error.reason
            ) from None
        except OSError as error:
            raise CertificateFileError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise CertificateFileError(str(error), Reason.MALFORMED) from None
