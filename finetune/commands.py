"""What each verb does with its flags. Standard output carries the result, standard error everything else."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from finetune.config.section import Section, parse_section
from finetune.config.source import Source, apply_overrides
from finetune.errors import CheckpointError, RecipeError
from finetune.files import replace_folder
from finetune.worker import quiet_libraries

S = TypeVar("S", bound=Section)
FLAGS = {"overrides": "--override", "symmetric": "--asymmetric", "verify": "--no-verify", "data": "--calibration"}
"""Flags that don't have the name of their setting."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(options: Namespace) -> None:
    from finetune.joined import join_launcher, run_joined
    from finetune.pipeline import RunOptions, run_recipe
    from finetune.recipe import load_recipe

    quiet_libraries()
    given = load_recipe(Path(options.recipe), options.overrides)
    loaded = with_launch_defaults(given)
    run_options = RunOptions(options.from_stage, options.until_stage, options.force, options.accept_changes)
    if join_launcher():
        states_processes = given.recipe.launch.num_processes is not None
        summary = run_joined(loaded, run_options, states_processes=states_processes, say=say)
    else:
        summary = run_recipe(loaded, run_options, say=say)
    if summary:
        print_summary(summary)


def with_launch_defaults(loaded: Any) -> Any:
    """Fill in device and num_processes where the recipe leaves them open: the run's recipe.yaml says what was used."""
    import dataclasses

    launch = loaded.recipe.launch
    if launch.device is None or launch.num_processes is None:
        from finetune.engine.device import resolve_launch

        loaded = dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"launch": resolve_launch(launch)}))
    return loaded


def print_summary(summary: dict[str, Any]) -> None:
    for stage in summary["stages"]:
        if stage["kind"] == "evaluate":
            from finetune.evaluate.table import format_table

            print(format_table(stage["metrics"]["models"]))
        elif stage["kind"] == "export":
            print(f"exported: {stage['metrics'].get('folder', stage['path'])}")
    print(f"summary: {Path(summary['stages'][0]['path']).parent / 'summary.json'}" if summary["stages"] else "")


def plan(options: Namespace) -> None:
    from finetune.config.size import parse_size
    from finetune.plan_text import format_plan
    from finetune.planning import plan_recipe
    from finetune.recipe import load_recipe

    given = {
        name: None if text is None else parse_size(text, where=f"--{name}-memory", needs_unit=True)
        for name, text in (("gpu", options.gpu_memory), ("cpu", options.cpu_memory))
    }
    quiet_libraries()
    planned = plan_recipe(
        load_recipe(Path(options.recipe), options.overrides),
        world_size=options.world_size,
        gpu_bytes=given["gpu"],
        cpu_bytes=given["cpu"],
    )
    print(json.dumps(planned, indent=2) if options.json else format_plan(planned))


def data(options: Namespace) -> None:
    from finetune.recipe import load_recipe

    quiet_libraries()
    from finetune.data_preview.show import show_data

    loaded = load_recipe(Path(options.recipe), options.overrides)
    chosen = {"stage": options.stage, "num_rows": options.rows, "seed": options.seed, "similarity": options.similarity}
    show_data(loaded, **chosen, html=options.html, as_json=options.json)


def launch_script(options: Namespace) -> None:
    from finetune.files import write_text
    from finetune.launch_script import ScriptOptions
    from finetune.launch_script import launch_script as script_of

    wanted = ScriptOptions(
        kind=options.kind,
        nodes=options.nodes,
        processes_per_node=options.processes_per_node,
        gpus_per_node=options.gpus_per_node,
        max_restarts=options.max_restarts,
        sbatch=tuple(options.sbatch),
    )
    text = script_of(Path(options.recipe), options.overrides, wanted, directory=Path.cwd())
    if options.out is None:
        print(text, end="")
        return
    out = Path(options.out)
    if out.exists() and not options.force:
        raise RecipeError("the file is there already", where=out, fix="name another one, or add --force to replace it")
    write_text(out, text)
    out.chmod(0o755)
    print(out)


def quantize(options: Namespace) -> None:
    if options.sweep is not None:
        sweep(options)
        return
    from finetune.quant.notation import override_values, scheme_flags
    from finetune.quant.settings import QuantizeSettings

    flags = quantize_flags(options) | scheme_flags(options.scheme, options.group_size)
    if options.asymmetric:
        flags["symmetric"] = False
    if options.override:
        flags["overrides"] = [override_values(text) for text in options.override]
    settings = parse_flags(QuantizeSettings, flags, options.settings)
    limits = {"kl": options.max_kl, "perplexity_ratio": options.max_perplexity_ratio}
    if settings.calibration is None and any(limit is not None for limit in limits.values()):
        raise RecipeError(
            "there is no text to measure on", where="--max-kl, --max-perplexity-ratio", fix="add --calibration FILE"
        )
    out = free_folder(options, options.model)
    if settings.uses_calibration and settings.calibration is None:
        say("without --calibration the outliers of int8 inputs stay where they are, and cost quality")
    quiet_libraries()
    from finetune.model.load import resolve_model
    from finetune.quant.report import check_limits, read_report
    from finetune.quant.report_text import format_report
    from finetune.stages.quantize import quantize as quantize_model

    report = quantize_model(
        resolve_model(options.model),
        settings=settings,
        out=out,
        seed=options.seed,
        device=device(options),
        restart=options.force,
    )
    publish(options, out)
    if options.json:
        print(json.dumps({key: value for key, value in report.items() if key != "settings"}, indent=2))
    else:
        print(format_report(read_report(Path(options.out)), Path(options.out)))
    check_limits(report["end_to_end"], limits, where=options.out)


