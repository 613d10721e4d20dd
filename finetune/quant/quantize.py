"""Quantize a model folder into another one that plain transformers loads."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import finetune
from finetune.artifact import MANIFEST_NAME, RECORD_NAME, write_record
from finetune.engine.host_memory import give_back_large_memory, keep_large_memory
from finetune.errors import CheckpointError, DataError, RecipeError
from finetune.files import published_folder, require_free_bytes, sha256_file, sha256_json, write_json
from finetune.model.probe import PROBE_NAME, probe_input_ids, write_probe
from finetune.quant.calibration import NOTHING_MEASURED, CalibrationSamples, check_length, load_calibration, notes_on
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.end_to_end import EndToEnd
from finetune.quant.layers import check_called, layer_schemes, linear_names
from finetune.quant.methods import METHODS
from finetune.quant.ranks import ALONE, Ranks, Share
from finetune.quant.report import (
    PLOT_NAME,
    REPORT_NAME,
    bits_per_weight,
    describe_layers,
    stored_sizes,
    write_report,
)
from finetune.quant.scheme import QuantScheme
from finetune.quant.settings import QuantizeSettings
from finetune.quant.spill import HiddenStates
from finetune.quant.stream import CALIBRATION_DTYPE, PROBE_DTYPE, BlockQuantizer, BlockResult, Stream
from finetune.quant.tuning import ScaleTuner
from finetune.quant.work import WorkFolder
from finetune.quant.writers import WRITERS

NUM_PROBE_TOKENS = 64
WHILE_MODELS_ARE_MADE_BYTES = 2**18
"""From what size on memory is then pages of its own. For the whole work a block took 8% more time so."""
_NOT_DECIDING = {"verify", "max_shard_size", "activation_memory"}
"""Settings that leave the blocks' bytes as they are."""
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_WRITTEN_ANEW = {"config.json", "README.md", MANIFEST_NAME, RECORD_NAME, PROBE_NAME, REPORT_NAME, PLOT_NAME}


