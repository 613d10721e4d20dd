"""Special tokens that are written out in a message: they stay text, as what a user typed must not end a turn.

The tokenizer knows a special token by its text alone, so a rendering can't say which of two equal texts the template
wrote. So the contents are rendered with a stand-in for each such text, and in the rendering the template's own special
tokens are swapped for private ones of a copied tokenizer, which then reads everything else as text: all else (spaces
beside a special token, the prefix of a text's first word) is tokenized as by the tokenizer itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.data.encoded import Encoded
from finetune.data.formats import Conversation

Hidden = Mapping[str, str]
"""The control token's text behind each stand-in."""
_PRIVATE = range(0xE000, 0xF8FF)


class ControlTokens:
    """The special tokens of one tokenizer, as texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {
            token.content: (token_id, token)
            for token_id, token in added.items()
            if (token.special or token.content in tokenizer.all_special_tokens) and token.content.strip()
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # Llama 3 has 256 of them, and all begin with the same character, which few texts hold.
        self._begins = sorted({content[0] for content in self._special})
        self._copy: _Copy | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None}

    def count(self, text: str) -> int:
        """How many special tokens are written out in ``text``."""
        if not any(begin in text for begin in self._begins):
            return 0
        return len(self._pattern.findall(text))

    def count_in(self, conversation: Conversation) -> int:
        return sum(map(self.count, _strings(conversation.messages))) + sum(
            map(self.count, _strings(conversation.tools))
        )

    def hide(self, conversation: Conversation) -> tuple[Conversation, Hidden]:
        """The conversation with a stand-in for each special token that is written out in its messages and tools."""
        texts = _all_strings(conversation)
        number = 0
        # Letters and digits alone, which templates neither trim nor escape.
        while any(f"controltoken{number}n" in text for text in texts):
            number += 1
        stand_ins = {content: f"controltoken{number}n{index}n" for index, content in enumerate(self._special)}

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(lambda found: stand_ins[found[0]], value)
            if isinstance(value, dict):
                return {hidden(key): item if key == "role" else hidden(item) for key, item in value.items()}
            return [hidden(item) for item in value] if isinstance(value, list) else value

        found = replace(conversation, messages=hidden(conversation.messages), tools=hidden(conversation.tools))
        return found, {stand_in: content for content, stand_in in stand_ins.items()}

    def encode(self, text: str, hidden: Hidden) -> Encoded:
        """Tokenize a rendering with stand-ins: a special token is one where the template wrote it. Characters of the
        result are ``text``'s, so those of a stand-in belong to all tokens of what it stands for."""
        behind = re.compile("|".join(map(re.escape, hidden)) or "(?!)")
        parts = list(_parts(text, self._pattern, behind))
        copy = self._copied(text + "".join(hidden.values()))
        out, starts_in, starts_out = [], [], []
        length = 0
        for at, part, kind in parts:
            shown = {"text": part, "special": copy.names.get(part, ""), "hidden": hidden.get(part, "")}[kind]
            starts_in.append(at)
            starts_out.append(length)
            out.append(shown)
            length += len(shown)
        points = np.array([*starts_out, length]), np.array([*starts_in, len(text)])
        return copy.encode("".join(out), *points)

    def encode_as_text(self, text: str) -> Encoded:
        """Tokenize ``text`` with no special token in it."""
        ends = np.array([0, len(text)])
        return self._copied(text).encode(text, ends, ends)

    def _copied(self, text: str) -> _Copy:
        if self._copy is None or any(mark in text for mark in self._copy.marks):
            free = [chr(code) for code in _PRIVATE if chr(code) not in text][:2]
            self._copy = _Copy(self._tokenizer, self._special, free[0], free[1])
        return self._copy


class _Copy:
    """The tokenizer with a private name for each special token, to be read as that token while its own is text."""

    def __init__(self, tokenizer: Any, special: Mapping[str, tuple[int, Any]], opening: str, closing: str) -> None:
        from tokenizers import AddedToken, Tokenizer

        self.marks = opening, closing
        self.names = {content: f"{opening}{index}{closing}" for index, content in enumerate(special)}
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.add_tokens(
            [
                AddedToken(
                    self.names[content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    single_word=token.single_word,
                    special=False,
                )
                for content, (_, token) in special.items()
            ]
        )
        self._backend.encode_special_tokens = True
        self._own = {
            self._backend.token_to_id(self.names[content]): token_id for content, (token_id, _) in special.items()
        }

    def encode(self, text: str, shown: np.ndarray, meant: np.ndarray) -> Encoded:
        """``shown`` and ``meant``: where each part of ``text`` begins in it and in the text it was made from."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        pairs = np.array(encoding.offsets, dtype=np.float64).reshape(-1, 2)
        starts = np.floor(np.interp(pairs[:, 0], shown, meant) + 1e-6).astype(np.int64)
        ends = np.ceil(np.interp(pairs[:, 1], shown, meant) - 1e-6).astype(np.int64)
        ids = [self._own.get(token_id, token_id) for token_id in encoding.ids]
        return Encoded(ids, np.stack((starts, ends), axis=1))


def _parts(text: str, special: re.Pattern[str], hidden: re.Pattern[str]) -> Iterator[tuple[int, str, str]]:
    """(where, text, kind) of each part of a rendering: what is hidden, the template's special tokens, and the rest."""
    at = 0
    for found in re.finditer(f"(?P<hidden>{hidden.pattern})|(?P<special>{special.pattern})", text):
        if found.start() > at:
            yield at, text[at : found.start()], "text"
        yield found.start(), found[0], found.lastgroup or ""
        at = found.end()
    if at < len(text):
        yield at, text[at:], "text"


def _all_strings(conversation: Conversation) -> list[str]:
    return [*_strings(conversation.messages), *_strings(conversation.tools)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            if key != "role":
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
