"""A causal language model one block at a time: all parameters on meta, each filled from its file when it is needed.

Shapes: B sequences, S tokens each, D hidden size, V vocabulary, T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import CheckpointError, RecipeError
from finetune.model.load import load_config, meta_model
from finetune.model.tied import tied_parameter_names
from finetune.quant.source import SafetensorsSource


@dataclass(frozen=True)
class BlockCall:
    """What the decoder passes to one block beside the hidden states: mask, rotary embeddings, positions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module, hidden_BSD: Tensor) -> Tensor:
        output = block(hidden_BSD, *self.args, **self.kwargs)
        if not isinstance(output, Tensor):
            raise RecipeError(
                f"a block of type {type(block).__name__} returns a {type(output).__name__}, not its hidden states",
                fix="this architecture can't be quantized block by block yet",
            )
        return output


class _Tap(nn.Module):
    """Stands where a block stands, notes how it is called, and hands on the hidden states (or others instead)."""

    def __init__(self, block: nn.Module, output_BSD: Tensor | None) -> None:
        super().__init__()
        self.output_BSD = output_BSD
        self.hidden_BSD: Tensor | None = None
        self.call = BlockCall((), {})
        if hasattr(block, "attention_type"):  # read by some decoders to choose the block's mask
            self.attention_type = block.attention_type

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.hidden_BSD = hidden_states
        self.call = BlockCall(args, kwargs)
        return hidden_states if self.output_BSD is None else self.output_BSD


