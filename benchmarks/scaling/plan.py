"""How many nodes a model wants: rates from a GPU's data sheet and assumed utilisations, and a search over node counts.

``Gpu`` and ``Assumptions`` hold what is assumed and not measured; ``python -m benchmarks.scaling plan`` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.scaling.simulate import Flow, Pipeline, flow
from benchmarks.scaling.step import Rates, Seconds, Work

WEIGHT_BYTES = 2
"""Of a parameter in bfloat16, in an engine and when it is published."""
STATE_BYTES = 16
"""Of a parameter in the trainer: float32 weights, gradients and AdamW's two moments, sharded over all GPUs."""
NODE_GPUS = (1, 2, 4, 8)
MOST_NODES = 32
MAX_STALENESS = 4
"""The setting's default."""
GROUP_SPREAD = 0.2
"""How much the seconds of groups differ, assumed: a standard deviation, as a share of their mean."""


@dataclass(frozen=True)
class Model:
    """What of a model costs time and memory."""

    label: str
    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_size: int

    @property
    def kv_bytes(self) -> float:
        """Of the keys and values of a token."""
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
class Gpu:
    """A data sheet."""

    name: str
    flops: float
    """Of dense bfloat16 a second."""
    bandwidth: float
    """Of its memory, bytes a second."""
    memory: float


H100 = Gpu("H100", 989e12, 3.35e12, 80e9)


@dataclass(frozen=True)
class Assumptions:
    """What depends on a cluster and is to be replaced by what is measured there."""

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

    @property
    def halved(self) -> Assumptions:
        """A cluster on which everything moves and computes half as fast."""
        return replace(
            self,
            train_utilisation=self.train_utilisation / 2,
            prefill_utilisation=self.prefill_utilisation / 2,
            decode_utilisation=self.decode_utilisation / 2,
            iteration_overhead=self.iteration_overhead * 2,
            node_bandwidth=self.node_bandwidth / 2,
            volume_bandwidth=self.volume_bandwidth / 2,
        )


@dataclass(frozen=True)
class Batch:
    """A step's batch."""

    prompts: int = 128
    group_size: int = 16
    prompt_tokens: int = 150
    completion_tokens: int = 500
    """Of a completion, on average."""
    longest: int = 2048
    trained_share: float = 0.7
    """Of the groups: the others have no variance."""
    replayed_groups: int = 2
    micro_batch_tokens: int = 16384

    @property
    def work(self) -> Work:
        """The work of a step."""
        completions = self.prompts * self.group_size
        # The trainer does not read the last token of a completion.
        tokens_of_group = self.prompt_tokens + self.group_size * (self.completion_tokens - 1)
        return Work(
            groups=self.prompts,
            completions=completions,
            prompt_tokens=self.prompts * self.prompt_tokens,
            completion_tokens=completions * self.completion_tokens,
            longest=self.longest,
            trained_tokens=(self.prompts * self.trained_share + self.replayed_groups) * tokens_of_group,
            updates=2.0 if self.replayed_groups else 1.0,
        )


@dataclass(frozen=True)
class Layout:
    """Nodes and their GPUs."""

    rollout_nodes: int
    rollout_gpus: int
    """Of a node, whose engine spans them all."""
    trainer_nodes: int
    trainer_gpus: int

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.rollout_nodes * self.rollout_gpus + self.trainer_nodes * self.trainer_gpus


@dataclass(frozen=True)
class Prediction:
    """A step of a model on a layout."""

    layout: Layout
    seconds: Seconds
    transport: str
    """The faster PUBLISH_TRANSPORT."""

    batch: Batch

    @property
    def asynchronous(self) -> Flow:
        """What MODE=async makes of it, by simulation."""
        seconds = self.seconds
        pipeline = Pipeline(
            batch=self.batch.prompts,
            concurrency=self.batch.prompts,
            max_staleness=MAX_STALENESS,
            group_seconds=seconds.generate + seconds.score,
            spread=GROUP_SPREAD,
            step_seconds=seconds.train + seconds.publish + seconds.rest,
        )
        return flow(pipeline)


def predict(
    model: Model, batch: Batch, layout: Layout, measured: Rates, gpu: Gpu = H100, assumed: Assumptions | None = None
) -> Prediction:
    """A step's seconds. Scoring and what is left over take what was measured, for they do not depend on the model."""
    assumed = assumed or Assumptions()
    work = batch.work
    publishes = publish_seconds(model, layout, assumed)
    transport = min(publishes, key=publishes.__getitem__)
    rates = Rates(
        **decode_rates(model, batch, layout, gpu, assumed),
        score_completion=measured.score_completion,
        update=0.0,
        trained_token=0.0,
        publish=publishes[transport],
        rest=measured.rest,
    )
    base = rates.seconds(work, layout.rollout_nodes)
    train = train_seconds(model, batch, layout, gpu, assumed)
    seconds = Seconds(base.generate, base.score, train, base.publish, base.rest)
    return Prediction(layout, seconds, transport, batch)


