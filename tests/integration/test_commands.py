"""What commands make of a running node's answers, and that they wait for what they bring about."""

from __future__ import annotations

from typing import Any


def test_exit_codes_and_the_end_of_a_node(network: Any) -> None:
    node = network.start("desk-1")
    done = node.cli("chat", "hello", "--model", "no-such")
    assert done.returncode == 5 and "no-such" in done.stderr, done.stderr
    done = node.cli("stop")
    assert done.returncode == 0, done.stderr
    assert node.process.poll() == 0, "it returned before the node had ended"
