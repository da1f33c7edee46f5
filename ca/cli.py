"""meshca: the certificate authority of a mesh, for its admin."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs

from ca import commands
from ca.errors import (
    AlreadyInitialisedError,
    CertificateError,
    LedgerError,
    LockedError,
    NotInitialisedError,
    RefusedError,
    UnknownCertificateError,
)
from ca.files import CERTIFICATE_FILE, KEY_FILE
from ca.issue import DEFAULT_DAYS
from ca.naming import (
    NETWORK_RULE,
    NODE_NAME_RULE,
    Role,
    is_network,
    is_node_name,
    parse_roles,
)

EXIT_OK = 0
EXIT_FILE = 1
EXIT_USAGE = 2
EXIT_NO_CA = 3
EXIT_LOCKED = 4
EXIT_REFUSED = 5
EXIT_UNKNOWN = 6
EXIT_INTERRUPTED = 130

# Every error that a command raises on purpose. Each is one line for the admin.
_EXITS: dict[type[Exception], int] = {
    commands.UsageError: EXIT_USAGE,
    NotInitialisedError: EXIT_NO_CA,
    AlreadyInitialisedError: EXIT_NO_CA,
    LedgerError: EXIT_NO_CA,
    LockedError: EXIT_LOCKED,
    RefusedError: EXIT_REFUSED,
    CertificateError: EXIT_REFUSED,
    UnknownCertificateError: EXIT_UNKNOWN,
}

_EPILOG = """\
the passphrase:
  is asked for at the terminal, or comes from --passphrase-file FILE or from MESHCA_PASSPHRASE. A
  CA made with --key-file has no passphrase: keep that file apart from the CA's folder, and give
  it each time.

exit status:
  0  done
  1  a file cannot be read or written
  2  wrong usage
  3  no usable CA in the folder (init: there is one already)
  4  passphrase missing or wrong
  5  refused: the request is not acceptable, the name is taken, the key was revoked, ...
  6  no such certificate
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. ``meshca --help`` documents both."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no text
    try:
        options.run(options)
        sys.stdout.flush()
    except tuple(_EXITS) as error:
        commands.complain(str(error))
        return _EXITS[type(error)]
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FILE
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        commands.complain(f"{name}{error.strerror or error}")
        return EXIT_FILE
    except KeyboardInterrupt:
        commands.complain("interrupted")
        return EXIT_INTERRUPTED
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshca",
        description="The certificate authority of a mesh: decides which machines belong to it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=platformdirs.user_data_path("meshca", appauthor=False),
        metavar="DIR",
        help="the CA's folder: sealed key, certificate, ledger (default: %(default)s)",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    init = _command(subparsers, "init", "make a CA for a new network", commands.init, unlocks=True)
    init.add_argument("--network", required=True, type=_network, help="the network's name")

    issue = _command(subparsers, "issue", "sign a node's request", commands.issue, unlocks=True)
    issue.add_argument("request", nargs="?", type=Path, metavar="REQUEST", help="the node's .csr")
    issue.add_argument(
        "--name", type=_node_name, help="make key and certificate here, without a request"
    )
    issue.add_argument(
        "--roles",
        type=_roles,
        default=frozenset({Role.SERVE, Role.USE}),
        metavar="ROLES",
        help="some of serve,use,admin (default: serve,use)",
    )
    issue.add_argument(
        "--days", type=float, default=DEFAULT_DAYS, help="days it lasts (default: %(default)g)"
    )
    issue.add_argument(
        "-o",
        dest="output",
        type=Path,
        metavar="FILE",
        help="with REQUEST: where the node's certificate goes ('-': standard output)",
    )
    issue.add_argument(
        "--out",
        dest="folder",
        type=Path,
        metavar="DIR",
        help=f"with --name: the folder for {KEY_FILE} and {CERTIFICATE_FILE}",
    )

    _command(subparsers, "list", "list all certificates", commands.list_all)

    show = _command(subparsers, "show", "show certificates, or write one out again", commands.show)
    show.add_argument("target", metavar="WHICH", help="name, PeerId or serial number")
    show.add_argument(
        "-o",
        dest="output",
        type=Path,
        metavar="FILE",
        help="write the newest valid one out as node.pem ('-': standard output)",
    )

    revoke = _command(
        subparsers, "revoke", "revoke a node or one certificate", commands.revoke, unlocks=True
    )
    revoke.add_argument(
        "target",
        metavar="WHICH",
        help="a name or PeerId: the node, all its certificates, and its key for good; "
        "a serial number: that certificate only",
    )

    crl = _command(subparsers, "crl", "write the newest revocation list out, in PEM", commands.crl)
    crl.add_argument(
        "-o",
        dest="output",
        type=Path,
        metavar="FILE",
        default=commands.STANDARD_OUTPUT,
        help="where it goes (default: standard output)",
    )
    return parser


def _command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], None],
    *,
    unlocks: bool = False,
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    if unlocks:
        secret = parser.add_mutually_exclusive_group()
        secret.add_argument(
            "--passphrase-file", type=Path, metavar="FILE", help="read the passphrase from a file"
        )
        secret.add_argument(
            "--key-file",
            type=Path,
            metavar="FILE",
            help="a file in place of a passphrase"
            + (" (made if it does not exist)" if name == "init" else ""),
        )
    return parser


def _network(text: str) -> str:
    if not is_network(text):
        raise argparse.ArgumentTypeError(f"a network's name is {NETWORK_RULE}")
    return text


def _node_name(text: str) -> str:
    if not is_node_name(text):
        raise argparse.ArgumentTypeError(f"a node's name is {NODE_NAME_RULE}")
    return text


def _roles(text: str) -> frozenset[Role]:
    try:
        return parse_roles(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
