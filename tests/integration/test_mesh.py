"""Three real nodes on loopback, two of which hold the demo model: any of them answers."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from inference.store.manifest import ModelManifest

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Name three fruits and their colours."}]


class Mesh:
    def __init__(self, network: Any, model: str) -> None:
        self.network, self.model = network, model
        self.admit_by_commands("desk-1")
        self.first = network.start("desk-1", "--model", model)
        others = {"desk-2": ("--model", model), "desk-3": ()}
        self.second, self.entry = network.start_all(others, peers=(self.first,))
        self.nodes = (self.first, self.second, self.entry)
        for node in self.nodes:
            done = node.cli("wait", "--peers", "2", "--model", model, "--timeout", "30")
            assert done.returncode == 0, done.stderr

    def admit_by_commands(self, name: str) -> None:
        """As people do it."""
        network, home = self.network, self.network.home(name)
        csr = network.folder / f"{name}.csr"
        done = network.run("meshnode", "init", "--home", home, "--name", name, "--csr", csr)
        assert done.returncode == 0, done.stderr
        network.ca("issue", csr, "--roles", "serve,use", "-o", home / "node.pem")

    def client(self, node: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{node.api}/v1", api_key="unused", max_retries=0)

    def active(self) -> int:
        """Requests that run or wait anywhere, as the entry node sees it."""
        view = httpx2.get(f"{self.entry.api}/v1/mesh/view").json()
        return sum(h["active"] + h["waiting"] for n in view["nodes"] for h in n["holdings"])


@pytest.fixture(scope="module")
def mesh(network: Any, demo_model: ModelManifest) -> Iterator[Mesh]:
    network.environment["MESHNODE_MODELS"] = str(demo_model.path.parent)
    yield Mesh(network, demo_model.name)


def eventually(holds: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_every_node_gives_the_same_greedy_answer(mesh: Mesh) -> None:
    texts = set()
    for node in mesh.nodes:
        answer = mesh.client(node).chat.completions.create(
            model=mesh.model, messages=QUESTION, temperature=0, max_tokens=32
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 32
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 1 and len(texts.pop()) > 20


def test_a_stream_through_a_node_without_the_model(mesh: Mesh) -> None:
    with mesh.client(mesh.entry).chat.completions.with_streaming_response.create(
        model=mesh.model, messages=QUESTION, temperature=0, max_tokens=32, stream=True,
        stream_options={"include_usage": True},
    ) as response:  # fmt: skip
        answered_by = response.headers["X-Mesh-Node"]
        assert response.headers["X-Mesh-Request"]
        chunks = list(response.parse())
    assert answered_by in (mesh.first.peer, mesh.second.peer)
    pieces = [c.choices[0].delta.content for c in chunks if c.choices]
    assert sum(bool(piece) for piece in pieces) > 10  # it came in pieces
    plain = mesh.client(mesh.entry).chat.completions.create(
        model=mesh.model, messages=QUESTION, temperature=0, max_tokens=32
    )
    assert "".join(piece or "" for piece in pieces) == plain.choices[0].message.content
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [32]


def test_seeded_sampling_does_not_depend_on_who_answers(mesh: Mesh) -> None:
    texts = {
        mesh.client(node)
        .completions.create(
            model=mesh.model, prompt="Once upon a time", temperature=0.9, seed=7, max_tokens=24
        )
        .choices[0]
        .text
        for node in mesh.nodes
    }
    assert len(texts) == 1


def test_models_of_the_mesh_are_listed_with_who_serves_them(mesh: Mesh) -> None:
    def servers() -> set[str]:
        listed = {m.id: m for m in mesh.client(mesh.entry).models.list()}
        return set(listed[mesh.model].model_dump()["mesh"]["nodes"])

    assert eventually(lambda: servers() == {mesh.first.peer, mesh.second.peer}), servers()


def test_errors_of_the_node_that_runs_it_reach_the_client(mesh: Mesh) -> None:
    client = mesh.client(mesh.entry)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=mesh.model, prompt="far too long " * 8000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(
            model=mesh.model, messages=QUESTION, extra_body={"mirostat": 2}
        )
    assert unknown.value.param == "mirostat"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_work_where_it_runs(mesh: Mesh, stream: bool) -> None:
    assert eventually(lambda: mesh.active() == 0)
    host, port = mesh.entry.api.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": mesh.model, "prompt": "Count:", "max_tokens": 4000, "stream": stream,
         "ignore_eos": True}
    )  # fmt: skip
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request.encode())
        assert eventually(lambda: mesh.active() == 1)
    # 4000 tokens take more than a minute here; leaving ends it long before.
    assert eventually(lambda: mesh.active() == 0, seconds=10.0)


def test_chat_and_verify_on_the_command_line(mesh: Mesh, tmp_path: Path) -> None:
    saved = tmp_path / "response.sse"
    nowhere = str(tmp_path / "missing" / "response.sse")
    refused = mesh.entry.cli("chat", "Say hello.", "--max-tokens", "1", "--save", nowhere)
    assert refused.returncode == 1 and f"cannot write {nowhere}" in refused.stderr
    done = mesh.entry.cli("chat", "Say hello.", "--max-tokens", "16", "--save", str(saved))
    assert done.returncode == 0 and done.stdout.strip(), done.stderr

    def verify(content: str, ca: Path) -> subprocess.CompletedProcess[str]:
        copy = tmp_path / "copy.sse"
        copy.write_text(content, encoding="utf-8")
        result: subprocess.CompletedProcess[str] = mesh.network.run(
            "meshnode", "verify", copy, "--ca", ca
        )
        return result

    content = saved.read_text(encoding="utf-8")
    good = verify(content, mesh.network.ca_pem)
    assert good.returncode == 0, good.stderr
    assert mesh.first.peer in good.stdout or mesh.second.peer in good.stdout
    changed = content.replace('"content":"', '"content":"X', 1)
    assert changed != content
    assert verify(changed, mesh.network.ca_pem).returncode == 8
    mesh.network.run("meshca", "--dir", tmp_path / "other", "init", "--network", "test")
    assert verify(content, tmp_path / "other" / "ca.pem").returncode == 8


def test_what_a_node_says_of_the_mesh(mesh: Mesh) -> None:
    def told(command: str, *fields: str) -> list[tuple[Any, ...]]:
        rows = json.loads(mesh.entry.cli(command, "--json").stdout)
        return sorted(tuple(row[field] for field in fields) for row in rows)

    # Who answered late may just be under suspicion.
    alive = [("desk-1", "alive"), ("desk-2", "alive")]
    assert eventually(lambda: told("peers", "name", "status") == alive)
    assert eventually(lambda: told("models", "model", "replicas") == [(mesh.model, 2)])
    status = json.loads(mesh.first.cli("status", "--json").stdout)
    assert (status["name"], status["network"]) == ("desk-1", "test")
    assert mesh.entry.cli("status").stdout and mesh.entry.cli("peers").stdout
    assert httpx2.get(f"{mesh.entry.api}/ready").json()["ready"] is True


def test_the_link_to_a_node_can_be_measured(mesh: Mesh) -> None:
    done = mesh.entry.cli("bench", "desk-1", "--json", timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["peer"], figures["path"]) == (mesh.first.peer, "direct")
    assert figures["up_mb_s"] > 0 and figures["down_mb_s"] > 0
    assert [trip["bytes"] for trip in figures["round_trips"]] == [1024, 10240]
    assert mesh.entry.cli("bench", "nobody").returncode == 1


def test_a_home_has_one_node(mesh: Mesh) -> None:
    second = mesh.network.launch("desk-1")
    try:
        assert second.process.wait(30) == 6
    finally:
        mesh.network.nodes["desk-1"] = mesh.first
