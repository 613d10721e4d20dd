"""A whole run on a tiny scale, in the places and under the names of the shipped recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RECIPE = """\
name: llama-sft
seed: 5
model:
  scratch:
    config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}
    tokenizer: {vocab_size: 320}
launch: {num_processes: 2, device: cpu}
zero: {stage: 3, offload: {optimizer: cpu, parameters: cpu}}
stages:
  - pretrain: {data: [{path: data/pretrain.jsonl}], max_seq_length: 64, micro_batch_size: 2, max_steps: 6,
               learning_rate: 1e-3, save_every_steps: 2}
  - sft: {data: [{path: data/train.jsonl}], max_seq_length: 64, micro_batch_size: 2, max_steps: 6, learning_rate: 1e-3,
          save_every_steps: 2}
  - quantize: {name: int8, scheme: w8a8, from: sft,
               calibration: {data: [{path: data/train.jsonl}], num_samples: 4, max_seq_length: 64}}
  - quantize: {name: int4, scheme: w4a16, group_size: 32, from: sft,
               calibration: {data: [{path: data/train.jsonl}], num_samples: 4, max_seq_length: 64}}
  - evaluate: {models: [pretrain, sft, int8, int4], reference: sft, perplexity: data/heldout.txt, window: 64,
               exact_match: {path: data/heldout.jsonl, limit: 4}, max_new_tokens: 4}
  - export: {from: int4}
"""


def write_inputs(folder: Path) -> None:
    """recipes/llama_sft.yaml and data/ below ``folder``, small enough to run in seconds."""
    words = ["red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven"]
    texts = [" ".join(words[(i * k) % 10] for k in range(1, 20)) + "." for i in range(40)]
    chats = [
        {"messages": [{"role": "user", "content": f"say {word} {i}"}, {"role": "assistant", "content": f"{word} {i}"}]}
        for i in range(12)
        for word in words[:4]
    ]
    (folder / "data").mkdir()
    (folder / "recipes").mkdir()
    (folder / "data/pretrain.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "data/heldout.txt").write_text("\n".join(texts[:12]))
    (folder / "data/train.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "data/heldout.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats[::5]))
    (folder / "recipes/llama_sft.yaml").write_text(RECIPE)


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "finetune", *arguments]


def finetune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
