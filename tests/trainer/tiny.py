"""Random models of a few thousand parameters, and random groups for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from services.protocol.groups import Group, TokenSequence
from tests.sequences import trained_sequence
from tests.toy_models import noisy_model
from toys.arithmetic import build_tokenizer
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.config.objective import Objective

VOCABULARY = 17
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

_WINDOW: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=False),
    "llama-one-key-head": LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    ),
    "gemma2": Gemma2Config(
        **SHAPE, **_WINDOW, num_key_value_heads=2, head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE, **_WINDOW, num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
}


def has_signal(group: Group, settings: TrainerSettings) -> bool:
    """Return whether a group, as the loss sees it, teaches anything."""
    objective = Objective(settings)
    return objective.has_signal(objective.training_group(group))


def with_heads_of(width: int, family: str) -> PretrainedConfig:
    """Return a family's configuration with heads of a width; kernels of attention on GPUs have at least 16 numbers."""
    config = FAMILIES[family]
    return type(config)(**{**config.to_dict(), "head_dim": width, "hidden_size": width * config.num_attention_heads})


def save_model(directory: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """Write a model with random weights and a tokenizer as a Hugging Face directory."""
    model = noisy_model(config, seed, matrices=0.1, vectors=0.1)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def plain_model(directory: Path) -> PreTrainedModel:
    """Load the model with transformers alone, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", config=AutoConfig.from_pretrained(directory)
    )
    model.eval()
    return model


def plain_logprobs(model: PreTrainedModel, group: TrainingGroup, temperature: float = 1.0) -> list[torch.Tensor]:
    """Run one forward pass a completion; ``result[completion]`` has the log-probability of each of its tokens."""
    return [logprobs for logprobs, _ in plain_forward(model, group, temperature)]


def plain_forward(
    model: PreTrainedModel, group: TrainingGroup, temperature: float = 1.0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run one forward pass a completion; return each token's log-probability and the entropy where it was sampled."""
    result = []
    for sequence in group.sequences:
        ids = torch.tensor([group.prompt_ids + sequence.completion_ids.tolist()])
        logits = model(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1].float() / temperature
        targets = torch.tensor(sequence.completion_ids.tolist(), dtype=torch.int64)
        log_p = logits.log_softmax(-1)
        result.append((log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)))
    return result


def random_groups(
    seed: int, n_groups: int = 5, n_completions: int = 4, longest: int = 9, vocabulary: int = VOCABULARY
) -> list[TrainingGroup]:
    """Return groups with prompts and completions of several lengths; every group has an advantage."""
    draw = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(draw.randint(1, most))]

    groups = []
    for g in range(n_groups):
        sequences = []
        for s in range(n_completions):
            completion = ids(longest)
            logprobs = [draw.uniform(-4, -1) for _ in completion]
            advantage = draw.choice([-1.0, 0.5, 1.0]) if s else 1.5
            sequences.append(trained_sequence(completion, logprobs, [advantage] * len(completion)))
        groups.append(TrainingGroup(ids(8), sequences, f"group-{g}"))
    return groups


def random_trees(
    seed: int, n_groups: int = 3, n_sequences: int = 6, vocabulary: int = VOCABULARY
) -> list[TrainingGroup]:
    """Return groups of sequences that begin like earlier ones of their group: episodes of several turns, with branches.

    Turns and tools' results take turns; a sampled token is trained by the first sequence that has it.
    """
    draw = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(draw.randint(1, most))]

    groups = []
    for g in range(n_groups):
        sequences: list[TokenSequence] = []
        for _ in range(n_sequences):
            earlier = draw.choice([[], *(s.completion_ids.tolist() for s in sequences)])
            tokens = earlier[: draw.randint(0, len(earlier))]
            loss_mask = [False] * len(tokens)
            for turn in range(draw.randint(1, 4)):
                new = ids(7)
                tokens = tokens + new
                loss_mask += [turn % 2 == 0] * len(new)
            logprobs = [draw.uniform(-4, -1) for _ in tokens]
            advantages = [draw.choice([-1.0, 0.5, 1.0])] * len(tokens)
            sequences.append(trained_sequence(tokens, logprobs, advantages, loss_mask))
        groups.append(TrainingGroup(ids(8), sequences, f"tree-{g}"))
    return groups
