"""``{"messages": [{"role", "content"}, ...]}``: a chat, optionally with ``tools`` and ``system``.

``content`` is text or a list of parts (text, reasoning). An assistant's turn with ``"weight": 0`` or ``"train": false``
is not learnt. ``tools`` and the arguments of ``tool_calls`` are objects or JSON text.
"""

from __future__ import annotations

from typing import Any

from finetune.data.chat import read_messages, read_tools, with_system
from finetune.data.formats import FORMATS, Conversation, RowFormat


def parse_messages(row: dict[str, Any], place: str) -> Conversation:
    messages, trained = read_messages(row.get("messages"), place)
    messages, trained = with_system(row.get("system"), messages, trained, place)
    return Conversation(messages, trained, read_tools(row.get("tools"), place))


FORMATS.register("messages")(RowFormat(required=("messages",), optional=("tools", "system"), parse=parse_messages))
