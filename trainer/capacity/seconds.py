"""The seconds in which engines generate a step's completions, and in which the trainer trains and publishes.

``grpo launch`` prints them and chooses the mode by them. They follow from the cards' data sheets and from the constants
below, whose docstrings say what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.engines.sglang_command import MOST_GRAPH_SEQUENCES
from trainer.capacity.need import Work, cached_tokens
from trainer.capacity.shape import Card, ModelShape
from trainer.config import TrainerSettings

WEIGHT_BYTES = 2
"""A parameter in bfloat16, in an engine and when it is published."""
MEAN_PROMPT_TOKENS = 150
TRAINED_SHARE = 0.7
"""Assumed share of groups with a gradient; the others have no variance."""
TRAIN_SHARES = {1e9: 0.25, math.inf: 0.39}
"""Share of a card's operations that training reaches, for models below a number of parameters: measured with 0.5B and
1.7B parameters on an H100 (docs/gpus.md)."""
PREFILL_SHARE, DECODE_SHARE = 0.4, 0.5
"""Assumed shares of a card's operations and of its memory's bandwidth that an engine reaches."""
ITERATION_SECONDS = 0.004
"""Assumed time of a decoding iteration besides reading memory: scheduling, and exchange between GPUs."""
SEQUENCE_SECONDS = 12.5e-6
"""Time of SGLang's scheduler and detokenizer for each sequence of an iteration: Python, 10 to 15 microseconds."""
SAMPLING_BYTES = 48
"""Bytes that sampling moves for each token and entry of the vocabulary: float32 logits, their softmax, logarithm and
draw are read and written twelve times."""
EAGER_LAYER_SECONDS = 4e-4
"""Assumed time in which a processor launches the kernels of a layer that no CUDA graph covers."""
NODE_BANDWIDTH, VOLUME_BANDWIDTH, HOST_BANDWIDTH = 25e9, 2e9, 10e9
"""Assumed bytes a second between nodes, of the shared volume for all its readers, and from GPUs to their host."""
PUBLICATION_SECONDS = 1.0
"""Assumed time of a publication that does not depend on the model: requests in flight end, and engines are asked."""


@dataclass(frozen=True)
class Batch:
    """The batch of a step."""

    prompts: int
    group_size: int
    completion_tokens: float
    """Mean length of a completion."""
    longest: int
    lora_rank: int = 0

    @classmethod
    def of(cls, settings: TrainerSettings) -> Batch:
        """Return the batch of the settings; a completion has half of its most tokens on average."""
        most = settings.longest_answer
        return cls(settings.batch_size, settings.largest_group, most / 2, most, settings.lora_rank)

    @property
    def completions(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group_size


STALE_UPDATES = 1.01
"""Updates that groups of one version ago need in place of one update on fresh groups: docs/results.md, staleness."""


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step's parts."""

    generate: float
    train: float
    publish: float

    @property
    def synchronous(self) -> float:
        """Seconds of a step whose parts follow each other; less, as far as it trains on its first groups meanwhile."""
        return self.generate + self.train + self.publish

    @property
    def asynchronous(self) -> float:
        """Seconds in which asynchronous training with MAX_STALENESS=1 learns as much as in a synchronous step."""
        return STALE_UPDATES * max(self.generate, self.train + self.publish)


def generate_seconds(shape: ModelShape, batch: Batch, card: Card, gpus: int, engines: int) -> float:
    """Return the seconds of generating with ``engines`` engines of ``gpus`` GPUs each.

    A sequence for which the cache has no room starts as soon as another one ends, because SGLang batches continuously.
    """
    mean, sequences = batch.completion_tokens, batch.completions / engines
    bandwidth, flops = gpus * card.bandwidth * DECODE_SHARE, gpus * card.flops * PREFILL_SHARE
    cached = max(1.0, cached_tokens(shape, gpus, card.memory) / (MEAN_PROMPT_TOKENS + mean))
    iteration = shape.parameters * WEIGHT_BYTES / bandwidth + ITERATION_SECONDS
    full = iteration
    if min(sequences, cached) > MOST_GRAPH_SEQUENCES:
        full = max(iteration, shape.layers * EAGER_LAYER_SECONDS)
    queued = mean * max(0.0, sequences / cached - 1)
    keys = 2 * WEIGHT_BYTES * shape.layers * shape.kv_heads * shape.head_size
    token = 2 * shape.parameters / flops + SEQUENCE_SECONDS + SAMPLING_BYTES * shape.vocabulary / card.bandwidth
    token += (MEAN_PROMPT_TOKENS + mean / 2) * keys / bandwidth
    prompts = batch.prompts / engines * MEAN_PROMPT_TOKENS * 2 * shape.parameters / flops
    return (mean + queued) * full + (batch.longest - mean) * iteration + sequences * mean * token + prompts


def train_seconds(shape: ModelShape, batch: Batch, card: Card, work: Work) -> float:
    """Return the longer of computing and of exchanging parameters and gradients, which FSDP does at the same time."""
    ranks = work.nodes * work.ranks_per_node
    # The trainer does not read the last token of a completion.
    tokens = TRAINED_SHARE * batch.prompts * (MEAN_PROMPT_TOKENS + batch.group_size * (batch.completion_tokens - 1))
    share = next(share for parameters, share in TRAIN_SHARES.items() if shape.parameters < parameters)
    # Adapters need no gradients of the model's weights.
    compute = (4 if batch.lora_rank else 6) * shape.parameters * tokens / (ranks * card.flops * share)
    gradients = 0 if batch.lora_rank else 4 * shape.parameters
    exchanged = 2.0 * gradients  # replicas of the shards add up their float32 gradients once a step
    if work.replicas == 1:
        # Every micro-batch, or without SHARD_PARAMETERS every step, gathers parameters twice and reduces gradients.
        times = math.ceil(tokens / ranks / work.micro_batch_tokens) if work.frees_parameters else 1
        exchanged = times * (2 * WEIGHT_BYTES * shape.parameters + gradients)
    return max(compute, exchanged * (work.nodes - 1) / work.nodes / NODE_BANDWIDTH)


def publish_seconds(shape: ModelShape, nodes: int, *, by_volume: bool) -> float:
    """Return the seconds in which ``nodes`` rollout nodes get a version from rank 0, by the volume or by broadcast."""
    size = WEIGHT_BYTES * shape.parameters
    sent = size * (1 + nodes) / VOLUME_BANDWIDTH if by_volume else size / NODE_BANDWIDTH
    return PUBLICATION_SECONDS + size / HOST_BANDWIDTH + sent
