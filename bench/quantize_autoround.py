"""A peer of bench/quantize.py: quantize with AutoRound, in its own environment, on token ids from a file.

    python bench/quantize_autoround.py --model FOLDER --ids IDS.npy --iterations 200 --group-size 64 --out FOLDER

The result is saved as plain float weights (the fake-quantized model), which every evaluator reads. A group size of 0
means one scale an output channel. Prints one JSON line: seconds, processor seconds, peak memory,
and the memory after the imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--ids", required=True)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    imports_bytes = peak_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids_NS = torch.from_numpy(np.load(args.ids)).long()
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids_NS]
    rounding = AutoRound(
        model,
        tokenizer,
        bits=4,
        group_size=args.group_size or -1,
        sym=True,
        iters=args.iterations,
        nsamples=len(rows),
        seqlen=ids_NS.shape[1],
        dataset=rows,
        batch_size=8,
        device_map="cpu",
    )
    model = rounding.quantize()[0]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    # The weights are rounded in place; what AutoRound notes beside them isn't part of the model.
    for module in model.modules():
        for name in ("scale", "zp"):
            if hasattr(module, name):
                delattr(module, name)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes()}
    print(json.dumps({**figures, "imports_bytes": imports_bytes}))


if __name__ == "__main__":
    main()
