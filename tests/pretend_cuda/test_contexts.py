"""A context group on the pretended device: layers compile whole, and exchange and keep the bytes that are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PretrainedConfig

from tests.pretend_cuda.learner import (
    packed_sequences,
    pretended_learner,
    pretended_policy,
    pretended_ranks,
    without_compilation,
)
from tests.pretend_cuda.seen import Seen
from tests.pretend_cuda.test_memory import with_layers
from tests.trainer.tiny import random_groups, with_heads_of
from trainer.algorithm.attention_layout import TILE
from trainer.capacity.need import CUDA_CONTEXT, needed, uncompiled_layer_bytes
from trainer.capacity.shape import CONFIGS, ModelShape
from trainer.capacity.work import USABLE, Limits, Machine, work_of
from trainer.config import TrainerSettings
from trainer.config.sections import Checkpointing
from trainer.model.optimizer import make_optimizer

pytestmark = pytest.mark.cuda

MODEL, GPUS, SEQUENCE = CONFIGS["8B"][1], 8, 131_072
DEPTHS = (1, 2)


def test_a_layer_is_one_graph_and_exchanges_tokens_for_heads(tmp_path: Path) -> None:
    config, size = with_heads_of(16, "qwen3"), 2
    counters.clear()
    with (
        pretended_learner(tmp_path, config, gpus=GPUS, context=size, activation_checkpointing=False) as learner,
        Seen() as seen,
        pytest.raises(DataDependentOutputException) as wait,
    ):
        learner.update(random_groups(1, n_groups=20, longest=12), 0)
    assert "metrics" in [entry.name for entry in wait.traceback], wait.getrepr()
    assert counters["stats"]["unique_graphs"] == 1
    exchanged = [call.args[0] for call in seen.calls if "all_to_all" in call.name]
    tokens = 2 * TILE  # of a rank, because the groups are short
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    passes = 2 * config.num_hidden_layers * seen.names()["aten.embedding.default"]
    assert sum(x.nbytes for x in exchanged) == passes * 2 * tokens * heads * config.head_dim


def settings_of(checkpointing: Checkpointing) -> TrainerSettings:
    return TrainerSettings.load(
        activation_checkpointing=checkpointing, shard_parameters=True, batch_size=256, group_size=16,
        max_new_tokens=SEQUENCE - 512, context_parallel_size=GPUS,
    )  # fmt: skip


def peak(config: PretrainedConfig, settings: TrainerSettings) -> int:
    """Return the bytes of a rank at the fullest moment of a pass over a sequence, with its layers recomputed."""
    with pretended_ranks(gpus=GPUS, context=GPUS) as ranks:
        batch = packed_sequences(SEQUENCE, SEQUENCE, ranks.context)
        with FakeTensorMode(allow_non_fake_inputs=True):
            recomputing = settings.model_copy(update={"activation_checkpointing": True})
            trained = pretended_policy(config, recomputing, ranks)
            tracker: Any = MemTracker()
            tracker.track_external(trained, make_optimizer(settings, trained))
            batch = batch.to(ranks.device)
            with tracker:
                trained(batch).logprobs.sum().backward()
    snapshot = tracker.get_tracker_snapshot("peak")
    return next(found["Total"] for device, found in snapshot.items() if device.type == "cuda")


def test_a_sequence_of_128k_tokens_takes_the_bytes_that_the_preflight_says(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilation(monkeypatch)
    monkeypatch.setattr("trainer.capacity.need.layer_bytes", uncompiled_layer_bytes)
    settings, shape = settings_of(True), ModelShape.of(MODEL)
    few, more = (peak(with_layers(MODEL, n), settings) for n in DEPTHS)
    counted = more + (MODEL.num_hidden_layers - DEPTHS[1]) * (more - few) // (DEPTHS[1] - DEPTHS[0])
    work = work_of(settings, shape, Machine(1, GPUS, 2, Limits(80 * 10**9, 0, 0, 0)))
    need = needed(shape, work)
    # Before the first step there are no gradients and moments.
    beginning = need.total("device") - (need.device["gradients"] + need.device["moments"] + CUDA_CONTEXT)
    assert 0.85 < counted / beginning < 1.02
    assert need.total("device") < USABLE * 80 * 10**9