class StreamedDecoder:
    """Raises RecipeError where no list of decoder blocks is found, CheckpointError where a tensor has no file."""

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self.folder = folder
        self.device = torch.device(device)
        self.config = load_config(folder)
        if getattr(self.config, "quantization_config", None) is not None:
            raise RecipeError("this model is quantized already", where=folder, fix="give the model it was made from")
        self.source = SafetensorsSource(folder)
        self.dtype: torch.dtype = getattr(self.config, "dtype", None) or torch.float32
        # None is transformers' own choice, the one of a plain load: sdpa, or eager where softcapping needs it.
        self.model = meta_model(self.config, dtype=self.dtype, attn_implementation=None)  # type: ignore[arg-type]
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))
        self.aliases = tied_parameter_names(self.model)
        self._decoder, self._list_name = self._find_blocks()
        self.blocks: nn.ModuleList = getattr(self._decoder, self._list_name)
        self.blocks_name = self._name_of(self.blocks)
        self._check_names()
        before, after = self.outer_names_around_blocks()
        self._outer_names = before + after

    def _find_blocks(self) -> tuple[nn.Module, str]:
        decoder = self.model.get_decoder()
        num_layers = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        for name, child in decoder.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return decoder, name
        raise RecipeError(
            f"no list of {num_layers} decoder blocks was found in {type(self.model).__name__}",
            where=self.folder,
            fix="only decoder-only language models built of equal blocks can be quantized",
        )

    def _name_of(self, wanted: nn.Module) -> str:
        return next(name for name, module in self.model.named_modules() if module is wanted)

    def _check_names(self) -> None:
        missing = [name for name in self.model.state_dict() if name not in self.source and name not in self.aliases]
        # A tied model's file may hold the head and not the embedding: then the embedding is read from the head's name.
        self._stored_as = {
            canonical: alias
            for alias, canonical in self.aliases.items()
            if canonical in missing and alias in self.source
        }
        missing = [name for name in missing if name not in self._stored_as]
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors of {type(self.model).__name__} are in no weight file, first {missing[0]}",
                where=self.folder,
                fix="save the model with this version of transformers (`from_pretrained`, then `save_pretrained`)",
            )

    def block_name(self, index: int) -> str:
        return f"{self.blocks_name}.{index}"

    def load_block(self, index: int) -> dict[str, Tensor]:
        """The tensors of block ``index`` in their stored dtype, by their name inside the block."""
        prefix = self.block_name(index) + "."
        names = [prefix + name for name in self.blocks[index].state_dict()]
        return {name.removeprefix(prefix): tensor for name, tensor in self.source.load(names).items()}

    def outer_names_around_blocks(self) -> tuple[list[str], list[str]]:
        """Names of the tensors before and behind the blocks, in the model's order, aliases of tied ones left out."""
        prefix = self.blocks_name + "."
        before: list[str] = []
        after: list[str] = []
        passed = False
        for name in self.model.state_dict():
            if name.startswith(prefix):
                passed = True
            elif name not in self.aliases:
                (after if passed else before).append(name)
        return before, after

    def stored_name(self, name: str) -> str:
        """Under what name the files hold the tensor ``name``."""
        return self._stored_as.get(name, name)

    def load_outer(self) -> dict[str, Tensor]:
        """Embedding, final norm and head in their stored dtype, by their full name; a tied head isn't there twice."""
        stored = self.source.load(self.stored_name(name) for name in self._outer_names)
        return {name: stored[self.stored_name(name)] for name in self._outer_names}

    @contextmanager
    def block(self, index: int, tensors: dict[str, Tensor], *, dtype: torch.dtype) -> Iterator[nn.Module]:
        """Block ``index`` filled with ``tensors`` in ``dtype``; empty again afterwards."""
        block = self.blocks[index]
        fill_module(block, tensors, dtype=dtype, device=self.device)
        try:
            yield block
        finally:
            empty_module(block)

    @contextmanager
    def _outer(self, dtype: torch.dtype, taps: list[_Tap]) -> Iterator[None]:
        """The model with its outer tensors in ``dtype`` and taps in the place of its blocks."""
        setattr(self._decoder, self._list_name, nn.ModuleList(taps))
        try:
            fill_module(self.model, self.load_outer(), dtype=dtype, device=self.device)
            self.model.tie_weights()
            yield
        finally:
            empty_module(self.model)
            self.model.tie_weights()
            setattr(self._decoder, self._list_name, self.blocks)

    @torch.no_grad()
    def embed(self, chunks_BS: list[Tensor], *, dtype: torch.dtype) -> tuple[list[Tensor], list[list[BlockCall]]]:
        """For each chunk of token ids: the hidden states that enter the first block, and the call of every block."""
        hidden, calls = [], []
        taps = [_Tap(block, None) for block in self.blocks]
        by_shape: dict[torch.Size, list[BlockCall]] = {}
        with self._outer(dtype, taps):
            for ids_BS in chunks_BS:
                self._decoder(input_ids=ids_BS.to(self.device), use_cache=False)
                assert taps[0].hidden_BSD is not None
                hidden.append(taps[0].hidden_BSD.cpu())
                # Rows are whole and unpadded, so mask and positions depend on the chunk's shape alone.
                calls.append(by_shape.setdefault(ids_BS.shape, [tap.call for tap in taps]))
        return hidden, calls

    @contextmanager
    def head(self, *, dtype: torch.dtype) -> Iterator[Callable[[Tensor], Tensor]]:
        """Within: what the model does after its last block (norm, head, softcapping) as a function.

        It takes hidden_BSD as they leave the last block to logits_BSV in ``dtype``, on this decoder's device.
        """
        taps = [_Tap(block, None) for block in self.blocks]

        def logits(hidden_BSD: Tensor) -> Tensor:
            for tap in taps:
                tap.output_BSD = hidden_BSD.to(self.device, dtype)
            # The ids only make embeddings that the taps drop.
            ids_BS = torch.zeros(hidden_BSD.shape[:2], dtype=torch.int64, device=self.device)
            with torch.no_grad():
                return self.model(input_ids=ids_BS, use_cache=False).logits

        with self._outer(dtype, taps):
            yield logits

    def logits(self, hidden_1TD: Tensor, *, dtype: torch.dtype) -> Tensor:
        """logits_TV, on the cpu, of one sequence that left the last block."""
        with self.head(dtype=dtype) as head:
            return head(hidden_1TD)[0].cpu()


def fill_module(module: nn.Module, tensors: dict[str, Tensor], *, dtype: torch.dtype, device: torch.device) -> None:
    """Put ``tensors`` (floating ones cast to ``dtype``) in the place of the module's parameters and buffers."""
    cast = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    unexpected = module.load_state_dict(cast, strict=False, assign=True).unexpected_keys
    assert not unexpected, unexpected
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def empty_module(module: nn.Module) -> None:
    """Drop the memory of every parameter; buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, nn.Parameter(parameter.to("meta"), requires_grad=False))
