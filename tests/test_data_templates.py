"""Templates that rewrite history, tools and reasoning, control tokens in contents, and which turns are learnt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune.cli import build_parser
from finetune.data.encoder import RowEncoder
from finetune.data.formats import Conversation
from finetune.data.options import ChatOptions
from finetune.errors import DataError
from finetune.evaluate.generation import chat_prompt_ids
from finetune.train.settings import TrainSettings
from tests.data_templates import MARKED, QWEN3, qwen3_tokenizer, tokenizer_with
from tests.test_data_masks import CHAT, CONTENT, supervised_runs
from tests.tiny import CHATML_TEMPLATE, tiny_tokenizer

Message = dict[str, Any]

QWEN = qwen3_tokenizer()
WEATHER: Message = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town, in °C",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
THOUGHT: list[Message] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "reasoning_content": "Two and two.", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "reasoning_content": "Three and three.", "content": "6"},
]


def conversation(messages: list[Message], tools: list[Message] | None = None) -> Conversation:
    trained = tuple(turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    return Conversation(messages, trained, tools)


def encoder(tokenizer: Any, *examples: Any, train_on: Any = "assistant", **options: Any) -> RowEncoder:
    made = RowEncoder(tokenizer, None, "error", train_on, ChatOptions(**options))
    made.add([(example, f"rows.jsonl:{line}") for line, example in enumerate(examples, start=1)], skip_invalid=False)
    return made


def runs(tokenizer: Any, made: RowEncoder) -> list[list[str]]:
    return [supervised_runs(tokenizer, row.input_ids, row.loss_mask) for row in made.rows]


def ids(tokenizer: Any, messages: list[Message], **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, **options)["input_ids"])


@st.composite
def reasoned_chats(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENT)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(CONTENT)})
        for _ in range(draw(st.integers(0, 2))):
            call = {"name": "weather", "arguments": {"town": draw(CONTENT), "days": draw(st.integers(0, 9))}}
            turn = {"role": "assistant", "content": draw(CONTENT), "tool_calls": [{"function": call}]}
            messages.append(turn if draw(st.booleans()) else {**turn, "reasoning_content": draw(CONTENT)})
            messages += [{"role": "tool", "content": draw(CONTENT)} for _ in range(draw(st.integers(1, 2)))]
        messages.append({"role": "assistant", "content": draw(CONTENT)})
        if draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(CONTENT)
    return messages


def written(turn: Message, *, is_last: bool) -> str:
    """What a template of Qwen3's shape writes for an assistant's turn after which no user's message comes."""
    thought = turn.get("reasoning_content", "")
    text = turn["content"]
    if is_last or thought:
        stripped = thought.strip("\n")
        text = f"<think>\n{stripped}\n</think>\n\n{text.lstrip(chr(10))}"
    for call in turn.get("tool_calls", ()):
        town, days = call["function"]["arguments"]["town"], call["function"]["arguments"]["days"]
        escaped = town.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        text += (
            '\n<tool_call>\n{"name": "weather", "arguments": '
            f'{{"town": "{escaped}", "days": {days}}}' + "}\n</tool_call>"
        )
    return text + "<|im_end|>"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chat=reasoned_chats(), tools=st.sampled_from([None, [WEATHER]]))
def test_split_gives_each_turn_as_it_was_written_then(chat: list[Message], tools: list[Message] | None) -> None:
    made = encoder(QWEN, conversation(chat, tools), history="split")
    whole = ids(QWEN, chat, tools=tools)
    turns = [turn for turn, message in enumerate(chat) if message["role"] == "assistant"]
    if len(made.rows) == 1:
        # Nothing was rewritten: one row, each turn as in the whole.
        assert made.rows[0].input_ids.tolist() == whole
        assert runs(QWEN, made) == [[written(chat[turn], is_last=turn == len(chat) - 1) for turn in turns]]
        assert not made.counts["split_by_turn"]
        return
    assert made.counts["split_by_turn"] == 1
    for turn, row, row_runs in zip(turns, made.rows, runs(QWEN, made), strict=True):
        assert row.input_ids.tolist() == ids(QWEN, chat[: turn + 1], tools=tools)
        assert row_runs == [written(chat[turn], is_last=True)]
    (last,) = encoder(QWEN, conversation(chat, tools), history="last").rows
    assert last.input_ids.tolist() == whole
    assert supervised_runs(QWEN, last.input_ids, last.loss_mask) == [written(chat[-1], is_last=True)]


