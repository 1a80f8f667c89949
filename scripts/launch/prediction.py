"""The predicted work of a launch's two tiers: the seconds in which engines generate and in which the trainer trains.

They follow from the cards' data sheets and the utilisations of ``ASSUMED``; docs/guides/larger-model.md explains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from scripts.launch.models import CARDS, MEMORY, WEIGHT_BYTES, Model
from scripts.launch.sizes import ASSUMED, GPU, MEAN_PROMPT_TOKENS, Layout, cached_sequences
from trainer.config import TrainerSettings
from trainer.preflight import sizes

TRAINED_SHARE = 0.7
"""Share of groups with a gradient; the others have no variance."""
REPLAYED_GROUPS = 2
LEAST_BUSY = 0.6
"""The work of the less busy tier, as a share of the other's, that a launch aims at."""
MOST_NODES = 32


@dataclass(frozen=True)
class Work:
    """The work of a step."""

    completions: float
    tokens: float
    """Tokens of prompts and completions that the engines compute; a group's prompt counts once."""
    longest: float
    """Tokens of the longest completion."""
    trained_tokens: float
    """Prompts and completions of the groups with a gradient, replayed ones included."""


@dataclass(frozen=True)
class Batch:
    """The batch of a step."""

    prompts: int = 128
    group_size: int = 16
    prompt_tokens: int = MEAN_PROMPT_TOKENS
    completion_tokens: int = 500
    """Mean length of a completion."""
    longest: int = 2048
    lora_rank: int = 0

    @classmethod
    def of(cls, settings: TrainerSettings) -> Batch:
        """Return the batch of the settings; a completion has half of its most tokens on average."""
        most = settings.longest_answer
        return cls(settings.batch_size, settings.largest_group, MEAN_PROMPT_TOKENS, most // 2, most, settings.lora_rank)

    @property
    def cached_tokens(self) -> int:
        """The tokens of a completion of mean length and its prompt."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def work(self) -> Work:
        """The work of a step."""
        completions = self.prompts * self.group_size
        # The trainer does not read the last token of a completion.
        tokens_of_group = self.prompt_tokens + self.group_size * (self.completion_tokens - 1)
        return Work(
            completions=completions,
            tokens=self.prompts * self.prompt_tokens + completions * self.completion_tokens,
            longest=self.longest,
            trained_tokens=(self.prompts * TRAINED_SHARE + REPLAYED_GROUPS) * tokens_of_group,
        )


def generate_seconds(model: Model, batch: Batch, layout: Layout) -> float:
    """Predict the seconds of generating. Sequences that an engine's cache cannot hold decode in a further wave."""
    work, card = batch.work, CARDS[layout.rollout_card]
    bandwidth = layout.rollout_gpus * card.bandwidth * ASSUMED.decode_utilisation
    token_compute = 2 * model.parameters / (layout.rollout_gpus * card.flops * ASSUMED.prefill_utilisation)
    token_read = (batch.prompt_tokens + batch.completion_tokens / 2) * model.kv_bytes / bandwidth
    sequences = math.ceil(work.completions / layout.rollout_nodes)
    waves = math.ceil(sequences / cached_sequences(model, batch.cached_tokens, layout.rollout_gpus, card.memory))
    iteration = waves * (model.parameters * WEIGHT_BYTES / bandwidth + ASSUMED.iteration_overhead)
    decoded = work.completions * batch.completion_tokens * token_read + work.tokens * token_compute
    return work.longest * iteration + decoded / layout.rollout_nodes


def train_seconds(model: Model, batch: Batch, layout: Layout) -> float:
    """Predict the longer of computing and of exchanging parameters and gradients, which FSDP does at the same time."""
    ranks = layout.trainer_nodes * layout.trainer_gpus
    trained = batch.work.trained_tokens
    # Adapters need no gradients of the model's weights.
    operations = (4 if batch.lora_rank else 6) * model.parameters * trained
    compute = operations / (ranks * CARDS[layout.trainer_card].flops * ASSUMED.train_utilisation)
    if layout.trainer_nodes == 1:
        return compute
    # The update on replayed groups is a micro-batch of its own.
    chosen = trainer_work(model, batch, layout.trainer_nodes, layout.trainer_gpus, layout.trainer_card)
    micro_batches = 1 + math.ceil(trained / ranks / chosen.micro_batch_tokens)
    gradients = 0 if batch.lora_rank else 4 * model.parameters
    if chosen.replicas > 1:
        # Replicas of the shards add up their float32 gradients once a step.
        exchanged = 2 * gradients
    else:
        # Every micro-batch gathers parameters before the forward and the backward pass, and reduces gradients after;
        # without SHARD_PARAMETERS, every step.
        once = 2 * WEIGHT_BYTES * model.parameters + gradients
        exchanged = (micro_batches if chosen.frees_parameters else 1) * once
    share = (layout.trainer_nodes - 1) / layout.trainer_nodes
    return max(compute, exchanged * share / ASSUMED.node_bandwidth)


@cache
def trainer_work(model: Model, batch: Batch, nodes: int, gpus: int, card: str = GPU) -> sizes.Work:
    """Return the trainer's work on a number of nodes, as the preflight chooses it."""
    settings = TrainerSettings.load(
        batch_size=batch.prompts, group_size=batch.group_size, max_new_tokens=batch.longest, lora_rank=batch.lora_rank
    )
    memory = MEMORY[card]
    flat = sizes.work_of(
        settings, model.shape, memory=memory, nodes=nodes, ranks_per_node=gpus, compute_bytes=WEIGHT_BYTES
    )
    return sizes.choose(settings, model.shape, flat, sizes.Limits(device=memory, host=0, shm=0, volume=0))


def busy(share: float) -> float:
    """Return the work of the less busy tier as a share of the other's, from an element of ``trainer_shares``."""
    return min(share, 1 / share)


def trainer_shares(model: Model, batch: Batch, layout: Layout, engines: int) -> dict[int, float]:
    """Return the trainer's seconds as a share of the engines', by the number of rollout nodes.

    Args:
        model: the model.
        batch: the batch of a step.
        layout: the nodes; the number of rollout nodes is left open.
        engines: engines of a rollout node, which share its GPUs.
    """
    alone = replace(layout, rollout_gpus=layout.rollout_gpus // engines)
    train = train_seconds(model, batch, layout)
    return {
        nodes: train / generate_seconds(model, batch, replace(alone, rollout_nodes=nodes * engines))
        for nodes in range(1, MOST_NODES + 1)
    }


def choose_rollout_nodes(shares: Mapping[int, float], present: int) -> tuple[int, str]:
    """Return a number of rollout nodes with the reason to print, which is empty if the present number is good.

    It is the one nearest to the present number that gives each tier LEAST_BUSY of the other's work. If none does, it is
    the present number. ``shares`` is the result of ``trainer_shares``.
    """
    enough = [nodes for nodes, share in shares.items() if busy(share) >= LEAST_BUSY]
    chosen = min(enough, key=lambda nodes: abs(nodes - present), default=present)
    text = f"{chosen} instead of {present}: {_compared(shares[chosen])}"
    if not enough:
        best = max(shares, key=lambda nodes: (round(busy(shares[nodes]), 2), -nodes))
        text = f"{LEAST_BUSY:.0%} cannot be reached, at best {busy(shares[best]):.0%} with {best}"
    elif chosen == present:
        return present, ""
    return chosen, f"rollout nodes: {text}; with {present}, {_compared(shares[present])} (docs/guides/larger-model.md)"


def _compared(share: float) -> str:
    if share <= 1:
        return f"the trainer has {share:.0%} of the engines' work"
    return f"the engines have {1 / share:.0%} of the trainer's work"
