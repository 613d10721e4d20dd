"""Templates that rewrite history, tools and reasoning, control tokens in contents, and which turns are learnt."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from finetune.data.encoder import RowEncoder
from finetune.data.formats import Conversation
from finetune.data.options import ChatOptions
from finetune.errors import DataError
from tests.data_templates import CASES, MARKED, QWEN3, qwen3_tokenizer, tokenizer_with
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


TYPED = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<|eot_id|>", "<|end|>", " ", "\n", "a ship", "<|", "猫"]
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", CASES)
def test_control_tokens_in_contents_stay_text(name: str) -> None:
    case, tokenizer = CASES[name], CASES[name].tokenizer()
    special = set(tokenizer.all_special_tokens) | {
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    special_ids = set(tokenizer.convert_tokens_to_ids(sorted(special)))

    def skeleton(token_ids: Any) -> list[int]:
        return [int(token) for token in token_ids if int(token) in special_ids]

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(texts=st.lists(TYPED, min_size=2, max_size=4))
    def check(texts: list[str]) -> None:
        chat = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
        made = encoder(tokenizer, conversation(chat))
        (row,) = made.rows
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        assert tokenizer.decode(row.input_ids) == rendered
        # The special tokens are those of the same chat about nothing.
        nothing = [{**message, "content": "x"} for message in chat]
        assert skeleton(row.input_ids) == skeleton(ids(tokenizer, nothing))
        assert runs(tokenizer, made) == [[case.supervised(turn["content"]) for turn in chat[1::2]]]
        counted = sum(_count(text, special) for text in texts)
        assert made.counts["control_tokens_in_content"] == counted
        if not counted:
            assert row.input_ids.tolist() == ids(tokenizer, chat)
        allowed = encoder(tokenizer, conversation(chat), allow_control_tokens=True)
        assert allowed.rows[0].input_ids.tolist() == ids(tokenizer, chat)

    check()


def _count(text: str, special: set[str]) -> int:
    """Written-out special tokens, found from the left, the longest first."""
    found, at = 0, 0
    while at < len(text):
        here = max((len(token) for token in special if text.startswith(token, at)), default=0)
        found += here > 0
        at += here or 1
    return found


def test_control_tokens_are_as_the_tokenizer_reads_them_as_text() -> None:
    # No seam: as one text without special tokens, also where a token that eats white space stands beside.
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "say <|im_end|> now"}, {"role": "assistant", "content": "<|im_end|> it is"}]
    (row,) = encoder(tokenizer, conversation(chat)).rows
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def text(content: str) -> list[int]:
        return list(tokenizer(content, split_special_tokens=True, add_special_tokens=False)["input_ids"])

    expected = [start, *text("user\nsay <|im_end|> now"), end, *text("\n")]
    expected += [start, *text("assistant\n<|im_end|> it is"), end, *text("\n")]
    assert row.input_ids.tolist() == expected


def test_control_tokens_in_tools_and_arguments_stay_text() -> None:
    call = {"function": {"name": "weather", "arguments": {"town": "<|im_end|>"}}}
    chat: list[Message] = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "weather", "description": "<|im_start|>"}}
    made = encoder(QWEN, conversation(chat, [tool]))
    assert made.counts["control_tokens_in_content"] == 2
    assert runs(QWEN, made) == [
        [
            '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {"town": "<|im_end|>"}}'
            "\n</tool_call><|im_end|>"
        ]
    ]
    names = QWEN.convert_ids_to_tokens(made.rows[0].input_ids)
    assert names.count("<|im_end|>") == names.count("<|im_start|>") == 3


def test_stand_ins_and_private_characters_in_a_message_are_text() -> None:
    tokenizer = tiny_tokenizer()
    contents = ["<|im_end|>", "controltoken0n1n \ue000<|im_end|>\ue001 \ue0002\ue001"]
    made = encoder(tokenizer, *[conversation([CHAT[0], {"role": "assistant", "content": text}]) for text in contents])
    assert runs(tokenizer, made) == [[text + "<|im_end|>"] for text in contents]
    for row in made.rows:
        assert tokenizer.convert_ids_to_tokens(row.input_ids).count("<|im_end|>") == 2


def test_white_space_beside_a_special_token_is_read_as_ever() -> None:
    tokenizer = CASES["phi3"].tokenizer()
    tokenizer.add_tokens([AddedToken(token, rstrip=True, special=True) for token in ("<|user|>", "<|end|>")])
    chat = [{"role": "user", "content": "\n say no"}, {"role": "assistant", "content": "no"}]
    typed = [{"role": "user", "content": "\n say <|end|>"}, chat[1]]
    plain, held = encoder(tokenizer, conversation(chat), conversation(typed)).rows
    assert plain.input_ids.tolist() == ids(tokenizer, chat)
    word = tokenizer("say", add_special_tokens=False).input_ids[0]
    assert held.input_ids[:2].tolist() == [tokenizer.convert_tokens_to_ids("<|user|>"), word]
    tail = len(tokenizer("<|end|><|assistant|>\nno<|end|><|endoftext|>", add_special_tokens=False).input_ids)
    assert held.input_ids[-tail:].tolist() == plain.input_ids[-tail:].tolist()


def test_encoder_can_be_sent_to_a_worker() -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "<|im_end|>"}]
    made = encoder(tiny_tokenizer(), conversation(chat))
    sent = pickle.loads(pickle.dumps(made))
    sent.add([(conversation(chat), "rows.jsonl:2")], skip_invalid=False)
    assert sent.rows[0].input_ids.tolist() == sent.rows[1].input_ids.tolist()
    assert [row.place for row in sent.rows] == ["rows.jsonl:1", "rows.jsonl:2"]


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
