"""A tokenizer learned from text: byte-level BPE whose digits stand alone, with ChatML's special tokens."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.errors import DataError, RecipeError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# GPT-4's split, but with each digit alone: a number's digits then always meet the model in the same form.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterator[str], *, vocab_size: int, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from ``texts``: any string encodes and decodes to itself, without an unknown token.

    ``<|endoftext|>`` ends a document (eos) and pads; ``<|im_start|>`` and ``<|im_end|>`` delimit turns. The result has
    at most ``vocab_size`` entries: fewer when the text has no more pairs to merge. ``chat_template`` is Jinja
    text; None means ChatML. Raises RecipeError for a vocabulary below 256 bytes and the special tokens, DataError when
    there is no text.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
        raise RecipeError(
            f"a vocabulary of {vocab_size} can't hold 256 bytes and {len(SPECIAL_TOKENS)} special tokens",
            where="model.scratch.tokenizer.vocab_size",
            fix=f"give at least {len(alphabet) + len(SPECIAL_TOKENS)}",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    num_texts = 0

    def counted() -> Iterator[str]:
        nonlocal num_texts
        for text in texts:
            num_texts += 1
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    if num_texts == 0:
        raise DataError("there is no text to train a tokenizer on", fix="give data with at least one row")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template or CHATML_TEMPLATE
    return fast
