"""Where rows come from: kinds of files, folders, patterns, lists, splits; each fault names its file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from finetune.data.files import find_data_files
from finetune.data.formats import Document
from finetune.data.readers import READERS
from finetune.data.rows import read_rows
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.errors import DataError, FinetuneError, HubError

TEXTS = [{"text": "a"}, {"text": "b"}, {"text": "c"}]


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def read(path: str | list[str], **options: Any) -> list[tuple[Any, str]]:
    return list(read_examples(DatasetSettings(path=path, **options)))


def texts(path: str | list[str], **options: Any) -> list[str]:
    return [example.text for example, _ in read(path, **options)]


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# Kinds of files.


def test_csv_rows_know_the_line_they_begin_on(tmp_path: Path) -> None:
    table = '\ufeffid,question,answer\r\n1,"two\r\nlines","say ""a, b"""\r\n\r\n2,q,a\r\n'
    path = write(tmp_path, "a.csv", table)
    (first, at), (second, then) = read(path)
    assert [message["content"] for message in first.messages] == ["two\r\nlines", 'say "a, b"']
    assert [message["content"] for message in second.messages] == ["q", "a"]
    assert (at, then) == (f"{path}:2", f"{path}:5")


def test_other_separators_and_json_in_cells(tmp_path: Path) -> None:
    assert texts(write(tmp_path, "a.csv", "text;n\nx,y;1\n"), separator=";") == ["x,y"]
    assert texts(write(tmp_path, "a.tsv", "text\tn\nx,y\t1\n")) == ["x,y"]
    chat = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]).replace('"', '""')
    ((example, _),) = read(write(tmp_path, "b.csv", f'id,messages\n1,"{chat}"\n'))
    assert [message["content"] for message in example.messages] == ["q", "a"]


def test_a_cell_may_hold_a_long_document(tmp_path: Path) -> None:
    assert texts(write(tmp_path, "a.csv", f'text\n"{"x" * 300_000}"\n')) == ["x" * 300_000]


def save_parquet(folder: Path, rows: list[dict[str, Any]], name: str = "a.parquet") -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name, row_group_size=2)
    return str(folder / name)


def save_arrow(folder: Path, rows: list[dict[str, Any]]) -> str:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    return str(folder / "a.arrow")


@pytest.mark.parametrize("save", [save_parquet, save_arrow])
def test_tables_of_arrow_count_rows(save: Callable[[Path, list[dict[str, Any]]], str], tmp_path: Path) -> None:
    path = save(tmp_path, TEXTS)
    assert read(path) == [(Document("abc"[index]), f"{path}:row {index + 1}") for index in range(3)]
    with pytest.raises(DataError, match="`text` of the row is null") as caught:
        read(save(tmp_path, [*TEXTS, {"text": None}]))
    assert caught.value.where == f"{path}:row 4"


def test_fields_that_other_rows_have_are_not_arguments_of_this_one(tmp_path: Path) -> None:
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        calls = [{"function": {"name": name, "arguments": arguments}}]
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]}

    path = save_parquet(tmp_path, [call("where", city="Rome"), call("add", one=1, two=2)])
    asked = [example.messages[1]["tool_calls"][0]["function"]["arguments"] for example, _ in read(path)]
    assert asked == [{"city": "Rome"}, {"one": 1, "two": 2}]


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"a.jsonl{suffix}", PACK[suffix](lines(*TEXTS).encode()))
    assert read(path)[2] == (Document("c"), f"{path}:3")
    assert texts(write(tmp_path, f"a.json{suffix}", PACK[suffix](json.dumps(TEXTS).encode()))) == ["a", "b", "c"]
    for broken in (PACK[suffix](lines(*TEXTS).encode())[:-6], b"not packed at all, whatever it is called"):
        broken_path = write(tmp_path, f"b.jsonl{suffix}", broken)
        with pytest.raises(DataError, match="can't be decompressed") as caught:
            read(broken_path)
        assert caught.value.where == broken_path
    with pytest.raises(DataError, match="no rows"):
        read(write(tmp_path, f"c.jsonl{suffix}", PACK[suffix](b"")))


