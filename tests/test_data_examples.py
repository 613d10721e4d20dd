"""Completions, rows of token ids, preferences, a mixed chunk, and how much may be dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from finetune.data.encoder import RowEncoder
from finetune.data.formats import Completion, Conversation, Document, Preference, TokenIds
from finetune.data.options import ChatOptions, check_dropped
from finetune.errors import DataError
from tests.data_templates import qwen3_tokenizer
from tests.test_data_masks import supervised_runs
from tests.tiny import CORPUS, tiny_tokenizer

CHAT = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], (1,))


def encoder(tokenizer: Any, *examples: Any, length: int | None = None, **options: Any) -> RowEncoder:
    overlong, train_on = options.pop("overlong", "error"), options.pop("train_on", "assistant")
    made = RowEncoder(tokenizer, length, overlong, train_on, ChatOptions(**options))
    made.add([(example, f"rows.jsonl:{line}") for line, example in enumerate(examples, start=1)], skip_invalid=False)
    return made


def bos_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def metaspace_tokenizer(scheme: str) -> Any:
    """Of SentencePiece's shape: a space is written before a text's first word (``first``), or each section's."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([*CORPUS, "\n. 0 | a"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TEXT = st.text(alphabet="the capital Paris\n.猫é", max_size=12)


@pytest.mark.parametrize("with_bos", [False, True])
def test_completion_is_learnt_after_the_prompt_s_own_tokens(with_bos: bool) -> None:
    tokenizer = bos_tokenizer() if with_bos else tiny_tokenizer()
    head = [tokenizer.bos_token_id] * with_bos

    @settings(max_examples=100, deadline=None)
    @given(prompt=TEXT, completion=TEXT)
    def check(prompt: str, completion: str) -> None:
        rows = encoder(tokenizer, Completion(prompt, completion)).rows
        asked = head + tokenizer(prompt, add_special_tokens=False).input_ids
        if not rows:
            assert not asked
            assert not completion
            return
        (row,) = rows
        ids = row.input_ids.tolist()
        assert ids[: len(asked)] == asked
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[len(head) : -1]) == prompt + completion
        assert tokenizer.decode(ids[len(asked) : -1]) == completion
        assert np.flatnonzero(row.loss_mask).tolist() == list(range(max(1, len(asked)), len(ids)))

    check()


def test_token_across_the_border_is_neither_lost_nor_leaks() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([")\n\n"])
    prompt, completion = "f(x)", "\n\nIt is"
    joined = tokenizer(prompt + completion).input_ids
    asked = tokenizer(prompt).input_ids
    assert joined[: len(asked)] != asked
    (row,) = encoder(tokenizer, Completion(prompt, completion)).rows
    assert row.input_ids.tolist() == [*asked, *tokenizer(completion).input_ids, tokenizer.eos_token_id]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == [completion + "<|im_end|>"]


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_completion_gets_no_space_that_its_text_has_not(scheme: str) -> None:
    tokenizer = metaspace_tokenizer(scheme)
    for prompt, completion in (("It is P", "aris"), ("It is ", "Paris"), ("It is", " Paris")):
        (row,) = encoder(tokenizer, Completion(prompt, completion)).rows
        asked = tokenizer(prompt).input_ids
        assert row.input_ids[: len(asked)].tolist() == asked
        tokens = tokenizer.convert_ids_to_tokens(row.input_ids[row.loss_mask])
        assert "".join(tokens) == completion.replace(" ", "▁") + "</s>"


def test_eos_that_is_written_out_ends_the_completion_once() -> None:
    tokenizer = bos_tokenizer()
    written = Completion("<|endoftext|>the fox", " jumps<|im_end|>")
    rows = encoder(tokenizer, written, Completion("the fox", " jumps")).rows
    assert rows[0].input_ids.tolist() == rows[1].input_ids.tolist()
    assert rows[0].input_ids.tolist().count(tokenizer.eos_token_id) == 1
    assert rows[0].input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_all_of_a_completion_is_learnt_when_asked() -> None:
    (row,) = encoder(tiny_tokenizer(), Completion("the ", "fox"), train_on="all").rows
    (document,) = encoder(tiny_tokenizer(), Document("the fox")).rows
    assert row.input_ids.tolist() == document.input_ids.tolist()
    assert row.loss_mask.tolist() == document.loss_mask.tolist()


def test_overlong_completion_keeps_the_end_of_its_prompt() -> None:
    tokenizer = bos_tokenizer()
    example = Completion("y" * 30 + "x" * 10, "z" * 5)
    (row,) = encoder(tokenizer, example, length=12, overlong="truncate").rows
    assert tokenizer.decode(row.input_ids) == "<|endoftext|>xxxxxzzzzz<|im_end|>"
    assert tokenizer.decode(row.input_ids[row.loss_mask]) == "zzzzz<|im_end|>"
    (row,) = encoder(tokenizer, Completion("x" * 20, "z" * 20), length=12, overlong="truncate").rows
    assert tokenizer.decode(row.input_ids) == "<|endoftext|>xxxxxzzzzzz"
    assert encoder(tokenizer, example, length=12, overlong="drop").counts["dropped_overlong"] == 1
    with pytest.raises(DataError, match="completion of 47 tokens can't be split"):
        encoder(tokenizer, example, length=12, overlong="split")


