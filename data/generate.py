"""Write this folder's data: `python data/generate.py [--out FOLDER]`. The same bytes on every machine."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chats import chats
from forms import Form
from prose import Writer

NUM_DOCUMENTS = 6500
NUM_CHATS = 3000
NUM_HELDOUT_CHATS = 240
NUM_HELDOUT_DOCUMENTS = 120
SEEDS = {"pretrain.jsonl": 1, "train.jsonl": 2, "heldout.jsonl": 3, "heldout.txt": 4}

Row = dict[str, Any]


def lines(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def unique_questions(
    pairs: Iterable[tuple[list[Form], list[dict[str, str]]]],
) -> list[tuple[list[Form], dict[str, object]]]:
    """The chats without those whose last question was asked before."""
    seen: set[str] = set()
    kept: list[tuple[list[Form], dict[str, object]]] = []
    for forms, messages in pairs:
        question = messages[-2]["content"]
        if question not in seen:
            seen.add(question)
            kept.append((forms, {"messages": messages}))
    return kept


def generate() -> dict[str, bytes]:
    """Every file's name and bytes; refuses a held-out value that also stands in a training file."""
    rng = {name: random.Random(seed) for name, seed in SEEDS.items()}
    writer = Writer(rng["pretrain.jsonl"], reserved=False)
    documents = [writer.document() for _ in range(NUM_DOCUMENTS)]
    train = unique_questions(chats(rng["train.jsonl"], num_chats=NUM_CHATS, reserved=False))
    heldout = unique_questions(chats(rng["heldout.jsonl"], num_chats=NUM_HELDOUT_CHATS, reserved=True))
    trained = {(form.kind, form.exact) for form in writer.written}
    trained |= {(form.kind, form.exact) for forms, _ in train for form in forms}
    overlap = trained & {(form.kind, form.exact) for forms, _ in heldout for form in forms}
    if overlap:
        raise RuntimeError(f"held-out values stand in the training data too: {sorted(overlap)[:5]}")
    reader = Writer(rng["heldout.txt"], reserved=None)
    prose = [reader.document() for _ in range(NUM_HELDOUT_DOCUMENTS)]
    return {
        "pretrain.jsonl": lines({"text": text} for text in documents),
        "train.jsonl": lines(row for _, row in train),
        "heldout.jsonl": lines(row for _, row in heldout),
        "heldout.txt": ("\n\n".join(prose) + "\n").encode(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, content in generate().items():
        (out / name).write_bytes(content)
        print(f"{name}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
