"""A causal language model one block at a time: all parameters on meta, each filled from its file when it is needed.

Shapes: B sequences, S tokens each, D hidden size, V vocabulary, T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.engine.host_memory import give_back_freed_memory
from finetune.errors import CheckpointError, RecipeError
from finetune.model.load import load_config, meta_model
from finetune.model.tied import tied_parameter_names
from finetune.quant.as_linear import FusedPart, LinearOfConv1D, put_linear
from finetune.quant.source import SafetensorsSource
from finetune.quant.stored_names import StoredNames, weight_converters


@dataclass(frozen=True)
class BlockCall:
    """What the decoder passes to one block beside the hidden states: mask, rotary embeddings, positions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: Callable[..., Any], hidden_BSD: Tensor) -> Tensor:
        """The hidden states that leave ``block``; some blocks return them as the first of several things."""
        output = block(hidden_BSD, *self.args, **self.kwargs)
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(first, Tensor) or first.shape != hidden_BSD.shape:
            raise RecipeError(
                f"a block of type {type(block).__name__} doesn't turn hidden states into hidden states",
                fix="this architecture can't be quantized block by block",
            )
        return first


class _StopError(Exception):
    """Raised by the first tap where only its call is wanted."""


class _Tap(nn.Module):
    """Stands where a block stands, notes how it is called, and hands on the hidden states (or others instead)."""

    def __init__(self, block: nn.Module, *, stop: bool = False, rest: tuple[Any, ...] | None = None) -> None:
        super().__init__()
        self.output_BSD: Tensor | None = None
        self.hidden_BSD: Tensor | None = None
        self.call = BlockCall((), {})
        self._stop = stop
        self._rest = rest
        # Decoders read plain attributes of their blocks to choose a mask, a cache or a rotary embedding.
        for name, value in vars(block).items():
            if not name.startswith("_") and name not in vars(self) and isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.hidden_BSD = hidden_states
        self.call = BlockCall(args, kwargs)
        if self._stop:
            raise _StopError
        output = hidden_states if self.output_BSD is None else self.output_BSD
        return output if self._rest is None else (output, *self._rest)


