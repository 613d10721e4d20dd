"""A sweep gives each scheme the figures and the size that quantizing by it gives, in one pass over the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import RecipeError
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
from finetune.quant.stream import BlockQuantizer
from finetune.quant.sweep import format_sweep, sweep_model
from tests.tiny import CORPUS, tiny_llama

FIGURES = ("perplexity", "unquantized_perplexity", "perplexity_ratio", "kl", "top1_agreement", "held_out", "num_tokens")


def settings_for(folder: Path, **values: Any) -> QuantizeSettings:
    path = folder / "calibration.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 12), encoding="utf-8")
    calibration = {"data": [{"path": str(path)}], "num_samples": 6, "max_seq_length": 32}
    return QuantizeSettings(**{"calibration": calibration, "tuning_steps": 0, **values})


VARIANTS: dict[str, dict[str, Any]] = {
    "w4a16:32": {"scheme": "w4a16", "group_size": 32},
    "w4a16:channel": {"scheme": "w4a16", "group_size": None},
    "w8a16": {"scheme": "w8a16"},
    "w8a8": {"scheme": "w8a8"},
}


def test_rounded_to_nearest_a_sweep_is_what_quantizing_by_each_scheme_gives(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", num_layers=3, dtype="bfloat16", tied=False)
    for name, values in VARIANTS.items():
        settings = settings_for(tmp_path, method="rtn", smoothing=None, **values)
        alone = quantize_model(source, settings=settings, out=tmp_path / name, seed=2)
        row = sweep_model(source, {name: settings}, out=tmp_path / f"sweep {name}", seed=2)["variants"][0]
        assert {key: row[key] for key in FIGURES} == {key: alone["end_to_end"][key] for key in FIGURES}
        assert row["output_bytes"] == alone["output_bytes"]
        assert row["bits_per_weight"] == pytest.approx(alone["bits_per_weight"])
        assert row["size_ratio"] == alone["size_ratio"]


def test_schemes_do_not_see_each_other_and_share_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together as alone, int8 inputs that are smoothed among them; Hessians of weight-only schemes are summed once."""
    source = tiny_llama(tmp_path / "source", num_layers=2)
    variants = {name: settings_for(tmp_path, **values) for name, values in VARIANTS.items()}
    passes = []
    sum_hessians = BlockQuantizer._hessians

    def counted(self: BlockQuantizer, block: Any, index: int, layers: Any, stream: Any, memo: Any) -> Any:
        passes.append((index, tuple(layers)))
        return sum_hessians(self, block, index, layers, stream, memo)

    monkeypatch.setattr(BlockQuantizer, "_hessians", counted)
    together = sweep_model(source, variants, out=tmp_path / "together", seed=0)["variants"]
    # Each block: one for the three of unrounded inputs, one for w8a8, whose inputs are others once they are smoothed.
    assert [index for index, _ in passes] == [0, 0, 1, 1]
    for row, (name, settings) in zip(together, variants.items(), strict=True):
        assert sweep_model(source, {name: settings}, out=tmp_path / name, seed=0)["variants"] == [row]
    kls = {row["name"]: row["kl"] for row in together}
    assert kls["w8a16"] < kls["w8a8"] < kls["w4a16:32"] < kls["w4a16:channel"]


def test_gptq_in_a_sweep_is_close_to_gptq_alone_and_better_than_rounding(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", num_layers=3)
    settings = settings_for(tmp_path, scheme="w4a16", group_size=32)
    alone = quantize_model(source, settings=settings, out=tmp_path / "alone", seed=0)["end_to_end"]["kl"]
    swept = {
        method: sweep_model(
            source,
            {"it": settings_for(tmp_path, scheme="w4a16", group_size=32, method=method)},
            out=tmp_path / method,
            seed=0,
        )["variants"][0]["kl"]
        for method in ("gptq", "rtn", "awq")
    }
    assert swept["gptq"] == pytest.approx(alone, rel=0.5)
    assert swept["gptq"] < 0.8 * swept["rtn"]
    assert swept["awq"] < swept["rtn"]


def test_a_sweep_writes_its_figures_a_picture_and_no_model(tmp_path: Path) -> None:
    source, out = tiny_llama(tmp_path / "source"), tmp_path / "out"
    variants = {name: settings_for(tmp_path, method="rtn", **VARIANTS[name]) for name in ("w4a16:32", "w8a16")}
    sweep = sweep_model(source, variants, out=out, seed=0)
    assert json.loads((out / "sweep.json").read_text()) == sweep
    assert sorted(path.name for path in out.iterdir()) == ["sweep.json", "sweep.png"]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    lines = format_sweep(sweep, out).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["unquantized", "w4a16:32", "w8a16"]
    assert str(out / "sweep.png") in lines[-1]
    assert lines[0].split("  ")[0] == "scheme"
    assert f"{sweep['variants'][1]['kl']:.5f}" in lines[4]


def test_what_cannot_be_swept_is_refused_by_its_name_before_any_calibration(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    good = settings_for(tmp_path, **VARIANTS["w4a16:32"])
    for values, told in (
        ({"group_size": 48}, "odd: group_size 48"),
        ({"group_size": 32, "method": "learned"}, "odd: a sweep can't quantize by learned"),
        ({"group_size": 32, "tuning_steps": 3}, "odd: a sweep tunes nothing"),
    ):
        with pytest.raises(RecipeError) as caught:
            sweep_model(source, {"good": good, "odd": settings_for(tmp_path, **values)}, out=tmp_path / "out", seed=0)
        assert told in str(caught.value)
    assert not (tmp_path / "out").exists()
