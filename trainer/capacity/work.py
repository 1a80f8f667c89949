"""The bytes that a run has, and its work: ``work_of`` reads the settings, ``choose`` decides what they leave open."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from services.core.machine import host_memory, memory_directory
from trainer.capacity.need import ENGINE_ASLEEP, EngineBeside, Work, needed
from trainer.capacity.shape import ModelShape
from trainer.config import CriticModel, Layout, PublishedType, TrainerSettings, Transport
from trainer.config.sections import Checkpointing, RecordGroups
from trainer.model.logprobs import chunk_states, memory_of


@dataclass(frozen=True)
class Limits:
    """Bytes that are there; 0 where a place does not exist."""

    device: int
    """Memory of this rank's GPU; 0 on a CPU."""
    host: int
    """Memory of this node: the container's limit, or the machine's memory."""
    shm: int
    volume: int
    """Free space of the run directory's volume, and what this run holds of it already."""

    def smallest(self, others: Iterable[dict[str, int]]) -> Limits:
        """Return the least of each place, among ranks' limits as ``vars`` gives them."""
        everyone = [vars(self), *others]
        return Limits(**{name: min(limits[name] for limits in everyone) for name in vars(self)})


def find_limits(device: torch.device, run_dir: Path, *, is_shared: bool = False) -> Limits:
    """Return the limits of this process; on a GPU that ``is_shared``, less what a sleeping engine keeps."""
    memory = memory_of(device)
    memory -= ENGINE_ASLEEP if memory and is_shared else 0
    disk = shutil.disk_usage(next(parent for parent in (run_dir, *run_dir.parents) if parent.exists()))
    volume = disk.free + _size(run_dir, "checkpoints", "policy", "groups")
    return Limits(memory, host_memory(), shutil.disk_usage(memory_directory()).total, volume)


def _size(run_dir: Path, *names: str) -> int:
    """Return the bytes of the files below directories of a run, such as those of an earlier attempt."""
    return sum(file.stat().st_size for name in names for file in (run_dir / name).rglob("*") if file.is_file())


@dataclass(frozen=True)
class Machine:
    """The ranks that a run has, and what each may use."""

    nodes: int
    ranks_per_node: int
    compute_bytes: int
    """Bytes of a number in forward and backward passes."""
    limits: Limits
    engine: EngineBeside | None = None
    """The engine on the same GPUs, if there is one."""


@dataclass(frozen=True)
class VolumeRoom:
    """The room on the volume, of which the checkpoints, versions and model of the run need ``needed`` bytes."""

    run_dir: Path
    needed: int

    def holds(self, size: int) -> bool:
        """Return whether there is room for a file of ``size`` bytes."""
        left = shutil.disk_usage(self.run_dir).free - size
        return left >= self.needed or left + _size(self.run_dir, "checkpoints", "policy", "model") >= self.needed


RECORD_STEPS, RECORD_SHARE = 1000, 10
"""RECORD_GROUPS is by default this many steps, or as many as this part of the volume's room holds: a tenth."""
RECORD_TOKEN_BYTES = 16
"""Bytes of a token in a record of groups: its id, its log-probability and its text, with some room for messages."""


