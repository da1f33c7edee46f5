"""A CA made in memory, and a forger that makes certificates which ca.issue would never make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from ca.certificate import Role, Root, load_root
from ca.form import LEAF_USAGE, ROLES_OID, roles_extension
from ca.issue import issue, make_root
from ca.naming import network_uri, node_uri, peer_id_of

NOW = 1_800_000_000.0
NOT_A_CA = x509.BasicConstraints(ca=False, path_length=None)
SERVE = roles_extension(frozenset({Role.SERVE})).value


@dataclass
class Ca:
    """A root with its key."""

    network: str = "acme"
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    now: float = NOW

    def __post_init__(self) -> None:
        self.der = make_root(self.key, self.network, serial=1, now=self.now)

    @property
    def root(self) -> Root:
        return load_root(self.der)

    def leaf(
        self,
        name: str = "desk-7",
        key: Ed25519PrivateKey | None = None,
        roles: Sequence[Role] = (Role.SERVE, Role.USE),
        serial: int | None = None,
        days: float = 30.0,
        now: float | None = None,
    ) -> bytes:
        return issue(
            self.key,
            self.der,
            network=self.network,
            name=name,
            public_key=(key or Ed25519PrivateKey.generate()).public_key(),
            roles=roles,
            serial=serial or x509.random_serial_number(),
            now=self.now if now is None else now,
            days=days,
        )

    def forge(
        self,
        *,
        key: Any = None,
        public_key: Any = None,
        signer: Any = None,
        issuer: x509.Name | None = None,
        subject: x509.Name | None = None,
        san: Sequence[x509.GeneralName] | None = None,
        constraints: x509.BasicConstraints | None = NOT_A_CA,
        constraints_critical: bool = True,
        usage: x509.KeyUsage | None = LEAF_USAGE,
        roles: bytes | None = SERVE,
        extra: Sequence[tuple[x509.ExtensionType, bool]] = (),
        hash_algorithm: Any = None,
        serial: int = 77,
        days: float = 30.0,
    ) -> bytes:
        """A node's certificate with whatever is wrong that the test asks for."""
        key = key or Ed25519PrivateKey.generate()
        public_key = public_key or key.public_key()
        start = datetime.fromtimestamp(self.now, UTC)
        if san is None:
            san = [x509.UniformResourceIdentifier(node_uri(self.network, peer_id_of(public_key)))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject or cn("desk-7"))
            .issuer_name(issuer or x509.load_der_x509_certificate(self.der).subject)
            .public_key(public_key)
            .serial_number(serial)
            .not_valid_before(start - timedelta(minutes=1))
            .not_valid_after(start + timedelta(days=days))
        )
        if san:
            builder = builder.add_extension(x509.SubjectAlternativeName(san), False)
        if constraints is not None:
            builder = builder.add_extension(constraints, constraints_critical)
        if usage is not None:
            builder = builder.add_extension(usage, True)
        if roles is not None:
            builder = builder.add_extension(x509.UnrecognizedExtension(ROLES_OID, roles), False)
        for extension, critical in extra:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer or self.key, hash_algorithm).public_bytes(Encoding.DER)

    def intermediate(
        self,
        key: Ed25519PrivateKey,
        *,
        signer: Ed25519PrivateKey | None = None,
        issuer: x509.Name | None = None,
        network: str | None = None,
        path_length: int | None = 0,
        name: str = "branch",
        serial: int = 88,
        days: float = 30.0,
    ) -> bytes:
        """A CA certificate below this root, or below ``signer``."""
        return self.forge(
            key=key,
            signer=signer,
            issuer=issuer,
            subject=cn(name),
            san=[x509.UniformResourceIdentifier(network_uri(network or self.network))],
            constraints=x509.BasicConstraints(True, path_length),
            usage=ca_usage(),
            roles=None,
            serial=serial,
            days=days,
        )


def cn(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def ca_usage(crl_sign: bool = True, key_cert_sign: bool = True) -> x509.KeyUsage:
    return x509.KeyUsage(False, False, False, False, False, key_cert_sign, crl_sign, False, False)


@pytest.fixture
def acme() -> Ca:
    return Ca()


@pytest.fixture
def make_ca() -> Callable[..., Ca]:
    return Ca
