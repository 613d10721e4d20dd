"""GGUF, which llama.cpp and all that is built on it load: one file with weights, configuration and tokenizer.

Codes and scales are stored as they were found, bit by bit: w4a16 as Q4_0, w8a16 as Q8_0 (both with 32 weights a scale),
q4_k as Q4_K. So llama.cpp runs GPTQ's codes. Norms and other vectors are float32, as it wants them; embedding, head and
layers that aren't quantized keep their dtype.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.errors import CheckpointError, RecipeError
from finetune.files import write_file
from finetune.model.gguf import ARCHITECTURES, GGUF_NAME, gguf_package, hyperparameters, rope_of, unsupported
from finetune.model.load import load_tokenizer
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.gguf_blocks import BLOCK_SIZE, from_blocks, to_blocks, type_name
from finetune.quant.gguf_tokenizer import GgufTokenizer, describe_tokenizer
from finetune.quant.layers import linear_names, some
from finetune.quant.methods import QuantizedWeight
from finetune.quant.q4_k import SUPERBLOCK
from finetune.quant.scheme import QuantScheme
from finetune.quant.shards import StoredTensor
from finetune.quant.writers import WRITERS

_COPY_BYTES = 2**24
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FILE_TYPES = {"Q4_0": "MOSTLY_Q4_0", "Q8_0": "MOSTLY_Q8_0", "Q4_K": "MOSTLY_Q4_K_S"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: where it comes from, and what is done to it on the way."""

    name: str
    """In llama.cpp's words."""
    source: StoredTensor
    type: str
    """``gguf.GGMLQuantizationType``."""
    shape: list[int]
    """(O, I) and the like, the way torch writes it; of blocks, in weights."""
    num_heads: int | None = None
    """Heads whose rows are stored as pairs of neighbours; None where rows keep their order."""
    offset: float = 0.0
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        if self.source.dtype == "U8":
            return self.source.num_bytes
        return self.source.num_bytes // _FLOATS[self.source.dtype].itemsize * _FLOATS[self.type].itemsize

    def pieces(self) -> Iterator[bytes]:
        """The tensor's bytes; what is only copied, in pieces of 16 MiB."""
        changed = self.source.dtype not in ("U8", self.type) or self.offset or self.transposed or self.num_heads
        with self.source.file.open("rb") as stream:
            stream.seek(self.source.offset)
            left = self.source.num_bytes
            while left and not changed:
                piece = stream.read(min(left, _COPY_BYTES))
                assert piece, f"{self.source.file} ends inside {self.source.name}"
                left -= len(piece)
                yield piece
            if changed:
                yield self._changed(bytearray(stream.read(left)))

    def _changed(self, data: bytearray) -> bytes:
        dtype = torch.uint8 if self.source.dtype == "U8" else _FLOATS[self.source.dtype]
        tensor = torch.frombuffer(data, dtype=dtype).view(self.source.shape)
        if self.transposed:
            tensor = tensor.T
        if self.num_heads is not None:
            tensor = as_neighbours(tensor, self.num_heads)
        if dtype != torch.uint8:
            tensor = (tensor.float() + self.offset).to(_FLOATS[self.type])
        return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def as_neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of q_proj or k_proj reordered: transformers rotates row i of a head with i + half of it, llama.cpp i + 1."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class GgufWriter:
    def check(self, decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
        gguf_package()
        reason = unsupported(decoder.config)
        if reason is not None:
            raise RecipeError(
                f"this model can't be stored as GGUF: {reason}",
                where=decoder.folder / "config.json",
                fix="choose another `format`: compressed-tensors",
            )
        linears = linear_names(decoder.model)
        unfit: list[str] = []
        for name, scheme in schemes.items():
            kind = type_name(scheme)
            if kind is None:
                shown = f"group_size {scheme.weights.group_size or 'null'}"
                shown += "" if scheme.weights.symmetric else " and zero points"
                raise RecipeError(
                    f"GGUF holds no {scheme.name} with {shown}",
                    fix=f"set `group_size: {BLOCK_SIZE}` and `symmetric: true` for w4a16 or w8a16, or `scheme: q4_k`",
                )
            if kind == "Q4_K" and linears[name].in_features % SUPERBLOCK:
                unfit.append(f"{name} ({linears[name].in_features} inputs)")
        if unfit:
            others = ", or put these layers in `ignore`" if len(unfit) < len(schemes) else ""
            raise RecipeError(
                f"q4_k needs inputs that are a multiple of {SUPERBLOCK}, unlike those of {some(unfit)}",
                fix=f"choose `scheme: w4a16` with `format: gguf`{others}",
            )
        describe_tokenizer(load_tokenizer(decoder.folder), vocab_size=decoder.config.vocab_size)
        for name in decoder.model.state_dict():
            if name not in decoder.aliases:
                gguf_name(decoder, name)

    def scale_dtype(self, scheme: QuantScheme, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def tensors(self, layer: str, weight: QuantizedWeight, scheme: QuantScheme) -> dict[str, Tensor]:
        if not torch.isfinite(weight.scale).all():
            raise CheckpointError(
                f"the weights of {layer} are too large for the float16 scales of GGUF",
                fix="choose another `format`: compressed-tensors",
            )
        kind = type_name(scheme)
        assert kind is not None
        return {f"{layer}.weight": to_blocks(weight, kind)}

    def read(self, layer: str, tensors: dict[str, Tensor], scheme: QuantScheme) -> QuantizedWeight:
        kind = type_name(scheme)
        assert kind is not None
        return from_blocks(tensors[f"{layer}.weight"], kind)

    def tensor_names(self, layer: str, scheme: QuantScheme) -> list[str]:
        return [f"{layer}.weight"]

    def publish(
        self,
        folder: Path,
        tensors: Sequence[StoredTensor],
        *,
        decoder: StreamedDecoder,
        schemes: Mapping[str, QuantScheme],
        kept: list[str],
        max_shard_size_bytes: int,
    ) -> int:
        known = set(decoder.model.state_dict())
        entries = [_entry(decoder, tensor, schemes) for tensor in tensors if tensor.name in known]
        kinds = [entry.type for entry in entries if entry.source.dtype == "U8"]
        metadata = _metadata(decoder, max(set(kinds), key=kinds.count))
        rope = rope_of(decoder.config)
        if rope.get("rope_type") == "llama3":
            file = folder / "rope_freqs.bin"
            file.write_bytes(_llama3_factors(decoder.config, rope).numpy().tobytes())
            source = StoredTensor("rope_freqs", "F32", [file.stat().st_size // 4], file, 0, file.stat().st_size)
            entries.append(Entry("rope_freqs.weight", source, "F32", source.shape))
        architecture = ARCHITECTURES[decoder.config.model_type].name
        write_file(folder / GGUF_NAME, lambda temporary: _write(temporary, architecture, metadata, entries))
        (folder / "rope_freqs.bin").unlink(missing_ok=True)
        shutil.copyfile(decoder.folder / "config.json", folder / "config.json")
        return (folder / GGUF_NAME).stat().st_size


def gguf_name(decoder: StreamedDecoder, name: str) -> str:
    """What llama.cpp calls the tensor ``name``. Raises RecipeError for one that it doesn't have."""
    package = gguf_package()
    wanted = ARCHITECTURES[decoder.config.model_type].name
    arch = next(key for key, value in package.MODEL_ARCH_NAMES.items() if value == wanted)
    table = package.get_tensor_name_map(arch, decoder.config.num_hidden_layers)
    found: str | None = table.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise RecipeError(
            f"llama.cpp's {wanted} has no tensor for {name}",
            where=decoder.folder,
            fix="choose another `format`: compressed-tensors",
        )
    return found


def _entry(decoder: StreamedDecoder, tensor: StoredTensor, schemes: Mapping[str, QuantScheme]) -> Entry:
    architecture = ARCHITECTURES[decoder.config.model_type]
    name = gguf_name(decoder, tensor.name)
    layer, _, _ = tensor.name.rpartition(".")
    last = layer.rpartition(".")[2]
    num_heads = None
    if architecture.permutes_rotary and last in ("q_proj", "k_proj"):
        num_heads = decoder.config.num_attention_heads if last == "q_proj" else decoder.config.num_key_value_heads
    if layer in schemes and tensor.dtype == "U8":
        kind = type_name(schemes[layer])
        assert kind is not None
        return Entry(name, tensor, kind, tensor.shape, num_heads)
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{tensor.name} is stored as {tensor.dtype}, which GGUF doesn't hold",
            where=decoder.folder,
            fix="store the model in float32, float16 or bfloat16",
        )
    return Entry(
        name,
        tensor,
        "F32" if len(tensor.shape) == 1 or name.startswith("position_embd") else tensor.dtype,
        tensor.shape[::-1] if decoder.is_transposed(tensor.name) else tensor.shape,
        num_heads,
        offset=architecture.norm_offset if name.endswith("norm.weight") else 0.0,
        transposed=decoder.is_transposed(tensor.name),
    )


def _llama3_factors(config: Any, rope: dict[str, Any]) -> Tensor:
    """float32 (half of a head,): by what Llama 3 divides each rotary frequency; llama.cpp keeps them as a tensor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, 2 * len(scaled), 2).float() / (2 * len(scaled))
    return (1 / float(rope["rope_theta"]) ** exponents / scaled).float()


def _metadata(decoder: StreamedDecoder, file_type: str) -> dict[str, Any]:
    package = gguf_package()
    architecture = ARCHITECTURES[decoder.config.model_type].name
    tokenizer = describe_tokenizer(load_tokenizer(decoder.folder), vocab_size=decoder.config.vocab_size)
    return {
        "general.type": "model",
        "general.quantization_version": package.GGML_QUANT_VERSION,
        "general.file_type": int(package.LlamaFileType[_FILE_TYPES[file_type]]),
        **{f"{architecture}.{key}": value for key, value in hyperparameters(decoder.config).items()},
        **_tokenizer_metadata(tokenizer),
    }


def _tokenizer_metadata(tokenizer: GgufTokenizer) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    values = {
        "model": tokenizer.model,
        "pre": tokenizer.pre,
        "tokens": tokenizer.tokens,
        "token_type": tokenizer.types,
        "merges": tokenizer.merges,
        "scores": tokenizer.scores,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        "add_space_prefix": tokenizer.add_space_prefix,
        **{f"{names[kind]}_token_id": index for kind, index in tokenizer.special_ids.items()},
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    if tokenizer.chat_template:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _write(path: Path, architecture: str, metadata: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    package = gguf_package()
    writer = package.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for entry in entries:
        stored = np.dtype(np.uint8 if entry.source.dtype == "U8" else np.float32)
        kind = package.GGMLQuantizationType[entry.type]
        writer.add_tensor_info(entry.name, entry.shape, stored, entry.num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (stream,) = writer.fout
    writer.write_padding(stream, stream.tell())
    for entry in entries:
        for piece in entry.pieces():
            stream.write(piece)
        writer.write_padding(stream, entry.num_bytes)
    writer.close()


WRITERS.register("gguf")(GgufWriter())
