"""The verbs and their flags. The only place that prints an error; nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from finetune import __version__
from finetune.errors import FinetuneError, InterruptedRunError, resource_error

MOST_RANKS = 1 << 20
EXIT_CODES = """exit codes: 0 done; 2 recipe or flags; 3 data; 4 checkpoint or model folder; 5 memory, disk, devices or
a lost process; 6 missing package; 7 Hub; 8 quality gate; 130 interrupted; 1 a bug of ours (with a traceback)"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune",
        description="One recipe takes a causal language model from data to a published, quantized model.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, help_line: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=help_line, description=help_line, epilog=EXIT_CODES)

    run = add("run", "Run a recipe's stages; what is done is skipped, what was killed goes on.")
    _add_recipe_flags(run)
    run.add_argument(
        "--from", dest="from_stage", metavar="STAGE", help="start at this stage; those before must be done"
    )
    run.add_argument("--until", dest="until_stage", metavar="STAGE", help="stop after this stage")
    run.add_argument("--force", action="store_true", help="run the chosen stages anew even where they are done")
    run.add_argument(
        "--accept-changes",
        action="store_true",
        help="let an unfinished training go on from its checkpoint with settings that have changed since",
    )

    plan = add(
        "plan",
        "Validate a recipe; show its stages, what is done, the memory and disk it will need, and what would make it "
        "fit. Ends with 0 whether it fits or not: --json says it as `fits`.",
    )
    _add_recipe_flags(plan)
    plan.add_argument(
        "--world-size", type=_ranks, metavar="N", help="plan for N ranks over all machines (default: the recipe's)"
    )
    plan.add_argument(
        "--gpu-memory", metavar="SIZE", help="of one GPU, as 80GiB: plans for cuda where there is none here, too"
    )
    plan.add_argument("--cpu-memory", metavar="SIZE", help="of one machine, as 512GiB (default: this machine's)")
    plan.add_argument("--json", action="store_true", help="print one JSON object")

    data = add(
        "data",
        "Show what a training stage's model will see: rows as tokens and which are learnt, counts, lengths, repeats, "
        "held-out rows that stand in the training data.",
    )
    _add_recipe_flags(data)
    data.add_argument("--stage", metavar="STAGE", help="a training stage (default: the first one)")
    data.add_argument("--rows", type=_not_negative, default=3, metavar="N", help="rows to show (default 3)")
    data.add_argument("--seed", type=_not_negative, metavar="N", help="which rows (default: by the recipe's seed)")
    data.add_argument(
        "--similarity", type=_share, default=0.7, metavar="X", help="from which on two rows are near (default 0.7)"
    )
    data.add_argument("--html", metavar="FILE", help="write it as a page, too")
    data.add_argument("--json", action="store_true", help="print one JSON object")

    script = add("launch-script", "Write the file that runs a recipe on several machines, by SLURM or torchrun.")
    _add_recipe_flags(script)
    kind = script.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", dest="kind", action="store_const", const="slurm", help="a script for sbatch")
    kind.add_argument(
        "--torchrun", dest="kind", action="store_const", const="torchrun", help="a shell script to start on each node"
    )
    script.add_argument("--nodes", type=_positive, default=1, metavar="N", help="machines (default 1)")
    processes = script.add_mutually_exclusive_group()
    processes.add_argument(
        "--gpus-per-node", type=_positive, metavar="N", help="GPUs of each, with a process for each of them"
    )
    processes.add_argument(
        "--processes-per-node", type=_positive, metavar="N", help="default: the recipe's launch.num_processes"
    )
    script.add_argument(
        "--max-restarts", type=_not_negative, default=3, metavar="N", help="new turns after a lost rank (default 3)"
    )
    script.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="one more of sbatch's: --sbatch=--partition=gpu"
    )
    script.add_argument("--out", metavar="FILE", help="default: standard output")
    script.add_argument("--force", action="store_true", help="replace FILE where it exists")

    _add_quantize(add("quantize", "Quantize a Hugging Face model folder, or measure several schemes to choose from."))

    consolidate = add("consolidate", "Turn a sharded training checkpoint into a Hugging Face model folder.")
    consolidate.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a step-N folder or the folder that holds them, a DeepSpeed checkpoint, or a DCP folder of another tool",
    )
    consolidate.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    consolidate.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="limit of one file (default 5GB)")
    consolidate.add_argument(
        "--model", metavar="FOLDER", help="configuration and tokenizer, where the checkpoint has none (a Hub id, too)"
    )
    consolidate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_out(consolidate)

    evaluate = add("evaluate", "Measure perplexity, KL to a reference and exact match of a model.")
    _add_model(evaluate)
    evaluate.add_argument("--perplexity", metavar="FILE", help="a text file to take the perplexity on")
    evaluate.add_argument("--reference", metavar="MODEL", help="another model to take the KL divergence to")
    evaluate.add_argument(
        "--exact-match", metavar="FILE", help="conversations whose last answer is generated and compared"
    )
    _add_template_kwargs(evaluate)
    evaluate.add_argument("--window", metavar="N", help="tokens of a perplexity window (1024, or the model's context)")
    evaluate.add_argument("--max-tokens", metavar="N", help="tokens of the file to take (all)")
    evaluate.add_argument("--max-new-tokens", metavar="N", help="tokens to generate at most")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")

    generate = add("generate", "Answer a prompt greedily, through the model's chat template.")
    _add_model(generate)
    generate.add_argument("--prompt", required=True, metavar="TEXT")
    generate.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N")
    _add_template_kwargs(generate)
    generate.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")

    export = add("export", "Write a folder ready for the Hub: weights, tokenizer, chat template, model card.")
    _add_model(export)
    export.add_argument("--license", help="the licence to name in the model card")
    export.add_argument("--base-model", metavar="ID", help="the Hub id of the model it was made from")
    _add_out(export)

    verify = add("verify", "Check a model folder and load it with plain transformers in a fresh process.")
    verify.add_argument("directory", metavar="DIR")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_quantize(quantize: argparse.ArgumentParser) -> None:
    from finetune.quant.notation import formats, methods_help, schemes_help

    def plain(text: str) -> str:
        return text.replace("%", "%%")

    _add_model(quantize)
    what = quantize.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--scheme", metavar="SCHEME[:N]", help=plain(f"{schemes_help()}; w4a16:64: with this --group-size")
    )
    what.add_argument(
        "--sweep",
        metavar="SCHEMES",
        help="measure instead of writing a model: w4a16:32,w4a16:64,w8a8, a group size behind each colon",
    )
    quantize.add_argument("--method", help=plain(f"{methods_help()} (default: gptq, where the scheme takes it)"))
    quantize.add_argument("--format", help=f"how it is stored: {', '.join(formats())} (default: the scheme's first)")
    quantize.add_argument(
        "--group-size", metavar="N", help="weights that share a scale; `channel`: one scale an output channel"
    )
    quantize.add_argument("--asymmetric", action="store_true", help="a zero point besides each scale")
    quantize.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="LAYERS=SCHEME[:N]",
        help="store some layers otherwise: --override 'down_proj,*.layers.0.*=w8a16'; the last one that matches counts",
    )
    quantize.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAMES",
        help="layers or modules to keep as they are, besides lm_head: --ignore 'o_proj,*.layers.0.*'",
    )
    quantize.add_argument("--calibration", metavar="FILE", help="text or conversations to calibrate and measure on")
    quantize.add_argument("--calibration-format", metavar="FORMAT", help="its row format, where its columns don't tell")
    quantize.add_argument("--num-samples", metavar="N", help="calibration samples (128)")
    quantize.add_argument("--max-seq-length", metavar="N", help="tokens of a calibration sample (512)")
    quantize.add_argument("--micro-batch-size", metavar="N", help="samples in one forward (8)")
    quantize.add_argument(
        "--num-processes", metavar="N", help="processes that share out the samples, on cuda a GPU each (1)"
    )
    quantize.add_argument("--max-shard-size", metavar="SIZE", help="limit of one weight file (5GB)")
    quantize.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other setting of a recipe's `quantize:`, as damp=0.02 or smoothing=0.5",
    )
    quantize.add_argument("--max-kl", type=float, metavar="NATS", help="end with 8 where the KL divergence is higher")
    quantize.add_argument(
        "--max-perplexity-ratio", type=float, metavar="X", help="end with 8 where perplexity grows by more than this"
    )
    quantize.add_argument("--no-verify", action="store_true", help="don't load the result in a fresh process")
    quantize.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    quantize.add_argument("--seed", type=int, default=17, help="decides the order of the calibration text (17)")
    _add_out(quantize)


