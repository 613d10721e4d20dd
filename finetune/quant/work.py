"""The finished blocks of a quantization under way, so that a killed run goes on at the block where it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetune.files import write_file, write_json
from finetune.quant.scheme import QuantScheme
from finetune.quant.stream import BlockResult
from finetune.quant.writers import Writer

_STATE_NAME = "state.json"


class WorkFolder:
    """One safetensors file a finished block, under ``out`` + ``.work``.

    ``fingerprint`` names everything that decides the blocks' bytes; a folder of another fingerprint is emptied.
    """

    def __init__(self, out: Path, fingerprint: str, *, writer: Writer, schemes: Mapping[str, QuantScheme]) -> None:
        self.folder = out.with_name(out.name + ".work")
        self._writer = writer
        self._schemes = schemes
        state = self.folder / _STATE_NAME
        if not state.is_file() or json.loads(state.read_text(encoding="utf-8")) != {"fingerprint": fingerprint}:
            shutil.rmtree(self.folder, ignore_errors=True)
            write_json(state, {"fingerprint": fingerprint})

    def file(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"

    def save(self, index: int, block_name: str, result: BlockResult) -> None:
        tensors = {f"{block_name}.{name}": tensor.contiguous() for name, tensor in result.tensors.items()}
        for layer, weight in result.quantized.items():
            full_name = f"{block_name}.{layer}"
            tensors.update(self._writer.tensors(full_name, weight, self._schemes[full_name]))
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        metadata = {"format": "pt", "report": json.dumps(result.report)}
        write_file(self.file(index), lambda temporary: save_file(tensors, temporary, metadata=metadata))

    def load(self, index: int, block_name: str, layers: list[str]) -> BlockResult | None:
        """The saved result; None where the block isn't finished."""
        try:
            with safe_open(self.file(index), framework="pt") as stored:
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
                report: list[dict[str, Any]] = json.loads(stored.metadata()["report"])
        except (SafetensorError, FileNotFoundError):
            return None
        quantized, taken = {}, set()
        for layer in layers:
            full_name = f"{block_name}.{layer}"
            quantized[layer] = self._writer.read(full_name, tensors, self._schemes[full_name])
            taken |= set(self._writer.tensor_names(full_name, self._schemes[full_name]))
        rest = {name.removeprefix(block_name + "."): value for name, value in tensors.items() if name not in taken}
        return BlockResult(rest, quantized, report)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
