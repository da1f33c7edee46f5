"""Shared by all tests: certificates of one network without a CA on disk, the demo model, and
networks of real node processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, settings

from ca.authority import Authority
from ca.certificate import Root, load_root
from ca.issue import issue, make_root
from ca.naming import Role
from ca.pem import write_bundle
from ca.request import read_request
from inference.store.demo import DEMO_MODEL
from inference.store.download import pull
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh.identity import Identity, identity_of, init_node

# What is computed is tested, not how fast a busy machine does it. Examples are the same each time,
# so that a failure comes of what was changed; `--hypothesis-profile=explore` looks for others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("usual", settings.get_profile("explore"), derandomize=True)
settings.load_profile("usual")

# Node after node is started: each would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

BIN = Path(sys.executable).parent
PASSPHRASE = "correct horse battery staple"
READY_TIMEOUT = 180.0  # s: the first start may compile the model


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


@dataclass
class NodeProcess:
    """One `meshnode start`, with what its ready line said and all that it logged."""

    name: str
    home: Path
    environment: dict[str, str]
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    api: str = ""
    peer: str = ""
    listen: str = ""

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when the process has ended and all that it logged is here."""
        code = self.process.wait(timeout)
        self._reader.join(10)  # not for ever: a process that it has started may have the pipe, too
        return code

    def cli(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A `meshnode` command in this node's home."""
        command, *rest = arguments
        return subprocess.run(
            [str(BIN / "meshnode"), command, "--home", str(self.home), *rest],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout: float = 20.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait()


class Network:
    """A CA and the nodes it admits. Each test module makes its own."""

    def __init__(self, folder: Path, models: Path | None) -> None:
        self.folder = folder
        self.nodes: dict[str, NodeProcess] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("MESHNODE_")},
            "MESHCA_PASSPHRASE": PASSPHRASE,
        }
        if models is not None:
            self.environment["MESHNODE_MODELS"] = str(models)
        secret = PASSPHRASE.encode()
        self.authority = Authority.create(folder / "ca", "test", secret, now=time.time())
        self._ca_key = self.authority.unlock(secret)

    def run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / program), *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def ca(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        done = self.run("meshca", "--dir", self.folder / "ca", *arguments)
        assert done.returncode == 0, done.stderr
        return done

    @property
    def ca_pem(self) -> Path:
        return self.folder / "ca" / "ca.pem"

    def home(self, name: str) -> Path:
        return self.folder / name

    def admit(self, name: str) -> Path:
        """What `meshnode init` and `meshca issue` do, without two processes for each node."""
        home = self.home(name)
        if not (home / "node.pem").exists():
            request = read_request(init_node(home, name).request_path.read_bytes())
            roles = (Role.SERVE, Role.USE)
            entry = self.authority.issue(self._ca_key, request, roles, now=time.time())
            (home / "node.pem").write_bytes(self.authority.bundle(entry))
        return home

    def launch(self, name: str, *flags: str, under: Sequence[str] = ()) -> NodeProcess:
        """Start a process without waiting for it to be ready; ``under`` is a command that runs it
        and gets commands of its own on standard input."""
        home = self.admit(name)
        defaults = {
            "--api": "127.0.0.1:0",
            "--listen": "/ip4/127.0.0.1/udp/0/quic-v1",
        }
        given = [f for k, v in defaults.items() if k not in flags for f in (k, v)]
        command = [str(BIN / "meshnode"), "start", "--home", str(home), *given, *flags]
        if "--mdns" not in flags:
            command.append("--no-mdns")
        log: list[str] = []
        if (before := self.nodes.get(name)) is not None:
            if before.process.poll() is not None:
                before.wait()
            log = [*before.log, "-- started again --\n"]
        process = subprocess.Popen(
            [*under, *(part for part in command if part != "--mdns")],
            env=self.environment,
            stdin=subprocess.PIPE if under else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        node = NodeProcess(name, home, self.environment, process, log)
        self.nodes[name] = node
        return node

    def start(self, name: str, *flags: str, peers: tuple[NodeProcess, ...] = ()) -> NodeProcess:
        """Start a node and wait for its ready line."""
        node = self.launch(name, *flags, *(f for p in peers for f in ("--peer", p.listen)))
        return self.ready(node)

    def start_all(
        self, wanted: Mapping[str, Sequence[str]], peers: tuple[NodeProcess, ...] = ()
    ) -> list[NodeProcess]:
        """Start nodes at once, by name with the flags of each, all of which dial ``peers``."""
        dial = [flag for peer in peers for flag in ("--peer", peer.listen)]
        launched = [self.launch(name, *flags, *dial) for name, flags in wanted.items()]
        return [self.ready(node) for node in launched]

    def ready(self, node: NodeProcess) -> NodeProcess:
        """Wait for the ready line of a node that was launched."""
        killer = threading.Timer(READY_TIMEOUT, node.process.kill)
        killer.start()
        line = node.process.stdout.readline() if node.process.stdout else ""
        killer.cancel()
        match = re.fullmatch(r"ready api=(\S+) peer=(\S+) listen=(\S+)\n", line)
        if match is None:
            node.process.kill()
            node.wait()
            pytest.fail(f"{node.name} is not ready: {line!r}\n{''.join(node.log)}")
        node.api, node.peer, listen = match.groups()
        node.listen = listen.split(",")[0]
        return node

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        for node in self.nodes.values():
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.wait()
            (self.folder / f"{node.name}.log").write_text("".join(node.log), encoding="utf-8")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    network = Network(tmp_path_factory.mktemp("network"), models=None)
    yield network
    network.close()