class StreamedDecoder:
    """Raises RecipeError where no list of decoder blocks is found, CheckpointError where a tensor has no file."""

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        self.folder = folder
        self.device = torch.device(device)
        self.config = load_config(folder)
        if getattr(self.config, "quantization_config", None) is not None:
            raise RecipeError("this model is quantized already", where=folder, fix="give the model it was made from")
        if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
            raise RecipeError(
                "this model is in llama.cpp's format (GGUF), most likely quantized already",
                where=folder,
                fix="give the model it was made from; a GGUF file of floats is unpacked by transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW_FOLDER)",
            )
        self.source = SafetensorsSource(folder)
        self.dtype: torch.dtype = getattr(self.config, "dtype", None) or torch.float32
        # In float32, as the probe: some rotary tables are computed in the default dtype that a load sets.
        self.model = meta_model(self.config)
        self.parts: dict[str, FusedPart] = put_linear(self.model, weight_converters(self.model))
        self._conv1d = {name for name, module in self.model.named_modules() if isinstance(module, LinearOfConv1D)}
        self.names = StoredNames(self.model, self.parts, self.source.names())
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))
        self.aliases = tied_parameter_names(self.model)
        self._decoder = self.model.get_decoder()
        self._owner, self._list_name = self._find_blocks()
        self.blocks: nn.ModuleList = getattr(self._owner, self._list_name)
        self.blocks_name = self._name_of(self.blocks)
        self._check_names()
        before, after = self.outer_names_around_blocks()
        self._outer_names = before + after
        self._rest: tuple[Any, ...] | None = None
        self._returns_known = False

    def _find_blocks(self) -> tuple[nn.Module, str]:
        num_layers = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        for path, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == num_layers:
                owner, _, name = path.rpartition(".")
                return self.model.get_submodule(owner), name
        raise RecipeError(
            f"no list of {num_layers} decoder blocks was found in {type(self.model).__name__}",
            where=self.folder,
            fix="only decoder-only language models built of equal blocks can be quantized",
        )

    def _name_of(self, wanted: nn.Module) -> str:
        return next(name for name, module in self.model.named_modules() if module is wanted)

    def _check_names(self) -> None:
        origins = self.names.origins
        buffers = {name for name, _ in self.model.named_buffers()}
        missing = [name for name in self.model.state_dict() if name not in origins and name not in self.aliases]
        # A tied model's file may hold the head and not the embedding: then the embedding is read from the head's name.
        self._stored_as = {
            canonical: alias for alias, canonical in self.aliases.items() if canonical in missing and alias in origins
        }
        missing = [name for name in missing if name not in self._stored_as and name not in buffers]
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors of {type(self.model).__name__} are in no weight file, first {missing[0]}",
                where=self.folder,
                fix="save the model with this version of transformers (`from_pretrained`, then `save_pretrained`)",
            )

    @property
    def carried_over(self) -> list[str]:
        """Stored tensors that the model class doesn't know (those of a part that transformers leaves out, say)."""
        return self.names.unknown

    def is_transposed(self, name: str) -> bool:
        """Whether files hold the tensor ``name`` (inputs, outputs), as Conv1D does, and the model (outputs, inputs)."""
        layer, _, part = name.rpartition(".")
        return part == "weight" and layer in self._conv1d

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors of the model in their stored dtype, each in the model's layout."""
        wanted = list(names)
        origins = [self.names.origins[name] for name in wanted]
        stored = self.source.load(dict.fromkeys(source for origin in origins for source in origin.names()))
        loaded: dict[str, Tensor] = {}
        for name in wanted:
            if name not in loaded:
                loaded.update(self.names.make(name, stored.__getitem__))
        return {name: loaded[name].T.contiguous() if self.is_transposed(name) else loaded[name] for name in wanted}

    def to_stored_layout(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model by full name as files hold them: those of Conv1D transposed, experts fused again where
        all of them are here."""
        stored = {name: tensor.T if self.is_transposed(name) else tensor for name, tensor in tensors.items()}
        members: dict[str, dict[str, FusedPart]] = {}
        for name, part in self.parts.items():
            members.setdefault(part.parameter, {})[name] = part
        for parameter, parts in members.items():
            if all(name in stored for name in parts):
                by_expert: dict[int, list[Tensor]] = {}
                for name in sorted(parts, key=lambda name: (parts[name].expert, parts[name].start)):
                    by_expert.setdefault(parts[name].expert, []).append(stored.pop(name))
                stored[parameter] = torch.stack([torch.cat(rows) for rows in by_expert.values()])
        return stored

    def from_stored_layout(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of ``to_stored_layout``."""
        tensors = {name: tensor.T if self.is_transposed(name) else tensor for name, tensor in stored.items()}
        for name, part in self.parts.items():
            if part.parameter in stored:
                tensors[name] = stored[part.parameter][part.expert, part.start : part.stop].clone()
                tensors.pop(part.parameter, None)
        return tensors

    def block_name(self, index: int) -> str:
        return f"{self.blocks_name}.{index}"

    def load_block(self, index: int) -> dict[str, Tensor]:
        """The tensors of block ``index`` in their stored dtype, by their name inside the block."""
        prefix = self.block_name(index) + "."
        names = [prefix + name for name in self.blocks[index].state_dict()]
        known = [name for name in names if name in self.names.origins]
        return {name.removeprefix(prefix): tensor for name, tensor in self.load(known).items()}

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

    def load_outer(self) -> dict[str, Tensor]:
        """Embedding, final norm and head in their stored dtype, by their full name; a tied head isn't there twice."""
        from_alias = {name: self._stored_as.get(name, name) for name in self._outer_names}
        loaded = self.load(name for name in from_alias.values() if name in self.names.origins)
        return {name: loaded[alias] for name, alias in from_alias.items() if alias in loaded}

    def outer_sources(self, name: str) -> dict[str, str]:
        """For the outer tensor ``name``: the stored tensors that it is made of, and what the output calls each."""
        if name in self._stored_as:
            stored = self.names.origins[self._stored_as[name]].stored_name
            assert stored is not None
            return {stored: self.names.written_name(name)}
        return {stored: stored for stored in self.names.origins[name].names()} if name in self.names.origins else {}

    @contextmanager
    def block(
        self, index: int, tensors: dict[str, Tensor], *, dtype: torch.dtype, give_back: bool = True
    ) -> Iterator[nn.Module]:
        """Block ``index`` filled with ``tensors`` in ``dtype``; empty again afterwards.

        ``give_back``: its memory goes back to the system, which asks for fresh pages the next time.
        """
        block = self.blocks[index]
        fill_module(block, tensors, dtype=dtype, device=self.device)
        try:
            yield block
        finally:
            empty_module(block)
            if give_back:
                give_back_freed_memory()

    @contextmanager
    def _outer(self, dtype: torch.dtype, taps: list[_Tap]) -> Iterator[None]:
        """The model with its outer tensors in ``dtype`` and taps in the place of its blocks."""
        setattr(self._owner, self._list_name, nn.ModuleList(taps))
        try:
            fill_module(self.model, self.load_outer(), dtype=dtype, device=self.device)
            self.model.tie_weights()
            yield
        finally:
            empty_module(self.model)
            self.model.tie_weights()
            setattr(self._owner, self._list_name, self.blocks)

    @torch.no_grad()
    def embed(
        self, chunks_BS: list[Tensor], *, dtype: torch.dtype, hidden: MutableSequence[Tensor] | None = None
    ) -> tuple[MutableSequence[Tensor], list[list[BlockCall]]]:
        """For each chunk of token ids: the hidden states that enter the first block, and the call of every block.

        The hidden states are added to ``hidden``, which is returned.
        """
        hidden = [] if hidden is None else hidden
        calls: list[list[BlockCall]] = []
        self._learn_returns(chunks_BS[0][:1, :2], dtype)
        taps = [_Tap(block, rest=self._rest) for block in self.blocks]
        by_shape: dict[torch.Size, list[BlockCall]] = {}
        with self._outer(dtype, taps):
            for ids_BS in chunks_BS:
                self._decoder(input_ids=ids_BS.to(self.device), use_cache=False)
                assert taps[0].hidden_BSD is not None
                hidden.append(taps[0].hidden_BSD.cpu())
                # Rows are whole and unpadded, so masks and positions depend on the chunk's shape alone; what doesn't
                # (embeddings that a block gets of its own) is kept for each chunk.
                first = by_shape.setdefault(ids_BS.shape, [tap.call for tap in taps])
                calls.append([_shared(tap.call, other) for tap, other in zip(taps, first, strict=True)])
        return hidden, calls

    def _learn_returns(self, ids_BS: Tensor, dtype: torch.dtype) -> None:
        """Find out, by running the first block, whether blocks return hidden states or a tuple that begins with them:
        a tap must return the same, or the decoder takes a row of the batch for it."""
        if self._returns_known:
            return
        taps = [_Tap(block, stop=True) for block in self.blocks]
        with self._outer(dtype, taps), suppress(_StopError):
            try:
                self._decoder(input_ids=ids_BS.to(self.device), use_cache=False)
            except (AttributeError, TypeError, ValueError, IndexError) as cause:
                # Before the first block a decoder may ask its blocks for what only they have.
                raise RecipeError(
                    f"{type(self.model).__name__} can't be run without its blocks: {cause}",
                    where=self.folder,
                    fix="this architecture can't be quantized block by block",
                ) from cause
        if taps[0].hidden_BSD is None or taps[0].hidden_BSD.ndim != 3:
            raise RecipeError(
                f"the blocks of {type(self.model).__name__} aren't called with hidden states (batch, tokens, width)",
                where=self.folder,
                fix="this architecture can't be quantized block by block",
            )
        with self.block(0, self.load_block(0), dtype=dtype) as block:
            output = block(taps[0].hidden_BSD, *taps[0].call.args, **taps[0].call.kwargs)
        self._rest = tuple(output[1:]) if isinstance(output, tuple | list) else None
        self._returns_known = True

    @contextmanager
    def head(self, *, dtype: torch.dtype) -> Iterator[Callable[[Tensor], Tensor]]:
        """Within: what the model does after its last block (norm, head, softcapping) as a function.

        It takes hidden_BSD as they leave the last block to logits_BSV in ``dtype``, on this decoder's device, and has
        a gradient with respect to them where they ask for one.
        """
        assert self._returns_known, "embed comes first"
        taps = [_Tap(block, rest=self._rest) for block in self.blocks]

        def logits(hidden_BSD: Tensor) -> Tensor:
            for tap in taps:
                tap.output_BSD = hidden_BSD.to(self.device, dtype)
            # The ids only make embeddings that the taps drop.
            ids_BS = torch.zeros(hidden_BSD.shape[:2], dtype=torch.int64, device=self.device)
            return self.model(input_ids=ids_BS, use_cache=False).logits

        with self._outer(dtype, taps):
            yield logits

    def logits(self, hidden_1TD: Tensor, *, dtype: torch.dtype) -> Tensor:
        """logits_TV, on the cpu, of one sequence that left the last block."""
        with self.head(dtype=dtype) as head:
            return head(hidden_1TD)[0].cpu()


def _shared(call: BlockCall, other: BlockCall) -> BlockCall:
    """``call`` with the tensors of ``other`` where they hold the same, so that no memory is kept for them."""

    def same(value: Any, of_other: Any) -> Any:
        if isinstance(value, Tensor) and isinstance(of_other, Tensor):
            equal = value.shape == of_other.shape and value.dtype == of_other.dtype and torch.equal(value, of_other)
            return of_other if equal else value
        if isinstance(value, tuple) and isinstance(of_other, tuple) and len(value) == len(of_other):
            return tuple(same(one, two) for one, two in zip(value, of_other, strict=True))
        return value

    kwargs = {name: same(value, other.kwargs.get(name)) for name, value in call.kwargs.items()}
    return BlockCall(same(call.args, other.args), kwargs)


def fill_module(module: nn.Module, tensors: dict[str, Tensor], *, dtype: torch.dtype, device: torch.device) -> None:
    """Put ``tensors`` (floating ones cast to ``dtype``) in the place of the module's parameters and buffers.

    Raises CheckpointError for one of another shape, or of integers where the module has floats.
    """
    places = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        place = places.get(name, tensor)
        if place.shape != tensor.shape or place.is_floating_point() != tensor.is_floating_point():
            raise CheckpointError(
                f"the stored tensor {name} is {_form(tensor)}, where the model class has {_form(place)}",
                fix="give the folder the config.json and the weight files of one model",
            )
    cast = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    unexpected = module.load_state_dict(cast, strict=False, assign=True).unexpected_keys
    assert not unexpected, unexpected
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def empty_module(module: nn.Module) -> None:
    """Drop the memory of every parameter; buffers stay."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, nn.Parameter(parameter.to("meta"), requires_grad=False))