def sweep(options: Namespace) -> None:
    from finetune.quant.notation import NOT_IN_A_SWEEP, misfits_error, scheme_values, sweep_names
    from finetune.quant.settings import QuantizeSettings

    for key, fix in NOT_IN_A_SWEEP.items():
        given = getattr(options, key)
        if given or isinstance(given, float):  # --max-kl 0, too
            flag = f"--{key.replace('_', '-')}"
            raise RecipeError(f"{flag} doesn't go with --sweep", where=flag, fix=fix)
    if options.calibration is None:
        raise RecipeError("a sweep measures on text", where="--sweep", fix="add --calibration FILE")
    for setting in options.settings:
        if setting.partition("=")[0] == "tuning_steps":
            raise RecipeError("a sweep tunes nothing", where=f"--set {setting}", fix="leave it out")
    shared = quantize_flags(options) | {"tuning_steps": 0}
    variants: dict[str, QuantizeSettings] = {}
    misfits: dict[str, RecipeError] = {}
    for name in sweep_names(options.sweep):
        try:
            values = scheme_values(name, where=f"--sweep {options.sweep}")
            variants[name] = parse_flags(QuantizeSettings, {**shared, **values}, options.settings)
        except RecipeError as error:
            misfits[name] = error
    if not variants:
        raise misfits_error(misfits, [])
    out = Path(options.out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not options.force:
            raise RecipeError(
                "--out isn't a new or empty folder", where=options.out, fix="name another, or add --force"
            )
        if not (out / "sweep.json").is_file():
            raise RecipeError("--force replaces an earlier sweep, this is none", where=options.out, fix="name another")
    quiet_libraries()
    from finetune.model.load import resolve_model
    from finetune.quant.sweep import format_sweep, sweep_model

    report = sweep_model(
        resolve_model(options.model), variants, out=out, seed=options.seed, device=device(options), misfits=misfits
    )
    print(json.dumps(report, indent=2) if options.json else format_sweep(report, Path(options.out)))


def quantize_flags(options: Namespace) -> dict[str, Any]:
    """What ``quantize`` is told of any scheme, as settings."""
    from finetune.quant.notation import ignore_values

    flags: dict[str, Any] = {}
    for key in ("method", "format", "max_shard_size", "num_processes"):
        if getattr(options, key) is not None:
            flags[key] = getattr(options, key)
    if options.ignore:
        flags["ignore"] = ignore_values(options.ignore)
    if options.no_verify:
        flags["verify"] = False
    for key in ("calibration_format", "num_samples", "max_seq_length", "micro_batch_size"):
        if getattr(options, key) is not None and options.calibration is None:
            flag = f"--{key.replace('_', '-')}"
            raise RecipeError(f"{flag} describes calibration text", where=flag, fix="add --calibration FILE")
    if options.calibration is not None:
        data = {"path": options.calibration}
        if options.calibration_format is not None:
            data["format"] = options.calibration_format
        flags["calibration"] = {"data": [data]}
        for key in ("num_samples", "max_seq_length", "micro_batch_size"):
            if getattr(options, key) is not None:
                flags["calibration"][key] = getattr(options, key)
    return flags


def consolidate(options: Namespace) -> None:
    from finetune.config.size import parse_size

    limit = parse_size(options.max_shard_size, where="--max-shard-size")
    out = free_folder(options, options.checkpoint)
    quiet_libraries()
    from finetune.checkpoint.commit import find_checkpoint
    from finetune.checkpoint.consolidate import consolidate as consolidate_checkpoint
    from finetune.checkpoint.sources import own_steps

    checkpoint = Path(options.checkpoint)
    if own_steps(checkpoint):
        found = find_checkpoint(checkpoint)
        if found is None:
            raise CheckpointError(
                "no checkpoint here is whole", where=checkpoint, fix="train on, or give another folder"
            )
        checkpoint = found.path
        say(f"newest good checkpoint: {checkpoint}")
    model = None
    if options.model:
        from finetune.model.load import resolve_model

        model = resolve_model(options.model)
    report = consolidate_checkpoint(checkpoint, out=out, dtype=options.dtype, max_shard_size_bytes=limit, model=model)
    publish(options, out)
    if options.json:
        print(json.dumps({key: value for key, value in report.items() if not isinstance(value, dict | list)}, indent=2))
        return
    size = f"{report['num_tensors']:,} tensors, {report['bytes'] / 1e6:,.1f} MB in {report['dtype']}"
    print(f"{options.out}: {size}, weight files: {report['num_shards']}, seconds: {report['seconds']:.1f}")


def evaluate(options: Namespace) -> None:
    from finetune.evaluate.settings import EvaluateSettings

    flags: dict[str, Any] = {}
    for key in ("perplexity", "window", "max_tokens", "max_new_tokens"):
        if getattr(options, key) is not None:
            flags[key] = getattr(options, key)
    if options.exact_match:
        flags["exact_match"] = {"path": options.exact_match}
    flags["chat_template_kwargs"] = options.chat_template_kwargs
    if not options.perplexity and not options.exact_match:
        raise RecipeError(
            "there is nothing to measure", where="evaluate", fix="give --perplexity FILE or --exact-match FILE"
        )
    if options.reference and not options.perplexity:
        raise RecipeError("a KL divergence needs text", where="--reference", fix="add --perplexity FILE")
    settings = parse_flags(EvaluateSettings, flags)
    quiet_libraries()
    from finetune.evaluate.run import evaluate_models
    from finetune.evaluate.table import format_table
    from finetune.model.load import resolve_model

    models = {options.model: resolve_model(options.model)}
    if options.reference:
        models = {options.reference: resolve_model(options.reference), **models}
    results = evaluate_models(models, reference=options.reference, settings=settings, device=device(options))
    print(json.dumps(results[options.model], indent=2) if options.json else format_table(results))


def generate(options: Namespace) -> None:
    quiet_libraries()
    from finetune.data.options import ChatOptions
    from finetune.evaluate.generation import chat_prompt_ids, generate_replies
    from finetune.model.load import load_config, load_model, load_tokenizer, resolve_model

    folder = resolve_model(options.model)
    # A broken config.json would be blamed on the tokenizer, which reads it, too.
    load_config(folder)
    tokenizer = load_tokenizer(folder)
    if options.raw:
        prompt = tokenizer(options.prompt)["input_ids"]
    else:
        chat = ChatOptions(template_kwargs=options.chat_template_kwargs)
        prompt = chat_prompt_ids(tokenizer, [{"role": "user", "content": options.prompt}], chat)
    model = load_model(folder, dtype="auto", device=device(options))
    (reply,) = generate_replies(model, tokenizer, [prompt], max_new_tokens=options.max_new_tokens)
    print(reply)


def export(options: Namespace) -> None:
    out = free_folder(options, options.model)
    quiet_libraries()
    from finetune.export.folder import export_model
    from finetune.export.model_card import CardFacts
    from finetune.model.load import resolve_model

    card = CardFacts(title=Path(options.out).resolve().name, license=options.license, base_model=options.base_model)
    export_model(resolve_model(options.model), out=out, card=card)
    publish(options, out)
    print(options.out)


def verify(options: Namespace) -> None:
    quiet_libraries()
    from finetune.export.verify import verify_folder
    from finetune.export.verify_text import format_verification

    report = verify_folder(Path(options.directory))
    print(json.dumps(report, indent=2) if options.json else format_verification(report))


def parse_flags(kind: type[S], flags: dict[str, Any], settings: Sequence[str] = ()) -> S:
    """A section from command-line flags and ``--set key=value``; an error names the flag."""
    source = Source(name="flags", value=flags)

    def flag(key: str) -> str:
        return FLAGS.get(key, f"--{key.replace('_', '-')}")

    for key, value in flags.items():
        source.places[(key,)] = flag(key)
        if isinstance(value, dict):
            for inner in value:
                source.places[(key, inner)] = flag(inner)
    for setting in settings:
        key = setting.partition("=")[0]
        if key in flags:
            raise RecipeError(f"`{key}` is given twice", where=f"--set {setting}", fix=f"drop this or {flag(key)}")
    apply_overrides(source, settings)
    return parse_section(kind, source, (), source.value)


def device(options: Namespace) -> str:
    from finetune.engine.device import choose_device

    return choose_device(options.device)


def free_folder(options: Namespace, source: str) -> Path:
    """The folder that a verb writes to: ``--out``, or a new one beside it that replaces it at the end (``--force``).

    Only a model folder is replaced, and never one that holds ``source``, which the verb reads.
    """
    out = Path(options.out).resolve()
    if out.exists() and not out.is_dir():
        raise RecipeError("--out is a file", where=options.out, fix="name a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return out
    if not options.force:
        raise RecipeError(
            "the folder isn't empty", where=options.out, fix="name another one, or add --force to replace it"
        )
    if Path(source).exists() and Path(source).resolve().is_relative_to(out):
        raise RecipeError(f"--out would replace {source}, which is read", where=options.out, fix="name another folder")
    if not (out / "config.json").is_file():
        raise RecipeError("--force replaces a model folder, this is none", where=options.out, fix="name another folder")
    return out.with_name(out.name + ".new")


def publish(options: Namespace, written: Path) -> None:
    out = Path(options.out).resolve()
    if written != out:
        replace_folder(written, out)
