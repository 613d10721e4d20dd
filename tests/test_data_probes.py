"""What a template leaves out is found, though its text stands elsewhere in the rendering."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.options import ChatOptions
from finetune.data.template import ChatTemplate
from finetune.errors import DataError
from finetune.evaluate.generation import chat_prompt_ids
from tests.data_templates import tokenizer_with
from tests.test_data_masks import CHAT
from tests.test_data_templates import QWEN, WEATHER, Message, conversation, encoder
from tests.tiny import CHATML_TEMPLATE


def asked_with(*messages: Message) -> list[Message]:
    return [{"role": "user", "content": "6 x 7?"}, *messages]


def call(name: str, **arguments: Any) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TWO_CALLS = CHATML_TEMPLATE.replace("{{ message['content'] }}", "{{ (message.tool_calls or [message])[0] | tojson }}")
SKIPPING = CHATML_TEMPLATE.replace("in messages %}", "in messages if message['role'] in ['user', 'assistant'] %}")
SAID_ELSEWHERE = {
    "tool's result": (
        SKIPPING,
        asked_with({"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42"}),
        None,
        r"the content of message 2 \(tool\): '42'",
    ),
    "system": (
        SKIPPING,
        [{"role": "system", "content": "6 x"}, *asked_with({"role": "assistant", "content": "42"})],
        None,
        r"the content of message 1 \(system\): '6 x'",
    ),
    "reasoning": (
        CHATML_TEMPLATE,
        asked_with({"role": "assistant", "reasoning_content": "42", "content": "It is 42"}),
        None,
        "the reasoning of message 2",
    ),
    "tool": (
        CHATML_TEMPLATE,
        [{"role": "user", "content": "The weather?"}, {"role": "assistant", "content": "4"}],
        [WEATHER],
        "the tool 'weather'",
    ),
    "tool call": (
        CHATML_TEMPLATE,
        asked_with({"role": "assistant", "content": "times 6 and 7", "tool_calls": [call("times", a="6", b=7)]}),
        None,
        "the tool call of message 2",
    ),
    "second tool call": (
        TWO_CALLS,
        asked_with({"role": "assistant", "content": "", "tool_calls": [call("times", a=6), call("times", a=6)]}),
        None,
        "the tool call of message 2",
    ),
    "number": (
        CHATML_TEMPLATE.replace(
            "{{ message['content'] }}",
            "{{ message.content }}{% for c in message.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
        ),
        asked_with({"role": "assistant", "content": "a", "tool_calls": [call("f", a=6)]}),
        None,
        "the tool call's argument of message 2",
    ),
}


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("case", SAID_ELSEWHERE)
def test_what_is_left_out_is_an_error_though_its_text_stands_elsewhere(case: str, train_on: str) -> None:
    template, messages, tools, missing = SAID_ELSEWHERE[case]
    with pytest.raises(DataError, match=f"leaves out {missing}") as caught:
        encoder(tokenizer_with(template), conversation(messages, tools), train_on=train_on)
    assert caught.value.where == "rows.jsonl:1"


def test_template_is_asked_once_for_conversations_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, *args: Any, places: Any, **kwargs: Any) -> list[str]:
        rendered.extend(places)
        return render(self, *args, places=places, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    chats: list[list[Message]] = [
        [
            {"role": "user", "content": f"Town {number}?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**call("weather", town=f"t{number}"), "id": f"{number}"}],
            },
            {"role": "tool", "content": f"{number} °C", "tool_call_id": f"{number}"},
            {"role": "assistant", "content": "Warm"},
        ]
        for number in range(5)
    ]
    made = encoder(QWEN, *[conversation(chat, [WEATHER]) for chat in chats], history="split")
    assert made.counts["kept"] == 10
    # Of the whole, and up to the call: once each, not once a row.
    assert 0 < rendered.count("a probe") <= 4


def test_template_that_refuses_the_probe_is_judged_by_the_text() -> None:
    refusing = CHATML_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{% if 'probe0word' in message.content %}{{ raise_exception('no') }}{% endif %}{{ message['content'] }}",
    )
    assert encoder(tokenizer_with(refusing), conversation([{**CHAT[0], "name": "A"}, CHAT[1]])).counts["kept"] == 1
    with pytest.raises(DataError, match="leaves out the reasoning"):
        encoder(tokenizer_with(refusing), conversation([CHAT[0], {**CHAT[1], "reasoning_content": "Well"}]))


def test_prompt_of_which_the_template_leaves_something_out_is_an_error() -> None:
    with pytest.raises(DataError, match=r"the content of message 1 \(system\): '6 x'") as caught:
        chat_prompt_ids(tokenizer_with(SKIPPING), [{"role": "system", "content": "6 x"}, *asked_with()], ChatOptions())
    assert caught.value.where == "the prompt"
