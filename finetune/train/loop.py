"""The training loop, run by every rank: from the newest good checkpoint, or from the model, to the last step."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from finetune.checkpoint.commit import (
    Skipped,
    find_checkpoint_together,
    load_checkpoint,
    prune_checkpoints,
    remove_newer_checkpoints,
    save_checkpoint,
)
from finetune.data.dataset import TokenDataset, TokenRow
from finetune.data.loader import Batch, Loader, StepLoader
from finetune.data.streaming import StreamLoader
from finetune.engine.build import build_engine, needs_process_group
from finetune.engine.launch import process_group
from finetune.engine.protocol import AdamWSettings, Engine, MicroBatch, StepResult
from finetune.engine.settings import ZeroSettings
from finetune.errors import RecipeError
from finetune.model import documents
from finetune.model.activations import checkpoint_blocks
from finetune.model.attention import require_exact_attention
from finetune.model.load import load_config, load_tokenizer, meta_model
from finetune.model.matmul import round_alike
from finetune.train.data import make_loader, pad_token_id, prepare_data_together
from finetune.train.loss import CausalLMLoss
from finetune.train.metrics import MetricsLog, peak_memory_bytes, read_metrics
from finetune.train.resume import deciding_settings, set_aside, settings_changed, step_under, taken
from finetune.train.schedule import learning_rate_at
from finetune.train.settings import TrainSettings

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The largest difference that rounding makes, over the logits' spread; a factor or a cap that is missed makes far more.
LOGIT_TOLERANCES = {"bf16": 0.05, "fp16": 0.02, "fp32": 1e-3}


@dataclass
class _Progress:
    step: int = 0
    """Steps done."""
    eval_losses: dict[str, float] = field(default_factory=dict)
    """Held-out loss by the number of steps done before it (a string, as JSON wants its keys)."""
    position: dict[str, Any] | None = None
    """Where the next step begins in rows that are streamed."""


def train(
    *,
    model_folder: Path,
    settings: TrainSettings,
    zero: ZeroSettings,
    launch_device: str,
    seed: int,
    folder: Path,
    attn_implementation: str = "sdpa",
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Train the model of ``model_folder`` and leave checkpoints and ``metrics.jsonl`` in ``folder``.

    Every rank calls it, inside the process group or alone. It goes on from the newest good checkpoint below
    ``folder/checkpoints`` and saves one at the end. Returns engine and engine_reason, num_steps, resumed_from,
    first_loss, loss, eval_loss_before and eval_loss_after where there is held-out data, num_tokens and
    num_supervised_tokens over the run, padding_share of its positions, pack_fill_rate (None without packing, or
    streamed), tokens_per_second (median of the steps), peak_memory_bytes, data (counts of rows), skipped_checkpoints.
    ``accept_changes`` lets it go on from a checkpoint of other settings: from the same
    place in the data, with the optimizer's state. Raises RecipeError for settings that don't fit the model and when a
    loss or gradient isn't finite, DataError for bad data, CheckpointError when settings changed since the checkpoint.
    """
    with process_group(launch_device, alone_too=needs_process_group(zero, launch_device)) as (rank, world_size):
        config, tokenizer = load_config(model_folder), load_tokenizer(model_folder)
        require_exact_attention(config, max_seq_length=settings.max_seq_length, packing=settings.packing)
        prepared = prepare_data_together(settings, tokenizer, config, folder=folder)
        loader, eval_dataset = make_loader(
            prepared,
            settings,
            tokenizer,
            config,
            seed=seed,
            rank=rank,
            world_size=world_size,
            say=_say if rank == 0 else lambda text: None,
        )
        engine, engine_reason = _build_engine(model_folder, settings, zero, launch_device, attn_implementation)
        _check_logits(engine, loader.first_row, settings)

        deciding = deciding_settings(
            settings, data_digest=loader.digest, num_steps=loader.num_steps, world_size=world_size, seed=seed
        )
        checkpoints = folder / "checkpoints"
        skipped: list[Skipped] = []
        found = find_checkpoint_together(checkpoints, skipped=skipped)
        progress = _Progress()
        changed = False
        if found is not None:
            changed = settings_changed(found, deciding, accepts=accept_changes)
            load_checkpoint(found.path, engine.state())
            engine.state_loaded()
            num_sequences = loader.num_sequences if isinstance(loader, StepLoader) else None
            step = step_under(found, deciding, num_sequences=num_sequences) if changed else found.step
            # Those of other steps than the first would stand at the wrong place where steps are counted anew.
            known = found.extra["eval_losses"].items()
            progress = _Progress(step, {key: loss for key, loss in known if step == found.step or key == "0"})
            if isinstance(loader, StreamLoader):
                progress.position = found.extra["stream_position"]
                loader.seek(step, progress.position)
        resumed_from = progress.step
        if rank == 0:
            for path, reason in skipped:
                print(f"passed over {path.name}: {reason}", file=sys.stderr)
            if found is not None or skipped:
                print(f"goes on behind step {resumed_from} of {loader.num_steps}", file=sys.stderr, flush=True)
        if changed and rank == 0:
            set_aside(folder, found_step=found.step if found else 0, step=resumed_from)
        log = MetricsLog(folder / "metrics.jsonl", writes=rank == 0, last_step=resumed_from)

        def evaluate() -> None:
            if eval_dataset is not None and str(progress.step) not in progress.eval_losses:
                progress.eval_losses[str(progress.step)] = held_out_loss(
                    engine,
                    eval_dataset,
                    settings,
                    rank=rank,
                    world_size=world_size,
                    pad_token_id=pad_token_id(tokenizer),
                )

        def save() -> None:
            extra = {"settings": deciding, "eval_losses": progress.eval_losses}
            if progress.position is not None:
                extra["stream_position"] = progress.position
            save_checkpoint(
                checkpoints, step=progress.step, state=engine.state(), extra=extra, model_files=model_folder
            )
            prune_checkpoints(checkpoints, settings.keep_checkpoints)

        if changed:
            # From here on the checkpoints are of the new settings, so that the next resume has nothing to accept.
            save()
            remove_newer_checkpoints(checkpoints, step=resumed_from)
        if rank == 0:
            taken(folder)
        if found is None:
            evaluate()
        steps = range(resumed_from, loader.num_steps)
        bar = tqdm(
            steps, initial=resumed_from, total=loader.num_steps, desc="train", disable=None if rank == 0 else True
        )
        for step in bar:
            start = time.perf_counter()
            learning_rate = learning_rate_at(
                step,
                num_steps=loader.num_steps,
                peak=settings.learning_rate,
                schedule=settings.lr_schedule,
                warmup_ratio=settings.warmup_ratio,
            )
            result = _train_step(
                engine, loader, step, learning_rate=learning_rate, settings=settings, seed=(seed, rank)
            )
            progress.step = step + 1
            seconds = time.perf_counter() - start
            num_tokens, num_positions = loader.num_tokens(step), loader.num_positions(step)
            if isinstance(loader, StreamLoader):
                progress.position = loader.position_after(step)
            line = {
                "step": progress.step,
                "loss": result.loss,
                # JSON has no infinity: null where float16 overflowed and the step was skipped.
                "grad_norm": None if result.is_skipped else result.grad_norm,
                "learning_rate": learning_rate,
                "num_tokens": num_tokens,
                "num_supervised_tokens": loader.global_supervised_tokens(step),
                "padding_share": round(1 - num_tokens / num_positions, 6),
                "tokens_per_second": num_tokens / seconds,
                "peak_memory_bytes": peak_memory_bytes(launch_device),
            }
            is_last = progress.step == loader.num_steps
            if is_last or (settings.eval_every_steps and progress.step % settings.eval_every_steps == 0):
                evaluate()
                if eval_dataset is not None:
                    line["eval_loss"] = progress.eval_losses[str(progress.step)]
            log.add(line)
            bar.set_postfix(loss=f"{result.loss:.4f}", refresh=False)
            if is_last or (settings.save_every_steps and progress.step % settings.save_every_steps == 0):
                save()
        return {
            "engine": engine.name,
            "engine_reason": engine_reason,
            "num_steps": loader.num_steps,
            "resumed_from": resumed_from,
            **_summary(log.path, progress, has_eval=eval_dataset is not None),
            "peak_memory_bytes": peak_memory_bytes(launch_device),
            "pack_fill_rate": loader.fill_rate() if isinstance(loader, StepLoader) else None,
            "data": loader.counts,
            "skipped_checkpoints": [f"{path.name}: {reason}" for path, reason in skipped],
        }


