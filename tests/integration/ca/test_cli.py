"""meshca as its admin uses it: real processes, files, exit statuses, one line for each error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ca.authority import Authority
from ca.crl import read_crl_file
from mesh.identity import (
    AdmissionError,
    Reason,
    Role,
    TrustStore,
    init_node,
    load_identity,
    load_roots,
)

PASSPHRASE = "correct horse"


@dataclass
class Result:
    status: int
    out: str
    err: str


class Admin:
    """Runs meshca in a folder of its own, with the passphrase in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "MESHCA_PASSPHRASE": PASSPHRASE}

    def __call__(self, *arguments: str | Path, **environment: str) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "ca.cli", "--dir", "ca", *map(str, arguments)],
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        result = Result(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "Traceback" not in result.err
        return result

    def ok(self, *arguments: str | Path, **environment: str) -> Result:
        result = self(*arguments, **environment)
        assert result.status == 0, result.err
        return result

    def fails(self, status: int, text: str, *arguments: str | Path, **environment: str) -> None:
        result = self(*arguments, **environment)
        assert (result.status, text in result.err) == (status, True), result
        assert result.out == ""
        if status != 2:  # argparse adds the usage
            assert result.err.startswith("meshca: error: ") and result.err.count("\n") == 1


@pytest.fixture
def admin(tmp_path, monkeypatch):
    """An admin with a CA whose vault opens faster than one that `meshca init` makes."""
    with monkeypatch.context() as patch:
        patch.setattr("ca.vault._SCRYPT_N", 1 << 14)
        Authority.create(tmp_path / "ca", "acme", PASSPHRASE.encode(), now=time.time())
    return Admin(tmp_path)


def test_from_nothing_to_an_admitted_node(admin, tmp_path):
    enrolment = init_node(tmp_path / "home", "desk-7")
    issued = admin.ok("issue", enrolment.request_path, "--roles", "serve,use", "-o", "node.pem")
    assert enrolment.peer_id in issued.err and issued.out == ""
    identity = load_identity(enrolment.key_path, tmp_path / "node.pem", now=time.time())
    assert (identity.network, identity.certificate.name) == ("acme", "desk-7")
    assert identity.certificate.roles == {Role.SERVE, Role.USE}
    left = identity.certificate.not_after.timestamp() - time.time()
    assert 29.9 * 86400 < left <= 30 * 86400
    trust = TrustStore("acme", load_roots(tmp_path / "ca" / "ca.pem"), tmp_path / "crl")
    trust.verify_peer(identity.certificate.chain_der, identity.peer_id, time.time())

    listed = admin.ok("list").out
    assert "desk-7" in listed and "valid" in listed and enrolment.peer_id in listed
    shown = admin.ok("show", "desk-7").out
    assert f"{identity.certificate.serial:040x}" in shown and "by the node" in shown
    admin.ok("show", enrolment.peer_id, "-o", "again.pem")
    assert (tmp_path / "again.pem").read_bytes() == (tmp_path / "node.pem").read_bytes()

    assert "revoked desk-7" in admin.ok("revoke", "desk-7").out
    admin.ok("crl", "-o", "crl.pem")
    assert trust.apply_crl(read_crl_file((tmp_path / "crl.pem").read_bytes()))
    with pytest.raises(AdmissionError) as caught:
        trust.verify_peer(identity.certificate.chain_der, identity.peer_id, time.time())
    assert caught.value.reason is Reason.REVOKED
    assert "revoked at" in admin.ok("show", "desk-7").out
    admin.fails(5, "was revoked", "issue", enrolment.request_path, "-o", "node.pem")
    admin.fails(6, "is valid", "show", "desk-7", "-o", "x.pem")
    assert "done already" in admin.ok("revoke", "desk-7").out
    assert admin.ok("crl").out.encode() == (tmp_path / "crl.pem").read_bytes()


def test_key_and_certificate_in_one_go(admin, tmp_path):
    result = admin.ok("issue", "--name", "lap-1", "--out", "stick", "--days", "2")
    assert "warning" in result.err and "CA's machine" in result.err
    stick = tmp_path / "stick"
    assert {path.name for path in stick.iterdir()} == {"node.key", "node.pem"}
    assert (stick / "node.key").stat().st_mode & 0o777 == 0o600
    identity = load_identity(stick / "node.key", stick / "node.pem", now=time.time())
    assert identity.certificate.name == "lap-1"
    assert "on this machine" in admin.ok("show", "lap-1").out
    before = (stick / "node.key").read_bytes()
    admin.fails(5, "never overwritten", "issue", "--name", "lap-2", "--out", "stick")
    assert (stick / "node.key").read_bytes() == before
    admin.fails(5, "belongs to", "issue", "--name", "LAP-1", "--out", "other")
    assert not (tmp_path / "other").exists()
    assert "lap-2" not in admin.ok("list").out


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are a POSIX matter")
def test_the_passphrase_is_asked_for_twice_and_not_shown(tmp_path):
    import pty

    def session(arguments: list[str], answers: list[str]) -> tuple[int, str]:
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.pop("MESHCA_PASSPHRASE", None)
            command = [sys.executable, "-m", "ca.cli", "--dir", str(tmp_path / "ca"), *arguments]
            os.execv(sys.executable, command)
        shown, left = "", list(answers)
        while True:
            try:
                piece = os.read(terminal, 1000).decode()
            except OSError:  # the other side has closed
                break
            shown += piece
            if left and shown.endswith(": "):
                os.write(terminal, left.pop(0).encode() + b"\n")
        os.close(terminal)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown

    init = ["init", "--network", "acme"]
    status, shown = session(init, [PASSPHRASE, "something else"])
    assert status == 4 and "differ" in shown
    status, shown = session(init, [PASSPHRASE, PASSPHRASE])
    assert status == 0 and PASSPHRASE not in shown
    issue = ["issue", "--name", "desk-7", "--out", str(tmp_path / "stick")]
    status, shown = session(issue, ["wrong horse"])
    assert status == 4 and not (tmp_path / "stick").exists()
    status, shown = session(issue, [PASSPHRASE])
    assert status == 0 and "acme" in shown


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_openssl_agrees(admin, tmp_path):
    for name in ("desk-7", "desk-8"):
        request = init_node(tmp_path / name, name).request_path
        admin.ok("issue", request, "-o", f"{name}.pem")
    admin.ok("revoke", "desk-8")
    admin.ok("crl", "-o", "crl.pem")

    def verify(name: str) -> subprocess.CompletedProcess[bytes]:
        arguments = ["-x509_strict", "-crl_check", "-CRLfile", "crl.pem", "-CAfile", "ca/ca.pem"]
        return subprocess.run(
            ["openssl", "verify", *arguments, f"{name}.pem"],
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )

    assert verify("desk-7").returncode == 0
    revoked = verify("desk-8")
    assert revoked.returncode != 0 and b"certificate revoked" in revoked.stderr
