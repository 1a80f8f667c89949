"""The work that settings ask for, and the choice of what ACTIVATION_CHECKPOINTING and SHARD_PARAMETERS leave open."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from trainer.config import CriticModel, PublishedType, TrainerSettings
from trainer.model.logprobs import CPU_CHUNK, CUDA_MEMORY_SHARE, LEAST_CUDA_CHUNK
from trainer.preflight.limits import Limits
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import Work, needed

PROMPT_TOKENS = 512
"""Assumed tokens of a prompt, which the data-server alone knows."""
USABLE = 0.94
"""Share of a GPU's memory that can be filled; the rest is lost between blocks."""


def work_of(
    settings: TrainerSettings, shape: ModelShape, *, memory: int, nodes: int, ranks_per_node: int, compute_bytes: int
) -> Work:
    """Return the work of a run, on a flat mesh and without activation checkpointing.

    Args:
        settings: the run's settings.
        shape: the model.
        memory: bytes of a GPU; 0 for a CPU.
        nodes: nodes of ppo-trainer.
        ranks_per_node: GPUs of a node, or 1.
        compute_bytes: bytes of a number in forward and backward passes.
    """
    sequence = PROMPT_TOKENS + settings.longest_answer
    share = math.ceil(settings.batch_size * settings.group_size / (nodes * ranks_per_node)) * sequence
    return Work(
        device="cuda" if memory else "cpu",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        replicas=1,
        # A completion longer than MICRO_BATCH_TOKENS is a micro-batch by itself.
        tokens=max(sequence, min(settings.micro_batch_tokens, share)),
        chunk_states=max(LEAST_CUDA_CHUNK, memory // CUDA_MEMORY_SHARE // (shape.vocabulary * 4))
        if memory
        else CPU_CHUNK,
        compute_bytes=compute_bytes,
        published_bytes=2 if settings.publish_type is PublishedType.BFLOAT16 else 4,
        has_checkpointing=settings.activation_checkpointing is True,
        frees_parameters=settings.shard_parameters is not False,
        lora_rank=settings.lora_rank,
        has_reference=settings.kl_coef > 0 and not settings.lora_rank,
        has_critic=settings.has_critic and settings.critic is CriticModel.OWN,
        checkpoints=_checkpoints(settings),
    )


def _checkpoints(settings: TrainerSettings) -> int:
    """Return how many checkpoints are on the volume at the same time: the newest, the best, and one being written."""
    # Each evaluation may find the best policy, whose checkpoint is kept.
    intervals = [settings.checkpoint_every, settings.eval_every if settings.eval_prompts else 0]
    if not any(intervals):
        return 1
    most = settings.checkpoints_kept + 1 + (settings.eval_prompts > 0)
    saves = sum(math.ceil(settings.max_steps / every) for every in intervals if every)
    return min(most, saves) if settings.max_steps else most


def choose(settings: TrainerSettings, shape: ModelShape, work: Work, limits: Limits) -> Work:
    """Return the work as a GPU's memory allows: with least traffic between nodes, then least computing, then gathering.

    On a CPU ``auto`` is what takes least time for short completions: no checkpointing, a flat mesh.
    """
    found = list(_ways(settings, work))
    fitting = (way for way in found if needed(shape, way).total("device") <= USABLE * limits.device)
    return next(fitting, min(found, key=lambda way: needed(shape, way).total("device")))


def _ways(settings: TrainerSettings, work: Work) -> Iterator[Work]:
    """Yield the work in every way that the settings leave open, the fastest first."""
    auto = (False, True)
    checkpointing = auto if settings.activation_checkpointing == "auto" else (settings.activation_checkpointing,)
    freeing = auto if settings.shard_parameters == "auto" else (settings.shard_parameters,)
    if work.device == "cpu":
        yield replace(work, has_checkpointing=checkpointing[0], frees_parameters=freeing[-1])
        return
    for replicas in dict.fromkeys((work.nodes, 1)):
        for has_checkpointing in checkpointing:
            for frees in freeing:
                yield replace(work, replicas=replicas, has_checkpointing=has_checkpointing, frees_parameters=frees)
