"""Tokenizers and models made from nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from finetune.errors import DataError, RecipeError
from finetune.files import sha256_file
from finetune.model.load import load_model, load_tokenizer
from finetune.model.scratch import create_model, scratch_config
from finetune.model.tokenizer import train_tokenizer
from tests.tiny import CORPUS

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TOKENIZER = train_tokenizer(iter(CORPUS * 3), vocab_size=320)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_any_text_decodes_to_itself(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_each_digit_is_a_token():
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("a1234 56"))
    assert [token for token in tokens if any(c.isdigit() for c in token)] == ["1", "2", "3", "4", "5", "6"]


def test_vocabulary_and_special_tokens():
    assert len(TOKENIZER) == 320
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(TOKENIZER.encode("<|im_start|><|im_end|>", add_special_tokens=False)) == 2
    own = train_tokenizer(iter(CORPUS), vocab_size=300, chat_template="{{ messages[0]['content'] }}")
    assert own.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_what_a_tokenizer_cannot_be_made_of():
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(iter([]), vocab_size=300)
    with pytest.raises(RecipeError, match="256 bytes"):
        train_tokenizer(iter(CORPUS), vocab_size=258)


def test_the_folder_is_a_plain_model_that_depends_on_the_seed_alone(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = create_model(TINY, TOKENIZER, seed=7, out=tmp_path / "one")
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    two = create_model(TINY, TOKENIZER, seed=7, out=tmp_path / "two")
    other = create_model(TINY, TOKENIZER, seed=8, out=tmp_path / "other")
    hashes = [sha256_file(folder / "model.safetensors") for folder in (one, two, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    model = AutoModelForCausalLM.from_pretrained(one)
    assert model.config.vocab_size == len(TOKENIZER)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == TOKENIZER.eos_token_id
    assert load_model(one, dtype=torch.float32, device="cpu").dtype == torch.float32
    assert load_tokenizer(one).chat_template == TOKENIZER.chat_template


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "did you mean `llama`"),
        ({"hidden_sise": 32}, "did you mean `hidden_size`"),
        ({"vocab_size": 99}, "comes from the tokenizer"),
        ({"num_key_value_heads": 3}, "can't share"),
    ],
)
def test_configurations_that_are_refused(change, message):
    with pytest.raises(RecipeError) as caught:
        scratch_config({**TINY, **change}, TOKENIZER)
    assert message in str(caught.value)
    assert caught.value.where == "model.scratch.config"
