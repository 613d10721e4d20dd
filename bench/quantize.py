"""Quantize one model by finetune, llm-compressor and AutoRound on the same calibration tokens; compare what it cost.

    python bench/quantize.py --model FOLDER --calibration FILE --text FILE --peer-python PYTHON --out FOLDER

Every run is a process of its own, one after the other; one evaluator reads all results by plain transformers, in
float32: perplexity, and KL(unquantized || quantized) in nats a token. Memory is the peak over what the imports took.
Prints a Markdown table and writes OUT/results.json and OUT/quantize.png; runs found there are not repeated. ``--only``
names rows; without ``--peer-python`` the peers' rows are left out. On a machine that does other work too, compare the
processor seconds.
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
SHAPES: dict[str, dict[str, Any]] = {
    "g32": {"scheme": "w4a16", "group_size": 32},
    "g64": {"scheme": "w4a16", "group_size": 64},
    "channel": {"scheme": "w4a16", "group_size": None},
    "w8a8": {"scheme": "w8a8"},
}
METHODS = ["rtn", "awq", "gptq", "best"]
OURS = {
    f"finetune {method} {shape}": {"method": method, **values} for shape, values in SHAPES.items() for method in METHODS
}
PEERS = {
    f"{peer} {shape}": [script, *flags, "--group-size", str(SHAPES[shape]["group_size"] or 0)]
    for shape in ("g64", "channel")
    for peer, script, flags in (
        ("llm-compressor rtn", "quantize_llmcompressor.py", ["--method", "rtn"]),
        ("llm-compressor gptq", "quantize_llmcompressor.py", ["--method", "gptq"]),
        ("AutoRound 200", "quantize_autoround.py", ["--iterations", "200"]),
    )
}
COMMON = ("calibration", "text", "num_samples", "max_seq_length", "num_tokens", "window", "dtype", "seed", "reference")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def calibration(args: argparse.Namespace) -> dict[str, Any]:
    data = [{"path": args.calibration}]
    return {"data": data, "num_samples": args.num_samples, "max_seq_length": args.max_seq_length}


def write_ids(args: argparse.Namespace) -> None:
    """Save the (num_samples, max_seq_length) token ids that finetune calibrates on."""
    import numpy as np

    from finetune.quant.calibration import load_calibration
    from finetune.quant.settings import CalibrationSettings

    samples = load_calibration(Path(args.model), CalibrationSettings(**calibration(args)), seed=args.seed)
    np.save(args.out / "ids.npy", samples.input_ids)


def quantize(args: argparse.Namespace, variant: dict[str, Any], out: Path) -> dict[str, Any]:
    from finetune.quant.quantize import quantize_model
    from finetune.quant.settings import QuantizeSettings

    imports_bytes = peak_bytes()
    settings = {**variant, "verify": False}
    # Rounding to nearest uses no text; for int8 inputs it would even them out by it.
    if variant["method"] != "rtn" or variant["scheme"] == "w8a8":
        settings["calibration"] = calibration(args)
    started, cpu_started = time.perf_counter(), time.process_time()
    report = quantize_model(
        Path(args.model), settings=QuantizeSettings(**settings), out=out, seed=args.seed, restart=True
    )
    # The figures of the report are no part of the work that the peers do.
    measuring = (report["end_to_end"] or {}).get("seconds", 0)
    return {
        "seconds": time.perf_counter() - started - measuring,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_bytes": peak_bytes(),
        "imports_bytes": imports_bytes,
    }


def evaluate(args: argparse.Namespace) -> dict[str, float]:
    """Perplexity over each window's tokens but its first, and KL to ``--reference``; windows don't overlap."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()

    ids = AutoTokenizer.from_pretrained(args.reference)(Path(args.text).read_text("utf-8"), add_special_tokens=False)
    ids_N = ids["input_ids"][: args.num_tokens]
    windows_NS = torch.tensor(ids_N[: len(ids_N) // args.window * args.window]).view(-1, args.window)
    model, reference = load(args.model), load(args.reference)
    nll, kl, count = 0.0, 0.0, 0
    with torch.inference_mode():
        for ids_1S in windows_NS.split(1):
            model_NV = model(ids_1S, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            exact_NV = reference(ids_1S, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            targets_N = ids_1S[0, 1:]
            nll -= model_NV.gather(1, targets_N[:, None]).sum().item()
            kl += (exact_NV.exp() * (exact_NV - model_NV)).sum().item()
            count += len(targets_N)
    return {"perplexity": math.exp(nll / count), "kl": kl / count}


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
    parser.add_argument("--peer-python", help="the python that has llm-compressor and AutoRound")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--max-seq-length", type=int, default=512)
    parser.add_argument("--num-tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", help="of the evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="run these rows")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker == "ids":
        write_ids(args)
        print("{}")
    elif args.worker == "evaluate":
        print(json.dumps(evaluate(args)))
    elif args.worker:
        print(json.dumps(quantize(args, OURS[args.worker], args.out / args.worker.replace(" ", "-"))))
    else:
        args.reference = args.model
        compare(args)


def compare(args: argparse.Namespace) -> None:
    file = args.out / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    common = [flag for name in COMMON for flag in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    ours = [sys.executable, __file__, "--out", str(args.out), *common]
    if not (args.out / "ids.npy").is_file():
        run([*ours, "--model", args.model, "--worker", "ids"])
    peers = list(PEERS) if args.peer_python else []
    rows = ["unquantized", *(row for shape in SHAPES for row in (*peers, *OURS) if row.endswith(f" {shape}"))]
    wanted = args.only or rows
    unknown = sorted(set(wanted) - set(rows))
    if unknown:
        sys.exit(f"no such row: {unknown[0]}; rows are {', '.join(rows)}")
    for name in [row for row in wanted if row not in results]:
        folder, entry = args.model, {}
        if name != "unquantized":
            folder = str(args.out / name.replace(" ", "-"))
        if name in OURS:
            entry = run([*ours, "--model", args.model, "--worker", name])
        elif name in PEERS:
            script, *flags = PEERS[name]
            command = [args.peer_python, str(HERE / script), "--model", args.model, *flags]
            entry = run([*command, "--ids", str(args.out / "ids.npy"), "--out", folder])
        entry |= run([*ours, "--model", folder, "--worker", "evaluate"])
        entry["bytes"] = weight_bytes(Path(folder))
        results[name] = entry
        file.write_text(json.dumps(results, indent=2))
    found = {row: results[row] for row in rows if row in results}
    print_table(found)
    plot(found, args.out / "quantize.png")


def print_table(results: dict[str, dict[str, Any]]) -> None:
    print("| | perplexity | over unquantized | KL, nats | size | seconds | processor seconds | peak memory |")
    print("|---|---|---|---|---|---|---|---|")
    whole = results.get("unquantized", {})
    for name, entry in results.items():
        ratio = f"{entry['perplexity'] / whole['perplexity']:.4f}" if whole else "?"
        # AutoRound's row holds float weights that have been rounded: its size would be that of the others.
        size = f"{entry['bytes'] / whole['bytes']:.3f}" if whole and "AutoRound" not in name else ""
        cost = ["", "", ""]
        if "seconds" in entry:
            memory = (entry["peak_bytes"] - entry["imports_bytes"]) / 2**30
            cost = [f"{entry['seconds']:.0f}", f"{entry['cpu_seconds']:.0f}", f"{memory:.2f} GiB"]
        figures = [f"{entry['perplexity']:.3f}", ratio, f"{entry['kl']:.4f}", size, *cost]
        print(f"| {name} | {' | '.join(figures)} |")


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Seconds against KL, a panel a shape: down and to the left is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = [shape for shape in SHAPES if any(name.endswith(f" {shape}") for name in results)]
    figure, axes = plt.subplots(1, max(1, len(shapes)), figsize=(4.2 * max(1, len(shapes)), 3.6), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=False):
        for name, entry in results.items():
            if not name.endswith(f" {shape}"):
                continue
            ours = name.startswith("finetune")
            axis.scatter(entry["seconds"], entry["kl"], marker="o" if ours else "s", color="C0" if ours else "C1")
            label = name.removesuffix(f" {shape}")
            axis.annotate(label, (entry["seconds"], entry["kl"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axis.set(title=shape, xlabel="seconds", ylabel="KL to the unquantized model (nats a token)", yscale="log")
        axis.margins(0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