def quantize_model(
    model_folder: Path,
    *,
    settings: QuantizeSettings,
    out: Path,
    seed: int,
    device: str = "cpu",
    verify: Callable[[Path], dict[str, Any]] | None = None,
    restart: bool = False,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Write the quantized model of ``model_folder`` to ``out`` (replaced when all is done).

    Returns the totals of the report; ``quantization_report.json`` in ``out`` has an entry a layer and a block besides.
    ``verify`` is given the finished folder before it gets its place; what it returns goes into the report, and where it
    raises CheckpointError nothing is published. ``settings.verify: false`` leaves it out.

    Several ``ranks`` call this alike, each on the device of its own, and share out the calibration samples. The first
    writes everything; the others return an empty dict when they aren't needed any more.

    Same arguments, same machine: same bytes. A killed run goes on at its first unfinished block, and ends with the
    bytes of an undisturbed one; ``restart`` drops what it left. Raises RecipeError for what doesn't fit the model
    (before any calibration), DataError for calibration data without a token, or of fewer samples than ranks,
    CheckpointError for damaged weights, or for an unfinished run that was begun otherwise, ResourceError for a full
    disk.
    """
    started = time.perf_counter()
    # A model on the meta device is made of real parameters that are dropped one by one. On the heap they would leave
    # holes between what stays, as many as the model is large, and later memory would be spread over all of them.
    give_back_large_memory(WHILE_MODELS_ARE_MADE_BYTES)
    if out.resolve() == model_folder.resolve():
        raise RecipeError("the quantized model would replace its source", where=out, fix="choose another folder")
    decoder = StreamedDecoder(model_folder, device=device)
    schemes = layer_schemes(decoder, settings)
    writer = WRITERS[settings.format_name]
    check_called(decoder, schemes)
    writer.check(decoder, schemes)
    if METHODS[settings.method].needs_calibration and settings.calibration is None:
        raise RecipeError(f"method {settings.method} needs calibration data", fix="add `calibration:`, or use `rtn`")
    keep_large_memory()
    samples, notes = None, [NOTHING_MEASURED]
    if settings.calibration is not None:
        check_length(settings.calibration, decoder.config)
        samples = load_calibration(model_folder, settings.calibration, seed=seed)
        notes = notes_on(samples)
        _check_enough(samples, ranks)
    for note in notes if ranks.is_first else ():
        print(note, file=sys.stderr, flush=True)
    source_bytes = sum((model_folder / name).stat().st_size for name in decoder.source.files())
    require_free_bytes(out, 2 * source_bytes)

    # The others find the folder as the first has left it.
    begun_with = ranks.broadcast(_begun_with(decoder, settings, samples))
    if not ranks.is_first:
        ranks.wait()
    work = WorkFolder(out, begun_with, decoder=decoder, writer=writer, schemes=schemes, restart=restart)
    if ranks.is_first:
        ranks.wait()
    spill_folder = work.spill_folder() if ranks.size == 1 else work.spill_folder() / f"rank-{ranks.rank}"
    quantizer = BlockQuantizer(
        decoder,
        schemes,
        {scheme: writer.scale_dtype(scheme, decoder.dtype) for scheme in schemes.values()},
        method=settings.method,
        damp=settings.damp,
        act_order=settings.act_order,
        true_sequential=settings.true_sequential,
        smoothing=settings.smoothing,
        rounding_iterations=settings.rounding_iterations,
        # Transformers dequantizes those of compressed-tensors while it fuses them, and leaves them in that dtype.
        experts_in_scale_dtype=settings.format_name == "compressed-tensors",
        ranks=ranks,
    )
    stream, tuning = None, None

    def begin(samples: CalibrationSamples) -> Stream:
        assert settings.calibration is not None
        hidden = HiddenStates(spill_folder / "inputs", settings.activation_memory_bytes // ranks.size)
        size = settings.calibration.micro_batch_size
        return calibration_stream(decoder, samples, size, hidden=hidden, ranks=ranks)

    if samples is not None:
        stream = begin(samples)
    exact = None
    if stream is not None and settings.corrects_drift and METHODS[settings.method].makes_up_for_drift:
        exact = stream.copy("exact")
    _quantize_blocks(quantizer, work, stream, exact)
    del exact
    steps = settings.num_tuning_steps(0 if samples is None else samples.counts["tokens_used"])
    if steps:
        assert samples is not None, "the settings ask for calibration data"
        stream = begin(samples)
        tuning = _tune(quantizer, work, stream, steps=steps, seed=seed, folder=spill_folder / "tuning")
    del stream
    peak_memory_bytes = max(ranks.gather(_peak_memory_bytes()), default=0)
    if not ranks.is_first:
        return {}
    done = _observe(quantizer, work, samples)
    linears = linear_names(decoder.model)
    kept = [name for name in linears if name not in schemes]
    shapes = {name: (linears[name].out_features, linears[name].in_features) for name in schemes}
    stored = {tensor.name: tensor for tensor in work.output_tensors()}
    sizes = stored_sizes(stored, schemes, shapes, writer)
    with published_folder(out) as folder:
        output_bytes = writer.publish(
            folder,
            work.named_as_written(stored.values()),
            decoder=decoder,
            schemes=schemes,
            kept=kept,
            max_shard_size_bytes=settings.max_shard_size_bytes,
        )
        for path in sorted(model_folder.iterdir()):
            if path.is_file() and path.name not in _WRITTEN_ANEW and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
        write_probe(
            folder,
            done.probe_ids,
            done.probe_logits,
            dtype=PROBE_DTYPE,
            float_activations=probe_of_float_inputs(schemes.values()),
        )
        summary = {
            "settings": settings.resolved(),
            "format": settings.format_name,
            "source_bytes": source_bytes,
            "output_bytes": output_bytes,
            "size_ratio": output_bytes / source_bytes,
            "bits_per_weight": bits_per_weight(sizes),
            "num_layers": len(done.layers),
            "relative_error": sum(entry["relative_error"] for entry in done.layers) / len(done.layers),
            "max_damp": max((entry["damp"] for entry in done.layers if entry["damp"] is not None), default=None),
            "calibration": samples.counts if samples is not None else None,
            "tuning": tuning,
            "end_to_end": done.end_to_end,
            "carried_over": decoder.carried_over,
            "notes": notes,
            "peak_memory_bytes": max(peak_memory_bytes, _peak_memory_bytes()),
        }
        # Whoever loads the folder looks there for what may be left over.
        write_json(folder / REPORT_NAME, {"carried_over": decoder.carried_over})
        if verify is not None and settings.verify:
            summary["verified"] = _verified(verify, folder, out)
        summary["seconds"] = round(time.perf_counter() - started, 2)
        layers = describe_layers(done.layers, schemes, shapes, sizes)
        write_report(folder, {**summary, "blocks": done.blocks, "layers": layers})
        # The report holds times: the record of the same model is to be the same file.
        write_record(folder, made_by="quantize", version=finetune.__version__, exclude=(REPORT_NAME, PLOT_NAME))
    work.remove()
    return summary


def _check_enough(samples: CalibrationSamples, ranks: Ranks) -> None:
    if len(samples.input_ids) < ranks.size:
        raise DataError(
            f"{ranks.size} processes can't share {len(samples.input_ids)} calibration samples",
            where="num_processes",
            fix=f"give more text, or num_processes: {len(samples.input_ids)}",
        )


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _verified(verify: Callable[[Path], dict[str, Any]], folder: Path, out: Path) -> dict[str, Any]:
    try:
        return verify(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the quantized model doesn't load as it was computed, and isn't kept: {error.what}",
            where=(error.where or "").replace(str(folder), str(out)),
            fix="choose another `format`, or other versions of the packages that load it (the finished blocks are "
            "kept, so the same command soon checks again)",
        ) from error


@dataclass(frozen=True)
class _Blocks:
    """What came of quantizing all blocks."""

    layers: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    end_to_end: dict[str, Any] | None
    probe_ids: list[int]
    probe_logits: Tensor
    """(T, V)"""


def _quantize_blocks(quantizer: BlockQuantizer, work: WorkFolder, stream: Stream | None, exact: Stream | None) -> None:
    """Quantize every block into ``work`` that isn't there yet, while the calibration samples stream by, in ``exact``
    through the unquantized blocks."""
    decoder = quantizer.decoder
    num_blocks = len(decoder.blocks)
    for index in tqdm(range(num_blocks), desc="quantize", unit="block", disable=None):
        name = decoder.block_name(index)
        result = work.load(index, name, quantizer.layers_of(index))
        is_last = index + 1 == num_blocks
        if result is None:
            result = quantizer.quantize(index, stream, advance=not is_last, exact=exact)
            if quantizer.ranks.is_first:
                work.save(index, name, result)
        elif stream is not None and not is_last:
            with quantizer.quantized_block(index, result, dtype=stream.dtype) as block:
                stream.advance(block, index, decoder.device)
            if exact is not None:
                with decoder.block(index, decoder.load_block(index), dtype=exact.dtype) as block:
                    exact.advance(block, index, decoder.device)
    quantizer.ranks.wait()  # for the last block to be saved


def _tune(
    quantizer: BlockQuantizer, work: WorkFolder, stream: Stream, *, steps: int, seed: int, folder: Path
) -> dict[str, Any] | None:
    """Tune scales and norms of the blocks in ``work``, which holds the tuned ones afterwards; for the report, which is
    the first rank's to write."""
    started = time.perf_counter()
    is_first = quantizer.ranks.is_first
    if not work.has_tuned():
        names = [quantizer.decoder.block_name(index) for index in range(len(quantizer.decoder.blocks))]
        tuner = ScaleTuner(
            quantizer,
            stream,
            load=lambda index: work.loaded(index, names[index], quantizer.layers_of(index)),
            folder=folder,
        )

        def save(index: int, result: BlockResult) -> None:
            if is_first:
                work.save(index, names[index], result, tuned=True)

        losses = tuner.tune(steps=steps, seed=seed, save=save)
        if is_first:
            work.note_tuning({"steps": steps, "kl_of_each_step": losses})
    if not is_first:
        return None
    work.use_tuned()
    return {**work.tuning_note(), "seconds": round(time.perf_counter() - started, 2)}


def _observe(quantizer: BlockQuantizer, work: WorkFolder, samples: CalibrationSamples | None) -> _Blocks:
    """What the blocks in ``work`` compute: the probe's logits, and what quantization costs on text."""
    decoder = quantizer.decoder
    evaluation = None
    probe_ids = probe_input_ids(decoder.config.get_text_config().vocab_size)
    if samples is not None:
        if samples.evaluation_ids.shape[1] > 1:
            evaluation = EndToEnd(decoder, samples, ["quantized"])
        probe_ids = samples.input_ids[0][samples.mask[0]][:NUM_PROBE_TOKENS].tolist()
    hidden, calls = decoder.embed([torch.tensor([probe_ids])], dtype=PROBE_DTYPE)
    probe = Stream(hidden, [None], calls, PROBE_DTYPE)
    float_inputs = probe_of_float_inputs(quantizer.schemes.values())
    layers: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    for index in range(len(decoder.blocks)):
        name = decoder.block_name(index)
        result = work.loaded(index, name, quantizer.layers_of(index))
        layers += result.report
        with quantizer.quantized_block(index, result, dtype=PROBE_DTYPE, round_inputs=not float_inputs) as block:
            probe.advance(block, index, decoder.device)
        if evaluation is not None:
            evaluation.advance_exact(index)
            with quantizer.quantized_block(index, result, dtype=CALIBRATION_DTYPE) as block:
                blocks.append({"block": name, "hidden_error": evaluation.advance("quantized", index, block)})
    return _Blocks(
        layers=layers,
        blocks=blocks,
        end_to_end=evaluation.figures()["quantized"] if evaluation is not None else None,
        probe_ids=probe_ids,
        probe_logits=decoder.logits(probe.hidden[0], dtype=PROBE_DTYPE),
    )


def probe_of_float_inputs(schemes: Iterable[QuantScheme]) -> bool:
    """Whether the probe leaves inputs in floats that will be rounded. Rounded ones hide faults, since two float32
    kernels tip some of them the other way; but stored scales of inputs are only seen where inputs are rounded."""
    activations = [scheme.activations for scheme in schemes if scheme.activations is not None]
    return bool(activations) and all(args.dynamic for args in activations)


def calibration_stream(
    decoder: StreamedDecoder,
    samples: CalibrationSamples,
    micro_batch_size: int,
    *,
    hidden: HiddenStates | None = None,
    ranks: Ranks = ALONE,
) -> Stream:
    """This rank's samples as they enter the first block, in ``hidden``, which may spill to disk, or in memory."""
    share = Share(samples.mask.sum(axis=1).tolist(), micro_batch_size, ranks.rank, ranks.size)
    ids_NS = torch.from_numpy(samples.input_ids[ranks.rank :: ranks.size]).long()
    mask_NS = torch.from_numpy(samples.mask[ranks.rank :: ranks.size])
    states, calls = decoder.embed(list(ids_NS.split(micro_batch_size)), dtype=CALIBRATION_DTYPE, hidden=hidden)
    masks = [None if mask_BS.all() else mask_BS for mask_BS in mask_NS.split(micro_batch_size)]
    return Stream(states, masks, calls, CALIBRATION_DTYPE, share)


def _begun_with(
    decoder: StreamedDecoder, settings: QuantizeSettings, samples: CalibrationSamples | None
) -> dict[str, Any]:
    """What decides the blocks' bytes. Weight files count by name, size and time, as a build tool has it."""
    stats = {name: (decoder.folder / name).stat() for name in decoder.source.files()}
    return {
        "settings": {key: value for key, value in settings.resolved().items() if key not in _NOT_DECIDING},
        "calibration tokens": None if samples is None else sha256_json(samples.input_ids.tolist()),
        "model": str(decoder.folder.resolve()),
        "config.json": sha256_file(decoder.folder / "config.json"),
        "weight files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "finetune": finetune.__version__,
        "torch": torch.__version__,
        "device": str(decoder.device),
        "threads (OMP_NUM_THREADS)": torch.get_num_threads(),
    }
