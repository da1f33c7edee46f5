"""Making certificates. Pure: the time and the serial number are arguments, nothing is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from ca.form import LEAF_USAGE, roles_extension
from ca.naming import (
    NETWORK_RULE,
    NODE_NAME_RULE,
    Role,
    is_network,
    is_node_name,
    network_uri,
    node_uri,
    peer_id_of,
)

BACKDATE = timedelta(minutes=1)  # machines whose clocks are a little behind can use it at once
DEFAULT_DAYS = 30.0
ROOT_DAYS = 3650.0

_ROOT_USAGE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def make_root(
    key: Ed25519PrivateKey, network: str, *, serial: int, now: float, days: float = ROOT_DAYS
) -> bytes:
    """A CA certificate signed by itself, in DER, under which nothing but nodes can be.

    ``now`` in seconds since the epoch. Raises ValueError for a bad network name.
    """
    if not is_network(network):
        raise ValueError(f"a network's name is {NETWORK_RULE}")
    public_key = key.public_key()
    # Two CAs of one network, as there are while one replaces the other, have different names.
    fingerprint = sha256(public_key.public_bytes_raw()).hexdigest()[:8]
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, network),
            x509.NameAttribute(NameOID.COMMON_NAME, f"mesh CA {fingerprint}"),
        ]
    )
    builder = (
        _dated(now, days)
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public_key)
        .serial_number(serial)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_ROOT_USAGE, critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(network_uri(network))]),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )
    return builder.sign(key, None).public_bytes(Encoding.DER)


def issue(
    ca_key: Ed25519PrivateKey,
    root_der: bytes,
    *,
    network: str,
    name: str,
    public_key: Ed25519PublicKey,
    roles: Iterable[Role],
    serial: int,
    now: float,
    days: float = DEFAULT_DAYS,
) -> bytes:
    """A node's certificate, in DER. ``now`` in seconds since the epoch.

    Raises ValueError for a bad name or for no roles. Whether the certificate *should* be made is
    decided before, by :class:`ca.authority.Authority`.
    """
    if not is_node_name(name):
        raise ValueError(f"a node's name is {NODE_NAME_RULE}")
    granted = frozenset(roles)
    if not granted:
        raise ValueError("a certificate needs at least one role")
    uri = node_uri(network, peer_id_of(public_key))
    builder = (
        _dated(now, days)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.load_der_x509_certificate(root_der).subject)
        .public_key(public_key)
        .serial_number(serial)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(LEAF_USAGE, critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
        )
        .add_extension(roles_extension(granted), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    return builder.sign(ca_key, None).public_bytes(Encoding.DER)


def _dated(now: float, days: float) -> x509.CertificateBuilder:
    start = datetime.fromtimestamp(int(now), UTC)
    return (
        x509.CertificateBuilder()
        .not_valid_before(start - BACKDATE)
        .not_valid_after(start + timedelta(days=days))
    )
