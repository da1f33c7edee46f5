"""Every way in which meshca says no: one line, a documented status, nothing done.

These run the command's `main` in this process; tests/integration/ca runs it as a process.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ca import cli
from ca.authority import Authority
from mesh.identity import init_node, load_identity

PASSPHRASE = "correct horse"


class Admin:
    """Runs meshca's main in a folder of its own, with the passphrase in the environment."""

    def __init__(self, monkeypatch, capfd) -> None:
        self.monkeypatch = monkeypatch
        self.capfd = capfd

    def __call__(self, *arguments: str | Path, **environment: str) -> SimpleNamespace:
        with self.monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                status = cli.main(["--dir", "ca", *map(str, arguments)])
            except SystemExit as exit_:  # argparse
                status = exit_.code
        out, err = self.capfd.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    def ok(self, *arguments: str | Path, **environment: str) -> SimpleNamespace:
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
def admin(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHCA_PASSPHRASE", PASSPHRASE)
    monkeypatch.setattr("ca.vault._SCRYPT_N", 1 << 14)
    Authority.create(tmp_path / "ca", "acme", PASSPHRASE.encode(), now=time.time())
    return Admin(monkeypatch, capfd)


def test_init_says_what_is_wrong(admin, tmp_path):
    admin.fails(3, "holds the CA of network acme", "init", "--network", "beta")
    shutil.rmtree(tmp_path / "ca")
    admin.fails(2, "a network's name", "init", "--network", "Not A Label")
    admin.fails(4, "at least 8", "init", "--network", "acme", MESHCA_PASSPHRASE="short")
    admin.fails(4, "no terminal", "init", "--network", "acme", MESHCA_PASSPHRASE="")
    for command in (["list"], ["show", "x"], ["revoke", "x"], ["crl"]):
        admin.fails(3, "there is no CA", *command)
    assert not (tmp_path / "ca").exists()


def test_wrong_passphrases(admin, tmp_path):
    request = init_node(tmp_path, "desk-7").request_path
    issue = ("issue", request, "-o", "node.pem")
    admin.fails(4, "wrong", *issue, MESHCA_PASSPHRASE="wrong horse")
    admin.fails(4, "no terminal", *issue, MESHCA_PASSPHRASE="")
    (tmp_path / "pass").write_text("wrong horse\n")
    admin.fails(4, "wrong", *issue, "--passphrase-file", "pass")
    admin.fails(4, "cannot read", *issue, "--passphrase-file", "missing")
    assert not (tmp_path / "node.pem").exists()
    assert "desk-7" not in admin.ok("list").out
    (tmp_path / "pass").write_text(PASSPHRASE + "\n")
    admin.ok(*issue, "--passphrase-file", "pass", MESHCA_PASSPHRASE="")


def test_requests_that_are_refused(admin, tmp_path):
    request = init_node(tmp_path, "desk-7").request_path
    content = request.read_bytes()
    for name, wrong in {
        "empty": b"",
        "huge": content + b"\n" * 1_000_000,
        "twice": content * 2,
        "cut": content[:150] + content[160:],
        "key": (tmp_path / "node.key").read_bytes(),
    }.items():
        (tmp_path / name).write_bytes(wrong)
        admin.fails(5, name, "issue", name, "-o", "node.pem")
    admin.fails(1, "missing.csr", "issue", "missing.csr", "-o", "node.pem")
    admin.fails(1, "directory", "issue", ".", "-o", "node.pem")
    admin.fails(5, "days", "issue", request, "-o", "node.pem", "--days", "nan")
    admin.fails(5, "lasts only", "issue", request, "-o", "node.pem", "--days", "3650")
    assert not (tmp_path / "node.pem").exists()


def test_wrong_usage(admin):
    for arguments in (
        [],
        ["nonsense"],
        ["init"],
        ["issue"],
        ["issue", "x.csr"],
        ["issue", "x.csr", "--out", "x"],
        ["issue", "x.csr", "--name", "x", "-o", "y"],
        ["issue", "--name", "x"],
        ["issue", "--name", "x", "-o", "y"],
        ["issue", "--name", "../x", "--out", "y"],
        ["issue", "x.csr", "-o", "y", "--roles", "root"],
        ["issue", "x.csr", "-o", "y", "--days", "many"],
        ["issue", "x.csr", "-o", "y", "--passphrase", "secret"],
    ):
        assert admin(*arguments).status == 2, arguments


def test_a_damaged_folder(admin, tmp_path):
    ledger = tmp_path / "ca" / "ledger.sqlite3"
    (tmp_path / "ca" / "ca.key").write_text("{}")
    request = init_node(tmp_path, "desk-7").request_path
    admin.fails(3, "damaged", "issue", request, "-o", "node.pem")
    ledger.write_bytes(b"\0" * 10_000)
    admin.fails(3, "ledger", "list")


def test_help_documents_statuses_and_shows_no_secret_option(admin):
    text = admin.ok("--help").out
    assert "exit status" in text and "MESHCA_PASSPHRASE" in text


def test_a_certificate_that_cannot_be_written_is_not_lost(admin, tmp_path):
    request = init_node(tmp_path, "desk-7").request_path
    result = admin("issue", request, "-o", "nowhere/node.pem")
    assert result.status == 1
    warning, error = result.err.splitlines()
    serial = warning.split()[-3]
    assert "is in the ledger" in warning and error.startswith("meshca: error: ")
    admin.ok("show", serial, "-o", "node.pem")
    load_identity(tmp_path / "node.key", tmp_path / "node.pem", now=time.time())


def test_standard_output(admin, tmp_path):
    request = init_node(tmp_path, "desk-7").request_path
    result = admin.ok("issue", request, "-o", "-")
    (tmp_path / "piped.pem").write_text(result.out)
    load_identity(tmp_path / "node.key", tmp_path / "piped.pem", now=time.time())


def test_a_key_file_in_place_of_a_passphrase(admin, tmp_path, monkeypatch):
    monkeypatch.delenv("MESHCA_PASSPHRASE")
    shutil.rmtree(tmp_path / "ca")
    admin.ok("init", "--network", "acme", "--key-file", "usb.key")
    assert (tmp_path / "usb.key").stat().st_mode & 0o777 == 0o600
    request = init_node(tmp_path, "desk-7").request_path
    admin.ok("issue", request, "-o", "node.pem", "--key-file", "usb.key")
    (tmp_path / "other.key").write_bytes(os.urandom(32))
    admin.fails(4, "wrong", "revoke", "desk-7", "--key-file", "other.key")
    admin.fails(4, "cannot read", "revoke", "desk-7", "--key-file", "missing.key")
    admin.fails(2, "not allowed", "revoke", "x", "--key-file", "usb.key", "--passphrase-file", "x")


def test_bytes_that_are_no_text(admin, tmp_path):
    wild = "\udcff\n"
    admin.fails(6, "no certificate for", "show", wild)
    admin.fails(6, "no certificate for", "revoke", "x" * 100_000)
    admin.fails(
        4, "not UTF-8", "issue", "--name", "x", "--out", "x", MESHCA_PASSPHRASE="\udcff" * 9
    )
    if os.name == "posix":
        (tmp_path / "ca").rename(tmp_path / "\udcff")
        (tmp_path / "ca").symlink_to("\udcff")
        assert "SERIAL" in admin.ok("list").out
        assert cli.main(["--dir", "\udcffnew", "init", "--network", "acme"]) == 0
