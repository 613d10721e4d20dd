"""Prepared rows: the same from the cache, from several processes and from one; made anew only for what changes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finetune.data.cache as cache
import finetune.data.encoding as encoding
from finetune.data.dataset import TokenDataset
from finetune.data.settings import DatasetSettings
from finetune.data.tokens import prepare_dataset, tokenize_dataset
from finetune.engine.launch import run_ranks
from finetune.errors import DataError, ResourceError
from tests.tiny import CHATML_TEMPLATE, tiny_llama, tiny_tokenizer
from tests.training import write_texts

OPTIONS: dict[str, Any] = {"max_seq_length": 64, "overlong": "drop", "show_progress": False}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_chats(path: Path, num_rows: int, *, wrong: tuple[int, ...] = ()) -> Path:
    """Conversations, one a line; those of the ``wrong`` lines have no role."""
    rows = []
    for line in range(1, num_rows + 1):
        reply = {"role": "assistant", "content": f"answer {line} " + "and on " * (line % 7)}
        user = {"content": "?"} if line in wrong else {"role": "user", "content": f"question {line}"}
        rows.append({"messages": [user, reply]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepared(*sources: Path | DatasetSettings, **options: Any) -> tuple[TokenDataset, Path]:
    options = {"tokenizer": tiny_tokenizer(), **OPTIONS, **options}
    given = [source if isinstance(source, DatasetSettings) else DatasetSettings(path=str(source)) for source in sources]
    return prepare_dataset(given, **options)


def same(one: TokenDataset, other: TokenDataset) -> bool:
    assert len(one) == len(other)
    for mine, its in zip(one, other, strict=True):
        assert mine.input_ids.tolist() == its.input_ids.tolist()
        assert mine.loss_mask.tolist() == its.loss_mask.tolist()
        assert mine.place == its.place
        assert (mine.input_ids.dtype, mine.loss_mask.dtype) == (np.int32, np.bool_)
    assert one.lengths.tolist() == other.lengths.tolist() == [len(row.input_ids) for row in one]
    assert one.supervised.tolist() == other.supervised.tolist() == [int(row.loss_mask.sum()) for row in one]
    assert (one.sources is None) == (other.sources is None)
    assert one.sources is None or one.sources.tolist() == list(other.sources)  # type: ignore[arg-type]
    parts = ("digest", "largest_token", "counts", "weights")
    return all(getattr(one, part) == getattr(other, part) for part in parts)


def test_rows_of_the_cache_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.data.stored.BATCH_TOKENS", 500)
    monkeypatch.setattr(encoding, "CHUNK_ROWS", 7)
    sources = [
        DatasetSettings(path=str(write_chats(tmp_path / "chats.jsonl", 60)), weight=2.0),
        DatasetSettings(path=str(write_texts(tmp_path / "texts.jsonl", 40)), limit=30),
    ]
    made, folder = prepared(*sources)
    found, again = prepared(*sources)
    assert folder == again
    assert same(made, found)
    assert same(found, tokenize_dataset(sources, tokenizer=tiny_tokenizer(), **OPTIONS))
    assert found[61].place == f"{tmp_path}/texts.jsonl:2"
    assert found.rows[-1].place == f"{tmp_path}/texts.jsonl:30"
    assert [row.place for row in found.rows[1:3]] == [f"{tmp_path}/chats.jsonl:{line}" for line in (2, 3)]
    with pytest.raises(IndexError):
        found[90]


def test_only_what_changes_the_rows_makes_them_anew(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 12)
    _, first = prepared(path)
    made = (first / "rows.arrow").stat().st_mtime_ns
    moved = write_chats(tmp_path / "elsewhere" / "other.jsonl", 12)
    dataset, folder = prepared(moved)
    assert folder == first
    assert (first / "rows.arrow").stat().st_mtime_ns == made
    assert dataset[3].place == f"{moved}:4"
    assert prepared(DatasetSettings(path=str(path), weight=3.0))[1] == first
    tokenizer = tiny_tokenizer()
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert prepared(path, tokenizer=tokenizer)[1] == first
    changed = {
        "length": prepared(path, max_seq_length=65)[1],
        "overlong": prepared(path, overlong="truncate")[1],
        "targets": prepared(path, train_on="all")[1],
        "limit": prepared(DatasetSettings(path=str(path), limit=12))[1],
        "template": prepared(path, tokenizer=tiny_tokenizer(chat_template=CHATML_TEMPLATE.replace("\n", " ")))[1],
        "vocabulary": prepared(path, tokenizer=tiny_tokenizer(vocab_size=300))[1],
        "special tokens": prepared(path, tokenizer=tiny_tokenizer(eos_token="<|endoftext|>"))[1],
        "separator": prepared(path, tokenizer=tiny_tokenizer(sep_token="<|endoftext|>"))[1],
        "content": prepared(write_chats(path, 13))[1],
        "order": prepared(path, moved)[1],
        "other order": prepared(moved, path)[1],
    }
    assert len({first, *changed.values()}) == len(changed) + 1


def test_the_code_that_encodes_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 3)
    _, first = prepared(path)
    names = set()
    read = Path.read_bytes

    def other(self: Path) -> bytes:
        names.add(self.name)
        return read(self) + (b"# other" if self.name == "encoder.py" else b"")

    cache._code_identity.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", other)
    try:
        assert prepared(path)[1] != first
    finally:
        cache._code_identity.cache_clear()
    assert {"template.py", "sources.py", "alpaca.py", "stored.py"} <= names
    assert "loader.py" not in names


def test_a_file_is_hashed_again_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 3)
    hashed = []
    monkeypatch.setattr(cache, "sha256_file", lambda path: hashed.append(path) or f"hash {len(hashed)}")
    first = prepared(path)[1]
    assert prepared(path)[1] != first, "a young file may change within its clock's tick"
    old = time.time_ns() - 10**10
    os.utime(path, ns=(old, old))
    folders = {prepared(path)[1] for _ in range(3)}
    assert (len(folders), len(hashed)) == (1, 3)
    os.utime(path, ns=(old + 1, old + 1))
    assert prepared(path)[1] not in folders


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "no entry", "half an entry", "empty", "no counts", "another digest", "a list"]
)
def test_a_damaged_entry_is_told_and_made_again(tmp_path: Path, damage: str) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 50)
    source = DatasetSettings(path=str(path))
    whole = tokenize_dataset([source], tokenizer=tiny_tokenizer(), **OPTIONS)
    _, folder = prepared(path)
    rows, entry = folder / "rows.arrow", folder / "entry.json"
    content = rows.read_bytes()
    if damage == "flipped":
        at = len(content) // 2
        rows.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "cut":
        rows.write_bytes(content[:-100])
    elif damage == "no entry":
        entry.unlink()
    elif damage in ("no counts", "another digest"):
        changed = {"counts": {}} if damage == "no counts" else {"digest": "0" * 64}
        entry.write_text(json.dumps({**json.loads(entry.read_text()), **changed}))
    elif damage == "a list":
        entry.write_text("[]")
    elif damage == "half an entry":
        entry.write_text(entry.read_text()[:100])
    else:
        rows.write_bytes(b"")
        entry.write_text(entry.read_text().replace(f'"size_bytes": {len(content)}', '"size_bytes": 0'))
    said: list[str] = []
    again, folder = prepared(path, say=said.append)
    assert len(said) == 1
    assert "damaged" in said[0]
    assert str(folder) in said[0]
    assert same(whole, again)
    assert same(again, prepared(path, say=said.append)[0])
    assert len(said) == 1


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.data_processes", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_prepares_and_a_killed_one_leaves_nothing_half(tmp_path: Path, own_cache: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 30)
    killed = start("prepare", path, 60)
    while not list(own_cache.glob("tokens/*.tmp/rows.arrow")):
        assert killed.poll() is None
        time.sleep(0.05)
    waiting = [start("prepare", path, 0.5), start("prepare", path, 0.5)]
    time.sleep(1)
    assert all(process.poll() is None for process in waiting), "they wait for the one that prepares"
    killed.send_signal(signal.SIGKILL)
    results = [json.loads(process.communicate(timeout=60)[0]) for process in waiting]
    assert sorted(result["built"] for result in results) == [0, 30]
    assert {result["rows"] for result in results} == {30}
    assert len({result["digest"] for result in results}) == 1
    assert any("another process prepares the same rows" in said for result in results for said in result["said"])
    assert [path.suffix for path in own_cache.glob("tokens/*") if path.is_dir()] == [""]
    killed.wait()


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="can't be written") as caught:
        prepared(write_chats(tmp_path / "chats.jsonl", 3))
    assert "FINETUNE_CACHE" in str(caught.value)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/finetune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache/finetune"


def test_nothing_is_kept_of_rows_that_are_refused(tmp_path: Path, own_cache: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 3)
    with pytest.raises(DataError, match="nothing to train on"):
        prepared(path, max_seq_length=3, max_dropped_share=1.0)
    assert not [path for path in own_cache.glob("tokens/*") if path.is_dir()]
    # How many rows may be dropped isn't in the key, and is asked each time.
    path = write_chats(path, 20, wrong=(3, 4))
    source = DatasetSettings(path=str(path), invalid_rows="skip")
    assert prepared(source)[0].counts["skipped_invalid"] == 2
    with pytest.raises(DataError, match="2 of 20 rows were dropped"):
        prepared(source, max_dropped_share=0.05)


def test_several_processes_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their order, places and counts; of two wrong rows the first is named, whoever meets it first."""
    monkeypatch.setattr(encoding, "START_SECONDS", -1)
    monkeypatch.setattr(encoding, "CHUNK_ROWS", 10)
    path = write_chats(tmp_path / "chats.jsonl", 95, wrong=(31, 77))
    source = DatasetSettings(path=str(path), invalid_rows="skip")
    options = {"tokenizer": tiny_tokenizer(), **OPTIONS}
    several = tokenize_dataset([source], num_workers=2, **options)
    assert several.counts["kept"] == 93
    assert same(several, tokenize_dataset([source], num_workers=0, **options))
    long = write_chats(tmp_path / "long.jsonl", 60)
    rows = long.read_text().splitlines()
    for line in (25, 41):
        rows[line - 1] = rows[line - 1].replace("answer", "answer " * 90)
    long.write_text("\n".join([*rows, "no JSON"]))
    with pytest.raises(DataError) as caught:
        tokenize_dataset([DatasetSettings(path=str(long))], num_workers=2, **{**options, "overlong": "error"})
    assert str(caught.value.where) == f"{long}:25"


