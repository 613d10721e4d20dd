"""The peer of bench/quantize.py: quantize with llm-compressor, in its own environment, on token ids from a file.

    python bench/quantize_llmcompressor.py --model FOLDER --ids IDS.npy --method gptq|rtn --group-size 64 --out FOLDER

A group size of 0 means one scale an output channel. Prints one JSON line: seconds, processor seconds, peak memory, and
the memory after the imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--ids", required=True)
    parser.add_argument("--method", choices=["gptq", "rtn"], required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    imports_bytes = peak_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    ids_NS = np.load(args.ids)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    if args.group_size:
        weights |= {"strategy": "group", "group_size": args.group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if args.method == "gptq":
        rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids_NS]
        oneshot(
            model=model,
            dataset=Dataset.from_list(rows),
            recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"]),
            num_calibration_samples=len(rows),
            max_seq_length=ids_NS.shape[1],
            shuffle_calibration_samples=False,
        )
    else:
        oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]))
    model.save_pretrained(args.out, save_compressed=True)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes()}
    print(json.dumps({**figures, "imports_bytes": imports_bytes}))


if __name__ == "__main__":
    main()