def test_rewritten_history_is_refused_by_default() -> None:
    with pytest.raises(DataError) as caught:
        encoder(QWEN, conversation(THOUGHT[:2]), conversation(THOUGHT))
    assert caught.value.where == "rows.jsonl:2"
    assert "message 2" in caught.value.what
    assert "Two and two." in caught.value.what
    assert "`history: split`" in str(caught.value.fix)
    assert "`history: last`" in str(caught.value.fix)
    # The recipe's fault, not the row's: it isn't skipped with the invalid ones.
    made = RowEncoder(QWEN, None, "error", "assistant")
    with pytest.raises(DataError, match="Two and two"):
        made.add([(conversation(THOUGHT), "rows.jsonl:1")], skip_invalid=True)


def test_rewritten_history_is_no_matter_where_only_the_last_turn_is_learnt() -> None:
    expected = ["<think>\nThree and three.\n</think>\n\n6<|im_end|>"]
    assert runs(QWEN, encoder(QWEN, conversation(THOUGHT), train_on="last")) == [expected]
    assert runs(QWEN, encoder(QWEN, Conversation(THOUGHT, (3,)))) == [expected]
    made = encoder(QWEN, Conversation(THOUGHT, (1,)), history="last")
    assert runs(QWEN, made) == [["<think>\nTwo and two.\n</think>\n\n4<|im_end|>"]]
    assert made.counts["cut_to_last_turn"] == 1


def test_markers_do_not_hide_that_history_is_rewritten() -> None:
    dropping = MARKED.replace("{{ message['content'] }}", "{{ message['content'] if loop.last else '' }}", 1)
    tokenizer = tokenizer_with(dropping)
    with pytest.raises(DataError, match="otherwise once later"):
        encoder(tokenizer, conversation(CHAT))
    made = encoder(tokenizer, conversation(CHAT), history="split")
    assert runs(tokenizer, made) == [["It is Paris.<|im_end|>"], ["Yes, it is.<|im_end|>"]]


def test_template_arguments_reach_training_and_prompt() -> None:
    plain = [CHAT[0], CHAT[1]]
    assert runs(QWEN, encoder(QWEN, conversation(plain))) == [["<think>\n\n</think>\n\nIt is Paris.<|im_end|>"]]
    quiet = encoder(QWEN, conversation(plain), template_kwargs={"enable_thinking": False})
    assert runs(QWEN, quiet) == [["It is Paris.<|im_end|>"]]
    with pytest.raises(DataError, match="generation prompt"):
        encoder(QWEN, conversation(THOUGHT[:2]), template_kwargs={"enable_thinking": False})
    for made, options in ((encoder(QWEN, conversation(plain)), {}), (quiet, {"enable_thinking": False})):
        asked = chat_prompt_ids(QWEN, [plain[0]], ChatOptions(template_kwargs=options))
        assert made.rows[0].input_ids[: len(asked)].tolist() == asked
        assert not made.rows[0].loss_mask[: len(asked)].any()
        assert made.rows[0].loss_mask[len(asked)]


def test_recipe_gives_the_template_s_own_arguments_alone() -> None:
    data = [{"path": "rows.jsonl"}]
    settings = TrainSettings.model_validate({"data": data, "chat_template_kwargs": {"enable_thinking": False}})
    assert settings.chat_options == ChatOptions(template_kwargs={"enable_thinking": False})
    for name in ("tokenize", "tools", "add_generation_prompt"):
        with pytest.raises(ValidationError, match=f"`{name}` is not for a recipe to set"):
            TrainSettings.model_validate({"data": data, "chat_template_kwargs": {name: True}})


@pytest.mark.parametrize("given", ["{", "[1]"])
def test_template_arguments_on_the_command_line_are_a_json_object(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "model", "--prompt", "Hi", "--chat-template-kwargs"]
    with pytest.raises(SystemExit):
        build_parser().parse_args([*words, given])
    assert "--chat-template-kwargs" in capsys.readouterr().err
    assert build_parser().parse_args([*words, '{"a": 1}']).chat_template_kwargs == {"a": 1}


LAST_TURN_TOOLS: list[Message] = [
    {"role": "user", "content": "Bern?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "B"}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4 °C"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "C"}}}]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "5 °C"},
]


@pytest.mark.parametrize(
    ("train_on", "trained", "learnt"),
    [
        ("assistant", (1, 3, 5, 7), (1, 3, 5, 7)),
        ("last", (1, 3, 5, 7), (7,)),
        ("completion", (1, 3, 5, 7), (5, 7)),
        ("completion", (1, 7), (7,)),
        ("last", (1, 3, 5), ()),
    ],
)
def test_which_turns_are_learnt(train_on: str, trained: tuple[int, ...], learnt: tuple[int, ...]) -> None:
    tokenizer = qwen3_tokenizer()
    # Without Qwen3's empty thought before a last turn, nothing is rewritten.
    tokenizer.chat_template = QWEN3.replace("(loop.last or thought)", "thought")
    made = encoder(tokenizer, Conversation(LAST_TURN_TOOLS, trained, [WEATHER]), train_on=train_on)
    texts = {
        1: '\n<tool_call>\n{"name": "weather", "arguments": {"town": "B"}}\n</tool_call><|im_end|>',
        3: "4 °C<|im_end|>",
        5: '\n<tool_call>\n{"name": "weather", "arguments": {"town": "C"}}\n</tool_call><|im_end|>',
        7: "5 °C<|im_end|>",
    }
    assert runs(tokenizer, made) == ([[texts[turn] for turn in learnt]] if learnt else [])
    assert made.counts["dropped_without_target"] == (not learnt)