def _add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML recipe")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override one value of the recipe"
    )


def _add_template_kwargs(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="arguments of the chat template: '{\"enable_thinking\": false}'",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face model folder or Hub id")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="the folder to write; must not exist yet, or be empty"
    )
    parser.add_argument("--force", action="store_true", help="replace DIR where it exists")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as cause:
        raise argparse.ArgumentTypeError(f"not JSON: {cause}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be an object: {"name": value}')
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _ranks(text: str) -> int:
    value = _positive(text)
    if value > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_RANKS:,}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    # A scheduler's SIGTERM is an interruption like ^C: workers are ended, and the same command goes on later.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        from finetune import commands
        from finetune.pipeline import StageFailedError

        try:
            code = int(getattr(commands, options.verb.replace("-", "_"))(options) or 0)
            sys.stdout.flush()
            return code
        except StageFailedError as error:
            _print_error(error)
            return 1
    except FinetuneError as error:
        _print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        interrupted = InterruptedRunError("interrupted", fix="nothing is lost: the same command goes on where it was")
        _print_error(interrupted)
        return interrupted.exit_code
    except BrokenPipeError:
        # The reader of a pipe has gone (`finetune plan … | head`): not a fault of anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        refused = resource_error(error)
        if refused is None:
            raise
        _print_error(refused)
        return refused.exit_code


def _print_error(error: FinetuneError) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # The output itself is what was refused, on a full disk say: what is left of it must not fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(error, file=sys.stderr)
