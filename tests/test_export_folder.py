"""The exported folder: what is in it, what it is when loaded, and what is left alone when something is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.errors import CheckpointError, HubError, RecipeError
from finetune.evaluate.generation import chat_prompt_ids, generate_replies
from finetune.export.folder import export_model
from finetune.export.hub import push_folder
from finetune.export.model_card import CardFacts
from finetune.export.settings import HubSettings
from finetune.export.verify import verify_folder
from finetune.model.load import load_model, load_tokenizer
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.tiny_quantized import tiny_quantized

CARD = CardFacts(title="Tiny")
REPORT: dict[str, Any] = {
    "settings": {"scheme": "w4a16", "calibration": {"data": [{"path": "/home/someone/secret/rows.jsonl"}]}},
    "format": "compressed-tensors",
    "source_bytes": 4_000_000,
    "output_bytes": 1_000_000,
    "carried_over": [],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer's eos isn't what its chat template ends turns with, as many fine-tunes have it."""
    root = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(eos_token="<|endoftext|>")
    folder = tiny_quantized(tiny_llama(root / "float", tokenizer=tokenizer), root / "m", scheme="w4a16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/someone/secret"}))
    (folder / "manifest.json.bak").write_text("{}")
    (folder / "quantization_report.json").write_text(json.dumps(REPORT))
    (folder / "quantization_report.png").write_bytes(b"\x89PNG")
    (folder / "optimizer.pt").write_bytes(b"")
    (folder / "LICENSE").write_text("Use it well.")
    return folder


# Verified in a fresh process on its way: the one export here that is.
@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(model, out=tmp_path_factory.mktemp("out") / "tiny", card=CARD, repo_id="me/tiny")


def test_the_folder_holds_what_a_model_needs_and_nothing_else(exported: Path) -> None:
    assert sorted(path.name for path in exported.iterdir()) == [
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "finetune.json",
        "generation_config.json",
        "model.safetensors",
        "quantization_report.json",
        "quantization_report.png",
        "tokenizer.json",
        "tokenizer_config.json",
        "verification.json",
    ]
    for path in exported.iterdir():
        assert b"secret" not in path.read_bytes(), path
    record = json.loads((exported / "finetune.json").read_text())
    assert sorted(record["files"]) == sorted(p.name for p in exported.iterdir() if p.name != "finetune.json")
    for name, entry in record["files"].items():
        content = (exported / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_the_report_goes_along_and_into_the_card(exported: Path, model: Path, tmp_path: Path) -> None:
    report = json.loads((exported / "quantization_report.json").read_text())
    assert report == {**REPORT, "settings": {**REPORT["settings"], "calibration": {"data": [{"path": "rows.jsonl"}]}}}
    card = (exported / "README.md").read_text()
    assert "| Weights (MB) | 4.0 | 1.0 |" in card
    assert "1. **quantize**: calibrated on rows.jsonl; scheme w4a16" in card
    # Stages of a recipe tell it themselves; a report that can't be read is left behind.
    stages = [{"name": "int4", "kind": "quantize", "settings": {}, "metrics": {}}]
    out = export_model(model, out=tmp_path / "staged", card=CardFacts(title="T", stages=stages), verify=False)
    assert "1. **int4** (quantize)" in (out / "README.md").read_text()
    assert "**quantize**" not in (out / "README.md").read_text()
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "quantization_report.json").write_text('{"settings": {"calibration": {"data": [3]}}}')
    out = export_model(damaged, out=tmp_path / "out", card=CARD, verify=False)
    assert not (out / "quantization_report.json").exists()


