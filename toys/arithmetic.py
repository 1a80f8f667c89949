"""A language model of arithmetic that tests can start the whole system with: ``python -m toys.arithmetic DIR``.

A Qwen2 of about 0.4M parameters that reads and writes the 15 characters of ``ALPHABET``, and is warmed up on additions
and subtractions such as ``3+4=`` until it answers a good third of them, so that reinforcement learning has both right
and wrong completions to learn from. The same seed gives the same model.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2Tokenizer

ALPHABET = "0123456789+-*= "
PAD, END = "<pad>", "<end>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + END + "{% endif %}{% endfor %}"
)
"""A user's turn is the question alone; an answer ends with the end token."""
CONTEXT = 256
WARM_ACCURACY = 0.35


@dataclass(frozen=True)
class Question:
    """An arithmetic question and its answer, as text."""

    prompt: str
    answer: str


def questions() -> list[Question]:
    """Return every ``a+b=``, and every ``a-b=`` that is not negative, with operands of one digit."""
    operands = range(10)
    sums = [Question(f"{a}+{b}=", str(a + b)) for a in operands for b in operands]
    return sums + [Question(f"{a}-{b}=", str(a - b)) for a in operands for b in operands if b <= a]


def build_tokenizer(tokens: Sequence[str] = ALPHABET, context: int = CONTEXT) -> Qwen2Tokenizer:
    """Return a tokenizer of PAD, END and ``tokens``, by default one a character; other characters vanish.

    It is byte-level BPE without merges, because transformers loads the tokenizer of any Qwen2 model as
    ``Qwen2Tokenizer``.
    """
    characters = ["\u0120" if token == " " else token for token in tokens]  # byte-level BPE's space
    tokenizer = Qwen2Tokenizer(
        vocab={token: id for id, token in enumerate([PAD, END, *characters])},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        model_max_length=context,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


SIZES: dict[str, Any] = {
    "vocab_size": len(ALPHABET) + 2,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}


def build_model(seed: int = 0, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """Return an untrained model in float32, with random weights from ``seed``; without a configuration, the Qwen2."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config or Qwen2Config(**SIZES))
    return model


def warm_up(model: Any, tokenizer: Qwen2Tokenizer, *, seed: int = 0) -> float:
    """Train ``model`` on answers until its sampled accuracy passes WARM_ACCURACY, and return that accuracy.

    torch computes with one thread from then on: a second one would only wait for the first.

    Raises:
        RuntimeError: 1,000 steps were not enough.
    """
    torch.set_num_threads(1)
    everything, draw = questions(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model.train()
    for step in range(1, 1001):
        ids, labels = _batch(tokenizer, draw.choices(everything, k=64))
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 and (accuracy := sampled_accuracy(model, tokenizer, seed=seed)) > WARM_ACCURACY:
            return accuracy
    raise RuntimeError(f"the arithmetic model did not reach a sampled accuracy of {WARM_ACCURACY} in 1,000 steps")


def _batch(tokenizer: Qwen2Tokenizer, drawn: list[Question]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [questions, longest], padded with 0, and labels: -100 but for the answer and the end token."""
    prompts = [torch.tensor(tokenizer.encode(question.prompt)) for question in drawn]
    answers = [torch.tensor([*tokenizer.encode(question.answer), 1]) for question in drawn]
    ids = [torch.cat(both) for both in zip(prompts, answers, strict=True)]
    labels = [torch.cat([torch.full_like(p, -100), a]) for p, a in zip(prompts, answers, strict=True)]
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)


def sampled_accuracy(model: Any, tokenizer: Qwen2Tokenizer, *, seed: int = 0) -> float:
    """Return the share of one-digit questions answered right by one completion sampled at temperature 1."""
    everything = questions()
    prompts = torch.tensor([tokenizer.encode(question.prompt) for question in everything])
    training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sampled = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=4
        )
    model.train(training)
    completions = tokenizer.batch_decode(sampled[:, prompts.shape[1] :])
    right: int = sum(
        completion.split(PAD)[0] == question.answer + END
        for completion, question in zip(completions, everything, strict=True)
    )
    return right / len(everything)


def make(directory: Path, *, seed: int = 0, config: PretrainedConfig | None = None) -> float:
    """Write the warmed-up model and its tokenizer to ``directory``, and return its sampled accuracy."""
    tokenizer, model = build_tokenizer(), build_model(seed, config)
    accuracy = warm_up(model, tokenizer, seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m toys.arithmetic", description="Write the arithmetic model.")
    parser.add_argument("directory", type=Path, help="where to write it")
    target = parser.parse_args().directory
    print(f"{target}: sampled accuracy {make(target):.2f} on one-digit sums and differences")
