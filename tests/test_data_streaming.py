"""Rows that are streamed: each once an epoch, the same on any number of ranks, and exact after a stop."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from finetune.data.encoding import Encoding
from finetune.data.settings import DatasetSettings
from finetune.data.streaming import StreamLoader
from finetune.data.tokens import tokenize_dataset
from finetune.engine.settings import ZeroSettings
from finetune.errors import CheckpointError, DataError
from finetune.train.loop import train
from finetune.train.metrics import read_metrics
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.training import train_settings, write_texts

LENGTH = 48


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[DatasetSettings]:
    """Two files of 50 and 23 rows."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": f"{name}{number} " + "and on " * (number % 5)} for name in "ab" for number in range(50)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:50]))
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[50:73]))
    return [DatasetSettings(path=str(folder / name)) for name in ("a.jsonl", "b.jsonl")]


def stream(sources: list[DatasetSettings], **options: Any) -> StreamLoader:
    options = {
        "max_dropped_share": 0.5,
        "vocab_size": 384,
        "packing": True,
        "max_seq_length": LENGTH,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "world_size": 1,
        "rank": 0,
        "seed": 5,
        "max_steps": 40,
        "pad_token_id": 0,
        "buffer_rows": 20,
        **options,
    }
    encoding = Encoding(options["max_seq_length"], "truncate")
    return StreamLoader(sources, tokenizer=tiny_tokenizer(), encoding=encoding, **options)


def places(loader: StreamLoader, steps: range) -> list[list[str]]:
    return [[row.place for row in chain.from_iterable(loader.sequences(step))] for step in steps]


@pytest.mark.parametrize("packing", [True, False])
def test_every_row_is_used_once_an_epoch_with_the_tokens_it_has_when_prepared(
    sources: list[DatasetSettings], packing: bool
) -> None:
    # A step over the end of an epoch would be sorted by length as one.
    loader = stream(sources, packing=packing, max_steps=200, group_by_length=False)
    prepared = tokenize_dataset(sources, tokenizer=tiny_tokenizer(), max_seq_length=LENGTH, overlong="truncate")
    tokens = {row.place: row.input_ids.tolist() for row in prepared}
    assert len(tokens) == 73
    read = list(chain.from_iterable(loader.sequences(step) for step in range(60)))
    rows = list(chain.from_iterable(read))
    assert all(row.input_ids.tolist() == tokens[row.place] for row in rows)
    epochs, rest = divmod(len(rows), 73)
    assert epochs >= 2
    for epoch in range(epochs):
        assert {row.place for row in rows[73 * epoch : 73 * (epoch + 1)]} == tokens.keys()
    assert [row.place for row in rows[:73]] != [row.place for row in rows[73:146]]
    assert all(sum(len(row.input_ids) for row in sequence) <= LENGTH for sequence in read)
    # Sources take turns, so both are in the first block; nothing comes from far behind it.
    first = {place.rsplit("/", 1)[1] for place in (row.place for row in rows[:20])}
    assert first == {f"{name}.jsonl:{line}" for name in "ab" for line in range(1, 11)}
    assert loader.counts["rows"] >= len(rows)
    assert rest < 73


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_two_stops_and_other_numbers_of_ranks_change_no_row_and_no_order(
    sources: list[DatasetSettings], seed: int, packing: bool
) -> None:
    options = {"packing": packing, "seed": seed}
    whole = places(stream(sources, **options), range(40))
    first, second = sorted(np.random.default_rng(seed).choice(np.arange(1, 40), 2, replace=False).tolist())
    one = stream(sources, **options)
    parts = places(one, range(first))
    position = json.loads(json.dumps(one.position_after(first - 1)))
    ranks = [stream(sources, world_size=2, rank=r, gradient_accumulation_steps=2, **options) for r in range(2)]
    for rank in ranks:
        rank.seek(first, position)
    for step in range(first, second):
        mine = [rank.batches(step) for rank in ranks]
        assert len(mine[0]) == len(mine[1])
        supervised = sum(batch.num_supervised_tokens for batches in mine for batch in batches)
        assert supervised == ranks[1].global_supervised_tokens(step)
        tokens = sum(batch.num_tokens for batches in mine for batch in batches)
        positions = sum(batch.input_ids.numel() for batches in mine for batch in batches)
        assert (tokens, positions) == (ranks[0].num_tokens(step), ranks[0].num_positions(step))
    parts += places(ranks[0], range(first, second)) if second > first else []
    last = stream(sources, **options)
    last.seek(second, ranks[1].position_after(second - 1))
    parts += places(last, range(second, 40))
    assert [Counter(rows) for rows in parts] == [Counter(rows) for rows in whole]
    assert parts == whole
    end, other = stream(sources, **options).position_after(39), last.position_after(39)
    assert end == other


