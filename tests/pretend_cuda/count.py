"""Count the kernels of a training step on the pretended device, and write them to benchmarks/scaling/counted.json.

    .venv-cuda/bin/python -m tests.pretend_cuda -m tests.pretend_cuda.count

The layers count as the kernels that torch's compiler makes of them, everything else as the operations that run one by
one, in traces of models of one and of two layers. benchmarks/scaling/roofline.py makes seconds of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from benchmarks.scaling.roofline import COUNTED, LABELS, NODE_GPUS, SEQUENCE, TOKENS, Counted, Launches
from scripts.launch.models import CONFIGS
from tests.pretend_cuda.compiled import count_layer
from tests.pretend_cuda.eager import Kernel, kernel
from tests.pretend_cuda.learner import packed_sequences, pretended_policy, pretended_ranks, without_compilation
from tests.pretend_cuda.seen import Call, Seen
from trainer.config import TrainerSettings
from trainer.model.optimizer import make_optimizer


@dataclass(frozen=True)
class Trace:
    """The operations of a model without compilation."""

    products: Counter[Kernel]
    moved: Counter[str]
    """Bytes of the other operations of a forward and backward pass, by name."""
    update: int
    """Bytes of clipping and of the optimizer."""


def count(config: PretrainedConfig) -> Counted:
    """Return the kernels of a model, in parts."""
    forward, backward = count_layer(config, TOKENS, SEQUENCE)
    _, selective = count_layer(config, TOKENS, SEQUENCE, "selective")
    one, two = (_trace(config, layers) for layers in (1, 2))
    outside = {name: 2 * one.moved[name] - two.moved[name] for name in one.moved}
    own = {name: moved - one.moved[name] for name, moved in two.moved.items() if name.startswith("fsdp.")}
    return Counted(
        forward=_launches(Counter(forward)),
        backward=_launches(Counter(backward)),
        selective=_launches(Counter(selective)),
        head=_launches(one.products - (two.products - one.products)),
        outside=sum(outside.values()),
        sharding=sum(own.values()),
        layer_update=two.update - one.update,
        outside_update=2 * one.update - two.update,
    )


def _trace(config: PretrainedConfig, layers: int) -> Trace:
    """Trace a forward and backward pass and an update of a model of few layers, on the first of NODE_GPUS ranks."""
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    settings = TrainerSettings.load(shard_parameters=True)
    batch = packed_sequences(TOKENS, SEQUENCE)
    with (
        pytest.MonkeyPatch.context() as patch,
        pretended_ranks(gpus=NODE_GPUS) as ranks,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        without_compilation(patch)
        policy = pretended_policy(config, settings, ranks, has_checkpointing=False)
        optimizer = make_optimizer(settings, policy)
        batch = batch.to(ranks.device)
        with Seen() as passes:
            policy(batch).logprobs.sum().backward()
        optimizer.step()  # makes its moments
        with Seen() as update:
            optimizer.step()
    kernels = [(call.name, found) for call in passes.calls if (found := kernel(call))]
    moved = Counter[str]()
    for name, found in kernels:
        moved[name] += 0 if found.operations else found.moved
    return Trace(Counter(found for _, found in kernels if found.operations), moved, _moved(update.calls))


def _moved(calls: Iterable[Call]) -> int:
    return sum(found.moved for call in calls if (found := kernel(call)))


def _launches(kernels: Counter[Kernel]) -> list[Launches]:
    """Return kernels with how often they run; those without products are one entry."""
    busy = [Launches(k.kind, times, k.operations, k.moved) for k, times in kernels.items() if k.operations]
    moved = sum(k.moved * times for k, times in kernels.items() if not k.operations)
    rest = [Launches("fused", 1, 0.0, moved)] if moved else []
    return sorted(busy, key=lambda found: -found.operations) + rest


if __name__ == "__main__":
    COUNTED.write_text(json.dumps({label: asdict(count(CONFIGS[label][1])) for label in LABELS}, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)
