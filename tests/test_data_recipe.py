"""What a recipe says about its sources: keys that go together, columns by their meaning, files that decide a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.config.section import parse_section
from finetune.config.source import Source
from finetune.data.formats import Conversation
from finetune.data.settings import DatasetSettings
from finetune.errors import DataError, RecipeError
from finetune.fingerprint import Fingerprints
from finetune.recipe import check_files_exist, load_recipe
from tests.small_run import write_inputs
from tests.test_data_sources import lines, read, texts, write


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "en"}, "`name` is of a data set with splits"),
        ({"revision": "main"}, "`revision` is of a data set with splits"),
        ({"path": ["a", "b"], "split": "train"}, "one path"),
        ({"path": []}, "at least 1"),
        ({"weight": 0}, "greater than 0"),
        ({"columns": {"q": "usr"}}, "did you mean `user`"),
        ({"columns": {"q": "user"}}, "no column is the assistant's"),
        ({"columns": {"q": "user", "a": "assistant", "t": "tools"}}, "don't go together: `tools`"),
        ({"columns": {"a": "text", "b": "text"}}, "two columns are the same one"),
        ({"columns": {"q": "user", "a": "assistant"}, "format": "text"}, "`columns` gives roles"),
        ({"use": "rejected"}, "chosen"),
        ({"splitt": "train"}, "unknown key"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_section(DatasetSettings, Source("r.yaml", {}, {}), (), {"path": "a.jsonl", **keys})
    assert message in str(caught.value)


def test_columns_by_role(tmp_path: Path) -> None:
    rows = [
        {"instruction": "q", "context": "c", "response": "a", "who": "Be kind.", "thought": "hm"},
        {"instruction": "q", "context": None, "response": "a", "who": None, "thought": None},
        {"instruction": "q", "context": "", "response": "a", "who": "", "thought": ""},
    ]
    columns = {"instruction": "user", "context": "user", "response": "assistant", "who": "system"}
    path = write(tmp_path, "a.jsonl", lines(*rows))
    first, *others = (example for example, _ in read(path, columns={**columns, "thought": "reasoning"}))
    assert first == Conversation(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "q\n\nc"},
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ],
        (2,),
    )
    plain = Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], (1,))
    assert others == [plain, plain]


def test_columns_under_other_names(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"body": "a", "text": "no"}, {"body": "b"}, {"bdy": "c"}))
    with pytest.raises(DataError, match="no column `body`, which `columns:` names") as caught:
        read(path, columns={"body": "text"})
    assert caught.value.where == f"{path}:3"
    assert "did you mean `bdy`" in (caught.value.fix or "")
    assert texts(path, columns={"body": "text"}, limit=2) == ["a", "b"]
    chat = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    path = write(tmp_path, "b.jsonl", lines({"dialog": chat, "functions": '[{"name": "f"}]'}))
    ((example, _),) = read(path, columns={"dialog": "conversations", "functions": "tools"})
    assert example.tools == [{"type": "function", "function": {"name": "f"}}]


def test_a_role_whose_columns_are_all_null_or_no_text(tmp_path: Path) -> None:
    columns = {"q": "user", "a": "assistant"}
    for row, message in (
        ({"q": "x", "a": None}, "`a` of the row is null"),
        ({"q": 3, "a": "x"}, "`q` of the row must"),
    ):
        path = write(tmp_path, "a.jsonl", lines(row))
        with pytest.raises(DataError, match=message) as caught:
            read(path, columns=columns)
        assert caught.value.where == f"{path}:1"


def test_fingerprint_and_check_before_the_run_see_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    row = {"instruction": "q", "output": "a"}
    write(tmp_path, "d/a.jsonl", lines(row))

    def deciding(path: str) -> dict[str, Any]:
        loaded = load_recipe(Path("recipes/llama_sft.yaml"), [f"stages.sft.data.0.path={path}"])
        check_files_exist(loaded)
        (stage,) = [stage for stage in loaded.stages if stage.name == "sft"]
        files: dict[str, Any] = Fingerprints(loaded).deciding(stage)["data"]
        return files

    for path in ("d", "d/*.jsonl", '["d/a.jsonl","d/more"]'):
        write(tmp_path, "d/more/b.jsonl", lines(row))
        before = deciding(path)
        assert before["d/a.jsonl"]
        write(tmp_path, "d/a.jsonl", lines({**row, "output": path}))
        assert deciding(path)["d/a.jsonl"] != before["d/a.jsonl"]
        added = write(tmp_path, "d/more/c.jsonl" if "more" in path else "d/c.jsonl", lines(row))
        assert len(deciding(path)) == len(before) + 1
        Path(added).unlink()
    for path, message in (("nowhere*.jsonl", "no file matches"), ("outputs", "isn't there"), ("some/data", "`split:`")):
        with pytest.raises(DataError) as caught:
            deciding(path)
        assert message in str(caught.value)
        assert "stage `sft`" in caught.value.what


def test_what_a_new_tokenizer_is_made_from_decides_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = ("data/words.txt", "chat.jinja")
    for name in names:
        write(tmp_path, name, "one")
    flags = [
        'model.scratch.tokenizer.data=[{"path": "data/words.txt"}]',
        "model.scratch.tokenizer.chat_template=chat.jinja",
    ]
    loaded = load_recipe(Path("recipes/llama_sft.yaml"), flags)

    def fingerprint() -> str:
        return Fingerprints(loaded).of("pretrain")

    check_files_exist(loaded)
    for name in names:
        before = fingerprint()
        write(tmp_path, name, "two words")
        assert fingerprint() != before
        Path(name).unlink()
        with pytest.raises(DataError, match=f"`pretrain` reads `{name}`, which isn't there"):
            check_files_exist(loaded)
        write(tmp_path, name, "three")