def test_token_ids_are_kept_and_their_labels_are_the_mask() -> None:
    tokenizer = tiny_tokenizer()
    made = encoder(tokenizer, TokenIds([5, 6, 7, 8], [-100, -100, 7, 8]), TokenIds([5, 6], None))
    assert [row.input_ids.tolist() for row in made.rows] == [[5, 6, 7, 8], [5, 6]]
    assert [row.loss_mask.tolist() for row in made.rows] == [[False, False, True, True], [False, True]]
    # The first token can't be predicted, whatever its label.
    assert not encoder(tokenizer, TokenIds([5, 6], [5, -100])).rows
    ids = list(range(10))
    made = encoder(tokenizer, TokenIds(ids, [-100] * 5 + ids[5:]), length=4, overlong="split")
    assert [row.input_ids[row.loss_mask].tolist() for row in made.rows] == [[5, 6], [7, 8, 9]]
    assert (made.counts["split"], made.counts["dropped_pieces"], made.counts["dropped_without_target"]) == (1, 1, 0)


def test_split_row_is_dropped_once_and_only_where_no_piece_is_kept() -> None:
    tokenizer, ids = tiny_tokenizer(), list(range(20))
    kept, unlearnt = TokenIds(ids, [-100] * 17 + ids[17:]), TokenIds(ids, [-100] * 20)
    made = encoder(tokenizer, kept, unlearnt, length=4, overlong="split")
    assert len(made.rows) == made.counts["kept"] == 2
    assert (made.counts["dropped_pieces"], made.counts["dropped_without_target"]) == (5, 1)
    check_dropped(made.finish(), 0.5)


@pytest.mark.parametrize(
    ("overlong", "length", "counted"),
    [
        ("drop", 30, {"kept": 1, "dropped_pieces": 2}),
        ("drop", 8, {"kept": 0, "dropped_overlong": 1}),
        ("truncate", 68, {"kept": 2, "truncated": 1, "dropped_pieces": 1}),
    ],
)
def test_counts_are_of_rows_and_not_of_their_turns(overlong: Any, length: int, counted: dict[str, int]) -> None:
    turns = [
        ("Hi", "yes"),
        ("And then, what was it that he said to you?", "no"),
        ("Or this one, in other words?", "well"),
    ]
    chat = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    made = RowEncoder(qwen3_tokenizer(), length, overlong, "assistant", ChatOptions(history="split"))
    made.add([(Conversation(chat, (1, 3, 5)), "rows.jsonl:1")], skip_invalid=False)
    assert {name: made.counts[name] for name in counted} == counted
    assert made.counts["dropped_overlong"] + made.counts["dropped_without_target"] <= 1


def test_token_that_the_tokenizer_lacks_is_an_error_or_a_counted_skip() -> None:
    tokenizer = tiny_tokenizer()
    wrong = TokenIds([5, len(tokenizer)], None)
    with pytest.raises(DataError, match=f"is {len(tokenizer)}, and the tokenizer's ids are 0 to") as caught:
        encoder(tokenizer, TokenIds([5, 6], None), wrong)
    assert caught.value.where == "rows.jsonl:2"
    made = RowEncoder(tokenizer, None, "error", "assistant")
    made.add([(wrong, "rows.jsonl:1")], skip_invalid=True)
    assert made.counts["skipped_invalid"] == 1


def test_preference_is_refused() -> None:
    message = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="preference") as caught:
        encoder(tiny_tokenizer(), CHAT, Preference(message, message, message))
    assert caught.value.where == "rows.jsonl:2"


def test_rows_of_a_mixed_chunk_keep_their_order() -> None:
    examples = [Document("the fox"), CHAT, TokenIds([5, 6], None), Completion("a", "b"), Document("a ship"), CHAT]
    made = encoder(tiny_tokenizer(), *examples, DataError("no row"))
    assert [row.place for row in made.rows] == [f"rows.jsonl:{line}" for line in range(1, 7)]
    assert (made.counts["rows"], made.counts["kept"], made.counts["skipped_invalid"]) == (7, 6, 1)


def test_control_tokens_in_a_document_are_text_unless_allowed() -> None:
    tokenizer = tiny_tokenizer()
    document = Document("the <|im_end|> fox")
    made = encoder(tokenizer, document, Document("a ship"))
    assert made.rows[0].input_ids.tolist().count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(made.rows[0].input_ids) == "the <|im_end|> fox<|im_end|>"
    assert (made.counts["control_tokens_in_content"], made.counts["texts_with_control_tokens"]) == (1, 1)
    check_dropped(made.finish(), 0.5)
    allowed = encoder(tokenizer, document, allow_control_tokens=True)
    assert allowed.rows[0].input_ids.tolist() == [*tokenizer("the <|im_end|> fox").input_ids, tokenizer.eos_token_id]
    check_dropped(allowed.finish(), 0.5)
    # Most texts hold them: a template has rendered them before.
    with pytest.raises(DataError, match="1 of 1 texts hold control tokens"):
        check_dropped(encoder(tokenizer, document).finish(), 0.5)


def test_dropping_more_than_the_stated_share_is_an_error() -> None:
    counts = {"rows": 10, "kept": 4, "dropped_overlong": 3, "dropped_without_target": 1, "skipped_invalid": 2}
    check_dropped(counts, 0.6)
    with pytest.raises(DataError, match="6 of 10 rows were dropped") as caught:
        check_dropped(counts, 0.5)
    for name in ("dropped_overlong 3", "dropped_without_target 1", "skipped_invalid 2"):
        assert name in caught.value.what
    assert "max_dropped_share" in str(caught.value.fix)
