"""``{"question", "answer"}``: one question and what the assistant answers, optionally ``system`` and ``reasoning``."""

from __future__ import annotations

from typing import Any

from finetune.data.chat import with_system
from finetune.data.formats import FORMATS, Conversation, RowFormat, text_field


def parse_question_answer(row: dict[str, Any], place: str) -> Conversation:
    messages = [
        {"role": "user", "content": text_field(row, "question", place)},
        {"role": "assistant", "content": text_field(row, "answer", place)},
    ]
    if row.get("reasoning"):
        messages[1]["reasoning_content"] = text_field(row, "reasoning", place)
    messages, trained = with_system(row.get("system"), messages, (1,), place)
    return Conversation(messages, trained)


FORMATS.register("question_answer")(
    RowFormat(required=("question", "answer"), optional=("system", "reasoning"), parse=parse_question_answer)
)
