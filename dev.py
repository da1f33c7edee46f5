#!/usr/bin/env python3
"""Set up and run the project: demo, test, bench, lint. Needs Python 3.11+ and nothing else.

    python3 dev.py demo [--once] [--sharded]   a mesh of three nodes that answers on a real model
    python3 dev.py test [PYTEST-ARGS]          lint, types and all tests
    python3 dev.py bench NAME [--quick] [--json FILE]
    python3 dev.py lint

Each makes .venv from requirements.lock when it is missing or older, then runs the thing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "made-from"


def wanted_stamp() -> str:
    """What .venv has to be made from: the lock file, our own metadata, this Python."""
    digest = hashlib.sha256()
    for name in ("requirements.lock", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return f"{sys.version_info.major}.{sys.version_info.minor} {digest.hexdigest()}"


def set_up() -> None:
    stamp = wanted_stamp()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == stamp:
        return
    print(f"dev: installing into {VENV} (first time: a few minutes)", file=sys.stderr, flush=True)
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(
            f"dev: cannot make a virtual environment ({error}); "
            "on Debian and Ubuntu install the package python3-venv"
        )
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for arguments in (["-r", "requirements.lock"], ["--no-deps", "--editable", "."]):
        if subprocess.call([*pip, *arguments], cwd=ROOT) != 0:
            sys.exit("dev: installing failed; the lines above say why")
    # libp2p needs the package trio-typing at run time; the stubs of an old trio that come with it
    # would hide trio's own types from mypy.
    for stubs in VENV.glob("[Ll]ib*/**/site-packages/trio-stubs"):
        shutil.rmtree(stubs)
    STAMP.write_text(stamp)


def run(*command: str) -> int:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        return subprocess.call([str(PYTHON), *command], cwd=ROOT, env=environment)
    except KeyboardInterrupt:  # Ctrl-C went to the child as well, which has said goodbye
        return 130


def lint() -> int:
    checks = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
    # Every check runs, so that one look shows all there is to mend.
    return max([run("-m", *check) for check in checks])


def bench(arguments: list[str]) -> int:
    names = sorted(path.stem for path in (ROOT / "tests" / "bench").glob("[!_]*.py"))
    if not arguments or arguments[0] not in names:
        print(f"dev: bench NAME, where NAME is one of: {', '.join(names)}", file=sys.stderr)
        return 2
    return run(str(ROOT / "tests" / "bench" / f"{arguments[0]}.py"), *arguments[1:])


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):
        sys.exit(f"dev: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    if command not in ("demo", "test", "bench", "lint"):
        print(__doc__, file=sys.stderr)
        return 2
    set_up()
    if command == "demo":
        return run(str(ROOT / "examples" / "demo" / "demo.py"), *rest)
    if command == "test":
        # With arguments, only what was asked for.
        return (0 if rest else lint()) or run("-m", "pytest", *rest)
    if command == "bench":
        return bench(rest)
    return lint()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