def test_tensors_that_quantization_carried_over_stay_known_in_the_export(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "extra.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "quantization_report.json").write_text(json.dumps({"carried_over": ["extra.weight"]}))
    out = export_model(folder, out=tmp_path / "out", card=CARD, verify=False)
    load_model(out, dtype=torch.float32, device="cpu")


def test_plain_generate_stops_on_the_templates_terminator(exported: Path) -> None:
    tokenizer = tiny_tokenizer()
    settings = json.loads((exported / "generation_config.json").read_text())
    assert sorted(settings["eos_token_id"]) == sorted(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    assert settings["pad_token_id"] == tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_plain_transformers_answers_as_generate_does(exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, plain = AutoTokenizer.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(exported)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = plain.generate(**inputs, max_new_tokens=20)
    expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model = load_model(exported, dtype=torch.float32, device="cpu")
    ours = load_tokenizer(exported)
    assert generate_replies(model, ours, [chat_prompt_ids(ours, messages)], max_new_tokens=20) == [expected]


def test_the_code_in_the_card_runs(exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = (exported / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert 'name = "me/tiny"' in code
    exec(code.replace('"me/tiny"', repr(str(exported))).replace("max_new_tokens=128", "max_new_tokens=8"), {})
    assert capsys.readouterr().out


def test_an_earlier_export_is_replaced_and_nothing_else(model: Path, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(model, out=out, card=CARD, verify=False)
    export_model(model, out=out, card=CardFacts(title="Second"), verify=False)
    assert "# Second" in (out / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    for place in (home, model, model.parent):
        with pytest.raises(RecipeError):
            export_model(model, out=place, card=CARD, verify=False)
    assert (home / "thesis.tex").read_text() == "years of work"


def test_a_model_that_fails_verification_is_not_published(model: Path, tmp_path: Path) -> None:
    damaged, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(model, damaged)
    config = json.loads((damaged / "config.json").read_text())
    del config["quantization_config"]["quantization_status"]
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_status") as caught:
        export_model(damaged, out=out, card=CARD)
    # The copy is gone: the error names the file that the user can look at.
    assert caught.value.where == str(damaged / "config.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_a_change_in_the_export_does_not_reach_its_source(model: Path, tmp_path: Path) -> None:
    out = export_model(model, out=tmp_path / "out", card=CARD, verify=False)
    with (out / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\xff")
    assert verify_folder(model, fresh_process=False)["load"]["probe"]["agrees"]
    with pytest.raises(CheckpointError):
        verify_folder(out, fresh_process=False)


def test_a_model_without_any_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.eos_token = None
    folder = tiny_llama(tmp_path / "m", tokenizer=tokenizer)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        values.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="end-of-sequence"):
        export_model(folder, out=tmp_path / "out", card=CARD, verify=False)


class FakeHub:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def create_repo(self, repo_id: str, **keywords: Any) -> str:
        self.calls.append(("create_repo", {"repo_id": repo_id, **keywords}))
        if self.error is not None:
            raise self.error
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, **keywords: Any) -> None:
        self.calls.append(("upload_folder", keywords))


def test_the_upload_is_one_commit_to_a_private_repository(exported: Path) -> None:
    hub = FakeHub()
    address = push_folder(exported, hub=HubSettings(repo_id="me/tiny"), api=hub)
    assert address == "https://huggingface.co/me/tiny"
    assert [name for name, _ in hub.calls] == ["create_repo", "upload_folder"]
    assert hub.calls[0][1] == {"repo_id": "me/tiny", "private": True, "repo_type": "model", "exist_ok": True}
    assert hub.calls[1][1]["folder_path"] == str(exported)


def hub_errors() -> list[tuple[Exception, str]]:
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    def response(status: int) -> HfHubHTTPError:
        answer: Any = SimpleNamespace(status_code=status, headers={}, request=None)
        return HfHubHTTPError("refused", response=answer)

    return [
        (response(401), "hf auth login"),
        (response(403), "HF_TOKEN"),
        (response(503), "later"),
        (OfflineModeIsEnabled("off"), "unset HF_HUB_OFFLINE"),
        (LocalTokenNotFoundError("none"), "hf auth login"),
        (ConnectionError("reset"), "network"),
    ]


@pytest.mark.parametrize("index", range(6))
def test_hub_errors_say_what_to_do(exported: Path, index: int) -> None:
    error, hint = hub_errors()[index]
    with pytest.raises(HubError) as caught:
        push_folder(exported, hub=HubSettings(repo_id="me/tiny"), api=FakeHub(error))
    assert hint in (caught.value.fix or "")
    assert caught.value.where == "me/tiny"
    assert caught.value.exit_code == 7
