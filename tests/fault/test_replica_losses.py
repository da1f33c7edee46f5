"""Replicas that are killed, hang and leave while a client reads; see test_chain_losses.py."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POSITIONS = int(os.environ.get("MESHNODE_FAULT_POSITIONS", "1"))
TOKENS = 64
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4}


@pytest.fixture(scope="module")
def whole(replicas: Any) -> Any:
    heard = replicas.ask(TOKENS, SAMPLED)
    assert heard.finish == "length"
    return heard


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_replica_is_lost_at_a_random_token(
    replicas: Any, whole: Any, how: signal.Signals
) -> None:
    drawn = random.Random(how.name)
    for at in [drawn.randrange(2, TOKENS - 16) for _ in range(POSITIONS)]:
        workers: list[str] = []

        def on_token(count: int, at: int = at, workers: list[str] = workers) -> None:
            if count == 1:
                workers.extend(replicas.workers())
            if count == at:
                replicas.nodes[workers[0]].process.send_signal(how)

        heard = replicas.ask(TOKENS, SAMPLED, on_token)
        victim = replicas.nodes[workers[0]]
        print(f"{how.name} at {at}: paused for {heard.longest_pause(at - 1):.2f} s")
        if how == signal.SIGSTOP:
            victim.process.send_signal(signal.SIGCONT)
            replicas.whole()
        else:
            victim.stop()
            replicas.bring(victim.name)
        assert heard.error is None
        assert (heard.text, heard.tokens, heard.finish) == (whole.text, whole.tokens, "length")
        assert heard.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
        first, second = replicas.named(heard)
        assert (first[0], second[0]) == (victim.name, replicas.twin(victim.name))
        assert at <= first[3] == second[2] and second[3] == TOKENS


def test_without_another_replica_there_is_an_error(replicas: Any) -> None:
    replicas.nodes["b0"].stop()
    lost: list[float] = []

    def on_token(count: int) -> None:
        if count == 5:
            lost.append(time.monotonic())
            replicas.nodes["a0"].process.kill()

    heard = replicas.ask(4000, SAMPLED, on_token)
    assert heard.ended - lost[0] < 10.0
    assert heard.finish is None and heard.mesh is None
    assert heard.error is not None and heard.error["code"] == "node_lost"
    assert not any("[DONE]" in line for line in heard.lines)
