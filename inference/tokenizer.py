"""Text to token ids and back, and chats to prompts, with a model's own tokenizer.

A thin wrapper over the tokenizer of openvino-genai, which runs the tokenizer's OpenVINO graph and
the chat template without torch or transformers. What it passes over in silence is an error here:
roles and contents that a template would render as nonsense, and prompts that it would cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import openvino_genai

from inference.errors import GenerationError
from inference.store.manifest import ModelManifest
from inference.text import text_of, texts_of

# Longer than any prompt. Without a number the tokenizer cuts at a limit of its own.
_MAX_LENGTH = 1 << 30
_CERTAIN = 512  # tokens; no tokenizer cuts below
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads at once.

    Raises :class:`GenerationError` (``engine_failed``) when the model's files cannot be used.
    """

    def __init__(self, model: ModelManifest) -> None:
        self._model = model
        try:
            self._tokenizer = openvino_genai.Tokenizer(model.path)
            if model.chat_template is not None and not self._tokenizer.chat_template:
                self._tokenizer.set_chat_template(model.chat_template)
        except RuntimeError as error:
            raise GenerationError(
                "engine_failed", f"the tokenizer of {model.name} cannot be loaded: {_line(error)}"
            ) from None
        self._pieces = self._read_pieces()
        self._texts = self._read_texts()
        self._uncut = _CERTAIN  # texts of fewer tokens are known to come out whole
        ids = model.eos_token_ids or (int(self._tokenizer.get_eos_token_id()),)
        self.eos_token_ids: frozenset[int] = frozenset(i for i in ids if i >= 0)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``; ``special`` adds what the model expects around a plain text.

        Raises :class:`GenerationError` (``context_length_exceeded``) for a text that the tokenizer
        would have cut.
        """
        data = text.encode("utf-8", "replace").decode()  # lone surrogates
        ids = self._encode(data, special)
        if len(ids) >= self._uncut:
            # Some tokenizers cut off what is beyond a limit of their own, despite being told not
            # to. One that does gives the same length for twice the text.
            double = len(self._encode(data + data, special))
            if double <= len(ids):
                raise GenerationError(
                    "context_length_exceeded",
                    f"the tokenizer of {self._model.name} takes at most {len(ids)} tokens",
                )
            self._uncut = max(self._uncut, double)
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=special, max_length=_MAX_LENGTH)
        return cast("list[int]", ids.input_ids.data[0].tolist())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens; bytes that are not UTF-8 are left out."""
        if self._texts is not None:
            return text_of(self._texts, ids)
        return str(self._tokenizer.decode(list(ids))) if ids else ""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt for ``messages``, each with ``role`` and ``content``.

        ``content`` is a text or a list of ``{"type": "text", "text": ...}``. Raises
        :class:`GenerationError` (``invalid_value``, param ``messages``) for anything else, and when
        the model's template refuses the order of roles.
        """
        if not self._tokenizer.chat_template:
            raise GenerationError(
                "invalid_value",
                f"{self._model.name} has no chat template: it completes plain prompts only",
                param="messages",
            )
        checked = [_message(index, message) for index, message in enumerate(messages)]
        try:
            prompt = self._tokenizer.apply_chat_template(checked, add_generation_prompt)
        except RuntimeError as error:
            raise GenerationError(
                "invalid_value",
                f"the chat template of {self._model.name} refuses these messages: {_line(error)}",
                param="messages",
            ) from None
        return str(prompt)

    def _read_pieces(self) -> list[bytes]:
        try:
            vocabulary: dict[bytes, int] = self._tokenizer.get_vocab()
        except RuntimeError:
            return []  # it has none to tell of
        pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for piece, index in vocabulary.items():
            pieces[index] = piece
        return pieces

    def _read_texts(self) -> dict[int, bytes] | None:
        try:
            return texts_of(self._pieces, self._tokenizer.decode)
        except RuntimeError:
            return None

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special tokens by their names; for log probabilities.

        Empty for an id that the vocabulary does not have.
        """
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` as a template wants it: role and content as plain texts."""

    def refuse(problem: str) -> GenerationError:
        return GenerationError("invalid_value", f"messages[{index}]{problem}", param="messages")

    role = message.get("role")
    if role not in _ROLES:
        raise refuse(f".role is {str(role)[:40]!r}; it must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = []
        for at, part in enumerate(content):
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise refuse(f".content[{at}] is not a text part")
            if part.get("type") != "text":
                raise refuse(f".content[{at}].type is not 'text': this model takes only text")
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise refuse(".content must be a text or a list of text parts")
    # "developer" is the newer name of "system", which templates know.
    return {"role": "system" if role == "developer" else role, "content": content}


def _line(error: Exception) -> str:
    """The line of a runtime's error that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if line.startswith("Minja's error:"):
            return line.removeprefix("Minja's error:").strip()[:300]
    return lines[-1][:300] if lines else type(error).__name__
