"""Replicas that are killed, hang and leave while a client reads; see test_chain_losses.py."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 80
LEFT = 32  # at least, after a loss: they are made while the client comes to inflict it


@pytest.fixture(autouse=True)
def healed(replicas: Any) -> None:
    replicas.heal()


@pytest.fixture(scope="module")
def unbroken(replicas: Any) -> Callable[[dict[str, Any]], Any]:
    """What an undisturbed client hears, for comparison."""
    heard: dict[str, Any] = {}

    def ask(sampling: dict[str, Any]) -> Any:
        key = str(sampling)
        if key not in heard:
            heard[key] = replicas.ask(TOKENS, sampling)
            assert heard[key].finish == "length", heard[key].error
        return heard[key]

    return ask


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_replica_is_lost_at_a_random_token(
    replicas: Any, tools: Any, unbroken: Any, how: signal.Signals
) -> None:
    """A client at the other one reads on meanwhile."""
    for number, at in enumerate(tools.positions(how.name, 2, TOKENS - LEFT)):
        sampling = (tools.SAMPLED, tools.GREEDY)[(number + (how == signal.SIGSTOP)) % 2]
        whole = unbroken(sampling)

        def fault(workers: list[str]) -> None:
            replicas.nodes[workers[0]].process.send_signal(how)

        heard, workers = replicas.hurt({at: fault}, TOKENS, sampling, apart=0)
        victim = replicas.nodes[workers[0]]
        print(f"{how.name} at {at}: paused for {heard.longest_pause(at - 1):.2f} s")
        if how == signal.SIGSTOP:
            victim.process.send_signal(signal.SIGCONT)
            replicas.whole()
        else:
            victim.stop()
            replicas.bring(victim.name)
        tools.same(heard, whole)
        assert replicas.took_part(heard, workers, 0) >= at


def test_a_stop_string_across_the_cut(replicas: Any, tools: Any, unbroken: Any) -> None:
    """Its beginning is held back by a replica that is lost, its end comes from the other one."""
    whole = unbroken(tools.SAMPLED)
    begin, size = 24, LEFT + 8  # tokens
    before, stop = ("".join(whole.pieces[a:b]) for a, b in ((0, begin), (begin, begin + size)))
    assert whole.text.index(stop) == len(before)

    def fault(workers: list[str]) -> None:
        replicas.nodes[workers[0]].process.kill()

    sampling = {**tools.SAMPLED, "stop": stop}
    heard, workers = replicas.hurt({begin + 4: fault}, TOKENS, sampling)
    replicas.nodes[workers[0]].stop()
    replicas.bring(workers[0])
    assert heard.error is None and heard.finish == "stop"
    assert heard.text == whole.text[: whole.text.index(stop)]
    assert heard.tokens == whole.tokens[: len(heard.tokens)]
    assert heard.usage["completion_tokens"] == len(heard.tokens)
    assert begin < replicas.took_part(heard, workers, 0) < begin + size


def test_beyond_the_queue_there_is_a_time_to_come_back(replicas: Any, tools: Any) -> None:
    """Said before any work: by the entry node, which knows how full the others are."""
    replicas.drop("b0")
    replicas.nodes["a0"].stop()
    flags = [*replicas.flags("a0"), "--queue", "1"]
    replicas.nodes["a0"] = replicas.network.ready(replicas.network.launch("a0", *flags))
    replicas.whole()
    first = replicas.beside()
    first.start()
    assert first.going.wait(60) and first.heard.error is None
    second = replicas.beside()
    second.start()  # and waits
    assert tools.eventually(lambda: replicas.load("a0") == (1, 1))
    body = replicas.body(4, tools.GREEDY)
    for stream in (True, False):
        refused = httpx2.post(
            f"{replicas.entry.api}/v1/completions",
            json={**body, "stream": stream, **({} if stream else {"stream_options": None})},
            trust_env=False,
        )
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
    assert replicas.load("a0") == (1, 1)
    first.end()
    assert second.going.wait(60) and second.heard.at
    second.end()


def test_without_another_replica_there_is_an_error(replicas: Any, tools: Any) -> None:
    replicas.drop("b0")
    lost: list[float] = []

    def fault(_: list[str]) -> None:
        lost.append(time.monotonic())
        replicas.nodes["a0"].process.kill()

    heard, _ = replicas.hurt({5: fault}, 4000, tools.SAMPLED)
    tools.lost_for_good(heard, lost[0])
    replicas.check_idle(replicas.entry)
