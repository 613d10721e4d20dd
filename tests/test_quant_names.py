"""Names that people bring from other tools: each error says what to write here, and what it says works."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from finetune.cli import build_parser
from finetune.config.section import parse_section
from finetune.config.source import Source
from finetune.errors import RecipeError
from finetune.quant.notation import ignore_values, layer_names, override_values, scheme_flags, scheme_values
from finetune.quant.other_names import MEANINGS, UNSUPPORTED, Meaning, looked_up
from finetune.quant.scheme import SCHEMES
from finetune.quant.settings import QuantizeSettings

CALIBRATION = {"data": [{"path": "rows.jsonl"}]}


def refused(scheme: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        scheme_flags(scheme, None)
    return caught.value


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("int4", "another tool's name", "write `--scheme w4a16`"),
        ("int8", "another tool's name", "write `--scheme w8a16` (weights alone) or `--scheme w8a8` (inputs too)"),
        ("Q4_K_M", "another tool's name", "write `--scheme q4_k`"),
        ("q4_0", "another tool's name", "write `--scheme w4a16 --format gguf`"),
        ("q8_0", "another tool's name", "write `--scheme w8a16 --format gguf`"),
        ("fp8", "8-bit floats aren't supported", "write `--scheme w8a8`"),
        ("FP8_DYNAMIC", "8-bit floats aren't supported", "write `--scheme w8a8`"),
        ("nvfp4", "aren't supported", "write `--scheme w4a16` or `--scheme nf4` (bitsandbytes)"),
        ("w4a16_asym", "another tool's name", "write `--scheme w4a16 --asymmetric`"),
        ("W4A16-ASYM", "another tool's name", "write `--scheme w4a16 --asymmetric`"),
        ("awq", "another tool's name", "write `--scheme w4a16 --method awq`"),
        (
            "gptq",
            "another tool's name",
            "--method gptq` (the method) or `--scheme w4a16 --format gptq`",
        ),
        ("8bit", "another tool's name", "or `--scheme llm_int8` (bitsandbytes)"),
        ("4bit", "another tool's name", "write `--scheme w4a16` or `--scheme nf4` (bitsandbytes)"),
        ("int4:64", "another tool's name", "write `--scheme w4a16:64`"),
        ("W8A8", "lower case", "write `--scheme w8a8`"),
        ("q5_k_m", "Q4_0, Q8_0 and Q4_K are written", "`--scheme q4_k` (Q4_K)"),
        ("w6a16", "weights take 2, 3, 4 or 8 bits", "write `--scheme w4a16` or `--scheme w8a16`"),
        ("w4a8", "aren't supported", "write `--scheme w4a16` (weights alone) or `--scheme w8a8` (8 bits both)"),
        ("w4a61", "unknown scheme", "did you mean `w4a16`?"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_what_to_write(name: str, what: str, fix: str) -> None:
    error = refused(name)
    assert what in error.what
    assert fix in (error.fix or "")
    assert error.where == f"--scheme {name}"


def all_meanings() -> list[Meaning]:
    found = [meaning for meanings in MEANINGS.values() for meaning in meanings]
    return list(dict.fromkeys([*found, *(meaning for _, _, meanings in UNSUPPORTED for meaning in meanings)]))


@pytest.mark.parametrize("meaning", all_meanings(), ids=lambda meaning: meaning.flags(None))
def test_whatever_an_error_tells_to_write_is_accepted(meaning: Meaning) -> None:
    values: dict[str, Any] = dict(yaml.safe_load(key).popitem() for key in meaning.keys(None))
    by_recipe = QuantizeSettings.model_validate({**values, "calibration": CALIBRATION})
    words = ["quantize", "MODEL", "--out", "OUT", *shlex.split(meaning.flags(None))]
    options = build_parser().parse_args(words)
    flags = scheme_flags(options.scheme, options.group_size)
    for key in ("method", "format"):
        if getattr(options, key):
            flags[key] = getattr(options, key)
    if options.asymmetric:
        flags["symmetric"] = False
    assert QuantizeSettings.model_validate({**flags, "calibration": CALIBRATION}) == by_recipe
    assert scheme_values(meaning.variant(None), where="")["scheme"] == meaning.scheme


def test_the_table_holds_no_name_of_ours() -> None:
    assert not set(MEANINGS) & set(SCHEMES)
    assert [looked_up(name) for name in ("banana", "w44", "w4a61")] == [None, None, None]


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"scheme": "int4"}, "set `scheme: w4a16`"),
        ({"scheme": "q4_0"}, "set `scheme: w4a16`, `format: gguf`, `group_size: 32`"),
        ({"scheme": "awq"}, "set `scheme: w4a16`, `method: awq`"),
        ({"scheme": "w4a16_asym"}, "set `scheme: w4a16`, `symmetric: false`"),
        ({"scheme": "w4a16:64"}, "set `scheme: w4a16`, `group_size: 64`"),
        ({"overrides": [{"layers": ["down_proj"], "scheme": "int8"}]}, "`scheme: w8a16` (weights alone) or"),
        ({"overrides": [{"layers": ["down_proj"], "scheme": "q8_0"}]}, "set `scheme: w8a16`, `group_size: 32`"),
    ],
)
def test_a_recipe_gets_the_same_answer_in_its_own_words(values: dict[str, Any], fix: str) -> None:
    given = {**values, "calibration": CALIBRATION}
    with pytest.raises(RecipeError) as caught:
        parse_section(QuantizeSettings, Source("recipe.yaml", given), (), given)
    assert fix in (caught.value.fix or "")
    assert "format" not in (caught.value.fix or "") or "overrides" not in values


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("down_proj=int4", "write `w4a16`"),
        ("down_proj=q4_0", "write `w4a16:32`"),
        ("o_proj=int4:64", "write `w4a16:64`"),
    ],
)
def test_an_override_is_told_what_stands_behind_its_equals_sign(text: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        override_values(text)
    assert fix in (caught.value.fix or "")
    assert "--scheme" not in (caught.value.fix or "")


def test_a_group_size_may_stand_behind_the_scheme_but_not_contradict_the_flag() -> None:
    assert scheme_flags("w4a16:64", None) == {"scheme": "w4a16", "group_size": 64}
    assert scheme_flags("w4a16:channel", None) == {"scheme": "w4a16", "group_size": None}
    assert scheme_flags("w4a16:64", "64") == scheme_flags("w4a16", "64") == scheme_flags("w4a16:64", None)
    assert scheme_flags("w4a16", None) == {"scheme": "w4a16"}
    for scheme, group in (("w4a16:64", "32"), ("w4a16:channel", "64"), ("w4a16:64", "channel")):
        with pytest.raises(RecipeError, match="contradict"):
            scheme_flags(scheme, group)


def test_commas_part_names_but_not_patterns() -> None:
    assert ignore_values(["o_proj,down_proj", "mlp", "o_proj"]) == ["lm_head", "o_proj", "down_proj", "mlp"]
    assert layer_names(r"re:.*\.[0-9]{1,2}\.mlp, o_proj") == [r"re:.*\.[0-9]{1,2}\.mlp", "o_proj"]
    assert override_values(r"re:.*\.\d{1,2}\..*,o_proj=w8a16")["layers"] == [r"re:.*\.\d{1,2}\..*", "o_proj"]
    with pytest.raises(RecipeError, match="names no layer"):
        ignore_values(["o_proj,"])
