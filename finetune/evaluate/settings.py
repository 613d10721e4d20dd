"""The ``evaluate:`` section: which figures to take over which models, and which of them must hold."""

from __future__ import annotations

from pydantic import Field, model_validator

from finetune.config.section import Section
from finetune.data.options import TemplateKwargs
from finetune.data.settings import DatasetSettings


class EvaluateSettings(Section):
    models: list[str] = Field(default_factory=list)
    """Stages whose models stand in the table, in this order; empty: the stage's own input."""
    reference: str | None = None
    """The stage whose model the others are compared with (KL, ratio of perplexities, drop of exact match)."""
    perplexity: str | None = None
    """A text file to take perplexity on, and KL to the reference where there is one."""
    window: int | None = Field(None, ge=2)
    """Tokens in one window of that text; default: 1024, or the models' context where that is shorter. Windows don't
    overlap; each starts with no context."""
    max_tokens: int | None = Field(None, ge=2)
    """Read only the first so many tokens of the text."""
    exact_match: DatasetSettings | None = None
    """Conversations whose last reply the model must give word for word, by greedy generation."""
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    """Further arguments of the chat template for ``exact_match``: those that the model was trained with."""
    max_new_tokens: int = Field(64, ge=1)
    """The longest reply, in tokens."""
    batch_size: int = Field(64, ge=1)
    """Prompts generated together. In bfloat16 it can tip a near-tie between two tokens."""
    gate: list[str] = Field(default_factory=list)
    """The models that must keep the limits below; empty: every model of the table."""
    max_kl: float | None = Field(None, ge=0)
    """Limit on KL(reference || model), nats a token. Not asked of the reference."""
    max_perplexity_ratio: float | None = Field(None, gt=0)
    """Limit on the model's perplexity over the reference's. Not asked of the reference."""
    min_exact_match: float | None = Field(None, ge=0, le=1)
    """Least share of replies given word for word."""
    max_exact_match_drop: float | None = Field(None, ge=0, le=1)
    """How much lower the exact match may be than the reference's (0.03 = 3 points). Not asked of the reference."""

    @model_validator(mode="after")
    def _complete(self) -> EvaluateSettings:
        if self.perplexity is None and self.exact_match is None:
            raise ValueError("there is nothing to evaluate; set `perplexity` or `exact_match`")
        for limit, figure, compares in (
            ("max_kl", "perplexity", True),
            ("max_perplexity_ratio", "perplexity", True),
            ("min_exact_match", "exact_match", False),
            ("max_exact_match_drop", "exact_match", True),
        ):
            if getattr(self, limit) is None:
                continue
            if getattr(self, figure) is None:
                raise ValueError(f"`{limit}` needs `{figure}`")
            if compares and self.reference is None:
                raise ValueError(f"`{limit}` needs `reference`")
        unknown = [name for name in self.gate if self.models and name not in (*self.models, self.reference)]
        if unknown:
            raise ValueError(f"`gate` names `{unknown[0]}`, which is not among `models`")
        return self
