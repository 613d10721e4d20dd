"""Prompts with a reference answer, for exact-match evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.data.control import ControlTokens
from finetune.data.conversations import ConversationEncoder
from finetune.data.formats import Completion, Conversation
from finetune.data.options import DEFAULT_CHAT_OPTIONS, ChatOptions
from finetune.data.plain import TextEncoder
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.errors import DataError


@dataclass(frozen=True)
class Prompt:
    messages: list[dict[str, Any]]
    """The conversation before its last assistant's turn; empty for a plain prompt."""
    prompt_ids: list[int]
    """What generation starts from: those messages rendered with the generation prompt, or the plain prompt."""
    reference: str
    """The last assistant's turn, or the completion."""


def load_prompts(source: DatasetSettings, tokenizer: Any, options: ChatOptions = DEFAULT_CHAT_OPTIONS) -> list[Prompt]:
    """Cut each conversation before its last assistant's turn, each completion before what is to be completed.

    The ids are those that training has there, with equal ``options``. Raises DataError for a row of another kind.
    """
    chats: list[tuple[Conversation, str]] = []
    completions: list[Completion] = []
    references: list[tuple[bool, str]] = []
    for example, place in read_examples(source):
        if isinstance(example, DataError):
            continue
        if isinstance(example, Completion):
            completions.append(example)
            references.append((False, example.completion))
            continue
        turns = (
            [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
            if isinstance(example, Conversation)
            else []
        )
        if not isinstance(example, Conversation) or not turns or turns[-1] == 0:
            raise DataError(
                "the row has no assistant's turn that answers something",
                where=place,
                fix="evaluate on conversations (messages or alpaca rows) that end in the assistant's answer",
            )
        references.append((True, example.messages[turns[-1]]["content"]))
        chats.append((Conversation(example.messages[: turns[-1]], (), example.tools), place))
    if not references:
        raise DataError("no row is left to evaluate", where=source.path, fix="correct the rows")
    chat_ids = iter(ConversationEncoder(tokenizer, "all", options).prompts(chats) if chats else [])
    texts = TextEncoder(tokenizer, ControlTokens(tokenizer), allow_control_tokens=options.allow_control_tokens)
    plain_ids = iter([texts.prompt(completion.prompt) for completion in completions])
    messages = iter([chat.messages for chat, _ in chats])
    return [
        Prompt(next(messages), next(chat_ids), reference) if is_chat else Prompt([], next(plain_ids), reference)
        for is_chat, reference in references
    ]
