"""Repeats and leakage: what MinHash finds is what comparing every pair finds."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.formats import Completion, Conversation, Document, Example, Preference, TokenIds
from finetune.data_preview.content import content_of
from finetune.data_preview.leakage import PASSAGE_WORDS, HeldOut, passages, text_file_passages
from finetune.data_preview.repeats import MISSED, Repeats, band_rows, find_repeats, row_store
from finetune.data_preview.words import NUM_HASHES, SIGNATURE_CHUNK, jaccard, ngrams, signatures, word_hashes


def repeats(examples: list[Example], similarity: float = 0.7) -> Repeats:
    with row_store(similarity) as store:
        for number, example in enumerate(examples):
            store.add(content_of(example), f"file:{number}")
        store.finish()
        return find_repeats(store)


def varied(random: np.random.Generator, text: str, num_changes: int) -> str:
    words = text.split()
    for place in random.choice(len(words), size=num_changes, replace=False):
        words[place] = f"other{random.integers(1000)}"
    return " ".join(words)


def documents(seed: int) -> list[Example]:
    """30 texts of 40 words and, of each, copies with 0 to 4 words changed, shuffled."""
    random = np.random.default_rng(seed)
    texts = []
    for _ in range(30):
        text = " ".join(f"word{number}" for number in random.integers(500, size=40))
        texts += [varied(random, text, changes) for changes in range(5)]
    return [Document(texts[place]) for place in random.permutation(len(texts))]


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.9])
def test_the_pairs_are_those_of_comparing_all(similarity: float) -> None:
    examples = documents(int(similarity * 10))
    found = repeats(examples, similarity)
    sets = [content_of(example).ngrams for example in examples]
    near = {b for a, b in combinations(range(len(sets)), 2) if similarity <= jaccard(sets[a], sets[b]) < 1}
    best = max(value for a, b in combinations(range(len(sets)), 2) if (value := jaccard(sets[a], sets[b])) < 1)
    assert found.exact == 0
    assert abs(found.near - len(near)) <= 1, "a pair at the very threshold may be missed"
    assert found.near_pairs[0].similarity == pytest.approx(best)
    assert all(pair.similarity >= similarity for pair in found.near_pairs)


def test_a_large_group_of_near_rows_is_found_whole() -> None:
    text = " ".join(f"w{number}" for number in range(100))
    found = repeats([Document(f"{text} end{number}") for number in range(200)])
    assert found.near == 199


def test_exact_repeats_are_counted_apart_from_near_ones() -> None:
    same, other = (
        "The ship leaves the harbour at nine in the morning.",
        "Something else entirely, without any likeness.",
    )
    found = repeats([Document(same), Document(other), Document(f" {same}\n"), Document(same), Document(same.upper())])
    assert (found.num_rows, found.exact, found.near) == (5, 2, 1)
    (pair,) = found.exact_pairs
    assert (pair.first, pair.second, pair.count) == ("file:0", "file:2", 3)
    assert (found.near_pairs[0].second, found.near_pairs[0].similarity) == ("file:4", 1.0)


def chat(question: str, answer: str, system: str = "") -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages, (len(messages) - 1,))


def test_rows_of_one_prompt_with_another_answer_are_counted() -> None:
    found = repeats(
        [chat("How far is it?", "Two miles."), chat("How far is it?", "No idea at all."), chat("Why?", "So.")]
    )
    assert (found.exact, found.near, found.same_prompt) == (0, 0, 1)


def test_a_system_prompt_makes_no_likeness() -> None:
    long = " ".join(f"rule{number}" for number in range(300))
    assert repeats([chat("What is this?", "A map.", long), chat("Who are you?", "A clerk.", long)]).near == 0


def test_every_kind_of_example_can_be_compared() -> None:
    message = {"role": "assistant", "content": "yes"}
    kinds: list[Example] = [
        Document("one"),
        Completion("one", " two"),
        TokenIds([1, 2, 3, 4], None),
        chat("one", "two"),
        Preference([{"role": "user", "content": "one"}], [message], [{**message, "content": "no"}]),
        Document(""),
    ]
    found = repeats([*kinds, *kinds])
    # The completion and the chat are of the same words.
    assert (found.exact, found.near) == (len(kinds), 1)


def test_scripts_without_spaces_are_compared_letter_by_letter() -> None:
    one = "从前有一座山山上有一座庙庙里有一个老和尚在讲故事"
    assert repeats([Document(one), Document(one.replace("老", "小"))]).near == 1


@pytest.mark.parametrize("similarity", [0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_bands_miss_no_more_than_said(similarity: float) -> None:
    rows = band_rows(similarity)
    assert (1 - similarity**rows) ** (NUM_HASHES // rows) <= MISSED or rows == 1


def test_a_signature_estimates_the_similarity() -> None:
    random = np.random.default_rng(0)
    for share in (0.2, 0.5, 0.8):
        errors = []
        for _ in range(20):
            left = np.unique(random.integers(1 << 32, size=400, dtype=np.uint32))
            other = random.integers(1 << 32, size=len(left), dtype=np.uint32)
            right = np.unique(np.where(random.random(len(left)) < share, left, other))
            first, second = signatures([left, right])
            errors.append((first == second).mean() - jaccard(left, right))
        assert abs(np.mean(errors)) < 0.03
        assert np.abs(errors).max() < 0.2


def test_a_set_larger_than_a_chunk_has_one_signature() -> None:
    members = np.arange(3 * SIGNATURE_CHUNK + 7, dtype=np.uint32)
    parts = signatures(np.array_split(members, 5))
    assert np.array_equal(signatures([members])[0], parts.min(axis=0))


@given(st.text(), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_case_and_punctuation_make_no_difference(text: str, marks: int) -> None:
    assert np.array_equal(ngrams(word_hashes(text)), ngrams(word_hashes(f"{'. ' * marks}{text} !{'?' * marks}")))


def held_out(held: list[Example], trained: list[Example], similarity: float = 0.7) -> HeldOut:
    found = HeldOut("eval_data", "held", ((example, f"held:{number}") for number, example in enumerate(held)))
    for number, example in enumerate(trained):
        found.compare(content_of(example), f"file:{number}")
    return found


def test_leakage_is_found_inside_a_longer_row() -> None:
    passage = " ".join(f"word{number}" for number in range(40))
    around = " ".join(f"noise{number}" for number in range(2000))
    held: list[Example] = [
        Document(passage),
        Document("a text that stands nowhere else"),
        chat("Why is it?", "Because."),
    ]
    trained: list[Example] = [
        Document(around),
        Document(f"{around} {passage} {around}"),
        chat("Why is it?", "Who knows."),
    ]
    found = held_out(held, trained).result(0.7)
    assert (found.num_rows, found.exact, found.near, found.same_prompt) == (3, 0, 1, 1)
    assert [(pair.first, pair.second) for pair in found.pairs] == [("file:1", "held:0"), ("file:2", "held:2")]
    assert found.pairs[0].similarity == 1.0


def test_a_held_out_row_that_is_a_training_row_is_exact() -> None:
    found = held_out([chat("one", "two"), chat("one", "two")], [chat("one", "two")]).result(0.7)
    assert (found.exact, found.near, found.same_prompt) == (2, 0, 0)


def test_a_long_text_is_compared_in_passages(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(10 * PASSAGE_WORDS + 5)]
    text = "\n".join(words)
    parts = list(passages(text))
    assert "".join(part for part, _ in parts) == text
    assert [line for _, line in parts] == [1 + place * PASSAGE_WORDS for place in range(10)]
    assert list(passages("a few words")) == [("a few words", 1)]
    assert list(passages(" \n")) == []
    path = tmp_path / "held.txt"
    path.write_text(text)
    found = HeldOut("perplexity", str(path), text_file_passages(str(path)))
    found.compare(content_of(Document(" ".join(words[PASSAGE_WORDS : 3 * PASSAGE_WORDS]))), "file:1")
    result = found.result(0.9)
    assert (result.num_rows, result.near) == (10, 2)
    assert {pair.second for pair in result.pairs} == {f"{path}:{1 + PASSAGE_WORDS}", f"{path}:{1 + 2 * PASSAGE_WORDS}"}