def decode_rates(model: Model, batch: Batch, layout: Layout, gpu: Gpu, assumed: Assumptions) -> dict[str, float]:
    """Rates of one engine. Sequences beyond what its cache holds decode in a further wave."""
    bandwidth = layout.rollout_gpus * gpu.bandwidth * assumed.decode_utilisation
    flops = layout.rollout_gpus * gpu.flops * assumed.prefill_utilisation
    sequences = math.ceil(batch.prompts * batch.group_size / layout.rollout_nodes)
    context = batch.prompt_tokens + batch.completion_tokens / 2
    waves = math.ceil(sequences / cached_sequences(model, batch, layout.rollout_gpus, gpu, assumed))
    compute = 2 * model.parameters / flops
    return {
        "decode_iteration": waves * (model.parameters * WEIGHT_BYTES / bandwidth + assumed.iteration_overhead),
        "decode_token": context * model.kv_bytes / bandwidth + compute,
        "prompt_token": compute,
    }


def cached_sequences(model: Model, batch: Batch, gpus: int, gpu: Gpu, assumed: Assumptions) -> int:
    """How many completions of average length an engine's cache holds; 0 where the weights leave no room."""
    free = gpus * gpu.memory * assumed.cache_share - model.parameters * WEIGHT_BYTES
    return max(0, int(free / (model.kv_bytes * (batch.prompt_tokens + batch.completion_tokens))))


def train_seconds(model: Model, batch: Batch, layout: Layout, gpu: Gpu, assumed: Assumptions) -> float:
    """The longer of computing and of exchanging parameters and gradients, which FSDP does at the same time."""
    ranks = layout.trainer_nodes * layout.trainer_gpus
    work = batch.work
    compute = 6 * model.parameters * work.trained_tokens / (ranks * gpu.flops * assumed.train_utilisation)
    if layout.trainer_nodes == 1:
        return compute
    micro_batches = work.updates - 1 + math.ceil(work.trained_tokens / ranks / batch.micro_batch_tokens)
    # What crosses a node's link: gathered before the forward and the backward pass and reduced after, each micro-batch.
    exchanged = micro_batches * (2 * WEIGHT_BYTES + 4) * model.parameters
    share = (layout.trainer_nodes - 1) / layout.trainer_nodes
    return max(compute, exchanged * share / assumed.node_bandwidth)


def publish_seconds(model: Model, layout: Layout, assumed: Assumptions) -> dict[str, float]:
    """By PUBLISH_TRANSPORT: written once and read by every node from the volume, or broadcast to them."""
    size = model.parameters * WEIGHT_BYTES
    return {
        "disk": size * (1 + layout.rollout_nodes) / assumed.volume_bandwidth,
        "broadcast": size / assumed.node_bandwidth,
    }


def layouts(model: Model, batch: Batch, gpu: Gpu = H100, assumed: Assumptions | None = None) -> Iterator[Layout]:
    """Every layout whose memory suffices, on the smallest nodes on which it does."""
    assumed = assumed or Assumptions()
    rollout = next(n for n in NODE_GPUS if cached_sequences(model, batch, n, gpu, assumed) >= 16)
    state = model.parameters * STATE_BYTES
    room = gpu.memory * 0.9 - assumed.activation_bytes
    for trainer in NODE_GPUS:
        fewest = math.ceil(state / (room * trainer))
        # A model that needs several GPUs gets them on one node as far as there are any: links between nodes are slower.
        if fewest > 1 and trainer < NODE_GPUS[-1]:
            continue
        for rollout_nodes in range(1, MOST_NODES + 1):
            for trainer_nodes in range(fewest, MOST_NODES + 1):
                yield Layout(rollout_nodes, rollout, trainer_nodes, trainer)


def cheapest(model: Model, batch: Batch, measured: Rates, step_seconds: float) -> Prediction:
    """The fewest GPUs with which a step takes at most ``step_seconds``, and of those the fastest.

    Raises:
        ValueError: there is no such layout.
    """
    found = [predict(model, batch, layout, measured) for layout in layouts(model, batch)]
    quick = [one for one in found if one.seconds.total <= step_seconds]
    if not quick:
        best = min(one.seconds.total for one in found)
        raise ValueError(f"{model.label}: the fastest step takes {best:.0f} s; --step-seconds {step_seconds:g} is less")
    return min(quick, key=lambda one: (one.layout.gpus, one.seconds.total))
