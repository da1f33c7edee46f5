"""Why something signed, or something to be signed, is refused."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a certificate, a request or a revocation list was refused."""

    MISSING = "missing"  # the peer showed no certificate
    MALFORMED = "malformed"  # not of the form that ca.form describes
    NOT_A_LEAF = "not_a_leaf"  # a CA certificate, or key usage of one, in a node's place
    NOT_A_CA = "not_a_ca"  # a certificate that may not sign others, in a CA's place
    PATH_TOO_LONG = "path_too_long"  # more CAs between root and node than the root allows
    UNKNOWN_CA = "unknown_ca"  # no trusted root signed it
    WRONG_NETWORK = "wrong_network"
    WRONG_KEY = "wrong_key"  # valid, but for another key than the one in use
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"
    REVOKED = "revoked"
    ROLLED_BACK = "rolled_back"  # two different revocation lists with one number


class CertificateError(Exception):
    """A certificate, request or revocation list that cannot be accepted.

    ``message`` is one line for a human; nothing in it was taken from outside unchecked.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class AuthorityError(Exception):
    """Something the CA cannot or will not do; the message is one line for its admin."""


class NotInitialisedError(AuthorityError):
    """There is no CA in that folder, or it is damaged."""


class AlreadyInitialisedError(AuthorityError):
    """There is a CA in that folder."""


class LockedError(AuthorityError):
    """The CA's key cannot be opened: no passphrase, or a wrong one."""


class RefusedError(AuthorityError):
    """A certificate that the CA does not issue; the message says what would be right."""


class UnknownCertificateError(AuthorityError):
    """The ledger has no certificate like that."""


class LedgerError(AuthorityError):
    """The ledger cannot be read or written."""
