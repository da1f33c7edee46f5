"""Revocation lists: standard X.509 CRLs, signed by a root, numbered upwards without end.

Of two lists of one root, the one with the higher number counts, for good: a node never goes back.
Each list is complete (there are no delta lists) and stays in force until a newer one comes, however
old it gets, because a node that is cut off from its CA should go on working; the short life of
certificates limits what it can miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, SignatureAlgorithmOID

from ca.errors import CertificateError, Reason
from ca.form import Root, check_exact, guarded

# An entry takes about 40 bytes and goes once its certificate has expired, so this is room for more
# than 6,000 nodes revoked within one certificate's life.
MAX_CRL_BYTES = 256 << 10
_MAX_NUMBER = 1 << 63

_UNDERSTOOD = frozenset({ExtensionOID.CRL_NUMBER, ExtensionOID.AUTHORITY_KEY_IDENTIFIER})


@dataclass(frozen=True)
class RevocationList:
    """A list whose signature has been checked.

    ``revoked`` maps serials to the time of revocation (seconds since the epoch); ``root_key`` is
    the raw public key of the root that signed it.
    """

    network: str
    number: int
    issued: datetime
    root_key: bytes = field(repr=False)
    revoked: Mapping[int, float] = field(repr=False)
    der: bytes = field(repr=False)


def build_crl(
    key: Ed25519PrivateKey,
    root_der: bytes,
    *,
    number: int,
    now: float,
    revoked: Mapping[int, float],
) -> bytes:
    """Sign a list, in DER. ``revoked`` maps serials to seconds since the epoch."""
    root = x509.load_der_x509_certificate(root_der)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.subject)
        .last_update(datetime.fromtimestamp(int(now), UTC))
        # The standard wants a date for the next list; ours come when there is something new.
        .next_update(max(root.not_valid_after_utc, datetime.fromtimestamp(int(now) + 1, UTC)))
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
    )
    for serial, when in sorted(revoked.items()):
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder()
            .serial_number(serial)
            .revocation_date(datetime.fromtimestamp(int(when), UTC))
            .build()
        )
    return builder.sign(key, None).public_bytes(Encoding.DER)


def verify_crl(der: bytes, roots: Iterable[Root]) -> RevocationList:
    """Read a list and check that one of ``roots`` signed it.

    Raises CertificateError: MALFORMED, UNKNOWN_CA (no root signed it), NOT_A_CA (the root may not
    sign lists). Entries are read only after the signature has been checked.
    """
    if len(der) > MAX_CRL_BYTES:
        raise CertificateError(
            Reason.MALFORMED,
            f"a revocation list of {len(der)} bytes; at most {MAX_CRL_BYTES} count",
        )

    def read() -> RevocationList:
        parsed = x509.load_der_x509_crl(bytes(der))
        check_exact(parsed, der, "the revocation list")
        if parsed.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
            raise CertificateError(
                Reason.MALFORMED, "the revocation list is not signed with Ed25519"
            )
        root = _signer(parsed, roots)
        for extension in parsed.extensions:
            if extension.critical and extension.oid not in _UNDERSTOOD:
                raise CertificateError(
                    Reason.MALFORMED, "the revocation list has a critical extension"
                )
        number = parsed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        if not 0 <= number < _MAX_NUMBER:
            raise CertificateError(Reason.MALFORMED, "the revocation list's number is out of range")
        revoked = {}
        for entry in parsed:
            if any(extension.critical for extension in entry.extensions):
                raise CertificateError(
                    Reason.MALFORMED, "the revocation list has an entry with a critical extension"
                )
            revoked[entry.serial_number] = entry.revocation_date_utc.timestamp()
        return RevocationList(
            network=root.network,
            number=number,
            issued=parsed.last_update_utc,
            root_key=root.key,
            revoked=revoked,
            der=bytes(der),
        )

    return guarded("the revocation list", read)


def read_crl_file(data: bytes) -> bytes:
    """A list in DER, unverified, from a file that holds one in PEM (as meshca writes it) or DER.

    Raises CertificateError: MALFORMED.
    """
    if len(data) > 2 * MAX_CRL_BYTES:  # PEM takes a third more
        raise CertificateError(Reason.MALFORMED, "too large for a revocation list")
    if b"-----BEGIN" not in data:
        return data
    return guarded(
        "the revocation list", lambda: x509.load_pem_x509_crl(data).public_bytes(Encoding.DER)
    )


def _signer(parsed: x509.CertificateRevocationList, roots: Iterable[Root]) -> Root:
    issuer = parsed.issuer.public_bytes()
    for root in roots:
        if root.subject == issuer and parsed.is_signature_valid(root.public_key):
            if not root.signs_crls:
                raise CertificateError(
                    Reason.NOT_A_CA, "the CA that signed the revocation list may not sign lists"
                )
            return root
    raise CertificateError(
        Reason.UNKNOWN_CA, "the revocation list is not signed by a CA that this node trusts"
    )
