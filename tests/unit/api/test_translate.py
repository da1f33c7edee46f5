"""Bodies of the OpenAI API: what is honoured, what is refused, and by which name."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from inference.generation import SamplingParams
from mesh.api.errors import ApiError
from mesh.api.openai.translate import Ask, chat_ask, choice_seed, completion_ask

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Ask:
    return chat_ask({"model": "m", "messages": HELLO, **fields}, lambda: 4711)


def completion(**fields: Any) -> Ask:
    return completion_ask({"model": "m", "prompt": "once", **fields}, lambda: 4711)


def refused(ask: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_bare_chat_leaves_the_model_as_it_is() -> None:
    ask = chat()
    (request,) = ask.requests
    assert request.model == "m"
    assert request.messages == ({"role": "user", "content": "hello"},)
    assert request.sampling == SamplingParams(seed=4711)
    assert request.max_tokens is None
    assert request.stop == ()
    assert not ask.stream


def test_every_sampling_field_arrives() -> None:
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 99,
    }
    (request,) = chat(**given, logit_bias={"5": -100, "17": 2.5}).requests
    assert request.sampling == SamplingParams(**given, logit_bias={5: -100.0, 17: 2.5})
    (request,) = chat(stop="END", max_tokens=7, ignore_eos=True).requests
    assert (request.stop, request.max_tokens, request.ignore_eos) == (("END",), 7, True)
    (request,) = chat(stop=["a", "b"], max_completion_tokens=8).requests
    assert (request.stop, request.max_tokens) == (("a", "b"), 8)


def test_null_is_the_default_everywhere() -> None:
    names = """
        n seed stop stream temperature top_p top_k min_p presence_penalty frequency_penalty
        repetition_penalty logit_bias max_tokens max_completion_tokens logprobs top_logprobs
        ignore_eos stream_options user metadata store service_tier response_format modalities
        tools tool_choice functions function_call parallel_tool_calls audio prediction
        reasoning_effort web_search_options safety_identifier prompt_cache_key verbosity
    """
    assert chat(**dict.fromkeys(names.split())) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u-1", "metadata": {"k": "v"}, "safety_identifier": "x", "prompt_cache_key": "y"},
        {"store": False, "service_tier": "auto"},
        {"service_tier": "default", "verbosity": "medium"},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"functions": [], "function_call": "none"},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"frobnicate": 1}, "frobnicate", "unsupported_parameter"),
        ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_value"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_value"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "unsupported_value"),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_value"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
        ({"audio": {"voice": "alloy"}}, "audio", "unsupported_parameter"),
        ({"prediction": {}}, "prediction", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": float("inf")}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"seed": 1 << 70}, "seed", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"07": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"7": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_value",
        ),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        (
            {"messages": [*HELLO, {"role": "tool", "content": "x"}]},
            "messages[1].role",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "name": "bob"}]},
            "messages[0].name",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "unsupported_value",
        ),
        ({"model": ""}, "model", "invalid_value"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(chat, **fields)
    assert (error.param, error.code) == (param, code)
    assert param in error.message


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(missing: str) -> None:
    body = {"model": "m", "messages": HELLO}
    del body[missing]
    with pytest.raises(ApiError) as caught:
        chat_ask(body, lambda: 1)
    assert caught.value.param == missing
    assert caught.value.code == "missing_required_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": HELLO}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1 << 31]}, "prompt[0]"),
        ({"prompt": ["a"] * 9, "n": 8}, "n"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_legacy_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(completion, **fields)
    assert error.param is not None
    assert error.param.startswith(param.partition("[")[0])


def test_prompts_in_all_their_forms() -> None:
    assert [r.prompt for r in completion(prompt="a").requests] == ["a"]
    assert [r.prompt for r in completion(prompt=["a", "b"]).requests] == ["a", "b"]
    assert [r.prompt_tokens for r in completion(prompt=[1, 2]).requests] == [(1, 2)]
    two = completion(prompt=[[1], [2, 3]]).requests
    assert [r.prompt_tokens for r in two] == [(1,), (2, 3)]


def test_legacy_defaults_are_those_of_the_original() -> None:
    assert completion().requests[0].max_tokens == 16
    assert completion(best_of=3, n=3, echo=False, suffix="").n == 3


def test_parts_of_text_are_paragraphs_and_developer_is_system() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {
            "role": "assistant",
            "content": "hm",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
    ]
    assert chat(messages=messages).requests[0].messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "hm"},
    )


def test_choices_have_seeds_of_their_own_and_prompts_do_not() -> None:
    seeds = [r.sampling.seed for r in chat(n=4, seed=7).requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    # The first choice, and a prompt in a list, are what they would be if asked for alone.
    assert chat(n=2, seed=7).requests[0] == chat(seed=7).requests[0]
    batch = completion(prompt=["a", "b"], n=2, seed=7).requests
    assert [r.prompt for r in batch] == ["a", "a", "b", "b"]
    assert batch[2:] == completion(prompt="b", n=2, seed=7).requests


def test_the_seed_of_a_choice_is_the_documented_function() -> None:
    data = b"meshnode-choice-seed-v1" + (7).to_bytes(8, "big") + (3).to_bytes(4, "big")
    digest = hashlib.sha256(data).digest()
    assert choice_seed(7, 3) == int.from_bytes(digest[:8], "big") % (1 << 63)


def test_a_negative_seed_is_a_seed() -> None:
    assert chat(seed=-1).requests[0].sampling.seed == (1 << 63) - 1


def test_logprobs_in_both_dialects() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).logprobs == 5
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=5).logprobs == 5


def test_a_hostile_number_of_mistakes_stays_one_error() -> None:
    many = {f"x{i}": 1 for i in range(100_000)}
    assert "fields" in refused(chat, **many).message
    assert "fields" in refused(chat, messages=[{"role": "user", "content": "x", **many}]).message
    assert "metadata" in refused(chat, metadata=many).message
    error = refused(completion, prompt=[[]] * 300_000)
    assert error.param is not None
    assert len(error.message) < 2100


def test_a_huge_field_name_is_not_sent_back() -> None:
    error = refused(chat, **{"x" * 100_000: 1})
    assert error.param is not None
    assert len(error.param) <= 200
    assert len(error.message) <= 2000
