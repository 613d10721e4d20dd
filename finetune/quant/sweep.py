"""Several schemes of one model measured in one pass, to choose from: size against KL divergence and perplexity.

The calibration text runs through the unquantized model once, and a block's Hessians are summed once for all schemes;
each scheme has only its own few evaluation sequences running through its own quantized blocks. Figures are a little
worse than a quantization's own: there a layer's Hessian sees the layers before it already quantized and makes up for
some of their error, and scales may be tuned. Where inputs are scaled (int8, awq) a scheme's Hessians are its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from finetune.errors import DataError, RecipeError
from finetune.files import write_json
from finetune.quant.activations import HessianSum
from finetune.quant.calibration import check_length, load_calibration, notes_on
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.drift import ExactInputs
from finetune.quant.end_to_end import EndToEnd
from finetune.quant.layers import layer_schemes
from finetune.quant.memo import ForwardMemo
from finetune.quant.methods import METHODS
from finetune.quant.notation import misfits_error
from finetune.quant.plots import plot_sweep
from finetune.quant.quantize import calibration_stream
from finetune.quant.scheme import QuantScheme
from finetune.quant.settings import QuantizeSettings
from finetune.quant.shards import stored_tensors
from finetune.quant.stream import CALIBRATION_DTYPE, BlockQuantizer, BlockResult, Stream
from finetune.quant.writers import WRITERS, Writer
from finetune.text_table import aligned, figure_of

SWEEP_NAME = "sweep.json"
PLOT_NAME = "sweep.png"
SWEEP_METHODS = ("awq", "gptq", "rtn", "smoothquant")
"""Those that quantize a layer by its Hessian alone, and don't learn beyond it."""


@dataclass(frozen=True)
class _SharingQuantizer(BlockQuantizer):
    """Takes the Hessians of a block's own inputs from ``shared``, where another scheme has summed them already."""

    shared: dict[str, HessianSum] = field(default_factory=dict)

    def _hessians(
        self,
        block: nn.Module,
        index: int,
        layers: dict[str, nn.Linear],
        stream: Stream,
        memo: ForwardMemo | None = None,
        exact_inputs: ExactInputs | None = None,
    ) -> dict[str, HessianSum]:
        assert exact_inputs is None, "every scheme reads what the unquantized model reads"
        rounds_inputs = any(scheme.activations is not None for scheme in self.schemes.values())
        if self.smoothing is not None and (rounds_inputs or METHODS[self.method].scales_inputs):
            return super()._hessians(block, index, layers, stream, memo)
        missing = {name: layer for name, layer in layers.items() if name not in self.shared}
        if missing:
            self.shared.update(super()._hessians(block, index, missing, stream, memo))
        return {name: self.shared[name] for name in layers}


@dataclass
class _Variant:
    """One scheme of the sweep and what has been counted of it."""

    settings: QuantizeSettings
    schemes: dict[str, QuantScheme]
    writer: Writer
    quantizer: _SharingQuantizer
    relative_errors: list[float] = field(default_factory=list)
    quantized_bytes: int = 0
    num_weights: int = 0
    other_bytes: int = 0

    def count(self, block_name: str, result: BlockResult) -> None:
        self.relative_errors += [entry["relative_error"] for entry in result.report]
        self.other_bytes += _num_bytes(result.tensors)
        for layer, weight in result.quantized.items():
            name = f"{block_name}.{layer}"
            self.quantized_bytes += _num_bytes(self.writer.tensors(name, weight, self.schemes[name]))
            self.num_weights += weight.codes.numel()


