"""Who gets in, who does not, and what `meshnode start` says about it."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest


def fails(network: Any, name: str, code: int, *flags: str) -> str:
    """Start a node that must refuse; returns its one line."""
    node = network.launch(name, *flags)
    assert node.wait(60) == code, "".join(node.log)
    lines = [line for line in node.log if line.startswith("meshnode:")]
    assert len(lines) == 1 and "Traceback" not in "".join(node.log)
    return str(lines[0])


def peers(node: Any) -> list[dict[str, Any]]:
    return json.loads(node.cli("peers", "--json").stdout)


def test_a_certificate_for_another_key(network: Any) -> None:
    network.admit("owner")
    network.admit("thief")
    stolen = network.home("owner") / "node.pem"
    assert "another key" in fails(network, "thief", 3, "--cert", str(stolen))


def test_no_certificate(network: Any, tmp_path: Path) -> None:
    network.admit("bare")
    assert "no certificate" in fails(network, "bare", 3, "--cert", str(tmp_path / "none.pem"))


def test_an_unknown_ca(network: Any) -> None:
    home = network.admit("stray")
    pem = (home / "node.pem").read_text()
    leaf_only = network.folder / "leaf.pem"
    leaf_only.write_text(pem[: pem.index("-----END CERTIFICATE-----") + 26])
    assert "CA" in fails(network, "stray", 3, "--cert", str(leaf_only))


def test_a_port_that_is_taken(network: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "port taken" in fails(network, "late-api", 4, "--api", address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        line = fails(network, "late", 4, "--listen", f"/ip4/127.0.0.1/udp/{port}/quic-v1")
        assert str(port) in line


def test_an_address_that_is_none(network: Any) -> None:
    assert "'4001'" in fails(network, "lost", 4, "--listen", "4001")


def test_an_api_for_everybody_needs_a_key(network: Any) -> None:
    assert "API key" in fails(network, "open", 4, "--api", "0.0.0.0:0")


def test_a_missing_model(network: Any) -> None:
    assert "known are" in fails(network, "poor", 5, "--model", "no-such-name")


@pytest.mark.slow
def test_a_missing_device_or_layer(network: Any, demo_model: Any) -> None:
    models = ("--models", str(demo_model.path.parent))
    name = demo_model.name
    line = fails(network, "no-gpu", 5, *models, "--model", name, "--device", "GPU")
    assert "no GPU" in line and "CPU" in line
    assert "30 layers" in fails(network, "no-layers", 5, *models, "--stage", f"{name}:20-40")


@pytest.mark.slow
def test_a_node_of_another_ca_stays_outside(network: Any, tmp_path_factory: Any) -> None:
    other = type(network)(tmp_path_factory.mktemp("other"), models=None)
    try:
        inside = network.start("inside")
        # The same network name, another CA: it dials us, and we dial it.
        outside = other.start("outside", peers=(inside,))
        network.start_all({"friend": (), "curious": ("--peer", outside.listen)}, peers=(inside,))
        assert inside.cli("wait", "--peers", "2", "--timeout", "20").returncode == 0
        assert outside.cli("wait", "--peers", "1", "--timeout", "4").returncode == 7
        assert peers(outside) == []
        assert {p["name"] for p in peers(inside)} == {"friend", "curious"}
    finally:
        other.close()


@pytest.mark.slow
def test_revocation_spreads_and_closes_live_links(network: Any) -> None:
    first = network.start("first")
    second, bad = network.start_all({"second": (), "bad": ()}, peers=(first,))
    for node in (first, second, bad):
        assert node.cli("wait", "--peers", "2", "--timeout", "30").returncode == 0
    crl = network.folder / "revoked.crl"
    network.ca("revoke", "bad")
    network.ca("crl", "-o", crl)
    assert first.cli("crl", str(crl)).returncode == 0
    end = time.monotonic() + 15
    while any(p["name"] == "bad" for node in (first, second) for p in peers(node)):
        assert time.monotonic() < end, "the revoked node is still there"
        time.sleep(0.2)
    # It is on disk: after a restart of the node that heard of it by gossip, the list still counts.
    second.stop()
    again = network.start("second", peers=(first,))
    assert again.cli("wait", "--peers", "1", "--timeout", "20").returncode == 0
    assert "bad" not in {p["name"] for p in peers(again)}
    bad.stop()
    back = network.start("bad", peers=(first, again))
    assert back.cli("wait", "--peers", "1", "--timeout", "4").returncode == 7
