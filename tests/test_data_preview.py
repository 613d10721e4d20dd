"""``finetune data``: what it says of rows whose faults are known, and what it shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.cli import main
from finetune.data_preview.lengths import lengths_of
from finetune.data_preview.pieces import pieces_of
from finetune.data_preview.preview import Preview, preview_data
from finetune.data_preview.samples import Reservoir
from finetune.data_preview.terminal import preview_lines, sample_lines
from finetune.data_preview.visible import printable, shortened, visible
from finetune.errors import DataError, RecipeError
from finetune.recipe import load_recipe
from tests.tiny import tiny_llama, tiny_tokenizer

HELLO = ("hello there my friend", "good morning")
FAR = ("how far is it", "two miles")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("preview") / "model")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_recipe(folder: Path, model: Path, rows: list[Any], *, source: str = "", stage: str = "") -> Path:
    """Of one sft stage over ``rows``; ``source`` and ``stage`` go on in the braces of either."""
    data, recipe = folder / "rows.jsonl", folder / "recipe.yaml"
    data.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    recipe.write_text(
        f"name: x\noutput_dir: {folder}/outputs\nmodel: {{path: {model}}}\nlaunch: {{num_processes: 2}}\nstages:\n"
        f"  - sft: {{data: [{{path: {data}{source}}}], max_seq_length: 64{stage}}}\n"
    )
    return recipe


def preview(recipe: Path, **options: Any) -> Preview:
    return preview_data(load_recipe(recipe), show_progress=False, **options)


def plain(shown: Preview) -> str:
    samples = [str(line) for sample in shown.samples for line in sample_lines(sample, colour=False)]
    return "\n".join([*preview_lines(shown), *samples])


def test_a_row_is_shown_as_the_model_sees_it(tmp_path: Path, model: Path) -> None:
    shown = preview(write_recipe(tmp_path, model, [chat(*HELLO)]), num_rows=5)
    (sample,) = shown.samples
    (row,) = sample.rows
    whole = "<|im_start|>user\nhello there my friend<|im_end|>\n<|im_start|>assistant\ngood morning<|im_end|>\n"
    assert "".join(piece.text for piece in row.pieces) == whole
    assert "".join(piece.text for piece in row.pieces if piece.learnt) == "good morning<|im_end|>"
    assert [piece.text for piece in row.pieces if piece.stop and piece.learnt] == ["<|im_end|>"]
    assert sum(len(piece.ids) for piece in row.pieces) == row.num_tokens == shown.counts["data"]["tokens"]
    assert row.num_learnt == shown.counts["data"]["supervised_tokens"]
    assert sample.place == f"{tmp_path}/rows.jsonl:1"
    text = plain(shown)
    assert "assistant↵\n⟦good morning<|im_end|>■⟧↵" in text
    assert f"{tmp_path}/rows.jsonl  messages          1              0" in text


def test_colours_say_the_same_as_brackets(tmp_path: Path, model: Path) -> None:
    (sample,) = preview(write_recipe(tmp_path, model, [chat(*HELLO)])).samples
    *_, text = sample_lines(sample, colour=True)
    assert "⟦" not in text.plain
    of_style: dict[str, str] = {}
    for span in text.spans:
        of_style[str(span.style)] = of_style.get(str(span.style), "") + text.plain[span.start : span.end]
    assert of_style["bold green"] == "good morning"
    assert of_style["bold white on red"] == "<|im_end|>"


def test_every_row_is_accounted_for(tmp_path: Path, model: Path) -> None:
    rows = [chat(*HELLO), chat("a", "b " * 200), "no json", chat(*FAR)]
    recipe = write_recipe(tmp_path, model, rows, source=", invalid_rows: skip", stage=", overlong: drop")
    shown = preview(recipe, num_rows=4)
    counts = shown.counts["data"]
    assert (counts["rows"], counts["kept"], counts["skipped_invalid"], counts["dropped_overlong"]) == (4, 2, 1, 1)
    (source,) = shown.sources
    assert (source.num_rows, source.num_invalid, source.kinds) == (4, 1, {"conversation": 3})
    assert source.first_invalid.startswith(f"{tmp_path}/rows.jsonl:3: the line is not JSON")
    assert [sample.notes[:1] for sample in shown.samples] == [
        [],
        ["dropped: longer than max_seq_length"],
        ["skipped: the line is not JSON: Expecting value at column 1"],
        [],
    ]
    assert [len(sample.rows) for sample in shown.samples] == [1, 0, 0, 1]
    text = plain(shown)
    assert "dropped: too long" in text
    assert f"first that can't be read: {tmp_path}/rows.jsonl:3" in text


def test_row_that_is_skipped_once_encoded_is_told(tmp_path: Path, model: Path) -> None:
    odd = chat(*HELLO)
    odd["tools"] = [{"name": "search"}]
    recipe = write_recipe(tmp_path, model, [chat(*FAR), odd, odd, chat(*HELLO)], source=", invalid_rows: skip")
    shown = preview(recipe, num_rows=0)
    assert (shown.counts["data"]["skipped_invalid"], shown.sources[0].num_invalid) == (2, 0)
    assert shown.first_refused == f"{tmp_path}/rows.jsonl:2: the chat template leaves out the tool 'search'"
    assert f"first that is skipped though it can be read: {shown.first_refused}" in plain(shown)
    assert not preview(write_recipe(tmp_path, model, [chat(*FAR)])).first_refused


def test_batches_are_those_of_the_training(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model, [chat(*HELLO)] * 9, stage=", packing: false, micro_batch_size: 2, epochs: 2")
    batching = preview(recipe).batching
    assert batching is not None
    assert (batching.num_sequences, batching.sequences_per_step) == (9, 4)
    assert (batching.steps_per_epoch, batching.num_steps, batching.fill_rate) == (3, 6, None)
    assert 0 < batching.padding_share < 1


@pytest.mark.parametrize("streaming", [False, True])
def test_streamed_rows_are_counted_alike(tmp_path: Path, model: Path, streaming: bool) -> None:
    recipe = write_recipe(tmp_path, model, [chat(*HELLO), chat(*FAR)], stage=", max_steps: 2")
    shown = preview_data(load_recipe(recipe, [f"stages.sft.streaming={str(streaming).lower()}"]), show_progress=False)
    assert (shown.counts["data"]["kept"], sum(shown.lengths["data"].counts)) == (2, 2)
    assert (shown.batching is None) == streaming


def test_of_a_row_split_into_many_a_few_are_shown(tmp_path: Path, model: Path) -> None:
    shown = preview(write_recipe(tmp_path, model, [{"text": "word " * 300}], stage=", overlong: split"))
    (sample,) = shown.samples
    assert len(sample.rows) == shown.counts["data"]["kept"] > 3
    assert sample.notes == ["split at max_seq_length"]
    assert f"row 1 of {len(sample.rows)}: 64 tokens, 63 learnt" in plain(shown)
    assert f"… and {len(sample.rows) - 3} more rows of it" in plain(shown)


def test_preference_rows_show_both_ways_on(tmp_path: Path, model: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "hello"}],
        "chosen": [{"role": "assistant", "content": "good day"}],
        "rejected": [{"role": "assistant", "content": "go away now"}],
    }
    shown = preview(write_recipe(tmp_path, model, [row]))
    (sample,) = shown.samples
    texts = {part.label: "".join(piece.text for piece in part.pieces) for part in sample.rows}
    assert list(texts) == ["prompt", "chosen", "rejected"]
    assert texts["prompt"].endswith("<|im_start|>assistant\n")
    assert texts["chosen"].startswith("good day<|im_end|>")
    assert texts["rejected"].startswith("go away now<|im_end|>")
    assert shown.counts["chosen"]["kept"] == shown.counts["rejected"]["kept"] == 1
    assert shown.lengths["rejected"].percentiles["50"] == sample.rows[0].num_tokens + sample.rows[2].num_tokens
    assert shown.batching is None


def test_held_out_rows_in_the_training_data_are_found(tmp_path: Path, model: Path) -> None:
    (tmp_path / "held.jsonl").write_text("\n".join(json.dumps(chat(*pair)) for pair in (HELLO, ("not", "there"))))
    (tmp_path / "held.txt").write_text("something else\nhow far is it? Two miles!")
    recipe = write_recipe(
        tmp_path, model, [chat(*FAR), chat(*HELLO)], stage=f", eval_data: [{{path: {tmp_path}/held.jsonl}}]"
    )
    with recipe.open("a") as stream:
        stream.write(f"  - evaluate: {{perplexity: {tmp_path}/held.txt}}\n")
    leaking, clean = preview(recipe).leakage
    assert (leaking.name, leaking.num_rows, leaking.exact, leaking.near) == ("eval_data", 2, 1, 0)
    assert [(pair.first, pair.second) for pair in leaking.pairs] == [
        (f"{tmp_path}/rows.jsonl:2", f"{tmp_path}/held.jsonl:1")
    ]
    assert (clean.name, clean.exact) == ("evaluate.perplexity", 0)


def test_which_rows_are_shown_depends_on_the_seed_alone(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model, [chat(f"number {index}", "yes") for index in range(50)])

    def places(**options: Any) -> list[str]:
        return [sample.place for sample in preview(recipe, **options).samples]

    assert places(num_rows=0) == []
    assert places(seed=1) == places(seed=1) != places(seed=2)
    assert len(places(num_rows=99)) == 50


def test_stages_are_chosen_by_name(tmp_path: Path, model: Path) -> None:
    recipe = write_recipe(tmp_path, model, [chat(*HELLO)])
    with recipe.open("a") as stream:
        stream.write(
            f"  - sft: {{name: again, data: [{{path: {tmp_path}/rows.jsonl}}], train_on: all, max_seq_length: 64}}\n"
        )
        stream.write("  - export\n")
    first, second = preview(recipe), preview(recipe, stage="again")
    assert (first.stage, second.stage) == ("sft", "again")
    assert second.counts["data"]["supervised_tokens"] > first.counts["data"]["supervised_tokens"]
    assert "other training stages: again" in plain(first)
    with pytest.raises(RecipeError, match="trains nothing"):
        preview(recipe, stage="export")
    with pytest.raises(RecipeError, match="no stage `agan`"):
        preview(recipe, stage="agan")


def test_a_scratch_models_tokenizer_is_learned_for_each_stage(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tmp_path, [chat(*HELLO), chat(*FAR)])
    text = recipe.read_text().replace(
        f"{{path: {tmp_path}}}", "{scratch: {tokenizer: {vocab_size: 300}, config: {max_position_embeddings: 64}}}"
    )
    recipe.write_text(
        text + f"  - sft: {{name: second, data: [{{path: {tmp_path}/rows.jsonl}}], max_seq_length: 64}}\n"
    )
    for stage in ("sft", "second"):
        shown = preview(recipe, stage=stage)
        assert shown.tokenizer == "learned from the data of stage sft"
        assert "⟦good morning<|im_end|>■⟧" in plain(shown)
    with pytest.raises(RecipeError, match="longer than the model's max_position_embeddings, 64"):
        preview_data(load_recipe(recipe, ["stages.sft.max_seq_length=65"]), show_progress=False)


def test_errors_are_those_of_a_run(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(tmp_path, model, [chat(*HELLO), {"messages": None}]))
    assert main(["data", recipe]) == 3
    assert f"at:  {tmp_path}/rows.jsonl:2" in capsys.readouterr().err
    assert main(["data", recipe, "--set", f"stages.sft.data.0.path={tmp_path}/none.jsonl"]) == 3
    assert main(["data", recipe, "--set", f"model.path={tmp_path}/none"]) == 2
    assert main(["data", recipe, "--html", str(tmp_path / "rows.jsonl")]) == 2
    assert "no such page" in capsys.readouterr().err
    nothing = ["--set", "stages.sft.data.0.invalid_rows=skip", "--set", "stages.sft.overlong=drop"]
    assert main(["data", recipe, *nothing, "--set", "stages.sft.max_seq_length=4"]) == 3
    assert "nothing to train on" in capsys.readouterr().err


def test_json_holds_what_is_printed(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(tmp_path, model, [chat(*HELLO)]))
    assert main(["data", recipe, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["data"]["kept"] == 1
    assert "".join(piece["text"] for piece in report["samples"][0]["rows"][0]["pieces"] if piece["learnt"]).startswith(
        "good"
    )
    assert main(["data", recipe, "--rows", "0"]) == 0
    assert "Samples" not in capsys.readouterr().out


def test_pieces_hold_whole_characters() -> None:
    tokenizer = tiny_tokenizer()
    text = "<|im_start|>你好 👩‍👩‍👧\n\n ein  wörd<|im_end|>"
    ids = np.array(tokenizer(text).input_ids)
    learnt = np.zeros(len(ids), dtype=np.bool_)
    learnt[-3:] = True
    pieces = pieces_of(tokenizer, ids, learnt, stop_ids=[int(ids[-1])])
    assert "".join(piece.text for piece in pieces) == text
    assert [token for piece in pieces for token in piece.ids] == ids.tolist()
    assert {piece.text for piece in pieces if piece.special} == {"<|im_start|>", "<|im_end|>"}
    assert [piece.text for piece in pieces if piece.stop] == ["<|im_end|>"]
    assert sum(len(piece.ids) for piece in pieces if piece.learnt) == 3
    assert any(piece.text == "你" and len(piece.ids) > 1 for piece in pieces)


def test_white_space_and_controls_are_visible() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("a  b \n\tc d").input_ids)
    pieces = pieces_of(tokenizer, ids, np.ones(len(ids), dtype=np.bool_), stop_ids=[])
    assert "".join(part.text for part in visible(pieces)) == "a··b·↵\n→c d"
    assert printable("\x1b[31mred\u202e\u200bx") == "<U+001B>[31mred<U+202E><U+200B>x"


def test_the_middle_of_a_long_part_is_left_out() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("x" * 500).input_ids)
    shown = visible(pieces_of(tokenizer, ids, np.ones(len(ids), dtype=np.bool_), stop_ids=[]))
    parts = list(shortened(shown))
    (left_out,) = [part for part in parts if isinstance(part, int)]
    assert left_out + len(parts) - 1 == len(shown) == 500


def test_each_row_is_as_likely_to_be_sampled() -> None:
    hits = np.zeros(10)
    for seed in range(2000):
        reservoir = Reservoir(3, seed)
        for row in range(10):
            reservoir.offer(row)
        kept = reservoir.items()
        assert kept == sorted(kept)
        hits[kept] += 1
    assert np.abs(hits / 2000 - 0.3).max() < 0.05


def test_histogram_counts_every_row() -> None:
    lengths = np.random.default_rng(3).integers(17, 900, size=500)
    found = lengths_of(lengths)
    assert sum(found.counts) == 500
    assert len(found.edges) == len(found.counts) + 1
    assert found.edges[0] <= lengths.min()
    assert found.edges[-1] == lengths.max() + 1
    assert found.percentiles["50"] == np.sort(lengths)[249]
    assert lengths_of(np.array([7])).counts == [1]


def test_no_training_stage_is_an_error(tmp_path: Path, model: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: x\nmodel: {{path: {model}}}\nstages: [export]\n")
    with pytest.raises(RecipeError, match="no training stage"):
        preview(recipe)


def test_rows_of_another_format_than_the_first_are_errors(tmp_path: Path, model: Path) -> None:
    with pytest.raises(DataError, match="messages"):
        preview(write_recipe(tmp_path, model, [chat(*HELLO), {"text": "a document"}]))