def test_an_earlier_step_is_read_anew(sources: list[DatasetSettings]) -> None:
    loader = stream(sources)
    rows = places(loader, range(10))
    assert places(loader, range(3, 5)) == rows[3:5]


def test_what_cannot_be_streamed_is_refused(sources: list[DatasetSettings], tmp_path: Path) -> None:
    data = write_texts(tmp_path / "texts.jsonl", 5)
    for changes, said in (
        ({"max_steps": None, "epochs": 1}, "set `max_steps`"),
        ({"eval_rows": 2}, "eval_rows"),
        ({"data": [{"path": str(data), "weight": 2.0}]}, "weight"),
    ):
        with pytest.raises(ValidationError, match=said):
            train_settings(data, streaming=True, **changes)


def test_faults_are_met_where_they_stand_in_the_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(30)) + '{"text": \n')
    loader = stream([DatasetSettings(path=str(path))], packing=False, buffer_rows=10)
    assert len(places(loader, range(7))) == 7
    with pytest.raises(DataError) as caught:
        places(loader, range(7, 9))
    assert str(caught.value.where) == f"{path}:31"
    skipping = stream([DatasetSettings(path=str(path), invalid_rows="skip")], packing=False, buffer_rows=10)
    assert len(places(skipping, range(20))) == 20
    assert skipping.counts["skipped_invalid"] >= 1
    with pytest.raises(CheckpointError, match="token 3"):
        stream([DatasetSettings(path=str(path), limit=5)], vocab_size=3).batches(0)
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 3)
    short = stream([DatasetSettings(path=str(path))], max_seq_length=2, max_dropped_share=1.0)
    with pytest.raises(DataError, match="nothing to train on"):
        short.sequences(0)


def test_a_training_that_streams_stops_and_goes_on_bit_by_bit(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", hidden_size=32, intermediate_size=48)
    data = write_texts(tmp_path / "texts.jsonl", 17)

    def run(folder: Path, **changes: Any) -> dict[str, Any]:
        chosen = {"streaming": True, "streaming_buffer_rows": 6, "max_steps": 12, "save_every_steps": 5, **changes}
        return train(
            model_folder=model,
            settings=train_settings(data, **chosen),
            zero=ZeroSettings(),
            launch_device="cpu",
            seed=5,
            folder=folder,
        )

    result = run(tmp_path / "whole")
    assert result["data"]["rows"] > 17
    again = tmp_path / "again"
    run(again)
    for checkpoint in ("step-00000010", "step-00000012"):
        for file in sorted((again / "checkpoints" / checkpoint).rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        (again / "checkpoints" / checkpoint).rmdir()
    resumed = run(again)
    assert resumed["resumed_from"] == 5
    assert resumed["data"] == result["data"]
    keys = ("step", "loss", "grad_norm", "num_tokens", "num_supervised_tokens", "padding_share")
    lines = [
        [{key: line[key] for key in keys} for line in read_metrics(f / "metrics.jsonl")]
        for f in (again, tmp_path / "whole")
    ]
    assert lines[0] == lines[1]
    with pytest.raises(CheckpointError, match="streaming_buffer_rows: 6 → 7"):
        run(again, streaming_buffer_rows=7)
