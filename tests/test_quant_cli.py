"""``finetune quantize`` as it is typed: its flags, their errors, and the gate."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.quant.notation import NOT_IN_A_SWEEP, methods_help, override_values, schemes_help, sweep_names
from finetune.quant.scheme import SCHEMES
from finetune.text_table import figure as digits
from tests.small_run import RECIPE, finetune, write_inputs
from tests.tiny import CORPUS, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 12), encoding="utf-8")
    return str(path)


def run(*arguments: Any) -> int:
    return main(["quantize", *map(str, arguments)])


def test_help_lists_what_is_registered_without_loading_torch() -> None:
    from finetune.quant.methods import METHODS

    assert {line.partition(":")[0] for line in methods_help().split("; ")} >= set(METHODS)
    assert all(f"{name}: " in schemes_help() for name in SCHEMES)
    code = "import sys; from finetune.cli import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    started = time.perf_counter()
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert time.perf_counter() - started < 2, "0.1 s where nothing else runs"


def test_every_flag_reaches_the_settings_of_the_report(
    model: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = [
        *("--scheme", "w4a16", "--group-size", "channel", "--format", "compressed-tensors", "--method", "gptq"),
        *("--override", "down_proj=w8a16", "--override", "*.layers.0.mlp.down_proj=w4a16:16"),
        *("--ignore", "model.layers.1.self_attn,model.layers.0.self_attn", "--calibration", rows, "--num-samples", "4"),
        *("--max-seq-length", "32", "--micro-batch-size", "2", "--max-shard-size", "60KB", "--no-verify"),
        *("--set", "damp=0.05", "--set", "act_order=false", "--seed", "3", "--json"),
    ]
    assert run(model, "--out", out, *flags) == 0
    printed = json.loads(capsys.readouterr().out)
    report = json.loads((out / "quantization_report.json").read_text())
    settings = report["settings"]
    assert printed["end_to_end"] == report["end_to_end"]
    assert (settings["group_size"], settings["damp"], settings["act_order"]) == (None, 0.05, False)
    assert settings["ignore"] == ["lm_head", "model.layers.1.self_attn", "model.layers.0.self_attn"]
    assert settings["calibration"] | {"data": []} == {
        **{"data": [], "num_samples": 4, "max_seq_length": 32, "micro_batch_size": 2}
    }
    stored = {entry["layer"]: (entry["num_bits"], entry["group_size"]) for entry in report["layers"]}
    assert stored["model.layers.0.mlp.down_proj"] == (4, 16)
    assert stored["model.layers.1.mlp.down_proj"] == (8, None)
    assert stored["model.layers.0.mlp.up_proj"] == (4, None)
    assert "model.layers.1.self_attn.q_proj" not in stored
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert "verified" not in report
    assert run(model, "--out", out, *flags) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--scheme", "w4a61", "--method", "rtn"], ["--scheme", "w4a16"]),
        (["--scheme", "w4a16", "--method", "gtpq"], ["--method", "gptq"]),
        (["--scheme", "w4a16"], ["needs `calibration:`"]),
        (["--scheme", "w4a16", "--method", "rtn", "--group-size", "many"], ["--group-size", "channel"]),
        (
            ["--scheme", "w4a16", "--method", "rtn", "--format", "bitsandbytes"],
            ["doesn't hold w4a16", "fix: set `format` to one of"],
        ),
        (
            ["--scheme", "nf4", "--method", "gptq", "--calibration", "x"],
            ["by a rule of its own", "fix: set `method: rtn`"],
        ),
        (["--scheme", "w8a8", "--method", "rtn", "--asymmetric"], ["symmetric"]),
        (["--scheme", "w4a16", "--method", "rtn", "--num-samples", "3"], ["--num-samples", "--calibration"]),
        (["--scheme", "w4a16", "--method", "rtn", "--override", "w8a16"], ["--override", "names layers"]),
        (["--scheme", "w4a16", "--method", "rtn", "--override", "a=w8a61"], ["--override", "w8a16"]),
        (["--scheme", "w4a16", "--method", "rtn", "--set", "dmap=1"], ["--set dmap=1", "`damp`"]),
        (["--scheme", "w4a16", "--method", "rtn", "--set", "damp=7"], ["--set damp=7", "7"]),
        (["--scheme", "w4a16", "--method", "rtn", "--set", "method=gptq"], ["given twice"]),
        (["--scheme", "w4a16", "--method", "rtn", "--max-shard-size", "much"], ["--max-shard-size"]),
        (["--scheme", "w4a16", "--method", "rtn", "--max-kl", "1"], ["--max-kl", "--calibration"]),
        (["--scheme", "int4", "--method", "rtn"], ["--scheme int4", "write `--scheme w4a16`"]),
        (["--scheme", "w4a16:64", "--group-size", "32"], ["--group-size 32", "contradict"]),
        (
            ["--scheme", "w4a16:32", "--method", "rtn", "--override", "lm_head=w8a16"],
            ["lm_head", "names nothing that is quantized"],
        ),
        (["--sweep", "w4a16:32"], ["--calibration"]),
        (["--sweep", "q4_0", "--calibration", "x"], ["write `w4a16:32`"]),
        (["--sweep", "awq", "--calibration", "x"], ["write `w4a16`, with --method awq"]),
        (["--sweep", "w4a16_asym", "--calibration", "x"], ["write `w4a16`; zero points can't"]),
        (["--sweep", "w4a16:32,w4a16:32", "--calibration", "x"], ["twice"]),
        (["--sweep", "w4a16:32", "--calibration", "x", "--asymmetric"], ["--asymmetric"]),
        (["--sweep", ",", "--calibration", "x"], ["no scheme"]),
        (["--sweep", "w4a16:32", "--calibration", "x", "--set", "tuning_steps=4"], ["tunes nothing"]),
        (["--sweep", "w4a16:32", "--calibration", "x", "--method", "learned"], ["can't quantize by learned"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_flag_that_cannot_be_meant_is_named(
    flags: list[str], told: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "--out", tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err
    for words in told:
        assert words in error
    assert error.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_samples_longer_than_the_context_are_refused_with_its_size(
    model: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--scheme", "w4a16", "--group-size", "32", "--calibration", rows, "--max-seq-length", "513"]
    assert run(model, "--out", tmp_path / "out", *flags) == 2
    assert "513 tokens are longer than the model's context, 512" in capsys.readouterr().err
    assert not (tmp_path / "out.work").exists()


def test_a_model_over_the_limits_is_written_and_ends_with_8(
    model: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--scheme", "w4a16", "--group-size", "32", "--method", "rtn", "--calibration", rows]
    flags += ["--num-samples", "4", "--max-seq-length", "32", "--no-verify"]
    assert run(model, "--out", tmp_path / "bad", *flags, "--max-kl", "1e-9") == 8
    assert "kl is" in capsys.readouterr().err
    assert (tmp_path / "bad" / "quantization_report.json").is_file()
    assert run(model, "--out", tmp_path / "good", *flags, "--max-kl", "9", "--max-perplexity-ratio", "9") == 0


def test_a_sweep_prints_its_table_and_replaces_only_a_sweep(
    model: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--sweep", "w4a16:32,w8a16", "--method", "rtn", "--calibration", rows, "--num-samples", "4"]
    flags += ["--max-seq-length", "32", "--out", str(out)]
    assert run(model, *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["unquantized", "w4a16:32", "w8a16"]
    assert [line.split() for line in lines[6:]] == [["report:", f"{out}/sweep.json"], ["plot:", f"{out}/sweep.png"]]
    assert run(model, *flags) == 2
    capsys.readouterr()
    assert run(model, *flags, "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "sweep.json").read_text())
    (out / "sweep.json").unlink()
    assert run(model, *flags, "--force") == 2


def test_notation() -> None:
    assert override_values("a,b.*=w4a16:channel") == {"layers": ["a", "b.*"], "scheme": "w4a16", "group_size": None}
    assert override_values("re:.*(q|k|v)_proj=w8a16") == {"layers": ["re:.*(q|k|v)_proj"], "scheme": "w8a16"}
    assert sweep_names("w4a16:32, w8a8") == ["w4a16:32", "w8a8"]


GIVEN_IN_A_SWEEP = {
    "format": ["gptq"], "group_size": ["32"], "asymmetric": [], "override": ["o_proj=w8a16"], "no_verify": [],
    "max_shard_size": ["1GB"], "max_kl": ["0"], "max_perplexity_ratio": ["1.1"],
}  # fmt: skip


@pytest.mark.parametrize("key", NOT_IN_A_SWEEP)
def test_each_flag_that_no_sweep_takes_gets_advice_of_its_own(
    key: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{key.replace('_', '-')}"
    flags = ["--sweep", "w4a16:32", "--calibration", "x", flag, *GIVEN_IN_A_SWEEP.get(key, ["2"])]
    assert run(model, "--out", tmp_path / "out", *flags) == 2
    assert f"{flag} doesn't go with --sweep\n  at:  {flag}\n  fix: {NOT_IN_A_SWEEP[key]}" in capsys.readouterr().err
    assert ("w4a16:32" in NOT_IN_A_SWEEP[key]) == (key == "group_size")


def test_all_schemes_of_a_sweep_that_do_not_fit_are_named_at_once(
    model: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--method", "gptq", "--calibration", rows, "--out", str(tmp_path / "out"), "--max-seq-length", "32"]
    assert run(model, "--sweep", "w4a16:48,w8a16,int4,nf4,w4a16:96", *flags) == 2
    error = capsys.readouterr().err
    assert "4 of 5 schemes can't be measured" in error
    for told in ("w4a16:48: group_size 48", "int4: `int4` is another", "nf4: nf4 finds", "w4a16:96: group_size 96"):
        assert f"\n  {told}" in error
    assert error.count("    fix: ") == 4
    assert error.count("error:") == 1
    assert "--sweep w8a16\n" in error
    # What is wrong with all of them alike is said once.
    assert run(model, "--sweep", "w4a16:32,w8a16", *flags, "--set", "dmap=1") == 2
    error = capsys.readouterr().err
    assert "unknown key `dmap`" in error
    assert "schemes" not in error
    assert not (tmp_path / "out").exists()


def test_what_was_done_is_printed_as_a_short_table(
    model: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--scheme", "w4a16:32", "--method", "rtn", "--num-samples", "4", "--max-seq-length", "32"]
    assert run(model, "--out", out, *flags, "--calibration", rows) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "quantization_report.json").read_text())
    figures = report["end_to_end"]
    lines = {line.split("  ")[0].rstrip(":"): line.split() for line in printed.splitlines()}
    assert lines["size (MB)"][-2:] == [f"{report[key] / 1e6:.1f}" for key in ("source_bytes", "output_bytes")]
    assert lines["perplexity"][1:] == [digits(figures[key], ".3f") for key in ("unquantized_perplexity", "perplexity")]
    assert lines["bits a weight"][-1] == f"{report['bits_per_weight']:.2f}"
    assert lines["KL (nats/token)"][-1] == f"{figures['kl']:.5f}"
    assert lines["top-1 agreement"][-1] == f"{figures['top1_agreement']:.2%}"
    worst = max(report["layers"], key=lambda entry: entry["relative_error"])
    assert worst["layer"] in printed
    assert "by transformers, its logits are those" in printed
    for name in ("quantization_report.json", "quantization_report.png"):
        assert f"{out / name}\n" in printed + "\n"
        assert (out / name).is_file()
    assert len(printed.splitlines()) < 25


def test_without_text_the_figures_are_said_to_be_missing_and_what_gives_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(model, "--out", out, "--scheme", "w4a16:32", "--method", "rtn", "--no-verify") == 0
    printed = capsys.readouterr()
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["end_to_end"] is None
    assert ["--calibration FILE" in note for note in report["notes"]] == [True]
    assert report["notes"][0] in printed.err
    assert "nothing (--calibration FILE" in printed.out
    assert "perplexity" not in printed.out
    assert "verified:    no" in printed.out


def test_a_folder_of_gguf_is_quantized_already(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gguf"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    flags = ["--scheme", "w4a16:32", "--method", "rtn", "--out", str(tmp_path / "out")]
    assert run(folder, *flags) == 2
    error = capsys.readouterr().err
    assert "quantized already" in error
    assert "give the model it was made from" in error
    (folder / "config.json").unlink()
    assert run(folder, *flags) == 4
    assert "a GGUF file and no config.json" in capsys.readouterr().err
    assert run(folder / "model-Q4_K_M.gguf", *flags) == 2
    assert f"give the folder {folder}" in capsys.readouterr().err


def test_a_recipe_calibrates_on_the_training_data_and_a_gate_ends_it_with_8(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    head = RECIPE[: RECIPE.index("  - sft")].replace("num_processes: 2", "num_processes: 1")
    head = head.replace("zero: {stage: 3, offload: {optimizer: cpu, parameters: cpu}}\n", "")
    tail = """\
  - quantize: {scheme: w4a16, group_size: 32}
  - evaluate: {models: [pretrain, quantize], reference: pretrain, perplexity: data/heldout.txt, window: 64,
               max_kl: 1e-9}