def _train_step(
    engine: Engine,
    loader: Loader,
    step: int,
    *,
    learning_rate: float,
    settings: TrainSettings,
    seed: tuple[int, int],
) -> StepResult:
    """One optimizer step; its dropout depends on the run's seed, the rank and the step alone."""
    torch.manual_seed(int(np.random.SeedSequence([*seed, step]).generate_state(1)[0]))
    micro_batches = [_micro_batch(batch) for batch in loader.batches(step)]
    engine.forward_backward(micro_batches, denominator=loader.global_supervised_tokens(step))
    result = engine.clip_and_step(max_norm=settings.max_grad_norm, learning_rate=learning_rate)
    if not (result.is_finite or result.is_skipped):
        raise RecipeError(
            f"step {step + 1}: the loss is {result.loss}, the gradient's norm {result.grad_norm}; "
            "the weights of the step before are kept",
            where="learning_rate",
            fix="lower the learning rate or raise warmup_ratio; look for damaged rows or weights",
        )
    return result


def held_out_loss(
    engine: Engine, dataset: TokenDataset, settings: TrainSettings, *, rank: int, world_size: int, pad_token_id: int
) -> float:
    """Mean loss over all supervised tokens of ``dataset``, the same on all ranks, which share the work."""
    loader = StepLoader(
        dataset,
        packing=settings.packing,
        max_seq_length=settings.max_seq_length,
        micro_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=1,
        world_size=world_size,
        rank=rank,
        seed=0,
        epochs=1,
        max_steps=None,
        pad_token_id=pad_token_id,
    )
    total = torch.zeros((), dtype=torch.float64)
    steps = tqdm(range(loader.num_steps), desc="held-out loss", leave=False, disable=None if rank == 0 else True)
    for step in steps:
        for batch in loader.batches(step):
            total += engine.forward(_micro_batch(batch)).double().cpu()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total) / sum(loader.global_supervised_tokens(step) for step in range(loader.num_steps))


