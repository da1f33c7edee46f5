"""Coming back for the rest of a stream, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import trio

from inference.generation import GenerateRequest
from mesh.api import AnswerEvent
from mesh.forward.kept import key_of

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Rest:
    """What a node finds of a kept response."""

    def __init__(self, node: Any, request: GenerateRequest, after: int) -> None:
        self.request = request
        self.started, *tokens, self.finish, self.done = node.events("Hello", " world", "!")
        self.tokens = tokens[after:]

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        for event in (self.started, *self.tokens, self.finish, self.done):
            yield event


def ask(serving: Any, node: Any, path: str, headers: dict[str, str]) -> httpx.Response:
    responses = []

    async def main() -> None:
        async with serving(node) as server, httpx.AsyncClient(base_url=server.url) as client:
            responses.append(await client.get(path, headers=headers))

    trio.run(main)
    return responses[0]


def chunks_of(response: httpx.Response) -> list[Any]:
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def first_part(serving: Any, node: Any, body: dict[str, Any]) -> httpx.Response:
    responses = []

    async def main() -> None:
        async with serving(node) as server, httpx.AsyncClient(base_url=server.url) as client:
            responses.append(await client.post("/v1/chat/completions", json=body))

    trio.run(main)
    return responses[0]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_both_streams_are_the_whole_response(serving: Any, node: Any, after: int) -> None:
    first = first_part(serving, node, CHAT)
    response_id, secret = first.headers["x-mesh-request"], first.headers["x-mesh-resume"]
    assert node.keys == [key_of(secret)]
    begun = [c for c in chunks_of(first) if c.get("mesh_tokens", after + 1) <= after]
    node.rest = Rest(node, node.requests[0], after)
    headers = {"x-mesh-resume": secret}
    response = ask(serving, node, f"/v1/mesh/responses/{response_id}?after={after}", headers)
    assert response.status_code == 200, response.text
    assert node.asked_for == [(response_id, key_of(secret), after)]
    rest = chunks_of(response)
    assert {chunk["id"] for chunk in [*begun, *rest]} == {f"chatcmpl-{response_id}"}
    pieces = [c["delta"].get("content", "") for ch in [*begun, *rest] for c in ch["choices"]]
    assert "".join(pieces) == "Hello world!"
    assert [c["mesh_tokens"] for c in rest if "mesh_tokens" in c] == list(range(after + 1, 4))
    assert ("role" in rest[0]["choices"][0]["delta"]) == (after == 0)
    assert rest[-2]["choices"][0]["finish_reason"] == "stop"
    assert rest[-1]["usage"]["total_tokens"] == 8
    assert rest[-1]["mesh"]["token_ids"] == [0, 1, 2]
    # And once more, if need be.
    assert response.headers["x-mesh-resume"] == secret


def test_only_streams_of_one_choice_can_be_resumed(serving: Any, node: Any) -> None:
    for body in ({**CHAT, "stream": False}, {**CHAT, "n": 2}):
        assert "x-mesh-resume" not in first_part(serving, node, body).headers
    assert node.keys == [None, None, None]


@pytest.mark.parametrize(
    ("path", "secret", "status", "code"),
    [
        (f"/v1/mesh/responses/{'a' * 32}", "s", 404, "response_not_found"),
        (f"/v1/mesh/responses/chatcmpl-{'a' * 32}", "s", 404, "response_not_found"),
        ("/v1/mesh/responses/nonsense", "s", 404, "response_not_found"),
        (f"/v1/mesh/responses/{'a' * 32}?after=101", "s", 410, "response_gone"),
        (f"/v1/mesh/responses/{'a' * 32}?after=-1", "s", 400, "invalid_value"),
        (f"/v1/mesh/responses/{'a' * 32}?after=%C2%B2", "s", 400, "invalid_value"),
        (f"/v1/mesh/responses/{'a' * 32}?after=99999999999", "s", 400, "invalid_value"),
        (f"/v1/mesh/responses/{'a' * 32}", "", 401, "missing_secret"),
        (f"/v1/mesh/responses/{'a' * 32}", "s" * 200, 401, "missing_secret"),
    ],
)
def test_what_is_refused(
    serving: Any, node: Any, path: str, secret: str, status: int, code: str
) -> None:
    response = ask(serving, node, path, {"x-mesh-resume": secret})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
