"""Quantize a model folder into another one that plain transformers loads."""

from __future__ import annotations

import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import finetune
from finetune.errors import RecipeError
from finetune.files import published_folder, require_free_bytes, sha256_file, sha256_json, write_json
from finetune.model.probe import probe_input_ids, write_probe
from finetune.quant.calibration import CalibrationSamples, load_calibration
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.layers import layer_schemes, linear_names
from finetune.quant.methods import METHODS
from finetune.quant.settings import QuantizeSettings
from finetune.quant.shards import StoredTensor, stored_tensors
from finetune.quant.stream import CALIBRATION_DTYPE, PROBE_DTYPE, BlockQuantizer, Stream
from finetune.quant.work import WorkFolder
from finetune.quant.writers import WRITERS

REPORT_NAME = "quantization_report.json"
NUM_PROBE_TOKENS = 64
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_WRITTEN_ANEW = {"config.json", "README.md", "manifest.json", "verification.json", REPORT_NAME}


def quantize_model(
    model_folder: Path, *, settings: QuantizeSettings, out: Path, seed: int, device: str = "cpu"
) -> dict[str, Any]:
    """Write the quantized model of ``model_folder`` to ``out`` (replaced when all is done).

    Returns the totals of the report; ``quantization_report.json`` in ``out`` has an entry a layer besides.

    Same arguments, same machine: same bytes. A killed run goes on at its first unfinished block, and ends with the
    bytes of an undisturbed one. Raises RecipeError for what doesn't fit the model (before any calibration),
    DataError for calibration data without a token, CheckpointError for damaged weights, ResourceError for a full disk.
    """
    started = time.perf_counter()
    if out.resolve() == model_folder.resolve():
        raise RecipeError("the quantized model would replace its source", where=out, fix="choose another folder")
    decoder = StreamedDecoder(model_folder, device=device)
    schemes = layer_schemes(decoder, settings)
    writer = WRITERS[settings.format_name]
    writer.check(decoder, schemes)
    if METHODS[settings.method].needs_calibration and settings.calibration is None:
        raise RecipeError(f"method {settings.method} needs calibration data", fix="add `calibration:`, or use `rtn`")
    samples = None
    if settings.calibration is not None:
        samples = load_calibration(model_folder, settings.calibration, seed=seed)
    source_bytes = sum((model_folder / name).stat().st_size for name in decoder.source.files())
    require_free_bytes(out, 2 * source_bytes)

    work = WorkFolder(out, _fingerprint(decoder, settings, samples), writer=writer, schemes=schemes)
    quantizer = BlockQuantizer(
        decoder,
        schemes,
        {scheme: writer.scale_dtype(scheme, decoder.dtype) for scheme in schemes.values()},
        method=settings.method,
        damp=settings.damp,
        act_order=settings.act_order,
        true_sequential=settings.true_sequential,
        smoothing=settings.smoothing,
    )
    report, probe_ids, logits_TV = _quantize_blocks(quantizer, work, settings, samples)
    kept = [name for name in linear_names(decoder.model) if name not in schemes]
    with published_folder(out) as folder:
        output_bytes = writer.publish(
            folder,
            _output_tensors(decoder, work),
            decoder=decoder,
            schemes=schemes,
            kept=kept,
            max_shard_size_bytes=settings.max_shard_size_bytes,
        )
        for path in sorted(model_folder.iterdir()):
            if path.is_file() and path.name not in _WRITTEN_ANEW and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
        write_probe(folder, probe_ids, logits_TV, dtype=PROBE_DTYPE)
        summary = {
            "settings": settings.resolved(),
            "source_bytes": source_bytes,
            "output_bytes": output_bytes,
            "size_ratio": output_bytes / source_bytes,
            "num_layers": len(report),
            "relative_error": sum(entry["relative_error"] for entry in report) / len(report),
            "max_damp": max((entry["damp"] for entry in report if entry["damp"] is not None), default=None),
            "calibration": samples.counts if samples is not None else None,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "seconds": round(time.perf_counter() - started, 2),
        }
        write_json(folder / REPORT_NAME, {**summary, "layers": report})
    work.remove()
    return summary


