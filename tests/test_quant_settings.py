"""What a recipe may say about quantization, and which layers that means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.config.section import parse_section
from finetune.config.source import Source
from finetune.errors import RecipeError
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.layers import layer_schemes, matches
from finetune.quant.settings import QuantizeSettings
from tests.tiny import tiny_llama

CALIBRATION = {"data": [{"path": "rows.jsonl"}]}


def parsed(**values: Any) -> QuantizeSettings:
    return parse_section(QuantizeSettings, Source("recipe.yaml", values), (), values)


def test_group_size_is_resolved_by_the_scheme() -> None:
    assert parsed(calibration=CALIBRATION).resolved()["group_size"] == 128
    assert parsed(scheme="w8a8", method="rtn").resolved()["group_size"] is None
    assert parsed(scheme="w4a16", group_size=None, method="rtn").group_size is None
    assert parsed(scheme="w4a16", group_size=64, method="rtn").group_size == 64


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"scheme": "w4a17", "method": "rtn"}, "w4a16"),
        ({"method": "gptk", "calibration": CALIBRATION}, "gptq"),
        ({"method": "gptq"}, "needs `calibration:`"),
        ({"method": "rtn", "scheme": "w8a8", "symmetric": False}, "symmetric"),
        ({"scheme": "nf4", "tuning_steps": 4}, "can't be tuned"),
        ({"method": "rtn", "tuning_steps": 4}, "needs `calibration:`"),
        ({"method": "rtn", "scheme": "nf4", "group_size": 32}, "blocks of its own"),
        ({"method": "rtn", "scheme": "w8a8", "format": "gptq"}, "compressed-tensors"),
        ({"method": "rtn", "overrides": [{"layers": ["down_proj"], "scheme": "nf4"}]}, "bitsandbytes"),
        ({"method": "rtn", "overrides": [{"layers": ["down_proj"], "scheme": "w8a61"}]}, "w8a16"),
        ({"method": "rtn", "scheme": "w8a8", "group_size": 64}, "group_size"),
        ({"method": "rtn", "group_sise": 64}, "group_size"),
        ({"method": "rtn", "max_shard_size": "much"}, "5GB"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(values: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parsed(**values)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("values", "num_tokens", "steps"),
    [
        ({}, 128 * 512, 7),
        ({"method": "best"}, 128 * 512, 64),
        ({"method": "best"}, 32 * 512, 16),  # each sample twice
        ({}, 16 * 64, 1),
        ({"method": "learned"}, 128 * 512, 0),
        ({"scheme": "w8a16"}, 128 * 512, 0),
        ({"scheme": "w8a8"}, 128 * 512, 0),
        ({"scheme": "w8a16", "overrides": [{"layers": ["down_proj"], "scheme": "w4a16"}]}, 128 * 512, 7),
        ({"scheme": "w2a16"}, 128 * 512, 7),
        ({"scheme": "w8a16", "tuning_steps": 5}, 16 * 64, 5),
        ({"tuning_steps": 0}, 128 * 512, 0),
    ],
)
def test_tuning_takes_no_more_steps_than_the_text_is_good_for(
    values: dict[str, Any], num_tokens: int, steps: int
) -> None:
    assert parsed(calibration=CALIBRATION, **values).num_tuning_steps(num_tokens) == steps
    assert parsed(calibration=CALIBRATION, **values).resolved()["tuning_steps"] == values.get("tuning_steps")


def test_settings_and_schemes_are_read_without_torch() -> None:
    code = (
        "import sys; import finetune.quant.settings as quant; quant.QuantizeSettings(method='rtn');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("entry", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("down_proj", "model.layers.3.mlp.down_proj", True),
        ("own_proj", "model.layers.3.mlp.down_proj", False),
        ("mlp.down_proj", "model.layers.3.mlp.down_proj", False),
        ("mlp", "model.layers.3.mlp.down_proj", True),
        ("lp", "model.layers.3.mlp.down_proj", False),
        ("mlp", "model.layers.3.mlp2.down_proj", False),
        ("3", "model.layers.3.mlp.down_proj", False),
        ("layers.3", "model.layers.3.mlp.down_proj", False),
        ("model.layers.1", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1", "model.layers.10.mlp.down_proj", False),
        ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj", True),
        ("*.layers.1.*", "model.layers.1.mlp.down_proj", True),
        ("*.layers.1.*", "model.layers.10.mlp.down_proj", False),
        ("re:model.layers.1", "model.layers.10.mlp.down_proj", False),
        (r"re:.*\.layers\.(0|1)\..*", "model.layers.1.self_attn.q_proj", True),
        (r"re:.*\.layers\.(0|1)\..*", "model.layers.11.self_attn.q_proj", False),
    ],
)
def test_ignore_entries_compare_names_part_by_part(entry: str, name: str, expected: bool) -> None:
    assert matches(entry, name) is expected


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StreamedDecoder]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": StreamedDecoder(tiny_llama(folder / "tied", num_layers=11)),
        "untied": StreamedDecoder(tiny_llama(folder / "untied", tied=False, intermediate_size=192)),
    }


def rtn(**values: Any) -> QuantizeSettings:
    return parsed(**{"method": "rtn", "group_size": 32, **values})


def test_targets_are_the_linear_layers_of_the_blocks(decoders: dict[str, StreamedDecoder]) -> None:
    names = layer_schemes(decoders["tied"], rtn())
    assert len(names) == 11 * 7
    fewer = layer_schemes(decoders["tied"], rtn(ignore=["lm_head", "model.layers.1", "down_proj"]))
    assert len(fewer) == 10 * 6
    assert "model.layers.10.mlp.up_proj" in fewer
    assert "model.layers.1.mlp.up_proj" not in fewer


def test_overrides_name_layers_exactly_and_the_last_one_counts(decoders: dict[str, StreamedDecoder]) -> None:
    overrides = [
        {"layers": ["model.layers.1.*"], "scheme": "w8a16"},
        {"layers": ["model.layers.*.mlp.down_proj"], "scheme": "w4a16", "group_size": 16},
    ]
    schemes = layer_schemes(decoders["tied"], rtn(overrides=overrides))
    found = {name: (scheme.name, scheme.weights.group_size) for name, scheme in schemes.items()}
    assert found["model.layers.1.mlp.up_proj"] == ("w8a16", None)
    assert found["model.layers.1.mlp.down_proj"] == ("w4a16", 16)
    assert found["model.layers.10.mlp.up_proj"] == found["model.layers.0.self_attn.q_proj"] == ("w4a16", 32)
    assert list(found.values()).count(("w8a16", None)) == 6


def test_a_modules_last_part_names_it_in_every_block(decoders: dict[str, StreamedDecoder]) -> None:
    kept = layer_schemes(decoders["tied"], rtn(ignore=["lm_head", "mlp"]))
    assert len(kept) == 11 * 4
    assert not any(".mlp." in name for name in kept)
    overrides = [{"layers": ["self_attn"], "scheme": "w8a16"}]
    schemes = layer_schemes(decoders["tied"], rtn(overrides=overrides))
    assert {name for name, scheme in schemes.items() if scheme.name == "w8a16"} == {
        name for name in schemes if ".self_attn." in name
    }
    with pytest.raises(RecipeError, match="did you mean `mlp`"):
        layer_schemes(decoders["tied"], rtn(ignore=["lm_head", "mpl"]))


@pytest.mark.parametrize(
    ("layers", "ignore", "told"),
    [
        (["lm_head"], ["lm_head"], "only layers inside the decoder's blocks are quantized"),
        (["lm_head", "down_proj"], ["lm_head"], "`overrides.layers: lm_head` names nothing that is quantized"),
        (["model.layers.1.*"], ["lm_head", "model.layers.1"], "take it out of `ignore`"),
        (["down_proj"], ["lm_head", "mlp"], "model.layers.0.mlp.down_proj"),
    ],
)
def test_an_override_that_would_do_nothing_is_refused(
    decoders: dict[str, StreamedDecoder], layers: list[str], ignore: list[str], told: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        layer_schemes(decoders["untied"], rtn(ignore=ignore, overrides=[{"layers": layers, "scheme": "w8a16"}]))
    assert told in str(caught.value)


@pytest.mark.parametrize("layers", [["k_proj"], ["model.layers.0.mlp.gate_proj"]])
def test_layers_of_one_kernel_keep_one_scheme(decoders: dict[str, StreamedDecoder], layers: list[str]) -> None:
    for values in ({"overrides": [{"layers": layers, "scheme": "w8a16"}]}, {"ignore": ["lm_head", *layers]}):
        with pytest.raises(RecipeError, match="computed as one layer") as caught:
            layer_schemes(decoders["tied"], rtn(**values))
        assert layers[0].rpartition(".")[2] in str(caught.value)
    with pytest.raises(RecipeError, match=r"overrides\.layers: down_prj"):
        layer_schemes(decoders["tied"], rtn(overrides=[{"layers": ["down_prj"], "scheme": "w8a16"}]))


@pytest.mark.parametrize(
    ("model", "ignore", "told"),
    [
        ("tied", ["lm_heed"], "did you mean `lm_head`"),
        ("tied", ["lm_head", "layers.1.mlp.down_pro"], "down_proj"),
        ("tied", [], "(tied)"),
        ("untied", [], "put `lm_head` in `ignore`"),
        ("tied", ["lm_head", "*_proj"], "no Linear layer is left"),
        ("tied", ["lm_head", "re:("], "isn't a valid pattern"),
    ],
)
def test_an_ignore_list_that_cannot_be_meant_is_refused(
    decoders: dict[str, StreamedDecoder], model: str, ignore: list[str], told: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        layer_schemes(decoders[model], rtn(ignore=ignore))
    assert told in str(caught.value)


def test_a_group_size_that_does_not_divide_names_the_layers_and_the_sizes_that_fit(
    decoders: dict[str, StreamedDecoder],
) -> None:
    with pytest.raises(RecipeError) as caught:
        layer_schemes(decoders["untied"], rtn(group_size=128))
    told = str(caught.value)
    assert "model.layers.0.self_attn.q_proj (64 inputs)" in told
    assert "group_size 16, 32, 64 fits" in told
    ignore = ["lm_head", "*.self_attn.*", "gate_proj", "up_proj"]
    with pytest.raises(RecipeError) as caught:
        layer_schemes(decoders["untied"], rtn(group_size=128, ignore=ignore))
    assert "model.layers.1.mlp.down_proj (192 inputs)" in str(caught.value)


def test_a_model_without_a_layer_left_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(RecipeError) as caught:
        layer_schemes(StreamedDecoder(tmp_path), rtn(group_size=16, ignore=["lm_head", "transformer.h"]))
    assert "no Linear layer is left" in str(caught.value)
    assert "GPT2Attention" in str(caught.value)