GOOD = lines(*TEXTS).encode()
FAULTS = {
    "csv: null cell": ("a.csv", "id,text\n1,a\n2,\n", ":3", "`text` of the row is null"),
    "csv: missing column": ("a.csv", "id,txet\n1,a\n", ":2", "no format is known by the columns `id`, `txet`"),
    "csv: a cell too many": ("a.csv", "id,text\n1,a\n2,b,c\n", ":3", "3 cells, the header 2"),
    "csv: a cell too few": ("a.csv", 'id,text\n1,"a\nb"\n2\n', ":4", "1 cells, the header 2"),
    "csv: an open quote": ("a.csv", 'id,text\n1,a\n2,"b\n3,c\n', ":3", "can't be read"),
    "csv: a quote inside": ("a.csv", 'id,text\n1,a\n2,"b" c\n', ":3", "can't be read"),
    "csv: two equal columns": ("a.csv", "text,text\na,b\n", ":1", "names `text` twice"),
    "csv: another separator": ("a.csv", "id;text\n1;a\n", ":1", "the header is one column, `id;text`"),
    "csv: only a header": ("a.csv", "id,text\n", "", "no rows"),
    "csv: empty": ("a.csv", "", "", "no rows"),
    "csv: not UTF-8": ("a.csv", b"text\na\n\xe9\n", ":3", "not UTF-8"),
    "csv: UTF-16": ("a.csv", "text\na\n".encode("utf-16"), ":1", "UTF-16"),
    "jsonl: UTF-16": ("a.jsonl", GOOD.decode().encode("utf-16"), ":1", "UTF-16"),
    "jsonl: UTF-16 without a mark": ("a.jsonl", GOOD.decode().encode("utf-16-le"), ":1", "UTF-16"),
    "json: UTF-16": ("a.json", json.dumps(TEXTS).encode("utf-16"), ":1", "UTF-16"),
    "json: not UTF-8": ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', ":2", "not UTF-8"),
    "json: cut inside a string": ("a.json", '[{"text": "a"},\n{"text": "b', ":2", "Unterminated string"),
    "json: one object over lines": ("a.json", '{\n"text": "a"\n}\n', ":1", "not JSON"),
    "txt: UTF-16": ("a.txt", "words".encode("utf-16"), ":1", "UTF-16"),
    "parquet: broken": ("a.parquet", b"PAR1 and then nothing of the kind PAR1", "", "not Parquet, or broken"),
    "parquet: text": ("a.parquet", "text\n", "", "not Parquet, or broken"),
    "parquet: empty": ("a.parquet", "", "", "no rows"),
    "arrow: broken": ("a.arrow", b"ARROW1 and then nothing of the kind", "", "not Arrow, or broken"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_file_and_line(fault: str, tmp_path: Path) -> None:
    name, content, line, message = FAULTS[fault]
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in caught.value.what
    assert caught.value.where == path + line
    assert caught.value.fix


def test_a_parquet_file_that_breaks_midway_is_an_error_after_its_good_rows(tmp_path: Path) -> None:
    path = Path(save_parquet(tmp_path, [{"text": f"{index} " * 200} for index in range(2000)]))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 4000] = b"\xff" * 4000
    path.write_bytes(whole)
    with pytest.raises(DataError, match="broken") as caught:
        read(str(path))
    assert caught.value.where == str(path)


def test_rows_of_a_wrong_length_are_skipped_and_counted_where_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "id,text\n1,a\n2,b,c\n3,\n4,d\n")
    found = read(path, invalid_rows="skip")
    assert [isinstance(example, DataError) for example, _ in found] == [False, True, True, False]
    assert [place for _, place in found] == [f"{path}:{line}" for line in (2, 3, 4, 5)]