def _quantize_blocks(
    quantizer: BlockQuantizer, work: WorkFolder, settings: QuantizeSettings, samples: CalibrationSamples | None
) -> tuple[list[dict[str, Any]], list[int], Tensor]:
    """Quantize (or take over) every block into ``work``; returns the layers' report, the probe's ids and logits."""
    decoder = quantizer.decoder
    stream = None
    probe_ids = probe_input_ids(decoder.config.get_text_config().vocab_size)
    if samples is not None:
        assert settings.calibration is not None
        stream = _calibration_stream(decoder, samples, settings.calibration.micro_batch_size)
        probe_ids = samples.input_ids[0][samples.mask[0]][:NUM_PROBE_TOKENS].tolist()
    hidden, calls = decoder.embed([torch.tensor([probe_ids])], dtype=PROBE_DTYPE)
    probe = Stream(hidden, [None], calls, PROBE_DTYPE)
    report = []
    num_blocks = len(decoder.blocks)
    for index in tqdm(range(num_blocks), desc="quantize", unit="block", disable=None):
        name = decoder.block_name(index)
        result = work.load(index, name, quantizer.layers_of(index))
        if result is None:
            result = quantizer.quantize(index, stream)
            work.save(index, name, result)
        report += result.report
        with quantizer.quantized_block(index, result, dtype=PROBE_DTYPE) as block:
            probe.advance(block, index, decoder.device)
        if stream is not None and index + 1 < num_blocks:
            with quantizer.quantized_block(index, result, dtype=stream.dtype) as block:
                stream.advance(block, index, decoder.device)
    del stream
    return report, probe_ids, decoder.logits(probe.hidden[0], dtype=PROBE_DTYPE)


def _calibration_stream(decoder: StreamedDecoder, samples: CalibrationSamples, micro_batch_size: int) -> Stream:
    ids_NS = torch.from_numpy(samples.input_ids).long()
    mask_NS = torch.from_numpy(samples.mask)
    hidden, calls = decoder.embed(list(ids_NS.split(micro_batch_size)), dtype=CALIBRATION_DTYPE)
    masks = [None if mask_BS.all() else mask_BS for mask_BS in mask_NS.split(micro_batch_size)]
    return Stream(hidden, masks, calls, CALIBRATION_DTYPE)


def _output_tensors(decoder: StreamedDecoder, work: WorkFolder) -> list[StoredTensor]:
    """Where every tensor of the output lies now, in the model's order: outer ones in the source, blocks in ``work``."""
    in_source: dict[str, StoredTensor] = {}
    for file in decoder.source.files():
        in_source.update(stored_tensors(decoder.folder / file))
    before, after = decoder.outer_names_around_blocks()
    ordered = [in_source[decoder.stored_name(name)].renamed(name) for name in before]
    for index in range(len(decoder.blocks)):
        ordered += stored_tensors(work.file(index)).values()
    return ordered + [in_source[decoder.stored_name(name)].renamed(name) for name in after]


def _fingerprint(decoder: StreamedDecoder, settings: QuantizeSettings, samples: CalibrationSamples | None) -> str:
    """The hash of what decides the blocks' bytes. Weight files count by name, size and time, as a build tool has it."""
    stats = {name: (decoder.folder / name).stat() for name in decoder.source.files()}
    return sha256_json(
        {
            "folder": str(decoder.folder.resolve()),
            "config": sha256_file(decoder.folder / "config.json"),
            "weights": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "settings": settings.resolved(),
            "samples": None if samples is None else samples.input_ids.tolist(),
            "versions": [finetune.__version__, torch.__version__, str(decoder.device), torch.get_num_threads()],
        }
    )
