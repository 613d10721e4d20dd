"""What the tests of prepared rows run in processes of their own.

python -m tests.data_processes prepare FILE SECONDS    prepare FILE's rows, taking so long; prints JSON
python -m tests.data_processes memory FILE             prepare and read FILE's rows; prints the memory they took
python -m tests.data_processes wait FOLDER MODEL       a rank: the first takes longer to prepare than a collective waits
python -m tests.data_processes fail FOLDER MODEL       a rank: the first can't prepare
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetune.data.encoding
import finetune.data.stored
import finetune.train.data
from finetune.data.settings import DatasetSettings
from finetune.data.tokens import prepare_dataset
from finetune.errors import DataError
from tests.tiny import tiny_tokenizer

TIMEOUT_SECONDS = 4.0


def prepare(file: Path, seconds: float) -> dict[str, Any]:
    import finetune.data.tokens as tokens

    def slow(*args: Any, **kwargs: Any) -> Any:
        for chunk in encoded(*args, **kwargs):
            built.append(len(chunk[1].lengths))
            time.sleep(seconds)
            yield chunk

    encoded: Callable[..., Any] = tokens._encoded
    built: list[int] = []
    said: list[str] = []
    tokens._encoded = slow
    dataset, _ = prepare_dataset(
        [DatasetSettings(path=str(file))],
        tokenizer=tiny_tokenizer(),
        max_seq_length=64,
        overlong="drop",
        show_progress=False,
        say=said.append,
    )
    return {"digest": dataset.digest, "rows": len(dataset), "built": sum(built), "said": said}


def memory(file: Path) -> dict[str, int]:
    """Bytes that this process holds of its own at most, over what it held before: pages of files don't count, since
    the kernel takes those back when it needs them."""
    from finetune.data.loader import StepLoader

    # As small a share of this test's rows as the real ones are of many.
    finetune.data.stored.BATCH_TOKENS, finetune.data.encoding.CHUNK_ROWS = 20_000, 100
    tokenizer = tiny_tokenizer()
    tokenizer("warm up")
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _own_bytes())

    before = _own_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    dataset, _ = prepare_dataset(
        [DatasetSettings(path=str(file))], tokenizer=tokenizer, max_seq_length=512, overlong="drop", num_workers=0
    )
    loader = StepLoader(
        dataset,
        packing=True,
        max_seq_length=512,
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        world_size=1,
        rank=0,
        seed=0,
        epochs=1,
        max_steps=None,
        pad_token_id=0,
    )
    tokens = sum(batch.num_tokens for step in range(loader.num_steps) for batch in loader.batches(step))
    done.set()
    watcher.join()
    return {"rows": len(dataset), "tokens": tokens, "bytes": peak - before}


def _own_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux only")


def rank_of(verb: str, folder: Path, model: Path) -> None:
    import torch
    import torch.distributed as dist

    from finetune.engine.launch import rank_process
    from finetune.model.load import load_config, load_tokenizer
    from tests.training import train_settings

    prepare_data = finetune.train.data.prepare_data

    def slow(*args: Any, **kwargs: Any) -> Any:
        (folder / f"prepares-{os.environ['RANK']}").touch()
        if verb == "fail":
            raise DataError("the row is wrong", where="rows.jsonl:7", fix="correct it")
        time.sleep(2.5 * TIMEOUT_SECONDS)
        return prepare_data(*args, **kwargs)

    finetune.train.data.prepare_data = slow
    with rank_process("cpu", timeout_seconds=TIMEOUT_SECONDS) as (rank, _):
        torch.set_num_threads(1)
        try:
            prepared = finetune.train.data.prepare_data_together(
                train_settings(folder / "texts.jsonl"), load_tokenizer(model), load_config(model), folder=folder / "run"
            )
        except DataError as error:
            (folder / f"failed-{rank}").write_text(str(error))
            raise
        total = torch.tensor([len(prepared.datasets["data"])])
        dist.all_reduce(total)
        (folder / f"digest-{rank}").write_text(f"{prepared.datasets['data'].digest} {int(total)}")


if __name__ == "__main__":
    verb, file, *rest = sys.argv[1:]
    if verb == "prepare":
        print(json.dumps(prepare(Path(file), float(rest[0]))))
    elif verb == "memory":
        print(json.dumps(memory(Path(file))))
    else:
        rank_of(verb, Path(file), Path(rest[0]))
