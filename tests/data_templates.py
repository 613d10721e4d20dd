"""Chat templates of the shapes that published models use, with what each is expected to supervise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.tiny import CHATML_TEMPLATE, tiny_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for message in rest %}{% if message['role'] == 'user' %}"
    "[INST] {{ system if loop.first else '' }}{{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The markers leave out the end of turn, as many do.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tokenizer's eos ends the conversation, not the turn.
PHI3 = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# Reasoning stands before the reply of a turn after the last user's message, and is left out of all earlier ones.
QWEN3 = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}"
    "{{ '# Tools\n<tools>' }}{%- for tool in tools %}{{ '\n' + tool | tojson }}{%- endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- set ns = namespace(asked=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{ content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)


@dataclass(frozen=True)
class TemplateCase:
    template: str
    special: dict[str, str]
    """The tokenizer's bos and eos."""
    stop: str
    before: str = ""
    """What the model writes before the content: a space."""
    trims: bool = False
    takes_system: bool = True

    def supervised(self, content: str) -> str:
        return self.before + (content.strip() if self.trims else content) + self.stop

    def tokenizer(self) -> Any:
        return tokenizer_with(self.template, **self.special)


def tokenizer_with(template: str, **special: str) -> Any:
    """The tiny tokenizer with every special token that the templates here write."""
    tokenizer = tiny_tokenizer(chat_template=template)
    tokens = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokens += ["<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    tokens += ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_tokens(tokens, special_tokens=True)
    for name, token in special.items():
        setattr(tokenizer, name, token)
    return tokenizer


CASES = {
    "chatml": TemplateCase(CHATML_TEMPLATE, {"eos_token": "<|im_end|>"}, "<|im_end|>"),
    "llama3": TemplateCase(
        LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}, "<|eot_id|>", trims=True
    ),
    "mistral": TemplateCase(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}, "</s>", before=" "),
    "gemma": TemplateCase(
        GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>"}, "<end_of_turn>", trims=True, takes_system=False
    ),
    "phi3": TemplateCase(PHI3, {"bos_token": "<s>", "eos_token": "<|endoftext|>"}, "<|end|>"),
    "marked": TemplateCase(
        MARKED,
        {"eos_token": "<|endoftext|>"},
        "<|im_end|>",
    ),
}


def qwen3_tokenizer() -> Any:
    """Of Qwen3's shape: marks of thought and of tool calls are tokens, but not special ones."""
    tokenizer = tokenizer_with(QWEN3, eos_token="<|im_end|>")
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    return tokenizer