def test_few_rows_do_not_wait_for_processes_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no process is needed")

    monkeypatch.setattr(encoding, "ProcessPoolExecutor", started)
    assert prepared(write_chats(tmp_path / "chats.jsonl", 2000))[0].counts["kept"] == 2000


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Eight times the rows, prepared and read once: some bytes a row more, for their lengths and order, not their
    tokens."""
    taken = {}
    for num_rows in (2000, 16000):
        path = tmp_path / f"{num_rows}.jsonl"
        # The same words again and again: the tokenizer keeps those that it has met, up to 10,000.
        texts = (f"{number % 100}: " + "the fox jumps over the lazy dog " * 20 for number in range(num_rows))
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        taken[num_rows] = json.loads(start("memory", path).communicate(timeout=120)[0])
        assert taken[num_rows]["rows"] == num_rows
    few, many = taken.values()
    more_bytes = 5 * (many["tokens"] - few["tokens"])
    assert more_bytes > 9_000_000
    assert many["bytes"] - few["bytes"] < more_bytes / 3, taken


def test_a_rank_waits_for_the_rows_longer_than_a_collective_may(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", hidden_size=32, intermediate_size=48)
    write_texts(tmp_path / "texts.jsonl", 20)
    arguments = ["-m", "tests.data_processes", "wait", str(tmp_path), str(model)]
    run_ranks(arguments, num_processes=2, device="cpu", log_dir=tmp_path / "logs")
    digests = [(tmp_path / f"digest-{rank}").read_text() for rank in range(2)]
    assert digests[0] == digests[1]
    assert digests[0].endswith(" 40")
    assert [path.name for path in tmp_path.glob("prepares-*")] == ["prepares-0"]
    assert list((tmp_path / "run").iterdir()) == []


def test_a_rank_that_cannot_prepare_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", hidden_size=32, intermediate_size=48)
    arguments = ["-m", "tests.data_processes", "fail", str(tmp_path), str(model)]
    with pytest.raises(DataError, match="the row is wrong") as caught:
        run_ranks(arguments, num_processes=2, device="cpu", log_dir=tmp_path / "logs")
    assert caught.value.where == "rows.jsonl:7"