"""
    (tmp_path / "gate.yaml").write_text(head + tail)
    done = finetune(tmp_path, "run", "gate.yaml")
    assert done.returncode == 8, done.stderr
    assert "quantize: kl is" in done.stderr
    run_dir = tmp_path / "outputs/llama-sft"
    import yaml

    resolved = yaml.safe_load((run_dir / "recipe.yaml").read_text())["stages"][1]["quantize"]["calibration"]
    assert [source["path"] for source in resolved["data"]] == ["data/pretrain.jsonl"]
    assert resolved["max_seq_length"] == 64
    report = json.loads((run_dir / "02-quantize/model/quantization_report.json").read_text())
    assert report["verified"]["probe"]["agrees"]
    assert report["calibration"]["tokens_used"] > 0
    assert "asked for" in done.stderr
    assert json.loads((run_dir / "03-evaluate/evaluation.json").read_text())["quantize"]["kl"] > 1e-9


def test_the_page_has_a_row_for_each_scheme_format_and_method() -> None:
    from finetune.quant.methods import METHODS
    from finetune.quant.writers import WRITERS

    page = (Path(__file__).parent.parent / "docs" / "quantization.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    named = {name: row for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    assert set(named) >= {*SCHEMES, *METHODS, *WRITERS}
    for name, scheme in SCHEMES.items():
        assert named[name][4].strip() == ", ".join(scheme.formats)
        assert f"{scheme.weights.num_bits} bits" in named[name][2]
        if scheme.weights.group_size is not None:
            assert f"{scheme.weights.group_size}" in named[name][2]
    for name in METHODS:
        assert named[name][3].strip() == ("yes" if METHODS[name].needs_calibration else "no")


def test_the_page_tells_each_setting_without_a_flag_and_its_default() -> None:
    from finetune.cli import build_parser
    from finetune.commands import FLAGS
    from finetune.quant.settings import QuantizeSettings

    page = (Path(__file__).parent.parent / "docs" / "quantization.md").read_text(encoding="utf-8")
    section = page.partition("| setting | default | what |")[2].partition("\n\n")[0]
    told = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| (.+?) \|", section, flags=re.M)}
    options = vars(build_parser().parse_args(["quantize", "MODEL", "--out", "OUT", "--scheme", "w4a16"]))
    fields = QuantizeSettings.model_fields
    assert set(told) >= {
        name for name in fields if FLAGS.get(name, name).removeprefix("--").replace("-", "_") not in options
    }
    for name, shown in told.items():
        default = fields[name].default
        assert shown.strip("`") == ("the method's" if name == "tuning_steps" else _as_yaml(default)), name


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
