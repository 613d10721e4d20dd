"""Texts and rows of token ids to token rows with their targets, before any is cut or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from finetune.data.control import ControlTokens
from finetune.data.conversations import all_but_first
from finetune.data.encoded import Encoded, encode_texts
from finetune.data.formats import Completion, Document, TokenIds
from finetune.errors import DataError

NO_LABEL = -100
_GUARDS = ("\n", ".", "a", "0", " ", "|")


class TextEncoder:
    """Tokenizes documents and completions with one tokenizer: its beginning-of-sequence token where it writes one
    itself, the text, and eos, each once."""

    def __init__(self, tokenizer: Any, controls: ControlTokens, *, allow_control_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._controls = controls
        self._allow_control_tokens = allow_control_tokens
        self._prepends_bos: bool | None = None

    def documents(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """int32 (T,) for each document."""
        texts = [self._without_end(self._without_beginning(document.text)) for document in documents]
        return [
            np.array([*self._head(), *encoded.input_ids, self._eos()], dtype=np.int32)
            for encoded in self._encode(texts)
        ]

    def completions(self, completions: Sequence[tuple[Completion, str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(int32 (T,) tokens, bool (T,) loss mask) for each completion.

        The prompt's tokens are those of the prompt by itself, as the model gets it when it is asked. Where a token of
        the joined text would lie across the border, the completion is tokenized by itself as well, so that no target
        is missing and none holds a part of the prompt.
        """
        prompts = [self._without_beginning(example.prompt) for example, _ in completions]
        wholes = [
            prompt + self._without_end(example.completion)
            for prompt, (example, _) in zip(prompts, completions, strict=True)
        ]
        rows = []
        alone, joined = self._encode(prompts), self._encode(wholes)
        for prompt, whole, asked, both, (_, place) in zip(prompts, wholes, alone, joined, completions, strict=True):
            length = len(asked.input_ids)
            if np.array_equal(both.input_ids[:length], asked.input_ids) and _starts_at(both, length, len(prompt)):
                rest = both.input_ids[length:]
            else:
                rest = self._continuation(whole[len(prompt) :], place)
            head = self._head()
            input_ids = np.array([*head, *asked.input_ids, *rest, self._eos()], dtype=np.int32)
            mask = np.arange(len(input_ids)) >= max(1, len(head) + length)
            rows.append((input_ids, mask))
        return rows

    @property
    def head_length(self) -> int:
        return len(self._head())

    def prompt(self, text: str) -> list[int]:
        """The token ids that the model is asked with for a completion's prompt."""
        (encoded,) = self._encode([self._without_beginning(text)])
        return [*self._head(), *encoded.input_ids.tolist()]

    def count(self, text: str) -> int:
        """How many control tokens are written out in a text, besides its own beginning and end."""
        return self._controls.count(self._without_end(self._without_beginning(text)))

    def _continuation(self, text: str, place: str) -> np.ndarray:
        """The ids of a text that follows another one: no space before its first word, as some tokenizers write it."""
        if not text:
            return np.empty(0, dtype=np.int32)
        for guard in _GUARDS:
            (encoded,) = self._encode([guard + text])
            first = encoded.first_token(1)
            if first and encoded.starts[first] == 1 and encoded.ends[first - 1] == 1:
                return encoded.input_ids[first:]
        raise DataError(
            "the border between prompt and completion can't be tokenized",
            where=place,
            fix="let the prompt end, or the completion begin, with white space or punctuation",
        )

    def _encode(self, texts: Sequence[str]) -> list[Encoded]:
        encodings = encode_texts(self._tokenizer, texts)
        if not self._allow_control_tokens:
            for row, text in enumerate(texts):
                if self._controls.count(text):
                    encodings[row] = self._controls.encode_as_text(text)
        return encodings

    def _head(self) -> list[int]:
        """The beginning-of-sequence token, where the tokenizer writes it before a text."""
        bos = self._tokenizer.bos_token_id
        if self._prepends_bos is None:
            self._prepends_bos = bos is not None and self._tokenizer("a").input_ids[:1] == [bos]
        return [bos] if self._prepends_bos else []

    def _eos(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no eos token to end a text with",
                where=self._tokenizer.name_or_path or None,
                fix="set `eos_token` in tokenizer_config.json",
            )
        return int(self._tokenizer.eos_token_id)

    def _without_beginning(self, text: str) -> str:
        return text.removeprefix(self._tokenizer.bos_token) if self._head() else text

    def _without_end(self, text: str) -> str:
        return text.removesuffix(self._tokenizer.eos_token or "")


def _starts_at(encoded: Encoded, token: int, character: int) -> bool:
    """Whether ``token`` holds nothing before ``character``."""
    return token >= len(encoded.input_ids) or int(encoded.starts[token]) >= character


def token_ids_row(example: TokenIds, place: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32 (T,) tokens, bool (T,) loss mask) of a row that was tokenized elsewhere.

    Raises DataError for an id that the tokenizer doesn't have.
    """
    ids = np.array(example.input_ids, dtype=np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        raise DataError(
            f"`input_ids[{wrong[0]}]` is {ids[wrong[0]]}, and the tokenizer's ids are 0 to {vocab_size - 1}",
            where=place,
            fix="tokenize the rows with the tokenizer of the model that is trained",
        )
    mask = all_but_first(len(ids))
    if example.labels is not None:
        labels = np.array(example.labels, dtype=np.int64)
        assert np.all((labels == ids) | (labels == NO_LABEL))
        mask &= labels == ids
    return ids.astype(np.int32), mask
