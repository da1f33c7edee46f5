"""The demo model's real tokenizer, as engines use it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import openvino_genai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import GenerationError
from inference.generation import GenerateRequest
from inference.prompt import prompt_tokens
from inference.store.manifest import ModelManifest
from inference.text import TextStream
from inference.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_model: ModelManifest) -> Tokenizer:
    return Tokenizer(demo_model)


TEXTS = (
    "The capital of France is Paris.",
    "  leading and   inner spaces\n\n\ttabs ",
    "héllo wörld 🙂🏳️‍🌈 日本語 العربية",
    "def f(x):\n    return x ** 2  # <|im_end|",
)


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.piece(i) for i in ids).decode() == text


@settings(deadline=None, max_examples=60)
@given(ids=st.lists(st.one_of(st.integers(17, 49_151), st.integers(100, 400)), max_size=80))
def test_streamed_text_is_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(tokenizer.decode)
    pieces = [stream.feed(token) for token in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.one_of(st.integers(0, 49_151), st.integers(0, 400)), max_size=40))
def test_text_is_that_of_the_runtime(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tokenizer._texts is not None  # as this model's vocabulary is one of bytes
    assert tokenizer.decode(ids) == str(tokenizer._tokenizer.decode(ids))


def test_emoji_arrives_whole(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer.decode)
    pieces = [stream.feed(token) for token in tokenizer.encode("a 🏳️‍🌈 b" * 20)]
    assert any(not piece for piece in pieces)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == "a 🏳️‍🌈 b" * 20


def test_long_prompts_come_out_whole(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("word " * 20_000)) > 20_000
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode(tokenizer.encode("lone \ud800 surrogate")) == "lone ? surrogate"


def test_a_tokenizer_that_cuts_is_noticed(demo_model: ModelManifest, tmp_path: Path) -> None:
    """OpenVINO GenAI's conversion keeps the last 8192 tokens of a prompt; ours lifts that."""
    folder = tmp_path / "cutting"
    shutil.copytree(demo_model.path, folder)
    weights = folder / "openvino_tokenizer.bin"
    data = weights.read_bytes()
    limit, lifted = (8192).to_bytes(4, "little"), (2**31 - 1).to_bytes(4, "little")
    assert data.count(lifted) == 1
    weights.write_bytes(data.replace(lifted, limit))
    cutting = Tokenizer(demo_model.model_copy(update={"path": folder}))
    assert len(cutting.encode("word " * 5000)) > 5000
    with pytest.raises(GenerationError, match="at most 8192 tokens") as caught:
        cutting.encode("word " * 20_000)
    assert caught.value.code == "context_length_exceeded"
    # What it would have done in silence:
    plain = openvino_genai.Tokenizer(folder)
    assert plain.encode("word " * 20_000).input_ids.shape[1] == 8192


def test_end_tokens_and_pieces(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.piece(2) == b"<|im_end|>"
    assert tokenizer.piece(49_152) == tokenizer.piece(-1) == b""


def test_chat_template(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    prompt = tokenizer.apply_chat_template(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "4"},
        ],
        add_generation_prompt=False,
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
    )
    started = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert started.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "x"}, "role is 'None'"),
        ({"role": "robot", "content": "x"}, "role is 'robot'"),
        ({"role": ["user"], "content": "x"}, "role is"),
        ({"role": "user"}, "content must be a text"),
        ({"role": "user", "content": 5}, "content must be a text"),
        ({"role": "user", "content": ["x"]}, r"content\[0\] is not a text part"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\] is not a text part"),
        ({"role": "user", "content": [{"type": "x", "text": "y"}]}, "takes only text"),
    ],
)
def test_messages_that_make_no_sense(
    tokenizer: Tokenizer, message: dict[str, object], problem: str
) -> None:
    with pytest.raises(GenerationError, match=problem) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "ok"}, message])
    assert caught.value.code == "invalid_value" and caught.value.param == "messages"
    assert "messages[1]" in caught.value.message


def _with_template(model: ModelManifest, folder: Path, template: str) -> Tokenizer:
    shutil.copytree(model.path, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    for name in ("openvino_tokenizer.xml", "openvino_detokenizer.xml"):
        xml = (folder / name).read_text(encoding="utf-8").split("<chat_template")
        (folder / name).write_text(xml[0] + xml[1].split("/>", 1)[1], encoding="utf-8")
    return Tokenizer(model.model_copy(update={"path": folder, "chat_template": template or None}))


def test_a_template_that_refuses_says_why(demo_model: ModelManifest, tmp_path: Path) -> None:
    refusing = _with_template(
        demo_model,
        tmp_path / "refusing",
        "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}x",
    )
    hello = {"role": "user", "content": "hello"}
    with pytest.raises(GenerationError, match="refuses these messages: roles must alternate"):
        refusing.apply_chat_template([hello, hello])


def test_a_model_without_template(demo_model: ModelManifest, tmp_path: Path) -> None:
    plain = _with_template(demo_model, tmp_path / "plain", "")
    with pytest.raises(GenerationError, match="completes plain prompts only"):
        plain.apply_chat_template([{"role": "user", "content": "hello"}])


def test_prompt_of_a_request(tokenizer: Tokenizer) -> None:
    def tokens(**fields: object) -> list[int]:
        request = GenerateRequest.model_validate({"model": "m", **fields})
        return prompt_tokens(request, tokenizer, vocabulary=49_152, context=100)

    assert tokens(prompt_tokens=[5, 6]) == [5, 6]
    assert tokens(prompt="Hello there") == tokenizer.encode("Hello there")
    chat = tokens(messages=[{"role": "user", "content": "Hi"}])
    assert chat[0] == 1 and chat.count(1) == 3  # <|im_start|>, once per turn
    assert len(tokens(prompt="a " * 90, max_tokens=5)) == 91
    with pytest.raises(GenerationError, match="the prompt has 91 and max_tokens asks for 20"):
        tokens(prompt="a " * 90, max_tokens=20)
    with pytest.raises(GenerationError, match="leaves no room") as caught:
        tokens(prompt="a " * 99)
    assert caught.value.code == "context_length_exceeded"


def test_the_demo_model_is_what_it_should_be(demo_model: ModelManifest) -> None:
    assert demo_model.name == "smollm2-135m-instruct"
    assert (demo_model.architecture, demo_model.layers) == ("llama", 30)
    assert (demo_model.context_length, demo_model.hidden_size) == (8192, 576)
    assert demo_model.kv_elements == 2 * 30 * 3 * 64
    assert demo_model.eos_token_ids == (2,)
    assert "<|im_start|>" in (demo_model.chat_template or "")
    # The digest comes from the GGUF file, whatever version of OpenVINO converted it.
    assert demo_model.digest == "b74dafe4c32728e3d4b0ab39ae35c5fa95c16162aeede4a4ffd28da0c290c1c0"
