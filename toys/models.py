"""Random models and their training on examples: the parts that all toy language models are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config

Example = tuple[list[int], list[int]]
"""Token ids, and the label of each: its id where the model learns to say it, -100 elsewhere."""


def qwen2(**sizes: int) -> Qwen2Config:
    """Return the configuration of a Qwen2 of some sizes whose padding is token 0 and whose end is token 1."""
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen2Config(**({"max_position_embeddings": 256} | sizes), **special, tie_word_embeddings=True)


def random_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """Return a causal language model in float32 with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def train(
    model: PreTrainedModel, draw: Callable[[], Sequence[Example]], *, learning_rate: float, steps: int
) -> Iterator[float]:
    """Train a model, each step on the examples that ``draw`` returns, and yield the loss of each step.

    torch computes with one thread from then on: a second one would only wait for the first.
    """
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    model.train()
    for _ in range(steps):
        ids, labels = batch(draw())
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def batch(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels [batch, width], padded on the right with 0 and -100."""
    width = max(len(ids) for ids, _ in examples)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in examples])
    return ids, torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in examples])
