"""Files to examples: every fault names its file and line, and every format obeys the same contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.config.section import parse_section
from finetune.config.source import Source
from finetune.data.formats import FORMATS, Conversation, Document
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.data.text import raw_texts
from finetune.data.tokens import tokenize_dataset
from finetune.errors import DataError, RecipeError
from tests.tiny import tiny_tokenizer

TEXT = {"text": "hello"}


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def examples(path: str, **settings: Any) -> list[tuple[Any, str]]:
    return list(read_examples(DatasetSettings(path=path, **settings)))


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_one_object_a_line(name: str, tmp_path: Path) -> None:
    # A byte order mark, blank lines, carriage returns, and a line separator inside a string.
    path = write(tmp_path, name, b"\xef\xbb\xbf" + b'{"text": "a\xe2\x80\xa8b"}\r\n\n{"text": "c"}')
    assert examples(path) == [(Document("a\u2028b"), f"{path}:1"), (Document("c"), f"{path}:3")]


def test_array_rows_know_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.json", '\n[\n{"text":\n "a"},\n\n {"text": "b"}, {"text": "c"}\n]\n')
    assert examples(path) == [(Document("a"), f"{path}:3"), (Document("b"), f"{path}:6"), (Document("c"), f"{path}:6")]


def test_text_file_is_one_document_or_split_at_its_separator(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "one\nmore\n\n\ntwo\n\nthree\n")
    assert [example.text for example, _ in examples(path)] == ["one\nmore\n\n\ntwo\n\nthree\n"]
    split = examples(path, separator="\n\n")
    assert [(example.text, place) for example, place in split] == [
        ("one\nmore", f"{path}:1"),
        ("\ntwo", f"{path}:5"),
        ("three\n", f"{path}:7"),
    ]


FAULTS = {
    "line 7 is not JSON": ("a.jsonl", lines(*[TEXT] * 6) + "{text: 1}\n" + lines(TEXT), ":7", "not JSON"),
    "line 2 is cut off": ("a.jsonl", lines(TEXT) + '{"text": "he', ":2", "not JSON"),
    "array broken at line 3": ("a.json", '[{"text": "a"},\n{"text": "b"},\n{"text": }]', ":3", "not JSON"),
    "array without its comma": ("a.json", '[{"text": "a"}\n{"text": "b"}]', ":2", "expected `,`"),
    "array without its end": ("a.json", '[{"text": "a"}', ":1", "expected `,`"),
    "text after the array": ("a.json", '[{"text": "a"}]\n\nmore', ":3", "after the array's end"),
    "a row that is a list": ("a.jsonl", lines(TEXT, ["x"]), ":2", "must be a JSON object"),
    "not UTF-8 in line 2": ("a.jsonl", lines(TEXT).encode() + b'{"text": "\xff"}', ":2", "not UTF-8"),
    "text not UTF-8": ("a.txt", b"one\ntwo \xff", ":2", "not UTF-8"),
    "empty file": ("a.jsonl", "", "", "no rows"),
    "blank file": ("a.jsonl", "\n \n", "", "no rows"),
    "empty array": ("a.json", "[ ]", "", "no rows"),
    "blank text": ("a.txt", " \n", "", "no rows"),
    "unknown kind of file": ("a.docx", "x", "", "not a known kind"),
    "null text": ("a.jsonl", lines(TEXT, {"text": None}), ":2", "`text` of the row is null"),
    "missing text": ("a.jsonl", lines(TEXT, {"texts": "a"}), ":2", "no field `text`"),
    "number for text": ("a.jsonl", lines(TEXT, {"text": 3}), ":2", "must be text, not int"),
    "unknown columns": ("a.jsonl", lines({"thema": "a", "body": "b"}), ":1", "columns `thema`, `body`"),
    "two formats fit": ("a.jsonl", lines({"text": "a", "messages": []}), ":1", "several formats: messages, text"),
    "no messages": ("a.jsonl", lines({"messages": []}), ":1", "`messages` is empty"),
    "null messages": ("a.jsonl", lines({"messages": None}), ":1", "`messages` is missing or null"),
    "null content": (
        "a.jsonl",
        lines({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}),
        ":1",
        "`content` of message 2 is null",
    ),
    "missing role": ("a.jsonl", lines({"messages": [{"content": "a"}]}), ":1", "message 1 has no field `role`"),
    "misspelt role": ("a.jsonl", lines({"messages": [{"role": "assitant", "content": "a"}]}), ":1", "unknown role"),
    "a message that is text": ("a.jsonl", lines({"messages": ["a"]}), ":1", "message 1 is not an object"),
    "weight of two": (
        "a.jsonl",
        lines({"messages": [{"role": "assistant", "content": "a", "weight": 2}]}),
        ":1",
        "must be 0 or 1",
    ),
    "tools": ("a.jsonl", lines({"messages": [{"role": "user", "content": "a"}], "tools": [3]}), ":1", "`tools`"),
    "null output": ("a.jsonl", lines({"instruction": "a", "output": None}), ":1", "`output` of the row is null"),
    "history of strings": (
        "a.jsonl",
        lines({"instruction": "a", "output": "b", "history": ["c"]}),
        ":1",
        "`history` must be a list",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_file_and_line(fault: str, tmp_path: Path) -> None:
    name, content, line, message = FAULTS[fault]
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        examples(path)
    assert message in caught.value.what
    assert caught.value.where == path + line
    assert caught.value.fix


def test_missing_file_is_named() -> None:
    with pytest.raises(DataError, match="no such data file"):
        examples("nowhere.jsonl")


def test_unknown_columns_list_the_formats(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        examples(write(tmp_path, "a.jsonl", lines({"question": "a"})))
    for name in FORMATS:
        assert name in (caught.value.fix or "")


def test_invalid_rows_are_skipped_and_counted_where_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines(TEXT, {"text": None}) + "{\n" + lines(TEXT))
    source = DatasetSettings(path=path, invalid_rows="skip")
    dataset = tokenize_dataset([source], tokenizer=tiny_tokenizer(), max_seq_length=None, overlong="error")
    assert (dataset.counts["rows"], dataset.counts["kept"], dataset.counts["skipped_invalid"]) == (4, 2, 2)
    assert list(raw_texts([source])) == ["hello", "hello"]


def test_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "a"}, {"text": "b"}) + "{ broken")
    assert [example.text for example, _ in examples(path, limit=2)] == ["a", "b"]


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_refuses_a_missing_or_null_column_by_name(name: str) -> None:
    row_format = FORMATS[name]
    for column in row_format.required:
        for row in ({}, dict.fromkeys(row_format.required)):
            with pytest.raises(DataError, match=rf"`({'|'.join(row_format.required)})`") as caught:
                row_format.parse(row, "file:3")
            assert caught.value.where == "file:3"
        assert column not in row_format.optional


def test_alpaca_turns(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Hi", "input": "", "output": "Ho", "system": "Be kind.", "history": [["a", "b"]]},
        {"instruction": "Hi", "input": None, "output": "Ho", "system": None, "history": None},
    ]
    first, second, third = (example for example, _ in examples(write(tmp_path, "a.json", json.dumps(rows))))
    assert first == Conversation(
        [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}], (1,)
    )
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert second.trained == (2, 4)
    assert [message["content"] for message in third.messages] == ["Hi", "Ho"]


def test_raw_texts_are_documents_and_message_contents(tmp_path: Path) -> None:
    text = write(tmp_path, "a.txt", "a book")
    chat = write(tmp_path, "b.jsonl", lines({"instruction": "q", "output": "a"}))
    assert list(raw_texts([DatasetSettings(path=text), DatasetSettings(path=chat)])) == ["a book", "q", "a"]


def test_unknown_format_is_refused_by_the_section() -> None:
    source = Source(name="recipe.yaml", value={}, places={("format",): "recipe.yaml:4"})
    with pytest.raises(RecipeError, match="did you mean `messages`") as caught:
        parse_section(DatasetSettings, source, (), {"path": "a.jsonl", "format": "mesages"})
    assert caught.value.where == "recipe.yaml:4"


CHAT = '{"messages": [{"role": "user", "content": "q", "of": %s}, {"role": "assistant", "content": "a"}]}'
NOT_ROWS = {
    "half a character": '{"text": "bad \\ud800 end"}',
    "half a character in a key": '{"text": "a", "\\uDfff": 1}',
    "half a character in a message": CHAT % '"\\ud83d x"',
    "half a character in JSON in a field": json.dumps({"messages": '[{"role": "user", "content": "\\ud83d"}]'}),
    "halves in the wrong order": '{"prompt": "a", "completion": "\\udc00\\ud800"}',
    "half a character in a column that isn't used": '{"text": "a", "id": ["\\udc00"]}',
    "nested lists": CHAT % ("[" * 600 + "]" * 600),
    "nested objects": '{"text": "a", "id": %s}' % ('{"a":' * 101 + "1" + "}" * 101),
    "nested JSON in a field": json.dumps({"messages": CHAT % ("[" * 600 + "]" * 600)}),
}
GOOD = ('{"text": "a"}', '{"prompt": "a", "completion": "b"}', CHAT % 1)


@pytest.mark.parametrize("row", NOT_ROWS.values(), ids=NOT_ROWS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_half_a_character_and_endless_nesting_are_errors_or_skipped(name: str, row: str, tmp_path: Path) -> None:
    rows = [row, next(good for good in GOOD if good[:6] == row[:6])]
    array = name == "rows.json"
    path = write(tmp_path, name, "[" * array + (",\n" if array else "\n").join(rows) + "]" * array)
    with pytest.raises(DataError, match=r"half a character|nested more than 100 deep") as caught:
        examples(path)
    assert caught.value.where == f"{path}:1"
    skipped, kept = examples(path, invalid_rows="skip")
    assert isinstance(skipped[0], DataError)
    assert skipped[1] == f"{path}:1"
    assert kept[1] == f"{path}:2"


def test_both_halves_of_a_character_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.jsonl", '{"text": "\\ud83d\\ude00 \\\\ud800"}\n')
    assert examples(path) == [(Document("😀 \\ud800"), f"{path}:1")]


def test_what_a_row_holds_does_not_act_on_a_terminal(tmp_path: Path) -> None:
    messages = [{"role": "\x1b[31mus\u202eer\x07", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path, "rows.jsonl", lines({"messages": messages}))
    with pytest.raises(DataError, match="unknown role") as caught:
        examples(path)
    assert "`<U+001B>[31mus<U+202E>er<U+0007>`" in str(caught.value)
    assert not {"\x1b", "\u202e", "\x07"} & set(str(caught.value))
    assert str(caught.value).count("\n") == 2
