"""`meshnode`: the commands and their flags. What a command does lives in a module beside."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from mesh.cli.exits import CommandError, Exit
from mesh.config import (
    DEFAULT_LISTEN,
    ConfigError,
    NodeConfig,
    default_home,
    default_models,
    load_config,
)

# Settings that every command knows, and those of `start`. A flag that is not given stays None, so
# that the environment and the file can speak.
_COMMON = ("home", "models", "log")
_SETTINGS = tuple(NodeConfig.model_fields)
# What the node takes as well, so that a mistake is found before it is asked.
MAX_COUNT = 4096  # of nodes, chains, sessions
MAX_CONTEXT = (1 << 31) - 1  # tokens
MAX_WAIT = 24 * 3600.0  # s


def _whole(least: int, most: int) -> Callable[[str], int]:
    """A type of flags: whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        if digits.isdecimal() and digits.isascii() and len(digits) <= 20:
            value = int(text)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")

    return parse


def _replicas(text: str) -> int | None:
    return None if text == "auto" else _whole(0, MAX_COUNT)(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if 0 <= value <= MAX_WAIT:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to {MAX_WAIT:.0f}")


def _add_start(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cert", metavar="PEM", help="certificate and CA chain (default: HOME/node.pem)")
    add("--api", metavar="HOST:PORT", help="HTTP endpoint (default 127.0.0.1:8000; port 0: any)")
    add("--api-key", metavar="KEY", help="demanded from clients; needed beyond loopback")
    add(
        "--listen",
        metavar="MULTIADDR",
        action="append",
        help=f"QUIC, repeatable (default {DEFAULT_LISTEN})",
    )
    add("--peer", metavar="MULTIADDR", action="append", help="a peer to dial, repeatable")
    add("--no-mdns", dest="mdns", action="store_const", const=False, help="no search on the LAN")
    add("--model", metavar="NAME", action="append", help="a model to serve whole, repeatable")
    add("--stage", metavar="MODEL:FIRST-LAST", action="append", help="layers to serve, repeatable")
    add("--device", metavar="CPU|GPU|NPU|AUTO", help="where models run (default CPU)")
    add("--engine", metavar="stage|genai", help="what runs whole models (default stage)")
    add(
        "--slots",
        type=_whole(1, 1024),
        metavar="N",
        help="sessions of an engine at once (default 16)",
    )
    add(
        "--activations",
        metavar="f32|f16|bf16|int8",
        help="between machines (default f32, the exact one)",
    )
    add(
        "--memory",
        metavar="SIZE",
        help="mesh may fill, as in 8GB (default: half of the free; 0: none)",
    )
    add("--queue", type=_whole(0, 65536), metavar="N", help="requests that may wait (default 64)")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", help="a model that the mesh is to serve")
    add = parser.add_argument
    add(
        "--replicas", type=_replicas, metavar="N|auto", help="chains wanted (auto); 0: not any more"
    )
    add("--max-nodes", type=_whole(1, MAX_COUNT), metavar="K", help="on at most so many nodes")
    add("--context", type=_whole(16, MAX_CONTEXT), metavar="N", help="tokens of a session (4096)")
    add("--sessions", type=_whole(1, MAX_COUNT), metavar="N", help="sessions at once (4)")
    _add_json(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="default: all that is wanted")
    parser.add_argument("--what-if", metavar="CHANGES", default="", help="add:16GB,remove:desk-7")
    _add_json(parser)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("response", metavar="RESPONSE-ID", help="as in the response's id")
    _add_json(parser)


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="name of this node, as in desk-7")
    parser.add_argument("--csr", metavar="FILE", help="where to write the CSR (default: NAME.csr)")


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=_whole(0, MAX_COUNT), default=0, metavar="N", help="so many peers are alive"
    )
    parser.add_argument("--model", metavar="NAME", dest="wanted", help="this model can be used")
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="give up after (default: 60)"
    )


def _add_drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="then hand over what still runs",
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", help="what to say")
    parser.add_argument("--model", metavar="NAME", dest="wanted", help="default: any of the mesh")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--save", metavar="FILE", help="write the response, to verify it later")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("response", help="a saved response (JSON or SSE), or - for standard input")
    parser.add_argument("--ca", required=True, metavar="PEM", help="the CA certificate to trust")


