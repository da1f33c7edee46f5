"""Shared by all tests: certificates of one network without a CA on disk, and the demo model."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import platformdirs
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Root, load_root
from ca.issue import issue, make_root
from ca.naming import Role
from ca.pem import write_bundle
from inference.store.demo import DEMO_MODEL
from inference.store.download import pull
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh.identity import Identity, identity_of


class TestAuthority:
    """A CA in memory. Keys follow from names, so that PeerIds are the same in every run."""

    __test__ = False

    def __init__(self, network: str = "test", now: float | None = None, name: str = "ca") -> None:
        self.network = network
        self.now = time.time() if now is None else now
        self._key = _key(f"{name} of {network}")
        self.root: Root = load_root(make_root(self._key, network, serial=1, now=self.now))

    @property
    def ca_pem(self) -> bytes:
        return write_bundle([self.root.der])

    def identity(
        self,
        name: str,
        roles: Sequence[Role] = (Role.SERVE, Role.USE),
        *,
        now: float | None = None,
        days: float = 30.0,
    ) -> Identity:
        """The identity of a node called ``name``, with a certificate issued at ``now``."""
        now = self.now if now is None else now
        key = _key(name)
        der = issue(
            self._key,
            self.root.der,
            network=self.network,
            name=name,
            public_key=key.public_key(),
            roles=roles,
            serial=x509.random_serial_number(),
            now=now,
            days=days,
        )
        return identity_of(key, [der], [self.root], now=now)


def _key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b".")[:32])


@pytest.fixture(scope="session")
def authority() -> TestAuthority:
    return TestAuthority()


@pytest.fixture(scope="session")
def make_authority() -> type[TestAuthority]:
    return TestAuthority


@pytest.fixture(scope="session")
def demo_model() -> ModelManifest:
    """The real demo model, fetched once into the user's cache folder (or MESHNODE_MODELS)."""
    usual = platformdirs.user_cache_path("meshnode", appauthor=False) / "models"
    store = ModelStore(Path(os.environ.get("MESHNODE_MODELS") or usual))
    return pull(store, DEMO_MODEL)
