"""Expect a step's time on a GPU from counted operations and bytes, by the figures of data sheets.

The kernels of a step are counted on the pretended device (tests/pretend_cuda/count.py) and kept in counted.json: layers
as torch's compiler makes kernels of them, everything else as operations that run one by one. A kernel takes the longer
of its operations over its share of the peak and its bytes over the memory's bandwidth. Transfers between GPUs count as
hidden behind the computation, and the host's work (hooks of FSDP, launches) behind the kernels before. Nothing here was
measured; the shares of the peak follow from what others have published:

- FlexAttention's Triton kernels have on H100 85% of FlashAttention-3's speed forward and 76% backward, on A100 90% and
  85% of FlashAttention-2's (D. Guessous, "FlexAttention", Nvidia GTC 2025).
- FlashAttention-3 reaches 521 TFLOP/s forward (causal, heads of 128) and 422 backward (heads of 64, without a mask) on
  H100 at 2048 tokens (arXiv 2407.08608, figures 5 and 6): 45% and 32% of the peak for FlexAttention. FlashAttention-2
  reaches 50 to 73% of an A100's peak (arXiv 2307.08691); the lower end gives 45% and 42%.
- Products: whole trainers with FSDP. On H100, Llama 7B reached 46% (fms-fsdp, its issue 89) and Llama 8B 39% at 500 W
  (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md); on A100, Llama 8B reached 58% (torchtitan,
  docs/performance.md of 2024). HOPPER and AMPERE have the shares with which Qwen3-8B reaches 46% and 58% without
  recomputation, so they include everything that is not modelled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.launch.models import CARDS, CONFIGS
from scripts.launch.tables import table as lines
from trainer.config import TrainerSettings
from trainer.config.sections import Checkpointing
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import USABLE, Limits, Work, choose, needed, work_of

TOKENS, SEQUENCE, MICRO_BATCHES = 16_384, 2048, 4
NODE_GPUS, MOST_NODES = 8, 33
LABELS = ("0.5B", "8B", "32B")
RECOMPUTES: dict[Checkpointing, str] = {False: "no", "selective": "a part", True: "yes"}
"""ACTIVATION_CHECKPOINTING as the tables show it."""
COUNTED = Path(__file__).with_name("counted.json")


@dataclass(frozen=True)
class Shares:
    """The shares of a card's peak that kinds of kernels reach."""

    product: float
    attention_forward: float
    attention_backward: float


HOPPER = Shares(0.55, 0.45, 0.32)
AMPERE = Shares(0.67, 0.45, 0.42)
BOUND = Shares(1.0, 1.0, 1.0)
"""No kernel is faster."""


@dataclass(frozen=True)
class Gpu:
    """A card by its data sheet: dense bfloat16 operations a second, bytes a second, bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: int
    shares: Shares


GPUS = tuple(
    Gpu(name, CARDS[name].flops, CARDS[name].bandwidth, CARDS[name].memory, shares)
    for name, shares in {"H100": HOPPER, "H200": HOPPER, "A100-80GB": AMPERE}.items()
)


def peak(device: str) -> float | None:
    """Return a device's bfloat16 operations a second by its name, as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    return next((gpu.flops for gpu in GPUS if gpu.name.split("-")[0] in device), None)


@dataclass(frozen=True)
class Launches:
    """A kernel that runs several times; all kernels without products are one entry, which counts once."""

    kind: str
    times: int
    operations: float
    moved: int

    def seconds(self, gpu: Gpu, share: float) -> float:
        """Return the seconds on a GPU of whose peak the kernel reaches a share."""
        return self.times * max(self.operations / (gpu.flops * share), self.moved / gpu.bandwidth)


@dataclass(frozen=True)
class Counted:
    """The kernels of a model on one of NODE_GPUS ranks, for micro-batches of TOKENS tokens in sequences of SEQUENCE."""

    forward: list[Launches]
    """A layer's, compiled."""
    backward: list[Launches]
    selective: list[Launches]
    """A layer's backward pass with ACTIVATION_CHECKPOINTING=selective, which computes a part of the forward again."""
    head: list[Launches]
    """The products of the output head."""
    outside: int
    """Bytes of all other operations outside the layers."""
    sharding: int
    """Bytes that FSDP copies for a layer."""
    layer_update: int
    """Bytes of an optimizer step on a layer's parameters, once a step."""
    outside_update: int

    @classmethod
    def of(cls, label: str) -> Counted:
        """Return what was counted of a model in CONFIGS."""
        record = json.loads(COUNTED.read_text("utf-8"))[label]
        lists = {name: [Launches(**one) for one in part] for name, part in record.items() if isinstance(part, list)}
        return cls(**(record | lists))


