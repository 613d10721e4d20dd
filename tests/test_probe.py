"""The probe tells a wrong model from the right one, at any scale of logits, and lets kernels differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import CheckpointError
from finetune.model.probe import (
    MAX_POSITIONS,
    TOLERANCES,
    check_probe,
    probe_input_ids,
    read_probe,
    write_probe,
)


def random_logits(num_tokens: int = 32, vocab_size: int = 300, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_tokens, vocab_size, generator=torch.Generator().manual_seed(1)) * scale


def test_equal_logits_agree_and_the_file_is_plain_json(tmp_path: Path) -> None:
    logits_TV = random_logits()
    write_probe(tmp_path, list(range(32)), logits_TV)
    report = check_probe(tmp_path, logits_TV)
    assert report["agrees"]
    assert report["max_abs_difference"] == 0
    assert report["top1_agreement"] == 1
    raw = json.loads((tmp_path / "verification.json").read_text())
    assert raw["input_ids"] == list(range(32))
    assert raw["dtype"] == "float32"
    assert len(raw["token_ids"]) == 32
    assert len(raw["token_ids"][0]) == 8
    # The largest logit first, with the token it belongs to.
    assert raw["token_ids"][3][0] == int(logits_TV[3].argmax())
    assert raw["logits"][3][0] == pytest.approx(float(logits_TV[3].max()))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_measure_does_not_depend_on_the_scale_of_the_logits(tmp_path: Path, scale: float) -> None:
    logits_TV = random_logits(scale=scale)
    write_probe(tmp_path, list(range(32)), logits_TV)
    noise_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(2)) * scale
    assert check_probe(tmp_path, logits_TV + 0.003 * noise_TV)["agrees"]
    report = check_probe(tmp_path, logits_TV + 0.03 * noise_TV)
    assert not report["agrees"]
    assert report["rms_difference"] == pytest.approx(0.03, rel=0.2)


def test_one_wrong_position_is_enough(tmp_path: Path) -> None:
    logits_TV = random_logits(num_tokens=64)
    write_probe(tmp_path, list(range(64)), logits_TV)
    wrong_TV = logits_TV.clone()
    wrong_TV[17] += 0.05 * logits_TV.std()
    report = check_probe(tmp_path, wrong_TV)
    assert report["rms_difference"] < TOLERANCES[torch.float32].rms
    assert not report["agrees"]


def test_the_coarser_dtype_decides_the_tolerance(tmp_path: Path) -> None:
    logits_TV = random_logits()
    write_probe(tmp_path, list(range(32)), logits_TV)
    other_TV = logits_TV + 0.1 * logits_TV.std() * torch.randn(logits_TV.shape)
    assert not check_probe(tmp_path, other_TV)["agrees"]
    assert check_probe(tmp_path, other_TV.bfloat16())["agrees"]
    assert check_probe(tmp_path, other_TV, dtype=torch.bfloat16)["agrees"]
    write_probe(tmp_path, list(range(32)), logits_TV.bfloat16())
    assert check_probe(tmp_path, other_TV)["agrees"]


def test_quantized_activations_leave_the_coarsest_tolerance(tmp_path: Path) -> None:
    logits_TV = random_logits()
    write_probe(tmp_path, list(range(32)), logits_TV)
    noisy_TV = logits_TV + 0.6 * logits_TV.std() * torch.randn(logits_TV.shape)
    assert not check_probe(tmp_path, noisy_TV)["agrees"]
    assert check_probe(tmp_path, noisy_TV, quantized_activations=True)["agrees"]
    assert not check_probe(tmp_path, logits_TV.flip(0), quantized_activations=True)["agrees"]


def test_random_weights_fail_in_every_dtype(tmp_path: Path) -> None:
    for dtype in TOLERANCES:
        write_probe(tmp_path, list(range(32)), random_logits().to(dtype))
        assert not check_probe(tmp_path, random_logits().flip(0).to(dtype))["agrees"]


def test_a_nan_never_agrees_and_is_never_written(tmp_path: Path) -> None:
    logits_TV = random_logits()
    write_probe(tmp_path, list(range(32)), logits_TV)
    broken_TV = logits_TV.clone()
    broken_TV[5] = float("nan")
    assert not check_probe(tmp_path, broken_TV)["agrees"]
    with pytest.raises(CheckpointError, match="finite"):
        write_probe(tmp_path, list(range(32)), broken_TV)


def test_a_long_probe_keeps_positions_over_its_whole_length(tmp_path: Path) -> None:
    write_probe(tmp_path, list(range(200)), random_logits(num_tokens=200))
    probe = read_probe(tmp_path)
    assert probe is not None
    assert len(probe.positions) == MAX_POSITIONS == len(set(probe.positions))
    assert (probe.positions[0], probe.positions[-1]) == (0, 199)
    assert check_probe(tmp_path, random_logits(num_tokens=200))["agrees"]


def test_a_probe_of_another_vocabulary_is_an_error(tmp_path: Path) -> None:
    write_probe(tmp_path, list(range(32)), random_logits(vocab_size=300))
    with pytest.raises(CheckpointError, match="vocabulary has 100"):
        check_probe(tmp_path, random_logits(vocab_size=100))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"format": 1', '"format": 9'),
        lambda text: text.replace('"float32"', '"int3"'),
        lambda text: text.replace('"positions": [', '"positions": [0, '),
        lambda text: text.replace('"spreads"', '"spread"'),
    ],
)
def test_a_damaged_probe_is_an_error_that_names_the_file(tmp_path: Path, damage: object) -> None:
    write_probe(tmp_path, list(range(32)), random_logits())
    path = tmp_path / "verification.json"
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(CheckpointError) as caught:
        read_probe(tmp_path)
    assert caught.value.where == str(path)


def test_a_folder_without_a_probe_has_none(tmp_path: Path) -> None:
    assert read_probe(tmp_path) is None
    with pytest.raises(CheckpointError, match="no probe"):
        check_probe(tmp_path, random_logits())


@settings(max_examples=30, deadline=None)
@given(vocab_size=st.integers(2, 200_000))
def test_probe_ids_fit_any_vocabulary(vocab_size: int) -> None:
    ids = probe_input_ids(vocab_size)
    assert len(ids) == 32
    assert all(0 <= token < vocab_size for token in ids)
    assert ids == probe_input_ids(vocab_size)
    if vocab_size > 10_000:
        assert len(set(ids)) > 28


def test_a_token_that_the_probe_does_not_name_may_not_take_the_first_place(tmp_path: Path) -> None:
    logits_TV = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    write_probe(tmp_path, [1, 2, 3, 4], logits_TV)
    damaged_TV = logits_TV.clone()
    damaged_TV[:, int(logits_TV[0].argmin())] = 1e6
    assert check_probe(tmp_path, logits_TV)["agrees"]
    assert not check_probe(tmp_path, damaged_TV)["agrees"]