# Reading piece by piece.

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=3), min_size=1), data=st.data())
def test_an_array_is_the_same_read_in_pieces_of_any_size(
    rows: list[Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(rows, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    path = write(tmp_path_factory.mktemp("array"), "a.json", text.encode("utf-8", "surrogatepass"))
    with patch("finetune.data.readers.json_lines.CHUNK_BYTES", data.draw(st.integers(1, 40))):
        found = list(read_rows(path))
    assert [row.value for row in found] == rows  # type: ignore[union-attr]
    numbers = [int(row.place.rsplit(":", 1)[1]) for row in found]  # type: ignore[union-attr]
    assert numbers == sorted(numbers)
    if text.startswith("[\n"):
        assert all(text.split("\n")[number - 1].lstrip().startswith("{") for number in numbers)


@pytest.mark.parametrize("separator", ["\n\n", "<|end|>", "\n"])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_documents_are_the_same_read_in_pieces_of_any_size(separator: str, chunk: int, tmp_path: Path) -> None:
    text = "".join(f"{'word ' * (index % 5)}\n{'<|end|>' * (index % 3)}\n\n\nline {index}\n" for index in range(30))
    path = write(tmp_path, "a.txt", text)
    with patch("finetune.data.readers.documents.CHUNK_CHARACTERS", chunk):
        found = read(path, separator=separator)
    assert [example.text for example, _ in found] == [part for part in text.split(separator) if part.strip()]
    for example, place in found:
        line = text.split("\n")[int(place.rsplit(":", 1)[1]) - 1]
        assert example.text.strip().split("\n")[0].strip() in line


def _array(rows: list[Any]) -> bytes:
    return json.dumps(rows).encode()


def _table(rows: list[Any]) -> bytes:
    return ("text\n" + "".join(f"{row['text']}\n" for row in rows)).encode()


def _documents(rows: list[Any]) -> bytes:
    return "\n\n".join(row["text"] for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "written"),
    [
        *[("a.json", _array), ("a.jsonl", lambda rows: lines(*rows).encode()), ("a.csv", _table)],
        *[("a.txt", _documents), ("a.json.zst", lambda rows: zstd(_array(rows)))],
    ],
)
def test_memory_does_not_grow_with_the_file(name: str, written: Callable[[Any], bytes], tmp_path: Path) -> None:
    rows = [{"text": f"{index} {'x' * 2000}"} for index in range(6000)]
    path = write(tmp_path, name, written(rows))
    del rows
    separator = "\n\n" if name == "a.txt" else None
    assert sum(1 for _ in read_rows(write(tmp_path, "b.json", "[{}]"))) == 1  # what is imported late isn't counted
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_rows(path, separator=separator))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 6000
    assert peak < 7e6, f"{peak / 1e6:.1f} MB for a file of 12 MB"


def test_memory_does_not_grow_with_the_row_group(tmp_path: Path) -> None:
    digits = np.random.default_rng(0).integers(0, 10, size=(20_000, 2000), dtype=np.uint8) + ord("0")
    table = pyarrow.table({"text": [row.tobytes().decode() for row in digits]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", row_group_size=20_000)
    del table, digits
    before = pyarrow.total_allocated_bytes()
    most = max(pyarrow.total_allocated_bytes() for _ in read_rows(str(tmp_path / "a.parquet")))
    assert (tmp_path / "a.parquet").stat().st_size > 16e6
    assert most - before < 9e6, f"{(most - before) / 1e6:.1f} MB"


# Folders, patterns, lists.


def test_a_folder_a_pattern_and_a_list(tmp_path: Path) -> None:
    for name, text in {"b": "2", "a": "1", "deep/c": "3"}.items():
        write(tmp_path, f"d/{name}.jsonl", lines({"text": text}))
    for other in ("README.md", ".hidden.jsonl", "_SUCCESS.jsonl"):
        write(tmp_path, f"d/{other}", "x")
    folder = f"{tmp_path}/d"
    assert texts(folder) == ["1", "2"]
    assert texts(f"{folder}/**/[!_]*.jsonl") == ["1", "2", "3"]
    assert texts([f"{folder}/b.jsonl", f"{folder}/deep"]) == ["2", "3"]
    assert read(folder)[1][1] == f"{folder}/b.jsonl:1"
    assert texts([f"{folder}/b.jsonl", folder + "/deep/*"], limit=1) == ["2"]
    write(tmp_path, "d/odd[1].jsonl", lines({"text": "4"}))
    assert texts(f"{folder}/odd[1].jsonl") == ["4"]  # a file's name before a pattern


def test_a_later_file_of_another_shape_says_what_rows_are_read_as(tmp_path: Path) -> None:
    first = write(tmp_path, "d/a.jsonl", lines({"text": "a"}))
    second = write(tmp_path, "d/b.jsonl", lines({"instruction": "q", "output": "a"}))
    with pytest.raises(DataError, match="no field `text`") as caught:
        read(str(tmp_path / "d"))
    assert caught.value.where == f"{second}:1"
    assert f"read as `text`, by the columns of {first}:1" in (caught.value.fix or "")


NOT_ONE_SET: dict[str, tuple[list[str], str]] = {
    "no data files": (["README.md"], "no data files"),
    "only in a folder below": (["train/a.jsonl"], "no data files"),
    "two kinds": (["a.jsonl", "b.json"], "several kinds of data files: .json, .jsonl"),
    "train and test": (["train-0.jsonl", "train-1.jsonl", "test.jsonl"], "to train and to test on"),
}


@pytest.mark.parametrize("case", NOT_ONE_SET)
def test_a_folder_that_is_not_one_data_set(case: str, tmp_path: Path) -> None:
    names, message = NOT_ONE_SET[case]
    for name in names:
        write(tmp_path, f"d/{name}", lines({"text": "a"}))
    with pytest.raises(DataError, match=message) as caught:
        read(f"{tmp_path}/d")
    assert caught.value.where == f"{tmp_path}/d"
    assert caught.value.fix


def test_what_is_not_there_or_twice(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "a"}))
    with pytest.raises(DataError, match="no file matches"):
        read(f"{tmp_path}/*.parquet")
    with pytest.raises(DataError, match="named twice"):
        read([path, f"{tmp_path}/*.jsonl"])
    with pytest.raises(DataError, match="no such data file") as caught:
        read("some-org/some-data")
    assert "`split:`" in (caught.value.fix or "")


# Splits that the datasets library loads.


@pytest.fixture
def splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write(tmp_path, "hub/train.jsonl", lines(*TEXTS))
    write(tmp_path, "hub/test.jsonl", lines({"text": "held out"}))
    return str(tmp_path / "hub")


def test_a_split_of_a_folder_laid_out_like_one_of_the_hub(splits: str) -> None:
    assert read(splits, split="train")[1] == (Document("b"), f"{splits}[train]:row 2")
    assert texts(splits, split="test") == ["held out"]
    assert texts(splits, split="train[1:]", limit=1) == ["b"]
    assert DatasetSettings(path=splits, split="test").data_files() == [f"{splits}/test.jsonl", f"{splits}/train.jsonl"]
    for wrong in ({"split": "trian"}, {"split": "train", "name": "other"}):
        with pytest.raises(DataError, match="can't be loaded") as caught:
            read(splits, **wrong)
        assert caught.value.where == f"{splits}[{wrong['split']}]"


def test_a_data_set_that_the_datasets_library_saved(tmp_path: Path, splits: str) -> None:
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(TEXTS)})
    saved.save_to_disk(tmp_path / "saved")
    assert texts(f"{tmp_path}/saved/train") == texts(f"{tmp_path}/saved", split="train") == ["a", "b", "c"]
    with pytest.raises(DataError, match="several splits: train"):
        read(f"{tmp_path}/saved")
    with pytest.raises(DataError, match="can't be loaded"):
        read(f"{tmp_path}/saved", split="test")


def test_the_hub_switched_off_is_said(splits: str) -> None:
    with pytest.raises(HubError, match="switched off") as caught:
        read("some-org/some-data", split="train")
    assert caught.value.where == "some-org/some-data[train]"
    assert caught.value.exit_code == 7


def test_every_kind_of_file_reads_an_empty_one_as_an_error(tmp_path: Path) -> None:
    for kind in READERS:
        with pytest.raises(FinetuneError, match="no rows"):
            read(write(tmp_path, f"empty{kind}", ""))
    assert find_data_files([f"{tmp_path}/empty{kind}" for kind in READERS])
