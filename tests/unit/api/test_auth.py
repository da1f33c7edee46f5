"""What counts as this machine."""

from __future__ import annotations

import pytest

from mesh.api.auth import is_loopback


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1", "127.9.8.7", "::1"],
)
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "example.com",
        "localhost.example.com",
        "127.0.0.1.nip.io",
        "notlocalhost",
        "2130706433",
        "::ffff:10.0.0.1",
        "127.0.0.1\x00",
    ],
)
def test_not_this_machine(host: str) -> None:
    assert not is_loopback(host)
