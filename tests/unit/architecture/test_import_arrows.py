"""Who may import whom. The arrows are the architecture: a wrong one is a failing test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OURS = ("mesh", "inference", "ca")

# Package -> packages of ours that it must not import.
FORBIDDEN = {
    "inference": ("mesh", "ca"),
    "ca": ("mesh", "inference"),
    "mesh/identity": ("inference", "mesh.transport", "mesh.gossip", "mesh.routing", "mesh.api"),
    "mesh/transport": (
        "inference", "mesh.gossip", "mesh.routing", "mesh.forward", "mesh.relay", "mesh.api",
    ),
    "mesh/gossip": ("mesh.routing", "mesh.forward", "mesh.relay", "mesh.api", "mesh.node"),
    "mesh/routing": ("mesh.forward", "mesh.relay", "mesh.api", "mesh.node", "mesh.transport"),
    "mesh/admission": ("mesh.forward", "mesh.relay", "mesh.api", "mesh.node", "mesh.cli"),
    "mesh/models": ("mesh.forward", "mesh.relay", "mesh.api", "mesh.node", "mesh.cli"),
    "mesh/forward": ("mesh.api", "mesh.node", "mesh.cli"),
    "mesh/relay": ("mesh.api", "mesh.node", "mesh.cli"),
    "mesh/receipts": ("mesh.transport", "mesh.gossip", "mesh.forward", "mesh.api", "mesh.node"),
    "mesh/api": ("mesh.node", "mesh.cli", "mesh.transport"),
}  # fmt: skip
# Libraries that only one place may touch.
CONFINED = {
    "libp2p": "mesh/transport",
    "aioquic": "mesh/transport",
    "openvino": "inference",
    "openvino_genai": "inference",
    "starlette": "mesh/api",
    "hypercorn": "mesh/api",
    "torch": "inference",
}


def modules() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts[
                : None if node.level <= 1 else 1 - node.level
            ]
            base = ".".join(package) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            # `from mesh import node` imports mesh.node.
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    names = imported(path)
    for place, forbidden in FORBIDDEN.items():
        if relative.startswith(place + "/"):
            wrong = [n for n in names if any(within(n, package) for package in forbidden)]
            assert not wrong, f"{relative} must not import {wrong}"
    for library, places in CONFINED.items():
        if not any(relative.startswith(place) for place in places.split()):
            wrong = [n for n in names if within(n, library)]
            assert not wrong, f"{relative} imports {wrong}; only {places} may"


def test_a_node_needs_no_torch() -> None:
    """Only what converts models may import the export extra, and only inside functions."""
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not any(
                    within(n, lib) for n in names for lib in ("torch", "optimum", "nncf")
                )


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [p for p in modules() if p.stem in ("utils", "helpers", "common", "misc")]