def _add_model(parser: argparse.ArgumentParser) -> None:
    common = [_common()]
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    pull = actions.add_parser(
        "pull", help="download a known name or a hub repository", parents=common
    )
    pull.add_argument("name")
    take = actions.add_parser(
        "import", help="take a folder with OpenVINO IR, or a GGUF file", parents=common
    )
    take.add_argument("path", type=Path)
    take.add_argument("--name", help="default: the name of the folder or file")
    convert = actions.add_parser(
        "export", help="convert original weights to OpenVINO IR", parents=common
    )
    convert.add_argument("source", metavar="HF-DIR-OR-ID", help="a folder or a hub repository")
    convert.add_argument("--weights", required=True, choices=("int4", "int8", "fp16"))
    convert.add_argument("--name", help="default: the source's, with the precision behind")
    actions.add_parser("list", help="models on this machine", parents=common)
    remove = actions.add_parser("rm", help="delete a model from this machine", parents=common)
    remove.add_argument("name")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", help="name or PeerId of a node")
    _add_json(parser)


def _add_crl(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="what `meshca revoke` or `meshca crl` wrote")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


# name: (help, module, function, what adds its flags)
_Command = tuple[str, str, str, Callable[[argparse.ArgumentParser], None] | None]
COMMANDS: dict[str, _Command] = {
    "init": ("make a key and a request for a certificate", "setup", "init", _add_init),
    "start": ("run the node in the foreground", "start", "start", _add_start),
    "stop": ("stop the running node", "show", "stop", None),
    "drain": ("take no new work, finish what runs, stop", "show", "drain", _add_drain),
    "wait": ("return when something is true of the mesh", "show", "wait", _add_wait),
    "status": ("this node", "show", "status", _add_json),
    "peers": ("the nodes this one knows", "show", "peers", _add_json),
    "models": ("the models of the mesh", "show", "models", _add_json),
    "discover": ("nodes seen on the local network", "show", "discover", _add_json),
    "bench": ("measure the link to a node", "bench", "bench", _add_bench),
    "chat": ("ask a model, streamed", "chat", "chat", _add_chat),
    "model": ("models on this machine", "model", "model", _add_model),
    "serve": ("have the mesh serve a model", "place", "serve", _add_serve),
    "plan": ("where layers go, and what that should give", "place", "plan", _add_plan),
    "explain": ("why a response took its route, and its times", "place", "explain", _add_explain),
    "crl": ("give the mesh a new revocation list", "show", "crl", _add_crl),
    "verify": ("check the receipt of a saved response", "setup", "verify", _add_verify),
}


def _common() -> argparse.ArgumentParser:
    # What is not given is not set, so that the parser of `model list` undoes nothing of what stood
    # before: `model --home DIR list` and `model list --home DIR` are the same.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    # "%%" because argparse formats help texts, and a path may hold anything.
    home, models = (str(path).replace("%", "%%") for path in (default_home(), default_models()))
    common.add_argument(
        "--home", metavar="DIR", help=f"where the node keeps all its state (default: {home})"
    )
    common.add_argument(
        "--models", metavar="DIR", help=f"the model store of this machine (default: {models})"
    )
    common.add_argument("--log", metavar="LEVEL", help="debug, info (default), warning or error")
    return common


def _parser() -> argparse.ArgumentParser:
    common = _common()
    parser = argparse.ArgumentParser(
        prog="meshnode", description="A node of a mesh that serves AI models to its owners."
    )
    parser.add_argument("--version", action="version", version=version("meshnode"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_text, _, _, add_flags) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, parents=[common])
        if add_flags is not None:
            add_flags(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = _SETTINGS if options.command == "start" else _COMMON
    flags: dict[str, Any] = {name: getattr(options, name, None) for name in names}
    _, module, function, _ = COMMANDS[options.command]
    try:
        config = load_config(flags)
        # Imported here: `meshnode status` should not wait for an inference runtime to load.
        run = getattr(_imported(f"mesh.cli.{module}"), function)
        return int(run(config, options))
    except CommandError as error:
        print(f"meshnode: {error}", file=sys.stderr)
        return error.code
    except ConfigError as error:
        print(f"meshnode: {error}", file=sys.stderr)
        return Exit.USAGE
    except KeyboardInterrupt:
        return 130


def _imported(module: str) -> ModuleType:
    """What modules are made of stays: looking meanwhile whether it is garbage takes a sixth of the
    time, and looking again later makes a node pause."""
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
