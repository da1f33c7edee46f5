"""A CA and node identities made on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Role, load_root
from ca.issue import issue, make_root
from mesh.identity import Identity, TrustStore, identity_of


@dataclass
class Authority:
    key: Ed25519PrivateKey
    root_der: bytes

    def identity(self, name: str, *roles: Role, serial: int = 0) -> Identity:
        key = Ed25519PrivateKey.generate()
        now = time.time()
        der = issue(
            self.key,
            self.root_der,
            network="acme",
            name=name,
            public_key=key.public_key(),
            roles=roles or (Role.SERVE, Role.USE),
            serial=serial or abs(hash(name)) + 1,
            now=now,
        )
        return identity_of(key, (der,), (load_root(self.root_der),), now=now)


@pytest.fixture
def make_authority() -> Callable[[], Authority]:
    def make() -> Authority:
        key = Ed25519PrivateKey.generate()
        return Authority(key, make_root(key, "acme", serial=1, now=time.time()))

    return make


@pytest.fixture
def authority(make_authority: Callable[[], Authority]) -> Authority:
    return make_authority()


@pytest.fixture
def trust(authority: Authority, tmp_path: Path) -> TrustStore:
    return TrustStore("acme", [load_root(authority.root_der)], tmp_path / "crl")
