"""The preflight on the ranks: what is there on every node, rank 0's choice, and the mesh."""

from __future__ import annotations

import os
from typing import Any

import torch

from services.core.errors import ConfigurationError
from trainer.checkpoints.volume import DiskFullError
from trainer.config import TrainerSettings
from trainer.model.loading import choose_compute, load_config
from trainer.model.ranks import Ranks
from trainer.preflight.check import Machine, check
from trainer.preflight.limits import find_limits
from trainer.preflight.shape import ModelShape


def preflight(settings: TrainerSettings, ranks: Ranks) -> tuple[TrainerSettings, Ranks]:
    """Return settings without ``auto`` and the ranks on the mesh to use, the same on every rank. A collective.

    Raises:
        ConfigurationError: the model cannot be loaded, or something does not fit; raised on every rank.
        DiskFullError: the volume of a run that has a checkpoint has no room for more; raised on every rank.
    """
    chosen = choose_compute(settings, ranks)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if ranks.world_size > 1 else 1
    own = find_limits(ranks.device, settings.run_dir, is_shared=settings.engine_sleeps)
    limits = own.smallest(ranks.gather_json(vars(own)) if ranks.world_size > 1 else [])

    def choose() -> dict[str, Any]:
        shape = ModelShape.of(load_config(settings), trust_remote_code=settings.trust_remote_code)
        bytes_ = getattr(torch, chosen.compute_type).itemsize
        machine = Machine(ranks.world_size // ranks_per_node, ranks_per_node, bytes_, limits)
        work = check(settings, shape, machine)
        return {"replicas": work.replicas, "checkpointing": work.has_checkpointing, "frees": work.frees_parameters}

    found = ranks.on_main(choose, ConfigurationError, DiskFullError)
    changes = {"activation_checkpointing": found["checkpointing"], "shard_parameters": found["frees"]}
    return settings.model_copy(update=changes), ranks.replicated(found["replicas"])