def _micro_batch(batch: Batch) -> MicroBatch:
    return {
        "input_ids": batch.input_ids,
        "targets": batch.targets,
        "position_ids": batch.position_ids,
        "document_ids": batch.document_ids,
    }


def _build_engine(
    model_folder: Path, settings: TrainSettings, zero: ZeroSettings, device: str, attn_implementation: str
) -> tuple[Engine, str]:
    config = load_config(model_folder)
    if attn_implementation == "sdpa" and documents.can_attend_by_document(
        config, device=device, max_seq_length=settings.max_seq_length
    ):
        attn_implementation = documents.NAME
    model = meta_model(config, attn_implementation=attn_implementation)
    round_alike(model)
    if settings.checkpointed_every is not None:
        checkpoint_blocks(model, every=settings.checkpointed_every)
    return build_engine(
        CausalLMLoss(model, offload_activations=settings.activation_offload),
        model,
        model_folder,
        zero=zero,
        device=device,
        compute_dtype=COMPUTE_DTYPES[settings.mixed_precision],
        adamw=AdamWSettings(betas=settings.betas, epsilon=settings.epsilon, weight_decay=settings.weight_decay),
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
    )


def _check_logits(engine: Engine, row: TokenRow, settings: TrainSettings) -> None:
    """Raise RecipeError where the chunked loss would see other logits than the model gives, on a row's beginning."""
    input_ids = torch.from_numpy(row.input_ids[:8].astype(np.int64))[None]
    probe = {
        "input_ids": input_ids,
        "targets": torch.full_like(input_ids, -100),
        "position_ids": torch.arange(input_ids.shape[1])[None],
        "document_ids": torch.zeros_like(input_ids, dtype=torch.int32),
    }
    difference = float(engine.forward(probe, compare_logits=True))
    if not difference <= LOGIT_TOLERANCES[settings.mixed_precision]:
        raise RecipeError(
            f"the loss does not know what this model does to its logits: {difference:.3g} of their spread is missing",
            where="model.path",
            fix="use another model; scaling and soft-capping by the configuration are known",
        )


def _summary(metrics_path: Path, progress: _Progress, *, has_eval: bool) -> dict[str, Any]:
    lines = read_metrics(metrics_path)
    summary: dict[str, Any] = {}
    if lines:
        summary = {
            "first_loss": lines[0]["loss"],
            "loss": lines[-1]["loss"],
            "num_tokens": sum(line["num_tokens"] for line in lines),
            "num_supervised_tokens": sum(line["num_supervised_tokens"] for line in lines),
            "padding_share": _padding_share(lines),
            "tokens_per_second": float(np.median([line["tokens_per_second"] for line in lines])),
        }
    if has_eval:
        summary["eval_loss_before"] = progress.eval_losses.get("0")
        summary["eval_loss_after"] = progress.eval_losses.get(str(progress.step))
    return summary


def _padding_share(lines: list[dict[str, Any]]) -> float | None:
    """Of all positions computed; None where a line was written before it was recorded."""
    if any("padding_share" not in line for line in lines):
        return None
    positions = sum(line["num_tokens"] / (1 - line["padding_share"]) for line in lines)
    return round(1 - sum(line["num_tokens"] for line in lines) / positions, 6)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