@dataclass(frozen=True)
class Expected:
    """The expected optimizer step of MICRO_BATCHES micro-batches of a model, on one rank of nodes of NODE_GPUS."""

    work: Work
    useful: float
    """Operations of the forward and backward pass of a micro-batch."""
    micro_batch_seconds: float
    update_seconds: float

    @property
    def seconds(self) -> float:
        """The seconds of a micro-batch with its part of the optimizer step."""
        return self.micro_batch_seconds + self.update_seconds / MICRO_BATCHES

    def utilisation(self, gpu: Gpu) -> float:
        """Return the model's share of the GPU's operations (MFU)."""
        return self.useful / self.seconds / gpu.flops


def useful_operations(shape: ModelShape, tokens: int, sequence: int) -> float:
    """Return the operations of a forward and backward pass: 6 a parameter and token, and those of attention."""
    products = 2 * tokens * (shape.layers * shape.layer_parameters + shape.head_parameters)
    # A token sees half of its sequence on average; its scores and its sums are two products.
    attention = 2 * 2 * tokens * sequence / 2 * shape.heads * shape.head_size * shape.layers
    return 3 * (products + attention)


def expected(
    label: str, gpu: Gpu, shares: Shares | None = None, *, recomputes: Checkpointing | None = None
) -> Expected:
    """Return the expected step of a model on the fewest nodes that hold it.

    Args:
        label: the model's.
        gpu: the card.
        shares: the shares of the card's peak, by default those of its generation.
        recomputes: ACTIVATION_CHECKPOINTING; by default as the preflight chooses.
    """
    shape, counted, shares = _shape(label), Counted.of(label), shares or gpu.shares
    work = _fitting(shape, gpu)
    way = work.checkpointing if recomputes is None else recomputes
    forwards, backward = 1 + (way is True), counted.selective if way == "selective" else counted.backward
    layer = forwards * _seconds(counted.forward, gpu, shares.product, shares.attention_forward)
    layer += _seconds(backward, gpu, shares.product, shares.attention_backward)
    head = _seconds(counted.head, gpu, shares.product, shares.product)
    copied = (counted.sharding * shape.layers + counted.outside) / gpu.bandwidth
    # The shards were counted for one node.
    update = (counted.layer_update * shape.layers + counted.outside_update) * NODE_GPUS / work.shards
    useful = useful_operations(shape, TOKENS, SEQUENCE)
    return Expected(work, useful, shape.layers * layer + head + copied, update / gpu.bandwidth)


def _seconds(kernels: Sequence[Launches], gpu: Gpu, product: float, attention: float) -> float:
    return sum(kernel.seconds(gpu, attention if kernel.kind == "attention" else product) for kernel in kernels)


@cache
def _shape(label: str) -> ModelShape:
    return ModelShape.of(CONFIGS[label][1])


def _fitting(shape: ModelShape, gpu: Gpu) -> Work:
    """Return the work on the fewest nodes whose GPUs hold it."""
    settings = TrainerSettings.load(
        batch_size=128, group_size=16, max_new_tokens=SEQUENCE - 512, micro_batch_tokens=TOKENS
    )
    limits = Limits(device=gpu.memory, host=0, shm=0, volume=0)
    for nodes in range(1, MOST_NODES):
        flat = work_of(settings, shape, memory=gpu.memory, nodes=nodes, ranks_per_node=NODE_GPUS, compute_bytes=2)
        work = choose(settings, shape, flat, limits)
        if needed(shape, work).total("device") <= USABLE * gpu.memory:
            break
    return work


def table() -> str:
    """Return the expectations for every model and card, on the fewest nodes that hold the model."""
    rows = []
    for label in LABELS:
        for gpu in GPUS:
            one, bound = expected(label, gpu), expected(label, gpu, BOUND)
            nodes, recomputed = str(one.work.nodes), RECOMPUTES[one.work.checkpointing]
            numbers = [f"{one.useful / 1e12:.0f}", f"{one.seconds:.2f}", f"{TOKENS / one.seconds:.0f}"]
            shares = [f"{one.utilisation(gpu):.0%}", f"{bound.utilisation(gpu):.0%}"]
            rows.append([label, gpu.name, nodes, recomputed, *numbers, *shares])
    header = ["model", "card", "nodes of 8", "recomputes", "TFLOP", "seconds", "tokens/s a GPU", "MFU", "at the peak"]
    title = f"a micro-batch of {TOKENS} tokens in sequences of {SEQUENCE}, {MICRO_BATCHES} a step"
    return "\n".join([title, "", *lines(header, rows)])