@pytest.mark.parametrize(
    ("messages", "tools", "missing"),
    [
        (LAST_TURN_TOOLS[:4], None, "tool call"),
        (THOUGHT[:2], None, "reasoning"),
        (CHAT[:2], [WEATHER], "the tool 'weather'"),
    ],
)
def test_what_the_template_leaves_out_is_an_error(messages: Any, tools: Any, missing: str) -> None:
    with pytest.raises(DataError, match="leaves out") as caught:
        encoder(tiny_tokenizer(), conversation(messages, tools))
    assert missing in caught.value.what
    assert caught.value.where == "rows.jsonl:1"


def test_message_of_a_role_that_the_template_skips_is_an_error() -> None:
    skipping = CHATML_TEMPLATE.replace("in messages %}", "in messages if message['role'] != 'tool' %}")
    chat = [CHAT[0], {"role": "tool", "content": "a map"}, CHAT[1]]
    with pytest.raises(DataError, match=r"leaves out the content of message 2 \(tool\): 'a map'"):
        encoder(tokenizer_with(skipping), conversation(chat))


LLAMA3_TOOLS = (
    "{{ bos_token }}{%- for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    "{{ '<|python_tag|>' + call.name + '(' + call.arguments | tojson + ')<|call_end|><|eom_id|>' }}"
    "{%- else %}{{ message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)


def test_turn_that_calls_tools_may_end_in_a_stop_token_of_its_own() -> None:
    tokenizer = tokenizer_with(LLAMA3_TOOLS, bos_token="<|begin_of_text|>", eos_token="<|endoftext|>")
    tokenizer.add_tokens(["<|eom_id|>", "<|python_tag|>", "<|call_end|>"], special_tokens=True)
    made = encoder(tokenizer, conversation(LAST_TURN_TOOLS[:4]))
    assert runs(tokenizer, made) == [
        ['<|python_tag|>weather({"town": "B"})<|call_end|><|eom_id|>', "4 °C<|eot_id|>"],
    ]
    stops = ["<|endoftext|>", "<|eot_id|>", "<|eom_id|>"]
    assert made.stop_ids == tokenizer.convert_tokens_to_ids(stops)


def test_template_that_ends_no_turn_is_masked_when_the_recipe_says_so() -> None:
    tokenizer = tokenizer_with(
        "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    )
    with pytest.raises(DataError, match="with a stop token"):
        encoder(tokenizer, conversation(CHAT))
    assert runs(tokenizer, encoder(tokenizer, conversation(CHAT), require_stop=False)) == [
        ["It is Paris.", "Yes, it is."]
    ]


JOINING = CHATML_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
    "<call>{{ call['function']['name'] + ' ' + call['function']['arguments'] }}</call>{% endfor %}",
)


@pytest.mark.parametrize("template", [JOINING, JOINING.replace(" + ' ' + ", " }} {{ ")])
def test_arguments_are_json_text_where_the_template_takes_text(template: str) -> None:
    tokenizer = tokenizer_with(template)
    call = {"function": {"name": "weather", "arguments": {"town": "Bern", "exact": True}}}
    chat: list[Message] = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    expected = '<call>weather {"town": "Bern", "exact": true}</call><|im_end|>'
    assert runs(tokenizer, encoder(tokenizer, conversation(chat))) == [[expected]]


def test_results_that_a_template_drops_later_are_no_error() -> None:
    forgetful = CHATML_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] if message['role'] != 'tool' or loop.revindex < 3 else 'omitted' }}",
    )
    tokenizer = tokenizer_with(forgetful)
    chat = [CHAT[0], {"role": "tool", "content": "a map"}, CHAT[1], *CHAT[2:]]
    made = encoder(tokenizer, conversation(chat), history="split")
    assert runs(tokenizer, made) == [["It is Paris.<|im_end|>"], ["Yes, it is.<|im_end|>"]]
    assert "a map" in tokenizer.decode(made.rows[0].input_ids)
    assert "omitted" in tokenizer.decode(made.rows[1].input_ids)
