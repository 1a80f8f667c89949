"""Predict how many nodes a model needs, from a GPU's data sheet and assumed utilisations.

``Assumptions`` holds the values that are assumed and not measured; ``python -m benchmarks.scaling plan`` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks.scaling.models import CONFIGS
from benchmarks.scaling.step import Rates, Seconds
from benchmarks.scaling.step import Work as StepWork
from trainer.config import TrainerSettings
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import USABLE, Limits, Work, choose, needed, work_of

WEIGHT_BYTES = 2
"""Size of a parameter in bfloat16, in an engine and when it is published."""
NODE_GPUS = (1, 2, 4, 8)
MOST_NODES = 32
LEAST_SEQUENCES = 16
"""Completions that an engine must be able to hold at the same time."""
TRAINED_SHARE = 0.7
"""Share of groups with a gradient; the others have no variance."""
REPLAYED_GROUPS = 2
MICRO_BATCH_TOKENS = 16384
DISK_SECONDS = 1.0
"""Publishing through the volume stays if it takes no longer, because a restarted worker needs the volume anyway."""

GPU = "H100"
FLOPS = 989e12
"""Dense bfloat16 operations a second."""
BANDWIDTH = 3.35e12
"""Bytes a second of the GPU's memory."""
MEMORY = 80e9


@dataclass(frozen=True)
class Model:
    """The dimensions of a model that decide over time and memory."""

    label: str
    name: str
    shape: ModelShape

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self.shape.parameters

    @property
    def kv_bytes(self) -> float:
        """Size of the keys and values of a token."""
        return 2 * WEIGHT_BYTES * self.shape.layers * self.shape.kv_heads * self.shape.head_size


MODELS = {label: Model(label, CONFIGS[label][0], ModelShape.of(CONFIGS[label][1])) for label in ("0.5B", "8B", "70B")}


@dataclass(frozen=True)
class Assumptions:
    """Values that depend on a cluster; measured values should replace them."""

    train_utilisation: float = 0.30
    """Share of the FLOP/s that forward and backward passes reach."""
    prefill_utilisation: float = 0.40
    decode_utilisation: float = 0.50
    """Share of the memory's bandwidth that decoding reaches."""
    iteration_overhead: float = 0.004
    """Seconds of a decoding iteration beside reading memory: scheduling, sampling, tensor parallel exchange."""
    node_bandwidth: float = 25e9
    """Bytes a second between nodes: gradients, gathered parameters, broadcast weights."""
    volume_bandwidth: float = 2e9
    """Bytes a second of the shared volume, for all its readers together."""
    cache_share: float = 0.85
    """Share of an engine's memory for weights and caches."""


ASSUMED = Assumptions()


@dataclass(frozen=True)
class Batch:
    """The batch of a step."""

    prompts: int = 128
    group_size: int = 16
    prompt_tokens: int = 150
    completion_tokens: int = 500
    """Mean length of a completion."""
    longest: int = 2048

    @property
    def work(self) -> StepWork:
        """The work of a step."""
        completions = self.prompts * self.group_size
        # The trainer does not read the last token of a completion.
        tokens_of_group = self.prompt_tokens + self.group_size * (self.completion_tokens - 1)
        return StepWork(
            completions=completions,
            tokens=self.prompts * self.prompt_tokens + completions * self.completion_tokens,
            longest=self.longest,
            trained_tokens=(self.prompts * TRAINED_SHARE + REPLAYED_GROUPS) * tokens_of_group,
        )


@dataclass(frozen=True)
class Layout:
    """The numbers of nodes and of GPUs of a node."""

    rollout_nodes: int
    rollout_gpus: int
    """GPUs of a node; one engine spans them all."""
    trainer_nodes: int
    trainer_gpus: int

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.rollout_nodes * self.rollout_gpus + self.trainer_nodes * self.trainer_gpus


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a model on a layout."""

    layout: Layout
    seconds: Seconds
    transport: str
    """PUBLISH_TRANSPORT."""

    @property
    def asynchronous_seconds(self) -> float:
        """The seconds of a step with MODE=async, which makes groups while the trainer trains and publishes."""
        return max(self.seconds.rollouts, self.seconds.learning)


def predict(model: Model, batch: Batch, layout: Layout, measured: Rates) -> Prediction:
    """Predict a step's seconds. Scoring and the rest take the measured time, which does not depend on the model."""
    transport, publish = publishing(model, layout)
    seconds = Seconds(
        generate=generate_seconds(model, batch, layout),
        score=batch.work.completions * measured.score_completion,
        train=train_seconds(model, batch, layout),
        publish=publish,
        rest=measured.rest,
    )
    return Prediction(layout, seconds, transport)


def generate_seconds(model: Model, batch: Batch, layout: Layout) -> float:
    """Predict the seconds of generating. Sequences that an engine's cache cannot hold decode in a further wave."""
    work = batch.work
    bandwidth = layout.rollout_gpus * BANDWIDTH * ASSUMED.decode_utilisation
    token_compute = 2 * model.parameters / (layout.rollout_gpus * FLOPS * ASSUMED.prefill_utilisation)
    token_read = (batch.prompt_tokens + batch.completion_tokens / 2) * model.kv_bytes / bandwidth
    sequences = math.ceil(work.completions / layout.rollout_nodes)
    waves = math.ceil(sequences / cached_sequences(model, batch, layout.rollout_gpus))
    iteration = waves * (model.parameters * WEIGHT_BYTES / bandwidth + ASSUMED.iteration_overhead)
    decoded = work.completions * batch.completion_tokens * token_read + work.tokens * token_compute
    return work.longest * iteration + decoded / layout.rollout_nodes


