"""The finished blocks of a quantization under way, so that a killed run goes on at the block where it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetune.engine.host_memory import give_back_freed_memory
from finetune.errors import CheckpointError
from finetune.files import write_file, write_json
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.scheme import QuantScheme
from finetune.quant.shards import StoredTensor, stored_tensors
from finetune.quant.stream import BlockResult
from finetune.quant.writers import Writer

_STATE_NAME = "state.json"
_TUNING_NAME = "tuning.json"
_MAX_DIFFERENCES = 8


class WorkFolder:
    """One safetensors file a finished block, under ``out`` + ``.work``.

    ``begun_with`` (JSON) is everything that decides the blocks' bytes. Raises CheckpointError, naming the differences,
    where blocks lie there that were made with something else; ``restart`` drops those.
    """

    def __init__(
        self,
        out: Path,
        begun_with: dict[str, Any],
        *,
        decoder: StreamedDecoder,
        writer: Writer,
        schemes: Mapping[str, QuantScheme],
        restart: bool = False,
    ) -> None:
        self.folder = out.with_name(out.name + ".work")
        self._decoder = decoder
        self._writer = writer
        self._schemes = schemes
        self._tuned = False
        begun_with = json.loads(json.dumps(begun_with))
        state = self.folder / _STATE_NAME
        before = _read_state(state)
        if before == begun_with:
            return
        if before is not None and not restart and any(self.folder.glob("block-*.safetensors")):
            differences = list(_differences(before, begun_with))
            more = len(differences) - _MAX_DIFFERENCES
            shown = [*differences[:_MAX_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])]
            raise CheckpointError(
                "an unfinished quantization lies here that was begun otherwise:\n       " + "\n       ".join(shown),
                where=self.folder,
                fix="put this back to go on; or start over: --force, or delete this folder",
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        write_json(state, {"begun_with": begun_with})

    def file(self, index: int) -> Path:
        return self._file(index, tuned=self._tuned)

    def _file(self, index: int, *, tuned: bool) -> Path:
        return self.folder / f"{'tuned' if tuned else 'block'}-{index:05d}.safetensors"

    def has_tuned(self) -> bool:
        """Whether tuning came to its end."""
        return (self.folder / _TUNING_NAME).is_file()

    def note_tuning(self, note: dict[str, Any]) -> None:
        """Tuning came to its end: every tuned block is saved. ``note`` is kept for the report."""
        write_json(self.folder / _TUNING_NAME, note)

    def tuning_note(self) -> dict[str, Any]:
        note: dict[str, Any] = json.loads((self.folder / _TUNING_NAME).read_text(encoding="utf-8"))
        return note

    def use_tuned(self) -> None:
        """From now on the blocks are the tuned ones."""
        self._tuned = True

    def spill_folder(self) -> Path:
        """Where memory that a run can't hold goes; nothing in it outlives the run."""
        return self.folder / "spilled"

    def save(self, index: int, block_name: str, result: BlockResult, *, tuned: bool = False) -> None:
        rest = {f"{block_name}.{name}": tensor for name, tensor in result.tensors.items()}
        tensors = self._decoder.to_stored_layout(rest)
        for layer, weight in result.quantized.items():
            full_name = f"{block_name}.{layer}"
            tensors.update(self._writer.tensors(full_name, weight, self._schemes[full_name]))
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        metadata = {"format": "pt", "report": json.dumps(result.report)}
        write_file(self._file(index, tuned=tuned), lambda temporary: save_file(tensors, temporary, metadata=metadata))
        give_back_freed_memory()

    def load(self, index: int, block_name: str, layers: list[str]) -> BlockResult | None:
        """The saved result; None where the block isn't finished."""
        try:
            with safe_open(self.file(index), framework="pt") as stored:
                # Copied, so that no page of the mapped file stays behind.
                tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118
                report: list[dict[str, Any]] = json.loads(stored.metadata()["report"])
        except (SafetensorError, FileNotFoundError):
            return None
        quantized, taken = {}, set()
        for layer in layers:
            full_name = f"{block_name}.{layer}"
            quantized[layer] = self._writer.read(full_name, tensors, self._schemes[full_name])
            taken |= set(self._writer.tensor_names(full_name, self._schemes[full_name]))
        rest = self._decoder.from_stored_layout({name: value for name, value in tensors.items() if name not in taken})
        return BlockResult(
            {name.removeprefix(block_name + "."): value for name, value in rest.items()}, quantized, report
        )

    def loaded(self, index: int, block_name: str, layers: list[str]) -> BlockResult:
        """A block that is known to be finished. Raises CheckpointError where its file is gone or cut."""
        result = self.load(index, block_name, layers)
        if result is None:
            raise CheckpointError("a finished block can't be read", where=self.file(index), fix="run it again")
        return result

    def output_tensors(self) -> list[StoredTensor]:
        """Where every tensor of the output lies now, in the model's order: outer ones in the source, under the name
        they are to have, and those of blocks in this folder, under the model's (see ``named_as_written``). Last come
        tensors of the source that the model class doesn't know."""
        decoder = self._decoder
        in_source: dict[str, StoredTensor] = {}
        for file in decoder.source.files():
            in_source.update(stored_tensors(decoder.folder / file))

        def outer(names: Iterable[str]) -> list[StoredTensor]:
            pairs = [pair for name in names for pair in decoder.outer_sources(name).items()]
            return [in_source[stored].renamed(written) for stored, written in dict(pairs).items()]

        before, after = decoder.outer_names_around_blocks()
        ordered = outer(before)
        for index in range(len(decoder.blocks)):
            ordered += stored_tensors(self.file(index)).values()
        ordered += outer(after)
        return ordered + [in_source[name] for name in decoder.carried_over if name in in_source]

    def named_as_written(self, tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
        """The same places, the tensors of blocks under the names that files of this model have."""
        prefix = self._decoder.blocks_name + "."
        layer_of = {
            name: layer for layer, scheme in self._schemes.items() for name in self._writer.tensor_names(layer, scheme)
        }
        named = []
        for tensor in tensors:
            name = tensor.name
            if name in layer_of:
                layer = layer_of[name]
                written = self._decoder.names.written_name(f"{layer}.weight").removesuffix(".weight")
                tensor = tensor.renamed(written + name.removeprefix(layer))
            elif name.startswith(prefix) and tensor.file.parent == self.folder:
                tensor = tensor.renamed(self._decoder.names.written_name(name))
            named.append(tensor)
        return named

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    begun_with = state.get("begun_with")
    return begun_with if isinstance(begun_with, dict) else {}


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            name = str(key) if path in ("", "settings") else f"{path}.{key}"
            if key not in before or key not in now:
                yield f"{name}: {'is new' if key not in before else 'is gone'}"
            else:
                yield from _differences(before[key], now[key], name)
    elif before != now:
        yield f"{path}: {json.dumps(before)} then, {json.dumps(now)} now"
