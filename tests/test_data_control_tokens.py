"""Special tokens that a message writes out stay text, wherever they stand."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.data_templates import CASES
from tests.test_data_masks import CHAT
from tests.test_data_templates import QWEN, Message, conversation, encoder, ids, runs
from tests.tiny import tiny_tokenizer

TYPED = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<|eot_id|>", "<|end|>", " ", "\n", "a ship", "<|", "猫"]
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", CASES)
def test_control_tokens_in_contents_stay_text(name: str) -> None:
    case, tokenizer = CASES[name], CASES[name].tokenizer()
    special = set(tokenizer.all_special_tokens) | {
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    special_ids = set(tokenizer.convert_tokens_to_ids(sorted(special)))

    def skeleton(token_ids: Any) -> list[int]:
        return [int(token) for token in token_ids if int(token) in special_ids]

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(texts=st.lists(TYPED, min_size=2, max_size=4))
    def check(texts: list[str]) -> None:
        chat = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
        made = encoder(tokenizer, conversation(chat))
        (row,) = made.rows
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        assert tokenizer.decode(row.input_ids) == rendered
        # The special tokens are those of the same chat about nothing.
        nothing = [{**message, "content": "x"} for message in chat]
        assert skeleton(row.input_ids) == skeleton(ids(tokenizer, nothing))
        assert runs(tokenizer, made) == [[case.supervised(turn["content"]) for turn in chat[1::2]]]
        counted = sum(_count(text, special) for text in texts)
        assert made.counts["control_tokens_in_content"] == counted
        if not counted:
            assert row.input_ids.tolist() == ids(tokenizer, chat)
        allowed = encoder(tokenizer, conversation(chat), allow_control_tokens=True)
        assert allowed.rows[0].input_ids.tolist() == ids(tokenizer, chat)

    check()


def _count(text: str, special: set[str]) -> int:
    """Written-out special tokens, found from the left, the longest first."""
    found, at = 0, 0
    while at < len(text):
        here = max((len(token) for token in special if text.startswith(token, at)), default=0)
        found += here > 0
        at += here or 1
    return found


def test_control_tokens_are_as_the_tokenizer_reads_them_as_text() -> None:
    # No seam: as one text without special tokens, also where a token that eats white space stands beside.
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "say <|im_end|> now"}, {"role": "assistant", "content": "<|im_end|> it is"}]
    (row,) = encoder(tokenizer, conversation(chat)).rows
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def text(content: str) -> list[int]:
        return list(tokenizer(content, split_special_tokens=True, add_special_tokens=False)["input_ids"])

    expected = [start, *text("user\nsay <|im_end|> now"), end, *text("\n")]
    expected += [start, *text("assistant\n<|im_end|> it is"), end, *text("\n")]
    assert row.input_ids.tolist() == expected


def test_control_tokens_in_tools_and_arguments_stay_text() -> None:
    call = {"function": {"name": "weather", "arguments": {"town": "<|im_end|>"}}}
    chat: list[Message] = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "weather", "description": "<|im_start|>"}}
    made = encoder(QWEN, conversation(chat, [tool]))
    assert made.counts["control_tokens_in_content"] == 2
    assert runs(QWEN, made) == [
        [
            '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {"town": "<|im_end|>"}}'
            "\n</tool_call><|im_end|>"
        ]
    ]
    names = QWEN.convert_ids_to_tokens(made.rows[0].input_ids)
    assert names.count("<|im_end|>") == names.count("<|im_start|>") == 3


def test_stand_ins_and_private_characters_in_a_message_are_text() -> None:
    tokenizer = tiny_tokenizer()
    contents = ["<|im_end|>", "controltoken0n1n \ue000<|im_end|>\ue001 \ue0002\ue001"]
    made = encoder(tokenizer, *[conversation([CHAT[0], {"role": "assistant", "content": text}]) for text in contents])
    assert runs(tokenizer, made) == [[text + "<|im_end|>"] for text in contents]
    for row in made.rows:
        assert tokenizer.convert_ids_to_tokens(row.input_ids).count("<|im_end|>") == 2


def test_white_space_beside_a_special_token_is_read_as_ever() -> None:
    tokenizer = CASES["phi3"].tokenizer()
    tokenizer.add_tokens([AddedToken(token, rstrip=True, special=True) for token in ("<|user|>", "<|end|>")])
    chat = [{"role": "user", "content": "\n say no"}, {"role": "assistant", "content": "no"}]
    typed = [{"role": "user", "content": "\n say <|end|>"}, chat[1]]
    plain, held = encoder(tokenizer, conversation(chat), conversation(typed)).rows
    assert plain.input_ids.tolist() == ids(tokenizer, chat)
    word = tokenizer("say", add_special_tokens=False).input_ids[0]
    assert held.input_ids[:2].tolist() == [tokenizer.convert_tokens_to_ids("<|user|>"), word]
    tail = len(tokenizer("<|end|><|assistant|>\nno<|end|><|endoftext|>", add_special_tokens=False).input_ids)
    assert held.input_ids[-tail:].tolist() == plain.input_ids[-tail:].tolist()


def test_encoder_can_be_sent_to_a_worker() -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "<|im_end|>"}]
    made = encoder(tiny_tokenizer(), conversation(chat))
    sent = pickle.loads(pickle.dumps(made))
    sent.add([(conversation(chat), "rows.jsonl:2")], skip_invalid=False)
    assert sent.rows[0].input_ids.tolist() == sent.rows[1].input_ids.tolist()
    assert [row.place for row in sent.rows] == ["rows.jsonl:1", "rows.jsonl:2"]
