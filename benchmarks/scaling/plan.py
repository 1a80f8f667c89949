"""Predict how many nodes a model needs, from a GPU's data sheet and assumed utilisations.

``Assumptions`` holds the values that are assumed and not measured; ``python -m benchmarks.scaling plan`` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.scaling.step import Rates, Seconds, Work

WEIGHT_BYTES = 2
"""Size of a parameter in bfloat16, in an engine and when it is published."""
STATE_BYTES = 16
"""Size of a parameter's state in the trainer, over all GPUs: float32 weights, gradients and AdamW's two moments."""
NODE_GPUS = (1, 2, 4, 8)
MOST_NODES = 32
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
    parameters: float
    layers: int
    kv_heads: int
    head_size: int

    @property
    def kv_bytes(self) -> float:
        """Size of the keys and values of a token."""
        return 2 * WEIGHT_BYTES * self.layers * self.kv_heads * self.head_size


MODELS = {
    model.label: model
    for model in (
        Model("0.5B", "Qwen/Qwen2.5-0.5B-Instruct", 0.494e9, 24, 2, 64),
        Model("7B", "Qwen/Qwen2.5-7B-Instruct", 7.62e9, 28, 4, 128),
        Model("70B", "meta-llama/Llama-3.1-70B-Instruct", 70.6e9, 80, 8, 128),
    )
}


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
    activation_bytes: float = 20e9
    """Of a trainer's GPU: activations, logits, gathered layers."""


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


def cached_sequences(model: Model, batch: Batch, gpus: int) -> int:
    """Return how many completions of mean length an engine's cache holds; 0 if the weights leave no room."""
    free = gpus * MEMORY * ASSUMED.cache_share - model.parameters * WEIGHT_BYTES
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
    # Every micro-batch gathers parameters before the forward and the backward pass, and reduces gradients after.
    exchanged = micro_batches * (2 * WEIGHT_BYTES + 4) * model.parameters
    share = (layout.trainer_nodes - 1) / layout.trainer_nodes
    return max(compute, exchanged * share / ASSUMED.node_bandwidth)


def publishing(model: Model, layout: Layout) -> tuple[str, float]:
    """Return PUBLISH_TRANSPORT and its seconds: every node reads the version from the volume, or gets a broadcast."""
    size = model.parameters * WEIGHT_BYTES
    disk = size * (1 + layout.rollout_nodes) / ASSUMED.volume_bandwidth
    broadcast = size / ASSUMED.node_bandwidth
    return ("disk", disk) if disk <= max(DISK_SECONDS, broadcast) else ("broadcast", broadcast)


def layouts(model: Model, batch: Batch) -> Iterator[Layout]:
    """Yield every layout with enough memory, on the smallest nodes with enough memory."""
    rollout = next(n for n in NODE_GPUS if cached_sequences(model, batch, n) >= 16)
    state = model.parameters * STATE_BYTES
    room = MEMORY * 0.9 - ASSUMED.activation_bytes
    for trainer in NODE_GPUS:
        fewest = math.ceil(state / (room * trainer))
        # A model that needs several GPUs gets large nodes, because links between nodes are slower.
        if fewest > 1 and trainer < NODE_GPUS[-1]:
            continue
        for rollout_nodes in range(1, MOST_NODES + 1):
            for trainer_nodes in range(fewest, MOST_NODES + 1):
                yield Layout(rollout_nodes, rollout, trainer_nodes, trainer)


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