def plan_records(settings: TrainerSettings, room: int) -> tuple[RecordGroups, int]:
    """Return RECORD_GROUPS, or what a part of ``room`` holds where it is unset, and the most bytes of these records.

    With `all` and without MAX_STEPS the number of steps is unknown, and no bytes are counted.
    """
    tokens = PROMPT_TOKENS + settings.largest_group * settings.longest_answer
    step = settings.batch_size * tokens * RECORD_TOKEN_BYTES
    # Before the last steps there are those that they replay; the same steps before the newest checkpoint stay, too.
    reach = settings.replay_max_staleness if settings.replay_groups else 0
    since_checkpoint = settings.checkpoint_every or sys.maxsize
    kept = settings.record_groups
    if kept is None:
        holds = room // RECORD_SHARE // step
        fitting = max(holds - since_checkpoint, holds // 2) - reach
        kept = "all" if 0 < settings.max_steps <= holds else min(fitting, RECORD_STEPS)
        kept = "off" if kept != "all" and kept < 1 else kept
    if isinstance(kept, str):
        steps = 0 if kept == "off" else settings.max_steps
    else:
        steps = kept + reach + min(kept + reach, since_checkpoint)
    return kept, step * (min(steps, settings.max_steps) if settings.max_steps else steps)


PROMPT_TOKENS = 512
"""Assumed tokens of a prompt, which the data-server alone knows."""
USABLE = 0.94
"""Share of a GPU's memory that can be filled; the rest is lost between blocks."""


def describe_layout(settings: TrainerSettings, shape: ModelShape) -> str:
    """Return the layout of a run's micro-batches, and why it is not trees; docs/models.md explains them."""
    obstacle = next((model.obstacle for model in (shape, *shape.teachers) if model.obstacle), "")
    if settings.layout is Layout.ROWS:
        return "rows (LAYOUT)"
    return f"rows: {obstacle}" if obstacle and settings.layout is Layout.AUTO else "trees"


def is_uncompiled(settings: TrainerSettings, shape: ModelShape) -> bool:
    """Return whether a model's layers or its teachers' are not compiled on GPUs: those of rows, and recurrent ones."""
    return has_rows(settings, shape) or any(model.recurrent_layers for model in (shape, *shape.teachers))


def has_rows(settings: TrainerSettings, shape: ModelShape) -> bool:
    """Return whether the layout of a run's micro-batches is rows."""
    needs_rows = any(model.obstacle for model in (shape, *shape.teachers))
    return settings.layout is Layout.ROWS or (settings.layout is Layout.AUTO and needs_rows)


def work_of(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Work:
    """Return the work of a run, on a flat mesh and without activation checkpointing."""
    memory, ranks = machine.limits.device, machine.nodes * machine.ranks_per_node
    sequence, context = _longest(settings), settings.context_parallel_size
    share = math.ceil(settings.batch_size * settings.largest_group * context / ranks) * sequence
    is_shared = settings.publish_transport is Transport.LOCAL
    is_sent = settings.publish_transport is Transport.BROADCAST or (is_shared and memory > 0)
    return Work(
        device="cuda" if memory else "cpu",
        nodes=machine.nodes,
        ranks_per_node=machine.ranks_per_node,
        replicas=1,
        # A completion longer than the MICRO_BATCH_TOKENS of a context group is a micro-batch by itself.
        tokens=max(sequence, min(settings.micro_batch_tokens, share)),
        micro_batch_tokens=settings.micro_batch_tokens,
        chunk_states=chunk_states(shape.vocabulary, memory),
        compute_bytes=machine.compute_bytes,
        is_uncompiled=is_uncompiled(settings, shape),
        scored_keys=sequence if shape.writes_scores and has_rows(settings, shape) else 0,
        published_bytes=2 if settings.publish_type is PublishedType.BFLOAT16 else 4,
        published_copies=2 if is_sent and not settings.lora_rank else 1,
        shares_versions=is_shared and not memory,
        shares_on_gpus=is_shared and memory > 0 and not settings.lora_rank,
        checkpointing=False if settings.activation_checkpointing == "auto" else settings.activation_checkpointing,
        frees_parameters=settings.shard_parameters is not False,
        has_offload=settings.cpu_offload is True and memory > 0,
        lora_rank=settings.lora_rank,
        has_reference=settings.kl_coef > 0 and not settings.lora_rank,
        has_critic=settings.has_critic and settings.critic is CriticModel.OWN,
        compares_vocabularies=bool(shape.teachers) and settings.teacher_jsd_beta is not None,
        checkpoints=_checkpoints(settings),
        context=context,
        engine=machine.engine,
    )


def _longest(settings: TrainerSettings) -> int:
    """Return a rank's tokens of the longest sequence."""
    return math.ceil((PROMPT_TOKENS + settings.longest_answer) / settings.context_parallel_size)


def _checkpoints(settings: TrainerSettings) -> int:
    """Return how many checkpoints are on the volume at the same time: the newest, the best, and one being written."""
    # Each evaluation may find the best policy, whose checkpoint is kept.
    intervals = [settings.checkpoint_every, settings.keep_checkpoints_every]
    intervals += [settings.eval_every] if settings.eval_prompts else []
    if not any(intervals):
        return 1
    kept_every = settings.keep_checkpoints_every
    forever = settings.max_steps // kept_every if kept_every else 0
    most = settings.checkpoints_kept + 1 + (settings.eval_prompts > 0) + forever
    saves = sum(math.ceil(settings.max_steps / every) for every in intervals if every)
    return min(most, saves) if settings.max_steps else most


def choose(settings: TrainerSettings, shape: ModelShape, work: Work, limits: Limits) -> Work:
    """Return the work as a GPU's memory allows: with least traffic between nodes, then least computing, then gathering.

    Selective recomputation takes a twentieth more time. Halving the micro-batches takes about 2 % more, for FSDP's
    copies, while recomputing whole layers takes a quarter more, so the halves come first, unless MICRO_BATCH_TOKENS is
    set. On a CPU ``auto`` is what takes least time for short completions: no checkpointing, a flat mesh. CPU_OFFLOAD,
    for which a node must have the memory, is the last choice.
    """
    ways = list(_ways(settings, work))

    def fits(way: Work) -> bool:
        need = needed(shape, way)
        has_room = way.has_offload is ways[0].has_offload or need.total("host") <= limits.host
        return has_room and max(need.total("device"), need.total("generating")) <= USABLE * limits.device

    asked = (way for way in ways if way.has_offload is ways[0].has_offload)
    return next(filter(fits, ways), min(asked, key=lambda way: needed(shape, way).total("device")))


def _ways(settings: TrainerSettings, work: Work) -> Iterator[Work]:
    """Yield the work in every way that the settings leave open, the fastest first, and CPU_OFFLOAD last."""
    if settings.cpu_offload == "auto" and work.device == "cuda" and not settings.lora_rank:
        kept = list(_ways(settings.model_copy(update={"cpu_offload": False}), work))
        yield from kept
        yield from (replace(way, has_offload=True) for way in kept if way.frees_parameters)
        return
    asked, all_freeing = settings.activation_checkpointing, (False, True)
    freeing = all_freeing if settings.shard_parameters == "auto" else (settings.shard_parameters,)
    if work.device == "cpu":
        yield replace(work, frees_parameters=freeing[-1])
        return
    half = work.micro_batch_tokens // 2
    smaller = replace(work, micro_batch_tokens=half, tokens=max(_longest(settings), min(half, work.tokens)))
    halves = [smaller] if "micro_batch_tokens" not in settings.model_fields_set else []
    by_checkpointing: dict[Checkpointing, list[Work]] = {False: [work], "selective": [work, *halves], True: [work]}
    if work.is_uncompiled:
        by_checkpointing = {False: [work, *halves], True: [work]}
    for replicas in dict.fromkeys((work.nodes, 1)):
        for checkpointing, sizes in by_checkpointing.items():
            if asked not in ("auto", checkpointing):
                continue
            for sized, frees in product(sizes, freeing):
                yield replace(sized, replicas=replicas, checkpointing=checkpointing, frees_parameters=frees)
