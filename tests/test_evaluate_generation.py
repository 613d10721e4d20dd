"""Greedy batches give what plain ``generate`` gives, prompt by prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import DataError
from finetune.evaluate.generation import (
    chat_prompt_ids,
    exact_match,
    generate_greedily,
    generate_replies,
)
from tests.tiny import tiny_llama, tiny_tokenizer

NUM_PROMPTS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path_factory.mktemp("model") / "m", num_layers=3)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 12, 1, 9, 5, 20, 3][:NUM_PROMPTS]
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


def plain(model: Any, prompt: list[int], *, max_new_tokens: int, stop_ids: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


@pytest.mark.parametrize("batch_size", [1, 3, NUM_PROMPTS])
def test_batched_replies_equal_plain_generate(model: Any, batch_size: int) -> None:
    stop_ids = [1, 2]
    replies = generate_greedily(model, prompts(), max_new_tokens=16, stop_ids=stop_ids, pad_id=0, batch_size=batch_size)
    expected = [plain(model, prompt, max_new_tokens=16, stop_ids=stop_ids) for prompt in prompts()]
    assert replies == [[token for token in ids if token not in stop_ids] for ids in expected]
    assert len({tuple(reply) for reply in replies}) > 1


def test_a_reply_ends_before_the_first_stop_token(model: Any) -> None:
    free = generate_greedily(model, prompts(), max_new_tokens=16, stop_ids=[2], pad_id=0)
    stop = free[0][4]
    stopped = generate_greedily(model, prompts(), max_new_tokens=16, stop_ids=[2, stop], pad_id=0)
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(stop)] if stop in before else before)
    assert len(stopped[0]) < len(free[0])


def test_pad_token_equal_to_a_stop_token_does_not_matter(model: Any) -> None:
    apart = generate_greedily(model, prompts(), max_new_tokens=12, stop_ids=[2], pad_id=0)
    same = generate_greedily(model, prompts(), max_new_tokens=12, stop_ids=[2], pad_id=2)
    assert apart == same


def test_sampling_settings_of_the_model_do_not_leak_in(model: Any) -> None:
    expected = generate_greedily(model, prompts(), max_new_tokens=12, stop_ids=[2], pad_id=0)
    saved = model.generation_config.to_dict()
    model.generation_config.update(do_sample=True, temperature=5.0, top_p=0.5, top_k=3)
    try:
        assert generate_greedily(model, prompts(), max_new_tokens=12, stop_ids=[2], pad_id=0) == expected
    finally:
        model.generation_config.update(**saved)


def test_replies_are_text_and_stop_on_the_templates_terminator(model: Any) -> None:
    # The tokenizer's eos is <|endoftext|>, the template ends turns with <|im_end|>: both must stop.
    tokenizer = tiny_tokenizer(eos_token="<|endoftext|>")
    ids = chat_prompt_ids(tokenizer, [{"role": "user", "content": "Is it far?"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nIs it far?<|im_end|>\n<|im_start|>assistant\n"
    (reply,) = generate_replies(model, tokenizer, [ids], max_new_tokens=24)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    expected = plain(model, ids, max_new_tokens=24, stop_ids=stops)
    assert reply == tokenizer.decode([token for token in expected if token not in stops], skip_special_tokens=True)


def test_a_chat_prompt_has_one_bos() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(
        chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    ids = chat_prompt_ids(tokenizer, [{"role": "user", "content": "Hi"}])
    assert ids.count(tokenizer.bos_token_id) == 1


def test_chatting_without_a_template_is_an_error() -> None:
    with pytest.raises(DataError, match="no chat template"):
        chat_prompt_ids(tiny_tokenizer(chat_template=None), [{"role": "user", "content": "Hi"}])


def test_exact_match_ignores_space_around_and_nothing_else() -> None:
    assert exact_match([" 12\n", "12", "1 2", "12."], ["12", "12", "12", "12"]) == 0.5
    assert exact_match(["a"], ["A"]) == 0.0


def test_no_prompts_no_replies(model: Any, tmp_path: Path) -> None:
    assert generate_greedily(model, [], max_new_tokens=4, stop_ids=[2], pad_id=0) == []
