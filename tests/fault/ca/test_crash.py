"""Two admins at once, and a CA that dies at any moment: nothing unrecorded is ever handed out."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.authority import Authority
from ca.certificate import Role, verify_chain
from ca.crl import verify_crl
from ca.pem import read_bundle
from ca.request import make_request, read_request

SECRET = b"correct horse"

# Issues and revokes without end, each under a name of its own, writing every certificate out.
WORKER = """
import sys, time
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ca.authority import Authority
from ca.files import write_atomic
from ca.naming import Role
from ca.request import make_request, read_request

folder, prefix, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
authority = Authority.open(folder / "ca")
key = authority.unlock(b"correct horse")
print("ready", flush=True)
for n in range(count):
    name = f"{prefix}-{n}"
    request = read_request(make_request(Ed25519PrivateKey.generate(), name))
    entry = authority.issue(key, request, [Role.USE], now=time.time())
    write_atomic(folder / "out" / f"{name}.pem", authority.bundle(entry))
    if n % 2:
        done = authority.revoke(key, name, now=time.time())
        write_atomic(folder / "out" / f"{name}.crl", done.crl_der)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("ca.vault._SCRYPT_N", 1 << 14)  # workers unlock at once
    Authority.create(tmp_path / "ca", "acme", SECRET, now=time.time())
    (tmp_path / "out").mkdir()
    return tmp_path


def start(folder, prefix: str, count: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), prefix, str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def check_what_is_out(folder) -> tuple[int, int]:
    """Everything that left the CA is in the ledger, and is what the ledger says it is."""
    authority = Authority.open(folder / "ca")
    entries = {entry.serial: entry for entry in authority.entries()}
    number, der = authority.crl()
    newest = verify_crl(der, [authority.root])
    assert newest.number == number
    assert set(newest.revoked) == {e.serial for e in entries.values() if e.revoked is not None}
    certificates = list((folder / "out").glob("*.pem"))
    for path in certificates:
        certificate = verify_chain(
            read_bundle(path.read_bytes()), [authority.root], network="acme", now=time.time()
        )
        assert entries[certificate.serial].der == certificate.der
    lists = [
        verify_crl(path.read_bytes(), [authority.root]) for path in (folder / "out").glob("*.crl")
    ]
    assert all(crl.number <= number and set(crl.revoked) <= set(newest.revoked) for crl in lists)
    assert len({crl.number for crl in lists}) == len(lists)
    return len(certificates), len(lists)


def test_two_processes_share_a_ledger(folder):
    workers = [start(folder, prefix, 15) for prefix in ("one", "two", "three")]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    assert check_what_is_out(folder) == (45, 21)
    assert len(Authority.open(folder / "ca").entries()) == 45


def test_two_processes_cannot_give_one_name_away_twice(folder):
    """The same names in both: each is issued once, and the other process is told so."""
    workers = [start(folder, "same", 15) for _ in range(2)]
    statuses = sorted(worker.wait(timeout=120) for worker in workers)
    assert statuses[0] in (0, 1) and statuses[1] == 1
    names = [entry.name for entry in Authority.open(folder / "ca").entries() if not entry.revoked]
    assert len(names) == len(set(names))


def test_a_ca_killed_at_any_moment(folder):
    rng = random.Random(7)
    written = 0
    for round_ in range(6):
        worker = start(folder, f"round-{round_}", 1000)
        while len(list((folder / "out").glob(f"round-{round_}-*.pem"))) < 2:
            assert worker.poll() is None
            time.sleep(0.005)
        time.sleep(rng.uniform(0.02, 0.4))
        worker.kill()
        worker.wait()
        written = check_what_is_out(folder)[0]
    assert written >= 12
    authority = Authority.open(folder / "ca")
    key = authority.unlock(SECRET)
    request = read_request(make_request(Ed25519PrivateKey.generate(), "after"))
    authority.issue(key, request, [Role.USE], now=time.time())
    assert not list((folder / "ca").glob("*-journal"))
