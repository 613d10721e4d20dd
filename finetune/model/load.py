"""Open a Hugging Face model folder, with errors that say what is wrong with it."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from finetune.errors import CheckpointError, HubError, RecipeError
from finetune.model.bitsandbytes import bitsandbytes_package
from finetune.model.gguf import GGUF_NAME, is_gguf_folder, loading_config, read_gguf

QUANTIZATION_REPORT = "quantization_report.json"
QUANTIZATION_PLOT = "quantization_report.png"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.gguf", "*.model", "*.jinja", "*.txt", "README.md", "LICENSE*"]


def resolve_model(path: str | Path) -> Path:
    """The local folder of ``path``: a folder, or a Hub id that is fetched into the Hugging Face cache.

    Raises CheckpointError for a folder without a config.json, RecipeError for a path that doesn't exist, HubError
    when the Hub can't be reached (or HF_HUB_OFFLINE forbids it) and the cache doesn't hold the model.
    """
    folder = Path(path).expanduser()
    if folder.suffix == ".gguf" and folder.is_file():
        raise RecipeError(
            "this is a file, a model is a folder",
            where=path,
            fix=f"give the folder {folder.parent}, which must hold config.json and the tokenizer too",
        )
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            what, fix = "no config.json", "give a Hugging Face model folder"
            if any(folder.glob("*.gguf")):
                what = "a GGUF file and no config.json"
                fix = (
                    "give the Hugging Face folder that the file was made from (it may well be quantized already); to "
                    f"evaluate the file, name it {GGUF_NAME} and put that folder's config.json and tokenizer beside it"
                )
            raise CheckpointError(f"this folder holds {what}", where=folder, fix=fix)
        return folder.resolve()
    if folder.exists() or str(path).startswith((".", "/", "~")) or not _HUB_ID.fullmatch(str(path)):
        raise RecipeError("there is no such model folder", where=path, fix="correct the path, or give a Hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=_HUB_FILES))
    except Exception as cause:
        raise HubError(
            f"`{path}` is neither a folder nor in the local cache, and the Hub didn't provide it: "
            f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}",
            where=path,
            fix="correct the path; go online (unset HF_HUB_OFFLINE) and log in with `hf auth login` for a gated model",
        ) from cause


def load_config(folder: Path) -> PreTrainedConfig:
    """Raises CheckpointError when there is no config.json or this transformers doesn't know its model type."""
    if not (folder / "config.json").is_file():
        raise CheckpointError("there is no config.json", where=folder, fix="give a Hugging Face model folder")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as cause:
        raise CheckpointError(
            f"the configuration isn't JSON: {cause}", where=folder / "config.json", fix="copy it from the model anew"
        ) from cause
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as cause:
        raise CheckpointError(
            f"transformers can't read the configuration: {cause}",
            where=folder / "config.json",
            fix="upgrade transformers for a newer model type; models that bring their own code aren't supported",
        ) from cause


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Raises CheckpointError when the folder holds no tokenizer that transformers can open."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as cause:
        raise CheckpointError(
            f"transformers can't open the tokenizer: {cause}",
            where=folder,
            fix="copy tokenizer.json and tokenizer_config.json of the model into the folder",
        ) from cause


def carried_over(folder: Path) -> set[str]:
    """Tensors of a quantized folder that its class doesn't know and its source had too, as its report lists them."""
    try:
        report = json.loads((folder / QUANTIZATION_REPORT).read_text(encoding="utf-8"))
        return set(report["carried_over"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: str | torch.device,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The causal language model of ``folder`` on ``device``, in evaluation mode; "auto" is the dtype it is stored in.

    ``attn_implementation`` None is transformers' own choice: sdpa, or eager where the class has nothing else (Gemma 2).

    Plain transformers loads it. Weights in the GPTQ format are dequantized first (``model.gptq``), without gptqmodel;
    so are those of a GGUF folder, by transformers.
    Raises CheckpointError when weights are missing, left over, or of another shape than the configuration says; what
    quantization has carried over on purpose (``carried_over``) may be left over.
    """
    config = load_config(folder)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    load: Any = AutoModelForCausalLM.from_pretrained
    source: Path | None = folder
    if _quantization_method(config) == "gptq":
        # With weights at hand from_pretrained takes no folder, but a model's own class.
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        load, source = model_class.from_pretrained, None
        options |= _gptq_as_floats(folder, config, dtype)
    elif _quantization_method(config) == "bitsandbytes":
        bitsandbytes_package()
    elif is_gguf_folder(folder):
        read_gguf(folder / GGUF_NAME)
        options |= {"gguf_file": GGUF_NAME, "config": loading_config(config), "use_safetensors": None}
    try:
        # compressed-tensors draws progress bars at a load and at the first forward, terminal or not, unasked.
        with redirect_stderr(io.StringIO()):
            loaded: Any = load(source, **options)
    except Exception as cause:
        raise CheckpointError(
            f"transformers can't load the model: {cause}", where=folder, fix="check that every weight file is whole"
        ) from cause
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in info.get(kind, ()))
        if kind == "unexpected_keys":
            names = sorted(set(names) - carried_over(folder))
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(
                f"{len(names)} {kind.replace('_', ' ')}: {shown}",
                where=folder,
                fix="the weight files and config.json must belong to one model",
            )
    if source is None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    model = model.to(device).eval()
    quantization = getattr(model.config, "quantization_config", None)
    if getattr(quantization, "quant_method", None) == "compressed-tensors":
        with redirect_stderr(io.StringIO()), torch.inference_mode():
            # Packed weights are unpacked here, at the first forward.
            model(torch.zeros((1, 1), dtype=torch.int64, device=device))
    return model


def _quantization_method(config: PreTrainedConfig) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def _gptq_as_floats(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | Literal["auto"]) -> dict[str, Any]:
    """Options of ``from_pretrained`` for a folder in the GPTQ format."""
    from finetune.model.gptq import float_weights

    quantization = config.quantization_config
    del config.quantization_config
    stored_dtype: Any = (config.dtype or torch.float32) if dtype == "auto" else dtype
    transposed = [name for name, module in meta_model(config).named_modules() if isinstance(module, Conv1D)]
    weights = float_weights(folder, quantization, dtype=stored_dtype, transposed=transposed)
    return {"config": config, "state_dict": weights, "dtype": stored_dtype}


def meta_model(
    folder_or_config: Path | PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The model's shape: its parameters take no memory (meta device), its buffers are real, and tied names are tied.

    Buffers, such as the rotary frequencies, are computed from the configuration and have no copy in the weight files:
    they are made on the cpu, in their own precision. Raises RecipeError for another kind of model.
    """
    from accelerate import init_empty_weights

    config = load_config(folder_or_config) if isinstance(folder_or_config, Path) else folder_or_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecipeError(
            f"a {config.model_type} is no causal language model that transformers knows",
            where="model.path",
            fix="give a decoder such as Llama, Qwen or GPT-2",
        )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.tie_weights()
    return model.eval()
