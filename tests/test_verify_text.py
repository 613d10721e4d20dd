"""What ``verify`` prints: lines to read, and with --json the object."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.export.verify_text import format_verification
from finetune.worker import quiet_libraries
from tests.tiny import tiny_llama

PROBE = {
    "rms_difference": 1.234567e-6,
    "rms_tolerance": 0.01,
    "worst_position_difference": 3.4e-6,
    "worst_position_tolerance": 0.03,
    "agrees": True,
}
REPORT: dict[str, Any] = {
    "folder": "outputs/w4",
    "num_tensors": 1272,
    "weights_bytes": 113_300_000,
    "hashed_files": 9,
    "quantization": "compressed-tensors",
    "chat_template": True,
    "load": {"loader": "transformers", "dtype": "bfloat16", "probe": PROBE},
    "warnings": ["README.md was changed after the export"],
}


def test_each_fact_has_a_line_that_a_person_reads() -> None:
    assert format_verification(REPORT).splitlines() == [
        "folder:        outputs/w4",
        "weights:       1,272 tensors, 113.3 MB, all finite",
        "quantization:  compressed-tensors",
        "hashes:        9 files are as they were recorded",
        "chat template: yes",
        "loaded:        in a fresh process by transformers, stored in bfloat16",
        "logits:        as the model's maker computed them: 1.2e-06 of their spread away (0.01 is allowed), "
        "3.4e-06 at the worst position (0.03)",
        "warning: README.md was changed after the export",
    ]


def test_a_library_that_logs_to_standard_output_is_sent_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    quiet_libraries()
    logger = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    try:
        logger.warning("Setting accelerator to %s.", "CPU")
    finally:
        logger.removeHandler(handler)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "DeepSpeed: Setting accelerator to CPU.\n"


def test_the_verb_prints_no_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_llama(tmp_path / "m")
    assert main(["verify", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert not set("{}[]") & set(printed)
    assert "quantization:  none" in printed
    assert "hashes:        none were recorded" in printed
    assert "logits:        finite; nothing is there to compare them with" in printed
    assert "warning: no verification.json" in printed
    assert main(["verify", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert printed == format_verification(report) + "\n"
