"""The form of an admission certificate, read strictly from hostile bytes.

A certificate is X.509 version 3 with Ed25519 throughout:

* subject: CN = the node's name, nothing else;
* exactly one subject alternative name, the URI ``libp2p://<network>/<PeerId>``, whose PeerId is
  that of the certificate's own key;
* the roles in a private extension;
* basicConstraints "not a CA", keyUsage "digital signature" and no more.

A CA certificate names its network by ``libp2p://<network>``, is a CA by basicConstraints, and may
sign certificates. A *root* is one that is signed with its own key.

Reading says nothing about trust: see :mod:`ca.certificate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import combinations
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, NameOID, SignatureAlgorithmOID

from ca.errors import CertificateError, Reason
from ca.naming import (
    NODE_NAME_RULE,
    PeerId,
    Role,
    format_roles,
    is_node_name,
    is_strong_key,
    parse_uri,
    peer_id_of,
)

MAX_CERTIFICATE_BYTES = 4096  # ours have about 450; more means that it is not one of ours

# A UUID as an OID (ITU-T X.667): private without a registered enterprise number. The value is a DER
# UTF8String with the roles, sorted and joined by commas.
ROLES_OID = x509.ObjectIdentifier("2.25.277857809928672772507946465108776651988")
_ROLE_SETS = [frozenset(some) for n in range(1, len(Role) + 1) for some in combinations(Role, n)]
_ROLES_DER = {
    roles: b"\x0c" + bytes([len(format_roles(roles))]) + format_roles(roles).encode()
    for roles in _ROLE_SETS
}
_ROLES_OF_DER = {der: roles for roles, der in _ROLES_DER.items()}

LEAF_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
_UNDERSTOOD = frozenset(
    {
        ExtensionOID.BASIC_CONSTRAINTS,
        ExtensionOID.KEY_USAGE,
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
        ROLES_OID,
    }
)
_SIGNATURE_HEAD = b"\x03\x41\x00"  # DER of a bit string: 65 bytes, no bit of the last one unused
_MAX_SERIAL = 1 << 159  # RFC 5280, 4.1.2.2: a positive number of at most 20 octets

T = TypeVar("T")


def roles_extension(roles: frozenset[Role]) -> x509.UnrecognizedExtension:
    """The extension that holds ``roles``, of which there is at least one."""
    return x509.UnrecognizedExtension(ROLES_OID, _ROLES_DER[roles])


@dataclass(frozen=True)
class Certificate:
    """A node's certificate whose form has been checked; see :mod:`ca.certificate` for the rest.

    ``chain_der`` is this certificate and the intermediate CAs above it, the leaf first, without the
    root: what a peer that trusts the same root needs to verify it.
    """

    name: str
    network: str
    peer_id: PeerId
    roles: frozenset[Role]
    serial: int  # positive, up to 159 bits
    not_before: datetime
    not_after: datetime
    public_key: Ed25519PublicKey = field(compare=False, repr=False)
    der: bytes = field(repr=False)
    chain_der: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class Root:
    """A CA certificate. The ones that are trusted, and so end a chain, signed themselves."""

    network: str
    not_before: datetime
    not_after: datetime
    path_length: int | None  # CAs allowed between it and a node; None: no limit
    signs_crls: bool
    subject: bytes = field(repr=False)  # DER of the name
    key: bytes = field(repr=False)  # raw public key, 32 bytes
    der: bytes = field(repr=False)
    public_key: Ed25519PublicKey = field(compare=False, repr=False)


def guarded(what: str, read: Callable[[], T]) -> T:
    """Run the library's parser over hostile bytes; whatever it raises becomes MALFORMED.

    The library raises a dozen types (ValueError, DuplicateExtension, InvalidVersion,
    UnsupportedAlgorithm, ...), some of them lazily, and adds new ones. None carries more than "no".
    """
    try:
        return read()
    except CertificateError:
        raise
    except Exception:
        raise CertificateError(Reason.MALFORMED, f"{what} cannot be read") from None


def check_exact(
    parsed: x509.Certificate | x509.CertificateRevocationList, der: bytes, what: str
) -> None:
    """Refuse every spelling but one of what was signed.

    Signatures are verified over bytes that the library writes again from what it has read. When
    writing the whole again gives the bytes received, those are the bytes received too. Of what is
    outside the signature, an encoder can still choose how many bits of the signature it calls
    unused (where they happen to be zero), so the whole end is compared: a BIT STRING of 64 bytes,
    all used. Raises CertificateError: MALFORMED.
    """
    if parsed.public_bytes(Encoding.DER) != der or der[-67:] != b"\x03\x41\x00" + parsed.signature:
        raise CertificateError(Reason.MALFORMED, f"{what} is not in its one DER form")


def parse_certificate(der: bytes, what: str) -> x509.Certificate:
    """Parse one certificate, bounded, and make sure that what is read is what was received.

    ``what`` names it in messages. Raises CertificateError: MALFORMED.
    """
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise CertificateError(
            Reason.MALFORMED, f"{what} has {len(der)} bytes; at most {MAX_CERTIFICATE_BYTES} count"
        )

    def read() -> x509.Certificate:
        parsed = x509.load_der_x509_certificate(bytes(der))
        # The signature is verified over bytes that the library writes again from what it has read.
        # When writing the whole again gives the bytes received, those are the bytes received too.
        if parsed.public_bytes(Encoding.DER) != der:
            raise CertificateError(Reason.MALFORMED, f"{what} is not in its one DER form")
        # A signature that ends in a zero bit is also read when its length is given in bits.
        if not der.endswith(_SIGNATURE_HEAD + parsed.signature):
            raise CertificateError(Reason.MALFORMED, f"{what} is not in its one DER form")
        # Names are parsed when they are first looked at, which must not be outside of here.
        parsed.subject.public_bytes()
        parsed.issuer.public_bytes()
        return parsed

    parsed = guarded(what, read)
    if parsed.version is not x509.Version.v3:
        raise CertificateError(Reason.MALFORMED, f"{what} is not X.509 version 3")
    if parsed.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
        raise CertificateError(Reason.MALFORMED, f"{what} is not signed with Ed25519")
    return parsed


def read_leaf(parsed: x509.Certificate, der: bytes) -> Certificate:
    """The fields of a node's certificate. Raises CertificateError: MALFORMED, NOT_A_LEAF."""

    def read() -> Certificate:
        key = _strong_key(parsed)
        extensions = parsed.extensions
        _check_usage(extensions, is_ca=False)
        network, peer_id = parse_uri(_single_uri(extensions))
        name = common_name(parsed.subject)
        if peer_id != peer_id_of(key):
            raise CertificateError(
                Reason.MALFORMED, "the PeerId in the certificate is not that of its key"
            )
        return Certificate(
            name=name,
            network=network,
            peer_id=PeerId(peer_id),
            roles=_roles(extensions),
            serial=_serial(parsed),
            not_before=parsed.not_valid_before_utc,
            not_after=parsed.not_valid_after_utc,
            public_key=key,
            der=bytes(der),
            chain_der=(bytes(der),),
        )

    return guarded("the certificate", read)


