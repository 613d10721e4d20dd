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
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from finetune.checkpoint.commit import (
    Skipped,
    find_checkpoint_together,
    load_checkpoint,
    prune_checkpoints,
    remove_newer_checkpoints,
    save_checkpoint,
)
from finetune.data.dataset import TokenDataset
from finetune.data.holdout import hold_out
from finetune.data.loader import Batch, StepLoader
from finetune.data.tokens import tokenize_dataset
from finetune.engine.build import build_engine, needs_process_group
from finetune.engine.launch import process_group
from finetune.engine.protocol import AdamWSettings, Engine, MicroBatch, StepResult
from finetune.engine.settings import ZeroSettings
from finetune.errors import CheckpointError, RecipeError
from finetune.model import documents
from finetune.model.activations import checkpoint_blocks
from finetune.model.attention import require_exact_attention
from finetune.model.load import load_config, load_tokenizer, meta_model
from finetune.model.matmul import round_alike
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
    num_supervised_tokens over the run, tokens_per_second (median of the steps), peak_memory_bytes, data (counts of
    rows), skipped_checkpoints. ``accept_changes`` lets it go on from a checkpoint of other settings: from the same
    place in the data, with the optimizer's state. Raises RecipeError for settings that don't fit the model and when a
    loss or gradient isn't finite, DataError for bad data, CheckpointError when settings changed since the checkpoint.
    """
    with process_group(launch_device, alone_too=needs_process_group(zero, launch_device)) as (rank, world_size):
        config, tokenizer = load_config(model_folder), load_tokenizer(model_folder)
        require_exact_attention(config, max_seq_length=settings.max_seq_length, packing=settings.packing)
        dataset, eval_dataset = _tokenize(settings, tokenizer, config, show_progress=rank == 0)
        if settings.eval_rows is not None:
            dataset, eval_dataset = hold_out(dataset, num_rows=settings.eval_rows, seed=seed)
        pad_token_id = _pad_token_id(tokenizer)
        loader = StepLoader(
            dataset,
            packing=settings.packing,
            max_seq_length=settings.max_seq_length,
            micro_batch_size=settings.micro_batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            world_size=world_size,
            rank=rank,
            seed=seed,
            epochs=settings.epochs,
            max_steps=settings.max_steps,
            pad_token_id=pad_token_id,
        )
        engine, engine_reason = _build_engine(model_folder, settings, zero, launch_device, attn_implementation)
        _check_logits(engine, dataset, settings)

        deciding = deciding_settings(
            settings, dataset=dataset, num_steps=loader.num_steps, world_size=world_size, seed=seed
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
            step = step_under(found, deciding, num_sequences=loader.num_sequences) if changed else found.step
            # Those of other steps than the first would stand at the wrong place where steps are counted anew.
            known = found.extra["eval_losses"].items()
            progress = _Progress(step, {key: loss for key, loss in known if step == found.step or key == "0"})
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
                    engine, eval_dataset, settings, rank=rank, world_size=world_size, pad_token_id=pad_token_id
                )

        def save() -> None:
            extra = {"settings": deciding, "eval_losses": progress.eval_losses}
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
            num_tokens = sum(len(dataset.rows[row].input_ids) for pack in loader.sequences(step) for row in pack)
            line = {
                "step": progress.step,
                "loss": result.loss,
                # JSON has no infinity: null where float16 overflowed and the step was skipped.
                "grad_norm": None if result.is_skipped else result.grad_norm,
                "learning_rate": learning_rate,
                "num_tokens": num_tokens,
                "num_supervised_tokens": loader.global_supervised_tokens(step),
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
            "data": dataset.counts,
            "skipped_checkpoints": [f"{path.name}: {reason}" for path, reason in skipped],
        }


def _train_step(
    engine: Engine,
    loader: StepLoader,
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


def _tokenize(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, *, show_progress: bool
) -> tuple[TokenDataset, TokenDataset | None]:
    """(data to train on, held-out data or None). Raises where a row holds a token that the model doesn't have."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and settings.max_seq_length > longest:
        raise RecipeError(
            f"rows of {settings.max_seq_length} tokens are longer than the model's max_position_embeddings, {longest}",
            where="max_seq_length",
            fix=f"set max_seq_length to at most {longest}",
        )
    datasets: list[TokenDataset | None] = []
    for sources in (settings.data, settings.eval_data):
        if not sources:
            datasets.append(None)
            continue
        dataset = tokenize_dataset(
            sources,
            tokenizer=tokenizer,
            max_seq_length=settings.max_seq_length,
            overlong=settings.overlong,
            train_on=settings.train_on,
            chat=settings.chat_options,
            max_dropped_share=settings.max_dropped_share,
            show_progress=show_progress,
        )
        largest = max(int(row.input_ids.max()) for row in dataset.rows)
        if largest >= text.vocab_size:
            raise CheckpointError(
                f"the tokenizer writes token {largest}, the model has {text.vocab_size}",
                fix="tokenizer and config.json must belong to one model",
            )
        datasets.append(dataset)
    assert datasets[0] is not None
    return datasets[0], datasets[1]


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id will do: padding is masked by position, never by its id."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)


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


def _check_logits(engine: Engine, dataset: TokenDataset, settings: TrainSettings) -> None:
    """Raise RecipeError where the chunked loss would see other logits than the model gives, on a row's beginning."""
    input_ids = torch.from_numpy(dataset.rows[0].input_ids[:8].astype(np.int64))[None]
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
            "tokens_per_second": float(np.median([line["tokens_per_second"] for line in lines])),
        }
    if has_eval:
        summary["eval_loss_before"] = progress.eval_losses.get("0")
        summary["eval_loss_after"] = progress.eval_losses.get(str(progress.step))
    return summary