def cached_sequences(model: Model, batch: Batch, gpus: int, memory: float = MEMORY) -> int:
    """Return how many completions of mean length an engine's cache holds; 0 if the weights leave no room.

    ``memory`` is that of a GPU, in bytes.
    """
    free = gpus * memory * ASSUMED.cache_share - model.parameters * WEIGHT_BYTES
    return max(0, int(free / (model.kv_bytes * (batch.prompt_tokens + batch.completion_tokens))))


def train_seconds(model: Model, batch: Batch, layout: Layout) -> float:
    """Predict the longer of computing and of exchanging parameters and gradients, which FSDP does at the same time."""
    ranks = layout.trainer_nodes * layout.trainer_gpus
    trained = batch.work.trained_tokens
    compute = 6 * model.parameters * trained / (ranks * FLOPS * ASSUMED.train_utilisation)
    if layout.trainer_nodes == 1:
        return compute
    # The update on replayed groups is a micro-batch of its own.
    micro_batches = 1 + math.ceil(trained / ranks / MICRO_BATCH_TOKENS)
    chosen = work(model, batch, layout.trainer_nodes, layout.trainer_gpus)
    if chosen.replicas > 1:
        # Replicas of the shards add up their float32 gradients once a step.
        exchanged = 2 * 4 * model.parameters
    else:
        # Every micro-batch gathers parameters before the forward and the backward pass, and reduces gradients after;
        # without SHARD_PARAMETERS, every step.
        exchanged = (micro_batches if chosen.frees_parameters else 1) * (2 * WEIGHT_BYTES + 4) * model.parameters
    share = (layout.trainer_nodes - 1) / layout.trainer_nodes
    return max(compute, exchanged * share / ASSUMED.node_bandwidth)


def publishing(model: Model, layout: Layout) -> tuple[str, float]:
    """Return PUBLISH_TRANSPORT and its seconds: every node reads the version from the volume, or gets a broadcast."""
    seconds = publish_seconds(model, layout)
    transport = "disk" if seconds["disk"] <= max(DISK_SECONDS, seconds["broadcast"]) else "broadcast"
    return transport, seconds[transport]


def publish_seconds(model: Model, layout: Layout) -> dict[str, float]:
    """Return the seconds of publishing by PUBLISH_TRANSPORT."""
    size = model.parameters * WEIGHT_BYTES
    return {
        "disk": size * (1 + layout.rollout_nodes) / ASSUMED.volume_bandwidth,
        "broadcast": size / ASSUMED.node_bandwidth,
    }


def layouts(model: Model, batch: Batch) -> Iterator[Layout]:
    """Yield every layout with enough memory, on the smallest nodes with enough memory."""
    rollout = next(n for n in NODE_GPUS if cached_sequences(model, batch, n) >= LEAST_SEQUENCES)
    for trainer in NODE_GPUS:
        fewest = next((n for n in range(1, MOST_NODES + 1) if fits(model, batch, n, trainer)), MOST_NODES + 1)
        # A model that needs several GPUs gets large nodes, because links between nodes are slower.
        if fewest > 1 and trainer < NODE_GPUS[-1]:
            continue
        for rollout_nodes in range(1, MOST_NODES + 1):
            for trainer_nodes in range(fewest, MOST_NODES + 1):
                yield Layout(rollout_nodes, rollout, trainer_nodes, trainer)


@cache
def work(model: Model, batch: Batch, nodes: int, gpus: int) -> Work:
    """Return the trainer's work on so many nodes, as the preflight chooses it."""
    settings = TrainerSettings.load(batch_size=batch.prompts, group_size=batch.group_size, max_new_tokens=batch.longest)
    limits = Limits(device=int(MEMORY), host=0, shm=0, volume=0)
    flat = work_of(
        settings, model.shape, memory=int(MEMORY), nodes=nodes, ranks_per_node=gpus, compute_bytes=WEIGHT_BYTES
    )
    return choose(settings, model.shape, flat, limits)


def fits(model: Model, batch: Batch, nodes: int, gpus: int) -> bool:
    """Return whether the trainer's state and its largest micro-batch fit in the memory of so many GPUs."""
    return needed(model.shape, work(model, batch, nodes, gpus)).total("device") <= MEMORY * USABLE


def cheapest(model: Model, batch: Batch, measured: Rates, step_seconds: float) -> Prediction:
    """Return the layout of the fewest GPUs whose step takes at most ``step_seconds``, and the fastest of equal ones.

    Raises:
        ValueError: there is no such layout.
    """
    found = [predict(model, batch, layout, measured) for layout in layouts(model, batch)]
    quick = [one for one in found if one.seconds.total <= step_seconds]
    if not quick:
        best = min(one.seconds.total for one in found)
        raise ValueError(f"{model.label}: the fastest step takes {best:.0f} s; --step-seconds {step_seconds:g} is less")
    return min(quick, key=lambda one: (one.layout.gpus, one.seconds.total))
