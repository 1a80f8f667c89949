"""A trainer takes of a GPU that it shares with an engine what the preflight says, in a step and between steps."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig

from local_runner.spec import env_file
from tests.pretend_cuda.learner import (
    bytes_of_device,
    packed_sequences,
    preflight,
    pretended_policy,
    pretended_ranks,
    tracked_pass,
    without_compilation,
)
from tests.pretend_cuda.test_memory import DEPTHS, with_layers
from trainer.capacity.need import BETWEEN_STEPS, uncompiled_layer_bytes
from trainer.capacity.shape import CONFIGS
from trainer.config import TrainerSettings
from trainer.model.sharding import leave_gpu
from trainer.rank_calls import RankCalls

pytestmark = pytest.mark.cuda

SEQUENCE = 1024
LABELS, PRESET = ("0.5B", "1.5B"), Path(__file__).parents[2] / "examples/one-gpu.env"


@pytest.fixture(autouse=True)
def _countable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave layers to eager execution, and let MemTracker, which hooks every parameter, pass over frozen ones."""
    without_compilation(monkeypatch)
    monkeypatch.setattr("trainer.capacity.need.layer_bytes", uncompiled_layer_bytes)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        monkeypatch.setattr(Tensor, name, partialmethod(_register, getattr(Tensor, name)))


def _register(tensor: Tensor, register: Any, hook: Any) -> Any:
    return register(tensor, hook) if tensor.requires_grad else RemovableHandle(OrderedDict())


@dataclass(frozen=True)
class Bytes:
    """Bytes of the device at the fullest moment of a step, and after it."""

    step: int
    between: int


def settings_of(**changes: Any) -> TrainerSettings:
    """Return the preset's settings, with what the preflight chooses on a small card."""
    preset = {name.lower(): value for name, value in env_file(PRESET).items()}
    return TrainerSettings.load(**preset | {"activation_checkpointing": True, "shard_parameters": True} | changes)


def counted(config: PretrainedConfig, settings: TrainerSettings) -> Bytes:
    with tracked_pass(config, settings, settings.micro_batch_tokens, SEQUENCE) as tracked:
        step = bytes_of_device(tracked.tracker, "peak")
        tracked.optimizer.step()
        tracked.optimizer.zero_grad()
        leave_gpu([tracked.policy])
        between = bytes_of_device(tracked.tracker, "current")
    batch = tracked.batch
    return Bytes(step, between - sum(t.nbytes for t in vars(batch).values() if hasattr(t, "nbytes")))


def test_nothing_that_any_model_gathered_stays_while_the_engine_generates() -> None:
    settings = settings_of(lora_rank=0, activation_checkpointing=False)
    config = with_layers(CONFIGS[LABELS[0]][1], DEPTHS[0])
    batch = packed_sequences(SEQUENCE, SEQUENCE)
    with pretended_ranks() as ranks, FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        models = [pretended_policy(config, settings, ranks) for _ in range(4)]
        trained, reference, critic, teacher = models
        unused: Any = None
        learner: Any = SimpleNamespace(policy=trained, reference=reference, teachers={"teacher": teacher})
        critic_learner: Any = SimpleNamespace(module=critic)
        rank_calls = RankCalls(settings, ranks, learner, unused, unused, critic_learner)
        batch = batch.to(ranks.device)
        tracker: Any = MemTracker()
        tracker.track_external(*models)
        with tracker:
            before = bytes_of_device(tracker, "current")
            for model in models:
                model(batch)
            gathered = 2 * config.vocab_size * config.hidden_size
            assert bytes_of_device(tracker, "current") - before > len(models) * gathered
            rank_calls.leave_gpu()
            # The batch keeps its mask.
            assert bytes_of_device(tracker, "current") == pytest.approx(before, abs=1 << 20)


def foreseen(config: PretrainedConfig, settings: TrainerSettings) -> Bytes:
    """Return what the preflight says of the first step, in which there are no moments yet, and of the time after it."""
    parts = preflight(config, settings).device
    step = sum(size for part, size in parts.items() if part not in ("gradients", "moments", "CUDA"))
    return Bytes(step, sum(parts.get(part, 0) for part in BETWEEN_STEPS if part != "CUDA"))


@pytest.mark.parametrize("label", LABELS)
def test_the_trainer_takes_the_bytes_of_the_table(label: str) -> None:
    config, settings = CONFIGS[label][1], settings_of()
    few, more = (counted(with_layers(config, layers), settings) for layers in DEPTHS)
    # Each further layer adds the same, and the tracker takes minutes for all.
    layers = (config.num_hidden_layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    step = more.step + layers * (more.step - few.step)
    between = more.between + layers * (more.between - few.between)
    expected = foreseen(config, settings)
    assert step == pytest.approx(expected.step, rel=0.02)
    assert between == pytest.approx(expected.between, rel=0.02), "nothing else is kept while the engine generates"