def sweep_model(
    model_folder: Path,
    variants: Mapping[str, QuantizeSettings],
    *,
    out: Path,
    seed: int,
    device: str = "cpu",
    misfits: Mapping[str, RecipeError] | None = None,
) -> dict[str, Any]:
    """Measure ``variants`` (by the names to show) of one model; write ``sweep.json`` and ``sweep.png`` to ``out``.

    The variants share their calibration and everything else but what is stored. Returns what ``sweep.json`` holds.
    Raises one RecipeError for all variants that don't fit the model, before any calibration, and names in it also the
    ``misfits`` that were found before; else as ``quantize_model``.
    """
    started = time.perf_counter()
    decoder = StreamedDecoder(model_folder, device=device)
    shared: dict[str, HessianSum] = {}
    plans: dict[str, _Variant] = {}
    unfit = dict(misfits or {})
    for name, settings in variants.items():
        try:
            plans[name] = _planned(decoder, settings, shared)
        except RecipeError as error:
            unfit[name] = error
    if unfit:
        raise misfits_error(unfit, list(plans))
    settings = next(iter(variants.values()))
    if settings.calibration is None:
        raise RecipeError("a sweep measures on calibration text", fix="give --calibration FILE")
    check_length(settings.calibration, decoder.config)
    samples = load_calibration(model_folder, settings.calibration, seed=seed)
    if samples.evaluation_ids.shape[1] < 2:
        raise DataError("a single token of text predicts nothing", fix="give more text to calibrate on")
    notes = notes_on(samples)
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    stream = calibration_stream(decoder, samples, settings.calibration.micro_batch_size)
    evaluation = EndToEnd(decoder, samples, list(plans))
    for index in tqdm(range(len(decoder.blocks)), desc="sweep", unit="block", disable=None):
        evaluation.advance_exact(index)
        for name, plan in plans.items():
            result = plan.quantizer.quantize(index, stream)
            plan.count(decoder.block_name(index), result)
            with plan.quantizer.quantized_block(index, result, dtype=CALIBRATION_DTYPE) as block:
                evaluation.advance(name, index, block)
        shared.clear()
        with decoder.block(index, decoder.load_block(index), dtype=CALIBRATION_DTYPE) as block:
            stream.advance(block, index, decoder.device)
    del stream
    source_bytes = sum((model_folder / name).stat().st_size for name in decoder.source.files())
    outer_bytes = _outer_bytes(decoder)
    figures = evaluation.figures()
    rows = []
    for name, plan in plans.items():
        output_bytes = outer_bytes + plan.other_bytes + plan.quantized_bytes
        rows.append(
            {
                "name": name,
                "scheme": plan.settings.scheme,
                "group_size": plan.settings.group_size,
                "format": plan.settings.format_name,
                "method": plan.settings.method,
                "bits_per_weight": 8 * plan.quantized_bytes / plan.num_weights,
                "output_bytes": output_bytes,
                "size_ratio": output_bytes / source_bytes,
                "relative_error": sum(plan.relative_errors) / len(plan.relative_errors),
                **{key: value for key, value in figures[name].items() if key != "seconds"},
            }
        )
    sweep = {
        "model": model_folder.name,
        "method": settings.method,
        "settings": settings.resolved(),
        "source_bytes": source_bytes,
        "calibration": samples.counts,
        "notes": notes,
        "variants": rows,
        "seconds": round(time.perf_counter() - started, 2),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / SWEEP_NAME, sweep)
    plot_sweep(sweep, out / PLOT_NAME)
    return sweep


def _planned(decoder: StreamedDecoder, settings: QuantizeSettings, shared: dict[str, HessianSum]) -> _Variant:
    if settings.method not in SWEEP_METHODS:
        raise RecipeError(
            f"a sweep can't quantize by {settings.method}", fix=f"choose one of {', '.join(SWEEP_METHODS)}"
        )
    if settings.tuning_steps:
        raise RecipeError("a sweep tunes nothing", where="tuning_steps", fix="set it to 0")
    if settings.num_processes > 1:
        raise RecipeError("a sweep is one process", where="num_processes", fix="set it to 1")
    schemes = layer_schemes(decoder, settings)
    writer = WRITERS[settings.format_name]
    writer.check(decoder, schemes)
    quantizer = _SharingQuantizer(
        decoder,
        schemes,
        {scheme: writer.scale_dtype(scheme, decoder.dtype) for scheme in schemes.values()},
        method=settings.method,
        damp=settings.damp,
        act_order=settings.act_order,
        true_sequential=False,
        smoothing=settings.smoothing,
        shared=shared,
    )
    return _Variant(settings, schemes, writer, quantizer)


def _outer_bytes(decoder: StreamedDecoder) -> int:
    """Of what is outside the blocks, and of tensors that are carried over as they are."""
    in_source = {
        name: tensor
        for file in decoder.source.files()
        for name, tensor in stored_tensors(decoder.folder / file).items()
    }
    before, after = decoder.outer_names_around_blocks()
    names = {stored for name in (*before, *after) for stored in decoder.outer_sources(name)}
    return sum(in_source[name].num_bytes for name in names | (set(decoder.carried_over) & set(in_source)))


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


COLUMNS = {
    "bits_per_weight": "bits a weight",
    "output_bytes": "size (MB)",
    "perplexity": "perplexity",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats/token)",
    "top1_agreement": "top-1 agreement",
}


def format_sweep(sweep: Mapping[str, Any], folder: Path) -> str:
    """A table of text: the unquantized model, then each variant; and what else lies in ``folder``."""
    unquantized = {
        "name": "unquantized",
        "output_bytes": sweep["source_bytes"],
        "perplexity": sweep["variants"][0]["unquantized_perplexity"],
    }
    rows = [["scheme", *COLUMNS.values()]]
    for entry in (unquantized, *sweep["variants"]):
        rows.append([entry["name"], *(figure_of(key, entry.get(key)) for key in COLUMNS)])
    return f"{aligned(rows)}\n\nreport: {folder / SWEEP_NAME}\nplot:   {folder / PLOT_NAME}"
