"""The kinds of sharded checkpoint that can become a model folder, told apart by what they hold.

ours        step-NNNNNNNN: manifest.json, .metadata, *.distcp, model_files/
deepspeed   a folder with `latest`, or the global_stepN that it names
dcp         .metadata and *.distcp as another tool's torch.distributed.checkpoint wrote them
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from finetune.artifact import MANIFEST_NAME
from finetune.checkpoint.deepspeed_layout import find_deepspeed_folder, read_deepspeed
from finetune.checkpoint.manifest import read_manifest, verify_checkpoint
from finetune.checkpoint.model_files import MODEL_FILES
from finetune.checkpoint.stored import METADATA_NAME, StoredTensor, stored_tensors
from finetune.errors import CheckpointError, RecipeError

_WRAPPERS = frozenset({"model", "module", "state_dict", "model_state_dict", "app"})
"""Keys under which training scripts nest a model's state."""
_INSERTED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What torch.compile, FSDP1 and activation checkpointing put into the middle of names."""
_BESIDE = ("optim", "opt_", "lr_scheduler", "scheduler", "train_state", "dataloader", "rng", "epoch", "step", "loss")
"""How the keys begin that stand beside a model's in one flat checkpoint."""


@dataclasses.dataclass(frozen=True)
class Names:
    """What a model's configuration asks for: its parameters and the buffers of its weight files, aliases included."""

    parameters: frozenset[str]
    buffers: frozenset[str]
    computed: frozenset[str]
    """Buffers that the model makes from its configuration: they may be stored, and aren't wanted."""


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """The model's tensors by their plain names, and what was stored under none of them."""

    tensors: dict[str, StoredTensor]
    left_over: list[str]
    """As the checkpoint names them: a parameter or buffer that the configuration has no place for."""


@dataclasses.dataclass(frozen=True)
class Source:
    kind: str
    folder: Path
    model_folder: Path
    """Where config.json and the tokenizer are."""
    step: int | None
    read: Callable[[Names], StoredModel]
    verify: Callable[[], object]
    """Compare all files with the hashes beside them; does nothing where there are none."""
    has_hashes: bool
    only_dtype: tuple[torch.dtype, str] | None = None
    """A type other than which the result can't be exact, and why."""


_OWN_STEP = re.compile(r"step-\d{8,}(\.old)?(\.tmp)?")
"""torchtitan's are step-10."""


def own_steps(folder: Path) -> list[str]:
    """The names of our own checkpoints in ``folder``."""
    return sorted(path.name for path in folder.glob("step-*") if _OWN_STEP.fullmatch(path.name))


def open_source(checkpoint: Path, *, model: Path | None = None) -> Source:
    """The checkpoint in the folder ``checkpoint``; ``model`` gives configuration and tokenizer where it has none.

    Raises CheckpointError when it is none of the kinds, or damaged; RecipeError for a ``model`` that isn't wanted.
    """
    if not checkpoint.is_dir():
        raise CheckpointError("there is no such checkpoint", where=checkpoint, fix="give the path of its folder")
    steps = own_steps(checkpoint) or sorted(path.parent.name for path in checkpoint.glob("*/.metadata"))
    if steps and not (checkpoint / METADATA_NAME).is_file():
        raise CheckpointError(
            "this folder holds checkpoints, it isn't one", where=checkpoint, fix=f"give one of: {', '.join(steps)}"
        )
    # A step folder without its manifest was never finished: it must not pass for another tool's.
    ours = (checkpoint / MODEL_FILES).is_dir() or _OWN_STEP.fullmatch(checkpoint.resolve().name)
    if ours or ((checkpoint / MANIFEST_NAME).is_file() and (checkpoint / METADATA_NAME).is_file()):
        return _open_ours(checkpoint, model)
    deepspeed = find_deepspeed_folder(checkpoint)
    if deepspeed:
        return _open_deepspeed(deepspeed, model)
    if (checkpoint / METADATA_NAME).is_file() or any(checkpoint.glob("*.distcp")):
        return _open_dcp(checkpoint, model)
    raise CheckpointError(
        "this folder isn't a checkpoint that can be consolidated",
        where=checkpoint,
        fix="give a step-N folder, a DeepSpeed checkpoint (`latest` and global_stepN), or a folder with .metadata "
        "and *.distcp",
    )


