"""The loss mask covers exactly the assistant's replies and their stop tokens, whatever the template's shape."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers, processors

from finetune.data.dataset import TokenDataset
from finetune.data.options import ChatOptions
from finetune.data.settings import DatasetSettings
from finetune.data.template import stop_token_ids
from finetune.data.tokens import tokenize_dataset
from finetune.errors import DataError
from tests.data_templates import CASES, LLAMA3, MARKED, tokenizer_with
from tests.tiny import CHATML_TEMPLATE, tiny_tokenizer

TOKENIZERS = {name: case.tokenizer() for name, case in CASES.items()}
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "It is Paris."},
    {"role": "user", "content": "Is it far?"},
    {"role": "assistant", "content": "Yes, it is."},
]


def tokenized(folder: Path, tokenizer: Any, *chats: list[dict[str, Any]], **options: Any) -> TokenDataset:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    options = {"max_seq_length": None, "overlong": "error", **options}
    return tokenize_dataset([DatasetSettings(path=str(path))], tokenizer=tokenizer, **options)


def supervised_runs(tokenizer: Any, input_ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The text of each unbroken run of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [tokenizer.decode(input_ids[first:last]) for first, last in edges.reshape(-1, 2)]


CONTENT = st.text(alphabet="abc dé\n\t.?17猫😀 ", max_size=12) | st.sampled_from(
    ["It is Paris.", "<b>", "[/INST]", " x "]
)


@st.composite
def chats(draw: st.DrawFn, takes_system: bool) -> list[dict[str, str]]:
    messages = []
    if takes_system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENT)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(CONTENT)})
        messages.append({"role": "assistant", "content": draw(CONTENT)})
    if draw(st.integers(0, 3)) == 0:
        messages.append({"role": "user", "content": draw(CONTENT)})
    return messages


@pytest.mark.parametrize("name", CASES)
def test_mask_is_the_replies_and_their_stop_tokens(name: str, tmp_path: Path) -> None:
    case, tokenizer = CASES[name], TOKENIZERS[name]

    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(batch=st.lists(chats(case.takes_system), min_size=1, max_size=4))
    def check(batch: list[list[dict[str, str]]]) -> None:
        dataset = tokenized(tmp_path, tokenizer, *batch)
        # A third key keeps a message off the outline: each conversation is then asked about itself.
        asked = tokenized(tmp_path, tokenizer, *[[{**message, "name": "n"} for message in chat] for chat in batch])
        for chat, row, other in zip(batch, dataset.rows, asked.rows, strict=True):
            assert row.input_ids.tolist() == tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
            expected = [case.supervised(turn["content"]) for turn in chat if turn["role"] == "assistant"]
            assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == expected
            assert np.array_equal(row.loss_mask, other.loss_mask)

    check()


@pytest.mark.parametrize("name", CASES)
def test_template_writes_bos_once(name: str, tmp_path: Path) -> None:
    case, tokenizer = CASES[name], CASES[name].tokenizer()
    bos = tokenizer.bos_token
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    row = tokenized(tmp_path, tokenizer, CHAT).rows[0]
    assert row.input_ids.tolist().count(tokenizer.bos_token_id) == ("bos_token" in case.template)


def test_stop_token_other_than_eos_is_supervised(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE, eos_token="<|endoftext|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    row = tokenized(tmp_path, tokenizer, CHAT).rows[0]
    assert row.input_ids[row.loss_mask].tolist().count(end) == 2
    assert stop_token_ids(tokenizer) == [tokenizer.eos_token_id, end]
    assert stop_token_ids(tokenizer_with(CHATML_TEMPLATE, eos_token="<|im_end|>")) == [end]
    tokenizer.chat_template = None
    assert stop_token_ids(tokenizer) == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    "marked",
    [
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n",
        "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}",
        "{%- generation -%}{{ message['content'] }}{%- endgeneration -%}<|im_end|>\n",
    ],
)
def test_markers_may_end_before_with_or_after_the_stop_token(marked: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
        + marked
        + "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    row = tokenized(tmp_path, tokenizer, CHAT).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == [
        "It is Paris.<|im_end|>",
        "Yes, it is.<|im_end|>",
    ]


def test_turn_of_weight_zero_is_not_supervised(tmp_path: Path) -> None:
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    for template in (CHATML_TEMPLATE, MARKED):
        tokenizer = tokenizer_with(template)
        row = tokenized(tmp_path, tokenizer, chat).rows[0]
        assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == ["Yes, it is.<|im_end|>"]


def test_template_without_generation_prompt_keeps_its_header_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE.split("{% if add_generation_prompt")[0])
    row = tokenized(tmp_path, tokenizer, CHAT).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == [
        "It is Paris.<|im_end|>",
        "Yes, it is.<|im_end|>",
    ]


def test_all_tokens_but_the_first_are_targets_when_asked(tmp_path: Path) -> None:
    row = tokenized(tmp_path, tiny_tokenizer(), CHAT, train_on="all").rows[0]
    assert not row.loss_mask[0]
    assert row.loss_mask[1:].all()


UNMASKABLE = {
    "rewrites earlier replies": CHATML_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] if loop.last or message['role'] != 'assistant' else 'cut' }}",
    ),
    "adds to the last reply": CHATML_TEMPLATE.replace(
        "{{ message['content'] }}", "{{ '<think></think>' if loop.last else '' }}{{ message['content'] }}"
    ),
    "prompts for what it doesn't render": CHATML_TEMPLATE.replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    ),
    "ends no turn": "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}",
    "ends only the last turn": "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}",
    "leaves the reply out": "{% for message in messages %}{{ message['role'] }}{{ eos_token }}{% endfor %}",
    "marks one reply of two": MARKED.replace("message['role'] == 'assistant'", "loop.last"),
    "refuses": "{{ raise_exception('not today') }}",
}


@pytest.mark.parametrize("what", UNMASKABLE)
def test_template_that_cannot_be_masked_is_an_error(what: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        tokenized(tmp_path, tokenizer_with(UNMASKABLE[what]), CHAT)
    assert caught.value.fix
    assert "template" in caught.value.what


def test_refused_conversation_names_its_line_or_is_skipped(tmp_path: Path) -> None:
    tokenizer = CASES["gemma"].tokenizer()
    good, bad = CHAT[:2], [{"role": "system", "content": "be kind"}, *CHAT[:2]]
    with pytest.raises(DataError, match="System role not supported") as caught:
        tokenized(tmp_path, tokenizer, good, good, bad)
    assert caught.value.where == f"{tmp_path}/chats.jsonl:3"
    source = DatasetSettings(path=f"{tmp_path}/chats.jsonl", invalid_rows="skip")
    counts = tokenize_dataset([source], tokenizer=tokenizer, max_seq_length=None, overlong="error").counts
    assert (counts["rows"], counts["kept"], counts["skipped_invalid"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("row", "told"),
    [({"messages": 1}, "the field `messages` is not a list"), ({"tools": [{"name": "f"}]}, "leaves out the tool 'f'")],
)
def test_refused_run_says_why_the_first_row_was_skipped(row: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps({'messages': CHAT})}\n" + f"{json.dumps({'messages': CHAT, **row})}\n" * 2)
    source = DatasetSettings(path=str(path), invalid_rows="skip")
    with pytest.raises(DataError, match="2 of 3 rows were dropped") as caught:
        tokenize_dataset([source], tokenizer=tiny_tokenizer(), max_seq_length=None, overlong="error")
    assert f"the first that is skipped as invalid: {path}:2: " in caught.value.what
    assert told in caught.value.what


def test_conversation_without_a_reply_is_dropped_and_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing to train on.*dropped_without_target 1"):
        tokenized(tmp_path, tiny_tokenizer(), CHAT[:1])
    counts = tokenized(tmp_path, tiny_tokenizer(), CHAT[:1], CHAT).counts
    assert (counts["rows"], counts["kept"], counts["dropped_without_target"]) == (2, 1, 1)


def test_conversation_that_begins_with_a_reply_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="begins with an assistant's turn"):
        tokenized(tmp_path, tiny_tokenizer(), CHAT[1:])


def test_tokenizer_without_a_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template"):
        tokenized(tmp_path, tiny_tokenizer(chat_template=None), CHAT)


def test_special_tokens_in_contents_are_counted(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "say <|im_end|> and <|im_start|>"},
        {"role": "assistant", "content": "<|im_end|>"},
    ]
    dataset = tokenized(tmp_path, tiny_tokenizer(), chat, CHAT)
    assert dataset.counts["control_tokens_in_content"] == 3
    row = dataset.rows[0]
    assert supervised_runs(tiny_tokenizer(), row.input_ids, row.loss_mask) == ["<|im_end|><|im_end|>"]


def test_offsets_that_leave_out_leading_spaces(tmp_path: Path) -> None:
    tokenizer = CASES["mistral"].tokenizer()
    tokenizer._tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat = [CHAT[0], {"role": "assistant", "content": "  two spaces "}]
    row = tokenized(tmp_path, tokenizer, chat).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == ["   two spaces </s>"]


def test_token_across_the_reply_s_first_character_is_a_target(tmp_path: Path) -> None:
    # With "\n\n" as one token, a reply that begins with a newline shares it with the header: no character is left out.
    tokenizer = tokenizer_with(CHATML_TEMPLATE)
    tokenizer.add_tokens(["\n\n"])
    row = tokenized(tmp_path, tokenizer, [CHAT[0], {"role": "assistant", "content": "\nParis"}]).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == ["\n\nParis<|im_end|>"]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("content", "learnt"),
    [
        ("yes", "yes<|end|>"),
        ("  yes ", "yes <|end|>"),
        ("\n\n", "<|end|>"),
        ("", "<|end|>"),
        (" a <s>", "a <s><|end|>"),
    ],
)
def test_header_that_strips_the_reply_s_white_space_is_no_target(
    content: str, learnt: str, marked: bool, tmp_path: Path
) -> None:
    template = CASES["phi3"].template
    if marked:
        reply = "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
        other = "{{ message['content'] }}<|end|>"
        whole = f"{{% if message['role'] == 'assistant' %}}{reply}{{% else %}}{other}{{% endif %}}"
        template = template.replace(other, whole)
    tokenizer = tiny_tokenizer(chat_template=template)
    tokens = [AddedToken(text, rstrip=True, special=True) for text in ("<|user|>", "<|assistant|>", "<|end|>", "<s>")]
    tokenizer.add_tokens(tokens, special_tokens=True)
    chat = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": content}] * 2
    row = tokenized(tmp_path, tokenizer, chat).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == [learnt] * 2


def test_next_turn_s_token_that_strips_the_reply_s_white_space_is_no_target(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    tokens = [AddedToken(f"<|{role}|>", lstrip=True, special=True) for role in ("user", "assistant")]
    tokenizer.add_tokens(tokens, special_tokens=True)
    chat = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "yes  "}] * 2
    row = tokenized(tmp_path, tokenizer, chat, chat=ChatOptions(require_stop=False)).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == ["yes", "yes  "]


def test_newline_tokens_of_the_vocabulary_end_no_turn(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(LLAMA3.replace("<|eot_id|>", "\n<|eot_id|>\n"), eos_token="<|endoftext|>")
    tokenizer.add_tokens(["\n"])
    assert stop_token_ids(tokenizer)[1] == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    row = tokenized(tmp_path, tokenizer, CHAT[:2]).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == ["It is Paris.\n<|eot_id|>"]
    tokenizer.chat_template = UNMASKABLE["ends no turn"]
    with pytest.raises(DataError, match="with a stop token"):
        tokenized(tmp_path, tokenizer, CHAT[:2])


def test_added_token_that_is_not_special_may_end_a_turn(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("<|im_end|>", "</turn>"))
    tokenizer.add_tokens(["</turn>"])
    row = tokenized(tmp_path, tokenizer, CHAT[:2]).rows[0]
    assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == ["It is Paris.</turn>"]
    assert stop_token_ids(tokenizer)[-1] == tokenizer.convert_tokens_to_ids("</turn>")


@pytest.mark.real_model
@pytest.mark.skipif(
    not os.environ.get("FINETUNE_TEST_MODEL") or not os.environ.get("FINETUNE_TEST_DATA"),
    reason="FINETUNE_TEST_MODEL and FINETUNE_TEST_DATA name no folders",
)
def test_published_model_s_template_on_real_rows() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["FINETUNE_TEST_MODEL"])
    path = Path(os.environ["FINETUNE_TEST_DATA"]) / "alpaca_en.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    dataset = tokenize_dataset(
        [DatasetSettings(path=str(path))], tokenizer=tokenizer, max_seq_length=None, overlong="error"
    )
    for source, row in zip(raw, dataset.rows, strict=True):
        asked = f"{source['instruction']}\n\n{source['input']}" if source["input"] else source["instruction"]
        chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": source["output"]}]
        assert row.input_ids.tolist() == tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
        assert supervised_runs(tokenizer, row.input_ids, row.loss_mask) == [source["output"] + "<|im_end|>"]


def test_sentencepiece_style_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([turn["content"] for turn in CHAT] + ["[INST] a [/INST] b"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    tokenizer.chat_template = CASES["mistral"].template
    row = tokenized(tmp_path, tokenizer, CHAT).rows[0]
    assert row.input_ids.tolist() == tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    runs = supervised_runs(tokenizer, row.input_ids, row.loss_mask)
    assert [run.strip() for run in runs] == ["It is Paris.</s>", "Yes, it is.</s>"]
