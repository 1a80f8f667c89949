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
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from toys.arithmetic import build_tokenizer
from trainer.capacity.shape import CONFIGS

SHAPES = ("0.5B", "1.7B", "8B")
"""The labels of Qwen2.5-0.5B, Qwen3-1.7B and Qwen3-8B."""


def write(config: PretrainedConfig, directory: Path, seed: int = 0) -> Path:
    """Write a model of random bfloat16 weights, made on the GPU where there is one, and its tokenizer."""
    torch.manual_seed(seed)
    shape = type(config)(**config.to_dict() | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer(shape.vocab_size, shape.max_position_embeddings).save_pretrained(directory)
    return directory


def tokenizer(vocabulary: int, context: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer of bytes with as many ids as the model has."""
    alphabet = sorted(ByteLevel.alphabet())
    placeholders = [f"<{number}>" for number in range(2 + len(alphabet), vocabulary)]
    return build_tokenizer([*alphabet, *placeholders], context)


def noise(response: str) -> float:
    """Return a reward of 0 or 1 that depends on every character of a completion."""
    return float(zlib.crc32(response.encode()) % 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.random_model", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    print(write(CONFIGS[args.shape][1], args.directory))
