"""A learner on the pretended device, whose layers are traced and not compiled to kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.trainer.rank_jobs import make_learner
from tests.trainer.tiny import save_model
from trainer.config import TrainerSettings
from trainer.model import policy
from trainer.model.attention import TREE_ATTENTION
from trainer.model.learner import Learner
from trainer.model.ranks import Ranks


class _ValueHead(policy.ValueHead):
    """A value head whose data begins on the device: FakeTensorMode does not move the data of parameters."""

    def __init__(self, decoder: PreTrainedModel, ranks: Ranks) -> None:
        nn.Linear.__init__(self, decoder.config.hidden_size, 1, device=ranks.device, dtype=torch.float32)


@contextmanager
def pretended_ranks(world_size: int = 1) -> Iterator[Ranks]:
    """Join a process group whose collectives move nothing, as rank 0 on cuda:0."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield Ranks(0, world_size, torch.device("cuda", 0), init_device_mesh("cuda", (world_size,)))
    finally:
        dist.destroy_process_group()


@contextmanager
def pretended_learner(directory: Path, config: PretrainedConfig, **settings: Any) -> Iterator[Learner]:
    """Make a learner of a model on cuda:0, within FakeTensorMode. Layers must be traced whole, or their call raises.

    Args:
        directory: an empty directory for the model's configuration and tokenizer.
        config: the model.
        settings: settings of the trainer.
    """
    save_model(directory, config)

    def on_the_device(_: TrainerSettings, materialise: bool) -> PreTrainedModel:
        assert materialise
        with torch.device("cuda"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=TREE_ATTENTION
            )
        return model

    with pytest.MonkeyPatch.context() as patch, pretended_ranks() as ranks:
        # Values that do not exist cannot be digested, nor can kernels be made of what is never run.
        patch.setattr(policy, "load_model", on_the_device)
        patch.setattr(policy, "ValueHead", _ValueHead)
        patch.setattr(policy, "weights_digest", lambda model: "")
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
        # Packing happens in a thread outside of this mode, so its tensors are not fake.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield make_learner(ranks, directory, compute_type="bfloat16", micro_batch_tokens=200, **settings)
