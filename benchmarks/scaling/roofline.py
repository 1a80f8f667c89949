"""Expect a step's time on a GPU from its operations and bytes, by the figures of data sheets.

A kernel takes the longer of its operations over the peak and its bytes over the bandwidth. Matrix products are counted
with their weights, inputs and outputs; everything between them with the bytes that autograd stores and reads again.
Nothing here was measured: a GPU reaches some 70% of its peak in large matrix products (MATMUL_SHARE).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scaling.models import CONFIGS
from benchmarks.scaling.report import table as lines
from trainer.config import TrainerSettings
from trainer.preflight.limits import Limits
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import Work, layer_bytes, needed
from trainer.preflight.work import USABLE, choose, work_of

TOKENS, SEQUENCE = 16_384, 2048
MATMUL_SHARE = 0.7
NODE_GPUS, MOST_NODES = 8, 33


@dataclass(frozen=True)
class Gpu:
    """A card by its data sheet: dense bfloat16 operations a second, bytes a second, bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: int


GPUS = (
    Gpu("H100", 989e12, 3.35e12, 80 * 10**9),
    Gpu("H200", 989e12, 4.8e12, 141 * 10**9),
    Gpu("A100-80GB", 312e12, 2.04e12, 80 * 10**9),
)


def peak(device: str) -> float | None:
    """Return a device's bfloat16 operations a second by its name, as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    return next((gpu.flops for gpu in GPUS if gpu.name.split("-")[0] in device), None)


@dataclass(frozen=True)
class Expected:
    """The expected micro-batch of a model on one rank of a node of NODE_GPUS."""

    work: Work
    useful: float
    """Operations of the forward and backward pass: 6 a parameter and token, and those of attention."""
    computed: float
    """With the logits, and layers if need be, computed again."""
    seconds: float

    def utilisation(self, gpu: Gpu) -> float:
        """Return the model's share of the GPU's operations (MFU)."""
        return self.useful / self.seconds / gpu.flops


def expected(shape: ModelShape, gpu: Gpu) -> Expected:
    """Return the expected time of a micro-batch of TOKENS tokens in sequences of SEQUENCE."""
    settings = TrainerSettings.load(batch_size=128, group_size=16, max_new_tokens=SEQUENCE - 512)
    limits = Limits(device=gpu.memory, host=0, shm=0, volume=0)
    for nodes in range(1, MOST_NODES):
        flat = work_of(settings, shape, memory=gpu.memory, nodes=nodes, ranks_per_node=NODE_GPUS, compute_bytes=2)
        work = choose(settings, shape, flat, limits)
        if needed(shape, work).total("device") <= USABLE * gpu.memory:
            break
    products = 2 * TOKENS * shape.layers * shape.layer_parameters
    # A token sees half of its sequence on average; its scores and its sums are two products.
    attention = 2 * 2 * TOKENS * SEQUENCE / 2 * shape.heads * shape.head_size * shape.layers
    head = 2 * TOKENS * shape.head_parameters
    useful = 3 * (products + attention + head)
    computed = useful + head + (products + attention) * work.has_checkpointing
    passes = 4 if work.has_checkpointing else 3
    stored = TOKENS * shape.layers * layer_bytes(shape, work)
    weights = 2 * shape.layers * shape.layer_parameters * passes
    logits = TOKENS * shape.vocabulary * 4 * 8
    # Stored numbers are written and read in the forward pass, and read and answered by gradients in the backward pass.
    seconds = computed / (gpu.flops * MATMUL_SHARE) + (passes + 1) * stored / gpu.bandwidth
    return Expected(work, useful, computed, seconds + (weights + logits) / gpu.bandwidth)


def table() -> str:
    """Return the expectations for every model and card, on the fewest nodes that hold the model."""
    rows = []
    for label in ("0.5B", "8B", "32B"):
        shape = ModelShape.of(CONFIGS[label][1])
        for gpu in GPUS:
            one = expected(shape, gpu)
            nodes, recomputed = str(one.work.nodes), "yes" if one.work.has_checkpointing else "no"
            numbers = [f"{one.useful / 1e12:.0f}", f"{one.seconds:.2f}", f"{TOKENS / one.seconds:.0f}"]
            rows.append([label, gpu.name, nodes, recomputed, *numbers, f"{one.utilisation(gpu):.0%}"])
    header = ["model", "card", "nodes of 8", "recomputes", "TFLOP", "seconds", "tokens/s a GPU", "MFU"]
    return "\n".join([f"a micro-batch of {TOKENS} tokens in sequences of {SEQUENCE}", "", *lines(header, rows)])