def _open_ours(checkpoint: Path, model: Path | None) -> Source:
    if model is not None:
        raise RecipeError(
            "the checkpoint has a configuration and a tokenizer of its own",
            where="--model",
            fix="leave it out",
        )
    manifest = read_manifest(checkpoint)

    def read(names: Names) -> StoredModel:
        stored = stored_tensors(checkpoint)
        tensors = {}
        left_over = []
        for prefix, known in (("model.", names.parameters), ("buffer.", names.buffers)):
            for key, tensor in stored.items():
                name = key.removeprefix(prefix)
                if key.startswith(prefix) and name in known:
                    tensors[name] = tensor
                elif key.startswith(prefix) and not (prefix == "buffer." and name in names.computed):
                    left_over.append(key)
        return StoredModel(tensors, left_over)

    return Source(
        kind="ours",
        folder=checkpoint,
        model_folder=checkpoint / MODEL_FILES,
        step=manifest.step,
        read=read,
        verify=lambda: verify_checkpoint(checkpoint),
        has_hashes=True,
    )


def _open_deepspeed(folder: Path, model: Path | None) -> Source:
    model_folder = _model_folder(folder, model)
    layout = read_deepspeed(folder)

    def read(names: Names) -> StoredModel:
        return match_names({**layout.parameters, **layout.buffers}, names, where=folder)

    rounded = {tensor.dtype for tensor in layout.parameters.values() if tensor.dtype.is_floating_point}
    only = None
    if layout.nameless_masters and len(rounded) == 1:
        only = (rounded.pop(), "a ZeRO 0 checkpoint names only its rounded weights, not its float32 masters")
    return Source("deepspeed", folder, model_folder, layout.step, read, lambda: None, False, only)


def _open_dcp(folder: Path, model: Path | None) -> Source:
    stored = stored_tensors(folder, tensors_only=False)
    model_folder = _model_folder(folder, model)

    def read(names: Names) -> StoredModel:
        return match_names(stored, names, where=folder)

    return Source("dcp", folder, model_folder, None, read, lambda: None, False)


def _model_folder(folder: Path, model: Path | None) -> Path:
    if model is not None:
        return model
    resolved = folder.resolve()
    for candidate in (resolved, resolved.parent):
        if (candidate / "config.json").is_file() and _is_model_config(candidate / "config.json"):
            return candidate
    raise CheckpointError(
        "neither the checkpoint nor the folder above it holds a config.json",
        where=folder,
        fix="add --model FOLDER: the model that was trained, with its configuration and tokenizer",
    )


def _is_model_config(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")).get("model_type"), str)
    except (ValueError, AttributeError):
        return False


def match_names(stored: Mapping[str, StoredTensor], names: Names, *, where: Path) -> StoredModel:
    """Find the model's tensors among keys that other tools wrote: flat or nested, wrapped, an optimizer beside them.

    Raises CheckpointError when no key is of the model, or two are of one tensor.
    """
    wanted = names.parameters | names.buffers
    by_prefix: dict[str, dict[str, str]] = {}
    for key in stored:
        plain = ".".join(part for part in key.split(".") if part not in _INSERTED)
        for prefix, name in _splits(plain):
            if name in wanted:
                found = by_prefix.setdefault(prefix, {})
                if name in found:
                    raise CheckpointError(f"{found[name]} and {key} are the same tensor", where=where)
                found[name] = key
    if not by_prefix:
        example = ", ".join(list(stored)[:3]) or "nothing"
        raise CheckpointError(
            f"none of the checkpoint's tensors has a name of the model's: it holds {example}",
            where=where,
            fix="the config.json must be of the model that was trained, and the names those of transformers",
        )
    # Where names of the model exist at two depths (`model.norm` of one in another), most of them decide.
    prefix = max(by_prefix, key=lambda each: (len(by_prefix[each]), -len(each)))
    found = by_prefix[prefix]
    used = set(found.values())
    left_over = []
    for key in stored:
        plain = ".".join(part for part in key.split(".") if part not in _INSERTED)
        inside = plain.startswith(prefix) and (prefix or not plain.startswith(_BESIDE))
        if inside and key not in used and plain.removeprefix(prefix) not in names.computed:
            left_over.append(key)
    return StoredModel({name: stored[key] for name, key in found.items()}, left_over)


def _splits(key: str) -> Iterable[tuple[str, str]]:
    """(wrappers, name) of a key at each depth: `model.model.norm` is that, `model.norm` under `model.`, and so on."""
    parts = key.split(".")
    for depth in range(len(parts)):
        yield ".".join([*parts[:depth], ""]) if depth else "", ".".join(parts[depth:])
        if parts[depth] not in _WRAPPERS:
            break
