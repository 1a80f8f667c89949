"""Write a model of random weights in the shape of a published one, with a tokenizer: no network is needed.

    python -m benchmarks.random_model 0.5B DIRECTORY

Its tokenizer has a token for each byte and placeholders for the other ids, which an untrained model samples, too. No
completion is right, so REWARD_FN=benchmarks.random_model:noise rewards half of them, from which a run can learn.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Tokenizer, Qwen3Config

from toys.arithmetic import CHAT_TEMPLATE, END, PAD
from trainer.capacity.shape import CONFIGS

SHAPES: dict[str, PretrainedConfig] = {
    "0.5B": CONFIGS["0.5B"][1],
    "1.7B": Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
    "8B": CONFIGS["8B"][1],
}
"""The shapes of Qwen2.5-0.5B, Qwen3-1.7B and Qwen3-8B."""


def write(config: PretrainedConfig, directory: Path, seed: int = 0) -> Path:
    """Write a model of random bfloat16 weights, made on the GPU where there is one, and its tokenizer."""
    torch.manual_seed(seed)
    shape = type(config)(**config.to_dict() | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer(shape.vocab_size).save_pretrained(directory)
    return directory


def tokenizer(vocabulary: int) -> Qwen2Tokenizer:
    """Return a tokenizer of bytes with as many ids as the model has."""
    tokens = [PAD, END, *sorted(ByteLevel.alphabet())]
    tokens += [f"<{number}>" for number in range(len(tokens), vocabulary)]
    made = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def noise(response: str) -> float:
    """Return a reward of 0 or 1 that depends on every character of a completion."""
    return float(zlib.crc32(response.encode()) % 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.random_model", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    print(write(SHAPES[args.shape], args.directory))
