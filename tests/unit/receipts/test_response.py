"""A saved HTTP response is checked by what it shows."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from mesh.receipts import ReceiptError, VerifiedReceipt, show_nodes, verify_response


def record_of(story: Any) -> dict[str, Any]:
    return {
        "node": story.receipt.signer,
        "nodes": show_nodes(story.receipt),
        "receipt": base64.b64encode(story.bundle.to_bytes()).decode(),
        "timings": {"total": 1.0},
        "token_ids": list(story.tokens),
        "seed": 5,
    }


def usage_of(story: Any) -> dict[str, Any]:
    counts = story.receipt.counts
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }


def head(story: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "created": 1, "model": story.request.model, "object": "x"}


def chat(story: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": story.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {
        **head(story),
        "choices": [choice],
        "usage": usage_of(story),
        "mesh": {"request": "1", **record_of(story)},
    }


def legacy(story: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": story.text, "logprobs": None, "finish_reason": "stop"}
    return {**chat(story), "choices": [choice]}


def stream(story: Any, *, usage: bool = True, legacy: bool = False) -> str:
    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        shown = {"text": delta.get("content", "")} if legacy else {"delta": delta}
        choice = {"index": 0, **shown, "finish_reason": reason}
        return {**head(story), "choices": [choice], **({"usage": None} if usage else {})}

    half = len(story.text) // 2
    events = [
        chunk({"role": "assistant", "content": "", "refusal": None}),
        chunk({"content": story.text[:half]}),
        chunk({"content": story.text[half:]}),
        chunk({}, "stop"),
    ]
    mesh = {"request": "1", **record_of(story)}
    if usage:
        events.append({**head(story), "choices": [], "usage": usage_of(story), "mesh": mesh})
    else:
        events[-1]["mesh"] = mesh
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
    return "".join([lines[0], ": waiting\n\n", *lines[1:], "data: [DONE]\n\n"])


def check(authority: Any, response: Any) -> tuple[VerifiedReceipt, ...]:
    text = response if isinstance(response, str) else json.dumps(response)
    return verify_response(text.encode(), authority.ca_pem, now=authority.now)


def failure(authority: Any, response: Any) -> str:
    with pytest.raises(ReceiptError) as caught:
        check(authority, response)
    return caught.value.code


@pytest.mark.parametrize("kind", ["one", "three"])
def test_plain_and_streamed_responses_hold(
    authority: Any, tell: Callable[..., Any], kind: str
) -> None:
    story = tell(kind)
    for response in (
        chat(story),
        legacy(story),
        stream(story),
        stream(story, usage=False),
        stream(story, legacy=True),
    ):
        (verified,) = check(authority, response)
        assert verified.receipt == story.receipt and verified.response_checked


CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("response", lambda r: r["choices"][0]["message"].update(content="Grüße")),
    ("response", lambda r: r["choices"][0]["message"].update(content=None)),
    ("malformed", lambda r: r["choices"][0]["message"].update(tool_calls=[{"id": "1"}])),
    ("malformed", lambda r: r["choices"][0].update(text="another text")),
    ("malformed", lambda r: r["choices"][0].update(delta={"content": "another text"})),
    ("response", lambda r: r["choices"][0].update(finish_reason="length")),
    ("response", lambda r: r["choices"][0].update(finish_reason=None)),
    ("malformed", lambda r: r["choices"].append(copy.deepcopy(r["choices"][0]))),
    ("malformed", lambda r: r["choices"].clear()),
    ("response", lambda r: r["mesh"]["token_ids"].pop()),
    ("response", lambda r: r["mesh"]["token_ids"].append(1)),
    ("response", lambda r: r["mesh"].update(node="12D3KooW" + "1" * 44)),
    ("response", lambda r: r["mesh"]["nodes"].clear()),
    ("response", lambda r: r["mesh"]["nodes"][0].update(evidence="lost")),
    ("response", lambda r: r["usage"].update(prompt_tokens=1)),
    ("response", lambda r: r["usage"].update(completion_tokens=1)),
    ("response", lambda r: r["usage"]["prompt_tokens_details"].update(cached_tokens=0)),
    ("model", lambda r: r.update(model="a-better-model")),
    ("malformed", lambda r: r.pop("mesh")),
    ("malformed", lambda r: r["mesh"].update(receipt="!")),
    ("malformed", lambda r: r["mesh"].update(receipt="")),
]


@pytest.mark.parametrize(("code", "change"), CHANGES)
def test_a_changed_response_fails(
    authority: Any, tell: Callable[..., Any], code: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    response = chat(tell("one"))
    change(response)
    assert failure(authority, response) == code


def test_every_choice_needs_its_own_receipt(authority: Any, tell: Callable[..., Any]) -> None:
    one, three = tell("one"), tell("three")
    response = chat(one)
    second = {**response["choices"][0], "index": 1}
    response["choices"].append(second)
    response["mesh"]["receipts"] = [
        {"index": 0, **record_of(one)},
        {"index": 1, **record_of(three)},
    ]
    assert [v.receipt for v in check(authority, response)] == [one.receipt, three.receipt]
    response["choices"][1] = {**second, "message": {"role": "assistant", "content": "x"}}
    assert failure(authority, response) == "response"
    response["mesh"]["receipts"].pop()
    assert failure(authority, response) == "malformed"


def test_a_changed_stream_fails(authority: Any, tell: Callable[..., Any]) -> None:
    story = tell("one")
    good = stream(story)
    lines = good.split("\n\n")
    assert failure(authority, good.replace("世界", "世間")) == "response"
    assert failure(authority, "\n\n".join(lines[:2] + lines[3:])) == "response"  # one is missing
    assert failure(authority, "\n\n".join([*lines[:3], lines[2], *lines[3:]])) == "response"
    assert failure(authority, good.replace("data: [DONE]\n\n", "")) == "malformed"
    late = [*lines[:5], lines[2], *lines[5:]]  # text after the end
    assert failure(authority, "\n\n".join(late)) == "malformed"


def test_what_a_client_library_has_written_out_holds(
    authority: Any, tell: Callable[..., Any]
) -> None:
    response = chat(tell("one"))
    response["choices"][0]["message"].update(tool_calls=None, audio=None, annotations=None)
    check(authority, response)
    response["choices"][0]["message"]["audio"] = {"data": "another text"}
    with pytest.raises(ReceiptError, match=r"choices\.0\.message\.audio: Extra") as caught:
        check(authority, response)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_there_twice_is_refused(authority: Any, tell: Callable[..., Any]) -> None:
    """Which of the two a reader is shown depends on the reader."""
    text = json.dumps(chat(tell("one")))
    twice = text.replace('"content":', '"content": "another text", "content":')
    assert failure(authority, twice) == "malformed"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"data: {}\n\ndata: [DONE]\n\n", b"[" * 99999]
)
def test_what_is_no_response_is_malformed(authority: Any, data: bytes) -> None:
    with pytest.raises(ReceiptError) as caught:
        verify_response(data, authority.ca_pem, now=authority.now)
    assert caught.value.code == "malformed"


def test_a_bad_ca_file_is_named(authority: Any, make_authority: Any, tell: Any) -> None:
    data = json.dumps(chat(tell("one"))).encode()
    other = make_authority("elsewhere", now=authority.now)
    for pem in (b"", b"nonsense", other.ca_pem, authority.ca_pem + other.ca_pem):
        with pytest.raises(ReceiptError) as caught:
            verify_response(data, pem, now=authority.now)
        assert caught.value.code == "certificate"