def read_ca(parsed: x509.Certificate, der: bytes) -> Root:
    """The fields of a CA certificate. Raises CertificateError: MALFORMED, NOT_A_CA."""

    def read() -> Root:
        key = _strong_key(parsed)
        extensions = parsed.extensions
        _check_usage(extensions, is_ca=True)
        network, peer_id = parse_uri(_single_uri(extensions))
        if peer_id is not None:
            raise CertificateError(Reason.NOT_A_CA, "a CA certificate names a node")
        _serial(parsed)
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        return Root(
            network=network,
            not_before=parsed.not_valid_before_utc,
            not_after=parsed.not_valid_after_utc,
            path_length=constraints.path_length,
            signs_crls=usage.crl_sign,
            subject=parsed.subject.public_bytes(),
            key=key.public_bytes_raw(),
            der=bytes(der),
            public_key=key,
        )

    return guarded("a CA certificate", read)


def common_name(subject: x509.Name) -> str:
    """The node name that is all of ``subject``. Raises CertificateError: MALFORMED."""
    attributes = list(subject)
    name = attributes[0].value if len(attributes) == 1 else None
    if (
        not isinstance(name, str)
        or attributes[0].oid != NameOID.COMMON_NAME
        or not is_node_name(name)
    ):
        raise CertificateError(
            Reason.MALFORMED, f"the subject is not CN=<name> alone, with a name of {NODE_NAME_RULE}"
        )
    return name


def _strong_key(parsed: x509.Certificate) -> Ed25519PublicKey:
    key = parsed.public_key()
    if not isinstance(key, Ed25519PublicKey) or not is_strong_key(key):
        raise CertificateError(Reason.MALFORMED, "the key is not an Ed25519 key fit for signing")
    return key


def _serial(parsed: x509.Certificate) -> int:
    if not 0 < parsed.serial_number < _MAX_SERIAL:
        raise CertificateError(Reason.MALFORMED, "the serial number is out of range")
    return parsed.serial_number


def _check_usage(extensions: x509.Extensions, *, is_ca: bool) -> None:
    for extension in extensions:
        if extension.critical and extension.oid not in _UNDERSTOOD:
            raise CertificateError(
                Reason.MALFORMED,
                f"a critical extension is not understood: {extension.oid.dotted_string}",
            )
    try:
        constraints = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage)
    except x509.ExtensionNotFound:
        raise CertificateError(
            Reason.MALFORMED, "basicConstraints or keyUsage is missing"
        ) from None
    if not (constraints.critical and usage.critical):
        raise CertificateError(Reason.MALFORMED, "basicConstraints or keyUsage is not critical")
    if is_ca:
        if not (constraints.value.ca and usage.value.key_cert_sign):
            raise CertificateError(Reason.NOT_A_CA, "a certificate in the chain is not a CA's")
    elif constraints.value.ca or usage.value != LEAF_USAGE:
        raise CertificateError(
            Reason.NOT_A_LEAF, "a node's certificate may sign messages and nothing else"
        )


def _single_uri(extensions: x509.Extensions) -> str:
    try:
        names = list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    if len(names) != 1 or not isinstance(names[0], x509.UniformResourceIdentifier):
        raise CertificateError(
            Reason.MALFORMED, "the certificate does not have exactly one name, a URI"
        )
    return names[0].value


def _roles(extensions: x509.Extensions) -> frozenset[Role]:
    try:
        extension = extensions.get_extension_for_oid(ROLES_OID).value
    except x509.ExtensionNotFound:
        raise CertificateError(Reason.MALFORMED, "the certificate has no roles") from None
    roles = (
        _ROLES_OF_DER.get(extension.value)
        if isinstance(extension, x509.UnrecognizedExtension)
        else None
    )
    if roles is None:
        raise CertificateError(Reason.MALFORMED, "the certificate's roles cannot be read")
    return roles
