"""Row formats: what each reads, what it refuses, and how it is recognised. Shapes of the data people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.formats import FORMATS, Completion, Conversation, Document, Preference, TokenIds, recognise_format
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.data.text import raw_texts
from finetune.errors import DataError

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
AS_TOOL = {"type": "function", "function": TOOL}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def parse(row: dict[str, Any]) -> Any:
    return FORMATS[recognise_format(row, "a.jsonl:1")].parse(row, "a.jsonl:1")


def refused(row: dict[str, Any], message: str) -> DataError:
    with pytest.raises(DataError) as caught:
        parse(row)
    assert message in caught.value.what
    assert caught.value.where == "a.jsonl:1"
    assert caught.value.fix
    return caught.value


def chat(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


# messages


def test_content_as_parts() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    example = parse(chat(Q, {"role": "assistant", "content": parts}))
    assert example.messages[1] == {"role": "assistant", "content": "ab", "reasoning_content": "hm"}
    for part in ({"type": "reasoning", "text": "hm"}, {"type": "reasoning", "reasoning": "hm"}):
        message = parse(chat(Q, {"role": "assistant", "content": [part, parts[1]]})).messages[1]
        assert (message["content"], message["reasoning_content"]) == ("a", "hm")
    assert parse(chat({"role": "user", "content": ["q", parts[1]]}, A)).messages[0]["content"] == "qa"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_as_a_key_of_the_message(key: str) -> None:
    assert parse(chat(Q, {**A, key: "hm"})).messages[1] == {**A, "reasoning_content": "hm"}
    assert parse(chat(Q, {**A, key: None})).messages[1] == A


def test_tool_calls_and_tools_as_objects_or_json() -> None:
    arguments = {"one": 1, "two": [2]}
    flat = {"name": "add", "arguments": arguments}
    spellings: list[dict[str, Any]] = [
        {"content": None, "tool_calls": [{"function": flat}]},
        {"tool_calls": [{"function": {**flat, "arguments": json.dumps(arguments)}}]},
        {"content": "", "tool_calls": [flat]},
        {"content": "", "tool_calls": json.dumps([flat])},
        {"content": None, "function_call": {**flat, "arguments": json.dumps(arguments)}},
    ]
    answer = {"role": "tool", "content": "3"}
    for message in spellings:
        for tools in ([TOOL], [AS_TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], AS_TOOL):
            example = parse(chat(Q, {"role": "assistant", **message}, answer, A, tools=tools))
            called = {"role": "assistant", "content": "", "tool_calls": [call(**arguments)]}
            assert example == Conversation([Q, called, answer, A], (1, 3), [AS_TOOL])
    with_id = {"id": "c1", "type": "function", "function": flat}
    example = parse(chat(Q, {**A, "tool_calls": [with_id]}, {**answer, "tool_call_id": "c1"}))
    assert example.messages[1]["tool_calls"] == [with_id]
    assert example.messages[2]["tool_call_id"] == "c1"
    for none in (None, [], "", "[]"):
        assert parse(chat(Q, A, tools=none)).tools is None


def test_each_message_may_say_whether_it_is_learnt() -> None:
    for no, yes in (({"weight": 0}, {"weight": 1}), ({"train": False}, {"train": True}), ({"weight": 0.0}, {})):
        example = parse(chat({**Q, **no}, {**A, **no}, Q, {**A, **yes}))
        assert example == Conversation([Q, A, Q, A], (3,))
    assert parse(chat(Q, {**A, "weight": None, "train": None})).trained == (1,)
    assert parse(chat({"role": "human", "content": "q"}, {"role": "model", "content": "a"})).messages == [Q, A]
    assert parse(chat(Q, A, system="Be kind.")) == Conversation([{"role": "system", "content": "Be kind."}, Q, A], (2,))


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
REFUSED_MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (chat({"role": "user", "content": [IMAGE]}), "trains on text alone"),
    "audio": (chat({"role": "user", "content": [{"type": "input_audio"}]}), "part 1 of message 1 is of the type"),
    "an unknown part": (chat({"role": "user", "content": [{"type": "txt"}]}), "unknown type `txt`"),
    "a part without its text": (chat({"role": "user", "content": [{"type": "text"}]}), "has no field `text`"),
    "no parts": (chat({"role": "user", "content": []}), "`content` of message 1 is null"),
    "an object as content": (chat({"role": "user", "content": {"a": 1}}), "must be text, not dict"),
    "the user's tool call": (chat({**Q, "tool_calls": [call()]}), "message 1 has tool calls, but its role is `user`"),
    "the user's reasoning": (chat({**Q, "reasoning": "hm"}), "message 1 has reasoning"),
    "a call without a name": (chat(Q, {**A, "tool_calls": [{"function": {"arguments": {}}}]}), "no function's name"),
    "arguments not JSON": (
        chat(Q, {**A, "tool_calls": [{"name": "add", "arguments": "{1"}]}),
        "arguments of `add` in message 2 is text but not JSON",
    ),
    "arguments a list": (chat(Q, {**A, "tool_calls": [{"name": "add", "arguments": "[1]"}]}), "must be an object"),
    "tools not JSON": (chat(Q, A, tools="add"), "`tools` is text but not JSON"),
    "a tool without a name": (chat(Q, A, tools=[{"parameters": {}}]), "a tool has no field `name`"),
    "the user's turn to learn": (chat({**Q, "train": True}, A), "to be learnt, but its role is `user`"),
    "weight and train disagree": (chat(Q, {**A, "weight": 0, "train": True}), "disagree"),
    "train of one": (chat(Q, {**A, "train": 1}), "`train` of message 2 must be true or false"),
    "two system prompts": (chat({"role": "system", "content": "x"}, Q, A, system="y"), "and a system message"),
    "messages as text": ({"messages": "hello"}, "`messages` is text but not JSON"),
}


@pytest.mark.parametrize("case", REFUSED_MESSAGES)
def test_messages_that_are_refused(case: str) -> None:
    refused(*REFUSED_MESSAGES[case])


# sharegpt


def turns(*pairs: tuple[str, Any], **columns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in pairs], **columns}


def test_sharegpt_speakers() -> None:
    for human, gpt in (("human", "gpt"), ("user", "assistant"), ("human", "model"), ("human", "bot")):
        assert parse(turns((human, "q"), (gpt, "a"))) == Conversation([Q, A], (1,))
    assert parse({"conversations": [Q, A]}) == Conversation([Q, A], (1,))
    assert parse({"conversations": json.dumps([Q, A])}) == Conversation([Q, A], (1,))
    example = parse({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0}]})
    assert example.trained == ()
    refused(turns(("humon", "q")), "unknown role `humon`")
    refused(turns(("human", None)), "`value` of message 1 is null")
    refused({"conversations": [{"from": "human"}]}, "message 1 has no field `value`")
    refused({"conversations": [{"value": "q"}]}, "message 1 has no field `from`")
    refused({"conversations": []}, "`conversations` is empty")


def test_sharegpt_function_calls() -> None:
    for value in (
        '{"name": "add", "arguments": {"one": 1}}',
        '[{"name": "add", "arguments": {"one": 1}}]',
        '{"name": "add", "arguments": "{\\"one\\": 1}"}',
    ):
        row = turns(("human", "q"), ("function_call", value), ("observation", "3"), ("gpt", "a"), tools=[TOOL])
        called = {"role": "assistant", "content": "", "tool_calls": [call(one=1)]}
        expected = Conversation([Q, called, {"role": "tool", "content": "3"}, A], (1, 3), [AS_TOOL])
        assert parse(row) == expected
        assert parse({**row, "tools": json.dumps([TOOL])}) == expected
    refused(turns(("human", "q"), ("function_call", "add(1)")), "the function call in message 2 is text but not JSON")
    refused(turns(("human", "q"), ("function_call", "3")), "the function call in message 2 is not an object")
    refused(turns(("human", "q"), ("function_call", '{"arguments": {}}')), "a tool call of message 2")


# prompt_completion, question_answer, tokens


def test_prompt_and_completion() -> None:
    assert parse({"prompt": "q", "completion": " a"}) == Completion("q", " a")
    example = parse({"prompt": [Q, A, Q], "completion": [A, Q, A], "tools": [TOOL]})
    assert example == Conversation([Q, A, Q, A, Q, A], (3, 5), [AS_TOOL])
    refused({"prompt": "q", "completion": [A]}, "one of `prompt` and `completion` is text")
    refused({"prompt": [Q], "completion": [Q]}, "`completion` has no assistant's turn")
    refused({"prompt": [Q], "completion": None}, "`completion` of the row is null")
    refused({"prompt": 3, "completion": "a"}, "must be text, not int")
    assert "lacks `completion`" in (refused({"prompt": "q"}, "no format is known").fix or "")


def test_question_and_answer() -> None:
    assert parse({"question": "q", "answer": "a", "id": 3}) == Conversation([Q, A], (1,))
    refused({"question": "q", "answer": None}, "`answer` of the row is null")


def test_token_ids() -> None:
    assert parse({"input_ids": [5, 6, 7]}) == TokenIds([5, 6, 7], None)
    assert parse({"input_ids": "[5, 6]", "labels": [-100, 6]}) == TokenIds([5, 6], [-100, 6])
    row = {"input_ids": [0, 5, 6, 0], "labels": [-100, -100, 6, 0], "attention_mask": [0, 1, 1, 0]}
    assert parse(row) == TokenIds([5, 6], [-100, 6])
    assert parse({**row, "labels": None, "attention_mask": [1, 1, 1, 1]}) == TokenIds([0, 5, 6, 0], None)


REFUSED_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "null": ({"input_ids": None}, "`input_ids` is missing or null"),
    "none": ({"input_ids": []}, "`input_ids` is empty"),
    "text": ({"input_ids": ["5"]}, "holds '5', which is not an integer"),
    "a null among them": ({"input_ids": [5, None]}, "holds None"),
    "below zero": ({"input_ids": [5, -1]}, "`input_ids` holds -1"),
    "beyond int32": ({"input_ids": [5, 2**31]}, "`input_ids` holds 2147483648"),
    "beyond int64": ({"input_ids": [5, 10**23]}, "`input_ids` holds 100000000000000000000000"),
    "thousands of digits": ({"input_ids": [5, 10**4000]}, f"`input_ids` holds 1{'0' * 36}…"),
    "far below zero": ({"input_ids": [-(10**23), 5]}, "`input_ids` holds -100000000000000000000000"),
    "a label beyond int64": ({"input_ids": [5, 6], "labels": [5, 10**23]}, "`labels[1]` is 100000000000000000000000"),
    "a mask beyond int64": ({"input_ids": [5, 6], "attention_mask": [1, 10**23]}, "must hold 0 and 1"),
    "fewer labels": ({"input_ids": [5, 6], "labels": [5]}, "`labels` has 1 entries, `input_ids` 2"),
    "shifted labels": ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "`labels[0]` is 6, where `input_ids[0]` is 5"),
    "a hole": ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "0 inside the row"),
    "all masked": ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "some 1"),
    "a mask of twos": ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "must hold 0 and 1"),
}


@pytest.mark.parametrize("case", REFUSED_TOKENS)
def test_token_ids_that_are_refused(case: str) -> None:
    refused(*REFUSED_TOKENS[case])


# preference

B = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": [A], "rejected": [B]},
        {"prompt": [Q], "chosen": A, "rejected": "b"},
        {"prompt": "q", "chosen": [Q, A], "rejected": [Q, B]},
        {"chosen": [Q, A], "rejected": [Q, B]},
        {
            **turns(("human", "q")),
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ],
)
def test_preferences(row: dict[str, Any], tmp_path: Path) -> None:
    assert parse(row) == Preference([Q], [A], [B])
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**row, "system": "Be kind.", "tools": [TOOL]}))
    ((example, _),) = read_examples(DatasetSettings(path=str(path), use="chosen"))
    assert example == Conversation([{"role": "system", "content": "Be kind."}, Q, A], (2,), [AS_TOOL])


def test_a_preference_learns_no_reply_of_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"chosen": [Q, A, Q, A], "rejected": [Q, A, Q, B]}))
    ((example, _),) = read_examples(DatasetSettings(path=str(path), use="chosen"))
    assert example == Conversation([Q, A, Q, A], (3,))


def test_preferences_that_are_refused(tmp_path: Path) -> None:
    refused({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same")
    refused({"prompt": "q", "chosen": "a", "rejected": None}, "`rejected` of the row is null")
    refused({"chosen": "a", "rejected": "b"}, "no prompt in common")
    refused({"chosen": [Q, A], "rejected": [Q]}, "`rejected` has no assistant's turn after the prompt")
    refused({"prompt": "q", "conversations": [Q], "chosen": "a", "rejected": "b"}, "both `prompt` and `conversations`")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    with pytest.raises(DataError, match="`use: chosen` is for rows of chosen and rejected"):
        list(read_examples(DatasetSettings(path=str(path), use="chosen")))


# Recognition.


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        (["message"], "did you mean `messages` by `message`?"),
        (["conversation"], "did you mean `conversations` by `conversation`?"),
        (["instructions", "input", "output"], "did you mean `instruction` by `instructions`?"),
        (["prompts", "completions"], "did you mean `prompt` by `prompts`, `completion` by `completions`?"),
        (["instruction", "response"], "for alpaca the row lacks `output`"),
        (["chosen", "prompt"], "lacks `rejected`"),
        (["thema"], "`columns:`"),
    ],
)
def test_columns_that_are_nearly_a_format(columns: list[str], advice: str) -> None:
    error = refused(dict.fromkeys(columns, "x"), "no format is known by the columns")
    assert advice in (error.fix or "")


def test_columns_of_several_formats_list_the_candidates() -> None:
    error = refused({"text": "a", "instruction": "q", "output": "b"}, "fit several formats: alpaca, text")
    assert "`format:`" in (error.fix or "")


def test_raw_texts_hold_all_that_a_model_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows: list[Any] = [
        chat(Q, {**A, "reasoning": "hm", "tool_calls": [call(one="eins")]}, tools=[TOOL]),
        {"prompt": "p", "completion": "c"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"text": "words"},
    ]
    found = []
    for row in rows:
        path.write_text(json.dumps(row))
        found += raw_texts([DatasetSettings(path=str(path))])
    text = " ".join(found)
    for part in ("hm", "eins", "Adds.", "pc", "q a b", "words"):
        assert part in text
    path.write_text(json.dumps({"input_ids": [5, 6]}))
    with pytest.raises(DataError, match="no text"):
        list(raw_texts([DatasetSettings(path=str(path))]))


def test_every_format_says_what_kind_of_example_it_gives() -> None:
    rows: dict[str, tuple[dict[str, Any], type]] = {
        "messages": (chat(Q, A), Conversation),
        "sharegpt": (turns(("human", "q"), ("gpt", "a")), Conversation),
        "alpaca": ({"instruction": "q", "output": "a"}, Conversation),
        "question_answer": ({"question": "q", "answer": "a"}, Conversation),
        "prompt_completion": ({"prompt": "q", "completion": "a"}, Completion),
        "text": ({"text": "a"}, Document),
        "tokens": ({"input_ids": [1]}, TokenIds),
        "preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, Preference),
    }
    assert set(rows) == set(FORMATS)
    for name, (row, kind) in rows.items():
        assert recognise_format(row, "") == name
        assert type(parse(row)) is kind
