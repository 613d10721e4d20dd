"""Quantize one model by finetune and by llm-compressor on the same calibration tokens; compare perplexity, size, cost.

    python bench/quantize.py --model FOLDER --calibration FILE --text FILE --peer-python PYTHON --out FOLDER

Every run is a process of its own; one evaluator (plain transformers) reads all results. Memory is the peak over what
the imports took. Prints a Markdown table and writes OUT/results.json; runs found there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OURS = {
    "finetune rtn w4a16": {"scheme": "w4a16", "method": "rtn"},
    "finetune gptq w4a16": {"scheme": "w4a16", "method": "gptq"},
    "finetune rtn w8a8": {"scheme": "w8a8", "method": "rtn"},
    "finetune gptq w8a8": {"scheme": "w8a8", "method": "gptq"},
}
PEERS = {"llm-compressor rtn w4a16": "rtn", "llm-compressor gptq w4a16": "gptq"}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_ids(args: argparse.Namespace) -> None:
    """Save the (num_samples, max_seq_length) token ids that finetune calibrates on."""
    import numpy as np

    from finetune.quant.calibration import load_calibration
    from finetune.quant.settings import CalibrationSettings

    samples = load_calibration(Path(args.model), CalibrationSettings(**calibration(args)), seed=args.seed)
    np.save(args.out / "ids.npy", samples.input_ids)


def calibration(args: argparse.Namespace) -> dict[str, Any]:
    data = [{"path": args.calibration}]
    return {"data": data, "num_samples": args.num_samples, "max_seq_length": args.max_seq_length}


def quantize(args: argparse.Namespace, variant: dict[str, Any], out: Path) -> dict[str, Any]:
    from finetune.quant.quantize import quantize_model
    from finetune.quant.settings import QuantizeSettings

    imports_bytes = peak_bytes()
    settings = dict(variant)
    if variant["scheme"] == "w4a16":
        settings["group_size"] = args.group_size
    if variant["method"] != "rtn":
        settings["calibration"] = calibration(args)
    started = time.perf_counter()
    quantize_model(Path(args.model), settings=QuantizeSettings(**settings), out=out, seed=args.seed)
    return {
        "seconds": time.perf_counter() - started,
        "peak_bytes": peak_bytes(),
        "imports_bytes": imports_bytes,
    }


def perplexity(folder: str, text: str, *, dtype: str, num_tokens: int, window: int) -> float:
    """exp of the mean negative log likelihood of each window's tokens but its first; windows don't overlap."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"][:num_tokens]
    windows_NS = torch.tensor(ids[: len(ids) // window * window]).view(-1, window)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    loss, count = 0.0, 0
    with torch.no_grad():
        for ids_BS in windows_NS.split(2):
            logits_NV = model(ids_BS, use_cache=False).logits[:, :-1].float().flatten(0, 1)
            targets_N = ids_BS[:, 1:].flatten()
            loss += torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum").item()
            count += targets_N.numel()
    return math.exp(loss / count)


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def run(command: list[str]) -> dict[str, Any]:
    """Run a worker process and return the JSON of its last line."""
    print("$", " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face model folder")
    parser.add_argument("--calibration", help="text to calibrate on")
    parser.add_argument("--text", help="text for the perplexity")
    parser.add_argument("--peer-python", help="the python that has llm-compressor; its rows are left out without it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--max-seq-length", type=int, default=512)
    parser.add_argument("--num-tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", help="of the evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run only the rows whose name holds this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker == "ids":
        write_ids(args)
        print("{}")
    elif args.worker == "evaluate":
        value = perplexity(args.model, args.text, dtype=args.dtype, num_tokens=args.num_tokens, window=args.window)
        print(json.dumps({"perplexity": value}))
    elif args.worker:
        print(json.dumps(quantize(args, OURS[args.worker], args.out / args.worker.replace(" ", "-"))))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    file = args.out / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    common = [
        flag
        for name in (
            "calibration",
            "text",
            "group_size",
            "num_samples",
            "max_seq_length",
            "num_tokens",
            "window",
            "dtype",
            "seed",
        )
        for flag in (f"--{name.replace('_', '-')}", str(getattr(args, name)))
    ]
    ours = [sys.executable, __file__, "--out", str(args.out), *common]
    if not (args.out / "ids.npy").is_file():
        run([*ours, "--model", args.model, "--worker", "ids"])
    rows = ["unquantized", *(PEERS if args.peer_python else {}), *OURS]
    for name in [row for row in rows if args.only in row and row not in results]:
        folder, entry = args.model, {}
        if name in OURS:
            folder = str(args.out / name.replace(" ", "-"))
            entry = run([*ours, "--model", args.model, "--worker", name])
        elif name in PEERS:
            folder = str(args.out / name.replace(" ", "-"))
            entry = run(
                [
                    args.peer_python,
                    str(HERE / "quantize_llmcompressor.py"),
                    "--model",
                    args.model,
                    "--ids",
                    str(args.out / "ids.npy"),
                    "--method",
                    PEERS[name],
                    "--group-size",
                    str(args.group_size),
                    "--out",
                    folder,
                ]
            )
        entry |= run([*ours, "--model", folder, "--worker", "evaluate"])
        entry["bytes"] = weight_bytes(Path(folder))
        results[name] = entry
        file.write_text(json.dumps(results, indent=2))
    print_table(results, [row for row in rows if row in results])


def print_table(results: dict[str, dict[str, Any]], rows: list[str]) -> None:
    print("| | perplexity | file, of the unquantized | seconds | peak memory over the imports |")
    print("|---|---|---|---|---|")
    whole = results.get("unquantized", {}).get("bytes")
    for name in rows:
        entry = results[name]
        ratio = f"{entry['bytes'] / whole:.3f}" if whole else "?"
        cost = ["", ""]
        if "seconds" in entry:
            memory = (entry["peak_bytes"] - entry["imports_bytes"]) / 2**30
            cost = [f"{entry['seconds']:.0f}", f"{memory:.2f} GiB"]
        print(f"| {name} | {entry['perplexity']:.2f} | {ratio} | {cost[0]} | {cost[1]} |")


if __name__ == "__main__":
    main()
