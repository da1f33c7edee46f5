"""What surrounds the answers: bodies, paths, keys, browsers, the node's own endpoints."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from mesh.api.body import MAX_BODY

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
KEY = "a-key-of-some-length"


def call(
    serving: Any,
    node: Any,
    method: str,
    path: str,
    *,
    api_key: str | None = None,
    http2: bool = False,
    **arguments: Any,
) -> httpx.Response:
    """One request to a fresh server; checks what every response has."""
    responses = []

    async def main() -> None:
        client = httpx.AsyncClient(http1=not http2, http2=http2, timeout=20)
        async with serving(node, api_key=api_key) as server, client:
            responses.append(await client.request(method, server.url + path, **arguments))

    trio.run(main)
    (response,) = responses
    assert len(response.headers["x-mesh-request"]) == 32
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    return response


def post(serving: Any, node: Any, content: Any, kind: str | None = "application/json", **more: Any):
    headers = {"content-type": kind} if kind else {}
    path = "/v1/chat/completions"
    return call(serving, node, "POST", path, content=content, headers=headers, **more)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_models(serving: Any, node: Any) -> None:
    listed = call(serving, node, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["OpenVINO/Qwen3-8B-int4-ov", "demo"]
    assert listed["data"][1] == {
        "id": "demo",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "mesh",
        "mesh": {"nodes": [node.peer], "digest": "sha256:00", "context_length": 2048},
    }
    assert call(serving, node, "GET", "/v1/models/demo").json() == listed["data"][1]
    for path in ("OpenVINO/Qwen3-8B-int4-ov", "OpenVINO%2FQwen3-8B-int4-ov"):
        assert call(serving, node, "GET", f"/v1/models/{path}").json() == listed["data"][0]
    missing = call(serving, node, "GET", "/v1/models/nope")
    assert code(missing) == (404, "model_not_found")


def test_health_ready_view_capabilities(serving: Any, node: Any) -> None:
    assert call(serving, node, "GET", "/health").json() == {"status": "ok", "peer": node.peer}
    assert call(serving, node, "GET", "/ready").json() == {"ready": True, "waiting_for": []}
    view = call(serving, node, "GET", "/v1/mesh/view").json()
    assert view == {"nodes": {node.peer: {"status": "alive", "rtt": None}}}
    assert call(serving, node, "GET", "/v1/mesh/capabilities").json() == {"devices": ["CPU"]}
    node.ready = False
    waiting = call(serving, node, "GET", "/ready")
    assert waiting.status_code == 503
    assert waiting.json()["waiting_for"] == ["the model loads"]


def test_paths_and_methods_that_do_not_exist(serving: Any, node: Any) -> None:
    assert code(call(serving, node, "GET", "/v1/nothing")) == (404, "unknown_url")
    assert code(call(serving, node, "POST", "/v1/chat/completions/")) == (404, "unknown_url")
    wrong = call(serving, node, "GET", "/v1/chat/completions")
    assert code(wrong) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"{} {}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"model": "a", "model": "b"}',
        b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"seed":' + b"9" * 100_000 + b"}",
        '{"model": "demo"}'.encode("utf-16"),
    ],
)
def test_what_is_not_a_json_object(serving: Any, node: Any, body: bytes) -> None:
    assert code(post(serving, node, body)) == (400, "invalid_json")
    assert not node.requests


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json; charset=latin-1",
    ],
)
def test_other_content_types(serving: Any, node: Any, kind: str | None) -> None:
    response = post(serving, node, json.dumps(CHAT).encode(), kind)
    assert code(response) == (415, "unsupported_media_type")


def test_a_charset_that_is_utf8(serving: Any, node: Any) -> None:
    body = json.dumps(CHAT).encode()
    assert post(serving, node, body, 'application/json; charset="UTF-8"').status_code == 200


def test_a_body_too_large_is_refused_and_the_refusal_arrives(serving: Any, node: Any) -> None:
    body = b'{"model": "' + b"x" * MAX_BODY + b'"}'
    assert code(post(serving, node, body)) == (413, "request_too_large")

    async def chunks():  # no Content-Length to look at
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    assert code(post(serving, node, chunks())) == (413, "request_too_large")


def test_a_body_that_never_ends_is_given_up(
    serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.body.BODY_SECONDS", 0.2)
    monkeypatch.setattr("mesh.api.app.DRAIN_SECONDS", 0.1)

    async def main() -> None:
        async with serving(node) as server:
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            await stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            answer = b"".join([part async for part in stream])
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"request_timeout" in answer

    trio.run(main)


def test_large_bodies_share_a_bound(
    serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.body.MAX_HELD", 1000)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 2000\r\n\r\n"
    )

    async def main() -> None:
        async with serving(node) as server, httpx.AsyncClient(timeout=20) as client:
            url = server.url + "/v1/chat/completions"
            large = await trio.open_tcp_stream("127.0.0.1", server.port)
            await large.send_all(head + b" " * 950)
            await trio.testing.wait_all_tasks_blocked(0.1)
            refused = await client.post(url, json=CHAT)
            assert code(refused) == (503, "overloaded")
            assert refused.headers["retry-after"] == "1"
            await large.aclose()
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert (await client.post(url, json=CHAT)).status_code == 200

    trio.run(main)


@pytest.mark.parametrize(
    "given",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": "Basic x"}],
)
def test_without_the_key(serving: Any, node: Any, given: dict[str, str]) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/mesh/view"),
        ("GET", "/nothing"),
    ):
        response = call(serving, node, method, path, api_key=KEY, headers=given)
        assert code(response) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert call(serving, node, "GET", "/health", api_key=KEY, headers=given).status_code == 200
    assert call(serving, node, "GET", "/ready", api_key=KEY, headers=given).status_code == 200


def test_with_the_key_host_and_origin_do_not_matter(serving: Any, node: Any) -> None:
    headers = {
        "authorization": f"bearer {KEY}",
        "host": "mesh.example.com",
        "origin": "https://example.com",
    }
    response = call(serving, node, "GET", "/v1/models", api_key=KEY, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("http2", [False, True])
def test_without_a_key_a_rebound_name_is_refused(serving: Any, node: Any, http2: bool) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]:80"):
        response = call(serving, node, "GET", "/v1/models", headers={"host": host}, http2=http2)
        assert code(response) == (403, "forbidden_host")
    for host in ("localhost:9", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        response = call(serving, node, "GET", "/v1/models", headers={"host": host}, http2=http2)
        assert response.status_code == 200


def test_without_a_key_a_page_of_another_site_is_refused(serving: Any, node: Any) -> None:
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://["):
        response = call(serving, node, "POST", "/v1/chat/completions", headers={"origin": origin})
        assert code(response) == (403, "forbidden_origin")
    headers = {"origin": "http://localhost:3000"}
    response = call(serving, node, "POST", "/v1/chat/completions", headers=headers, json=CHAT)
    assert response.status_code == 200


def test_http2_streams_too(serving: Any, node: Any) -> None:
    response = call(
        serving, node, "POST", "/v1/chat/completions", json={**CHAT, "stream": True}, http2=True
    )
    assert response.http_version == "HTTP/2"
    assert response.text.endswith("data: [DONE]\n\n")


def test_a_host_that_makes_no_url(serving: Any, node: Any) -> None:
    headers = {"authorization": f"Bearer {KEY}", "host": "[::1"}
    response = call(serving, node, "GET", "/nothing", api_key=KEY, headers=headers)
    assert code(response) == (404, "unknown_url")


def test_a_refused_body_leaves_the_connection_usable(serving: Any, node: Any) -> None:
    """The client sends all of it before it reads anything."""
    refused = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    async def main() -> None:
        async with serving(node) as server:
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            with trio.fail_after(20):
                await stream.send_all(refused + b"x" * 9_000_000)
                await stream.send_all(health)
                answers = b"".join([part async for part in stream])
            assert answers.startswith(b"HTTP/1.1 404")
            assert b"HTTP/1.1 200" in answers

    trio.run(main)
