"""Ways to compute the output head's logits from bfloat16 inputs, and their errors against float64.

On a CPU the trainer casts hidden states and weight to float32 once, and oneDNN multiplies them (see
trainer/model/logprobs.py). The other ways show what the alternatives cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import harness
from benchmarks.common.harness import spread

SHAPES = {"SmolLM2-135M": (49_152, 576), "Qwen2.5-0.5B": (151_936, 896)}
"""Vocabulary and hidden size."""
ROWS = 256
LOGIT_DEVIATION = 6.0
"""The standard deviation of SmolLM2-135M's logits on this project's README."""

Product = Callable[[Tensor, Tensor], Tensor]
"""A function from the factors [n, k] and [k, m] to their product [n, m] in float32."""


@dataclass
class Way:
    """A way to multiply, with its processor seconds and errors for one shape."""

    name: str
    product: Product
    shape: str = ""
    seconds: list[float] = field(default_factory=list)
    errors: tuple[float, ...] = ()


def in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply copies of both factors in float32."""
    return left.float() @ right.float()


@contextmanager
def _bfloat16_factors() -> Iterator[None]:
    products = cast("Any", torch.backends.mkldnn).matmul
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = "none"


def by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """Multiply copies of both factors in float32, which oneDNN may round to bfloat16."""
    with _bfloat16_factors():
        return in_float32(left, right)


def in_chunks(left: Tensor, right: Tensor) -> Tensor:
    """Multiply in float32, 4,096 columns at a time."""
    left, product = left.float(), torch.empty(len(left), right.shape[1])
    for start in range(0, right.shape[1], 4096):
        torch.mm(left, right[:, start : start + 4096].float(), out=product[:, start : start + 4096])
    return product


def rounded(left: Tensor, right: Tensor) -> Tensor:
    """Multiply in bfloat16, which rounds the product."""
    return (left.bfloat16() @ right).float()


def with_remainder(left: Tensor, right: Tensor) -> Tensor:
    """Multiply in bfloat16 twice: the second product is the error of the first."""
    product = left @ right
    return product.float().add_(torch.addmm(product, left, right, beta=-1))


def in_parts(left: Tensor, right: Tensor) -> Tensor:
    """Add four bfloat16 products over a quarter of the inner dimension each."""
    pairs = zip(left.chunk(4, 1), right.chunk(4, 0), strict=True)
    return torch.stack([(a @ b).float() for a, b in pairs]).sum(0)


def shifted(left: Tensor, right: Tensor, targets: Tensor) -> Tensor:
    """Multiply in bfloat16, with each row less about its target's number."""
    shift = torch.linalg.vecdot(left, right.T[targets]).neg_()
    return torch.addmm(shift[:, None], left, right).float()


FORWARD: dict[str, Product] = {
    "float32 copies": in_float32,
    "float32 copies, oneDNN with bfloat16 factors (the trainer)": by_onednn,
    "float32 copies of 4,096 tokens each": in_chunks,
    "bfloat16 logits": rounded,
    "bfloat16 logits in four parts": in_parts,
    "bfloat16 logits and their error": with_remainder,
}
BACKWARD: dict[str, Product] = {name: FORWARD[name] for name in list(FORWARD)[:2]} | {"bfloat16": rounded}


def measure(rounds: int) -> tuple[list[Way], list[Way]]:
    """Return the ways of forward and backward passes, measured with every shape."""
    forward: list[Way] = []
    backward: list[Way] = []
    for shape, (vocabulary, size) in SHAPES.items():
        torch.manual_seed(0)
        hidden = torch.randn(ROWS, size).bfloat16()
        weight = (torch.randn(vocabulary, size) * LOGIT_DEVIATION / size**0.5).bfloat16()
        exact = (hidden.double() @ weight.double().T).log_softmax(1)
        targets = exact.exp().multinomial(1)
        ways = FORWARD | {"bfloat16 logits, shifted": partial(shifted, targets=targets[:, 0])}
        for name, product in ways.items():
            way = Way(name, product, shape)
            log_p = _timed(way, rounds, (hidden, weight.T))[0].log_softmax(1)
            wrong = (log_p.gather(1, targets) - exact.gather(1, targets)).abs()
            entropy = ((log_p.exp() * log_p).sum(1) - (exact.exp() * exact).sum(1)).abs()
            way.errors = float(wrong.mean()), float(wrong.max()), float(entropy.max())
            forward.append(way)
        gradient = exact.exp().neg_().scatter_add_(1, targets, torch.ones(ROWS, 1, dtype=torch.float64)).float()
        del exact
        wanted = gradient @ weight.float(), gradient.T @ hidden.float()
        for name, product in BACKWARD.items():
            way = Way(name, product, shape)
            found = _timed(way, rounds, (gradient, weight), (gradient.T, hidden))
            way.errors = tuple(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
            backward.append(way)
    return forward, backward


def _timed(way: Way, rounds: int, *factors: tuple[Tensor, Tensor]) -> list[Tensor]:
    for _ in range(rounds):
        started = time.process_time()
        products = [way.product(left, right) for left, right in factors]
        way.seconds.append(time.process_time() - started)
    harness.say(f"{way.shape}, {way.name}: {min(way.seconds):.2f} s")
    return products


def show(forward: Sequence[Way], backward: Sequence[Way]) -> list[Table]:
    """Return a table of the logits, and one of the products of the backward pass."""
    logits = ("log-probability's mean error", "largest", "entropy's largest")
    gradients = ("relative error, hidden states", "weight")
    return [
        harness.table(
            title,
            ("", "model", "processor seconds", *columns),
            [(way.name, way.shape, spread(way.seconds), *(f"{error:.1e}" for error in way.errors)) for way in ways],
        )
        for title, ways, columns in (
            (f"logits of {ROWS} tokens, {torch.get_num_threads()} threads", forward, logits),
            ("both products of the backward pass", backward, gradients),
        )
    ]
