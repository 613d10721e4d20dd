"""The fields of a ``pretrain:`` or ``sft:`` stage."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from finetune.config.section import Section
from finetune.data.options import DEFAULT_MAX_DROPPED_SHARE, ChatOptions, TemplateKwargs
from finetune.data.settings import DatasetSettings


class TrainSettings(Section):
    data: list[DatasetSettings] = Field(min_length=1)
    """What to train on, in the order given; rows are shuffled anew each epoch."""
    max_seq_length: int = Field(1024, ge=2)
    """Longest row, in tokens; the length of a packed row."""
    packing: bool = True
    """Put several documents into one row, each isolated from the others."""
    group_by_length: bool = True
    """Without packing: keep rows of like length together, in blocks of 16, so that little of a batch is padding."""
    streaming: bool = False
    """Read and encode the rows while training, for data that is too large to be prepared first. Needs ``max_steps``."""
    streaming_buffer_rows: int = Field(2000, ge=1)
    """How many rows are shuffled (and packed) among themselves where rows are streamed."""
    data_workers: int | None = Field(None, ge=0)
    """Processes that help to prepare the rows where that takes longer than they take to start; by default one for each
    core but one, of two cores none."""
    overlong: Literal["drop", "truncate", "error", "split"] = "truncate"
    """What to do with a row longer than ``max_seq_length``."""
    train_on: Literal["assistant", "last", "completion", "all"] = "assistant"
    """Which tokens of a conversation are targets: all turns of the assistant, its last one, its turns after the last
    user's message, or every token. A turn that its row says not to train is never one, but with `all`."""
    history: Literal["refuse", "split", "last"] = "refuse"
    """A chat template may write an earlier turn otherwise once later ones follow, as without its reasoning. Then:
    `refuse` the conversation, `split` it into a row a turn, each as it was written then, or train the `last` alone."""
    allow_control_tokens: bool = False
    """Read a special token that is written out in a message or a text as that token. By default it stays text."""
    require_stop_token: bool = True
    """Refuse a chat template that ends the assistant's turn in no token: the model would not learn to stop."""
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    """Further arguments of the chat template, for example `{enable_thinking: false}`."""
    max_dropped_share: float = Field(DEFAULT_MAX_DROPPED_SHARE, ge=0, le=1)
    """Largest part of the rows that may be dropped (invalid, overlong, without a target); more is an error."""
    epochs: float | None = Field(1.0, gt=0)
    """Passes over the data; ignored where ``max_steps`` is given."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps."""
    micro_batch_size: int = Field(1, ge=1)
    """Rows a process computes at once."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches a process adds up before the optimizer steps."""
    learning_rate: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up, towards zero; constant: not at all."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Part of all steps over which the learning rate rises from zero to its peak."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled decay, on matrices only: biases and norms aren't decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm over all parameters when it is longer."""
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """What is computed in; masters and optimizer state are float32 in each case. fp16 scales its loss dynamically."""
    gradient_checkpointing: Literal["none", "full"] | int = "none"
    """Which blocks compute their activations again in the backward pass: `none`, `full` (all: far less memory, about a
    third more time), or a number k (every k-th block)."""
    activation_offload: bool = False
    """Keep the activations that wait for the backward pass in the host's memory. On the cpu they are there anyway."""
    save_every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints to keep; older ones are removed once a newer one is verified."""
    eval_data: list[DatasetSettings] = Field(default_factory=list)
    """Held-out data; its loss is taken before the first step and after the last."""
    eval_rows: int | None = Field(None, ge=1)
    """Instead of ``eval_data``: how many rows of ``data``, chosen by the seed, to hold out and not train on."""
    eval_every_steps: int | None = Field(None, ge=1)
    """Steps between held-out losses, besides the first and the last."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Stored precision of the consolidated model."""
    max_shard_size: str = "5GB"
    """Size limit of one file of the consolidated model: a number with KB, MB, GB or TB."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _spelt_out(cls, value: object) -> object:
        if isinstance(value, bool):
            return "full" if value else "none"
        if isinstance(value, str) and value not in ("none", "full") and not value.strip().lstrip("-").isdigit():
            raise ValueError("write `none`, `full`, or a number k: every k-th block")
        return value

    @field_validator("gradient_checkpointing")
    @classmethod
    def _is_every(cls, value: str | int) -> str | int:
        if isinstance(value, int) and value < 1:
            raise ValueError("write `none`, `full`, or a number of 1 or more: every k-th block")
        return value

    @field_validator("max_shard_size")
    @classmethod
    def _is_size(cls, value: str) -> str:
        if not re.fullmatch(r"\d+(\.\d+)? *[KMGT]B", value):
            raise ValueError("write a size as 500MB or 5GB")
        if float(value[:-2]) == 0:
            raise ValueError("a file must hold something: write a size as 500MB or 5GB")
        return value

    @field_validator("betas")
    @classmethod
    def _are_decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must be at least 0 and below 1")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSettings:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("give `epochs` or `max_steps`")
        if self.eval_rows is not None and self.eval_data:
            raise ValueError("give `eval_data` or `eval_rows`, not both")
        if self.streaming:
            self._can_be_streamed()
        return self

    def _can_be_streamed(self) -> None:
        unread = "`streaming` reads the rows as it goes on"
        if self.max_steps is None:
            raise ValueError(f"{unread}, so how many steps an epoch has isn't known; set `max_steps`")
        if self.eval_rows is not None:
            raise ValueError(f"{unread}, so it can't choose `eval_rows` among them; set `eval_data`")
        if any(source.weight != 1 for source in self.data):
            raise ValueError(f"{unread}, so `weight`, a share of all rows, can't be kept; set it to 1")

    @property
    def chat_options(self) -> ChatOptions:
        return ChatOptions(
            history=self.history,
            allow_control_tokens=self.allow_control_tokens,
            require_stop=self.require_stop_token,
            template_kwargs=self.chat_template_kwargs,
        )

    @property
    def checkpointed_every(self) -> int | None:
        """Every how many blocks one is checkpointed: 1 is all, None is none."""
        if isinstance(self.gradient_checkpointing, int):
            return self.gradient_checkpointing
        return 1 if self.gradient_checkpointing == "full" else None

    @property
    def max_shard_size_bytes(self) -> int:
        number, unit = float(self.max_shard_size[:-2]), self.max_shard_size[-2]
        return int(number * 1000 ** ("KMGT".index(unit) + 1))
