"""The comparison of a run's needs with what its nodes have: a short table in the log, and a refusal.

``preflight`` is the check on the ranks, with rank 0's choice of mesh; the dry run (``__main__.py``) and ``grpo launch``
call ``check``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from services.core.errors import ConfigurationError
from services.core.files import saved_steps
from services.core.logs import get_logger
from services.core.machine import ComputeType
from services.engines.engine import choose_engine
from services.engines.placement import SizeFacts, read_config
from services.engines.settings import EngineKind, RolloutSettings
from services.engines.sglang_command import GRAPH_BYTES, graph_sequences
from trainer.capacity.need import CUDA_CONTEXT, ENGINE_ASLEEP, GIB, EngineBeside, Need, Work, needed
from trainer.capacity.shape import ModelShape
from trainer.capacity.work import (
    USABLE,
    Limits,
    Machine,
    VolumeRoom,
    choose,
    find_limits,
    is_uncompiled,
    plan_records,
    work_of,
)
from trainer.config import Layout, TrainerSettings
from trainer.model.loading import choose_compute, choose_layout, load_config
from trainer.model.ranks import Ranks
from trainer.model.saving import DiskFullError
from trainer.model.teachers import check_teachers, load_teacher_config

log = get_logger(__name__)

PLACES = {
    "device": "GPU memory",
    "generating": "GPU memory while the engine generates",
    "host": "host memory of a node",
    "shm": "/dev/shm",
    "volume": "the volume of the run directory",
}
REMEDIES = {
    "device": "lower MICRO_BATCH_TOKENS, set CPU_OFFLOAD=true or LORA_RANK, or give ppo-trainer more or larger GPUs",
    "generating": "lower ENGINE_MAX_TOTAL_TOKENS, or set PUBLISH_TRANSPORT=disk or CPU_OFFLOAD=true",
    "host": "raise `memory` or `num_nodes` of ppo-trainer in the job group's file, or set LORA_RANK",
    "shm": "mount a larger memory volume at /dev/shm on the nodes of ppo-trainer, or set PUBLISH_TRANSPORT=disk",
    "volume": "set RECORD_GROUPS=off or CHECKPOINTS_KEPT=1, remove old runs (grpo clean), or take a larger volume "
    "(`size` in jobgroups/volume.yaml, or another --shared-dir)",
}
"""The settings that help most, by place."""
COUNTED_GRAPHS = 256
"""The sequences whose CUDA graphs are part of ENGINE_ASLEEP."""
LENGTHS = ("activations", "logits and backward pass", "scores of attention")
"""Parts that are smaller for completions shorter than MAX_NEW_TOKENS. On a CPU they warn and refuse nothing."""


def check(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Work:
    """Return the work with what the settings leave open chosen; log the needs and what is there, place by place.

    Raises:
        ConfigurationError: a place has too little; the message has the need, the limit and the settings that help. Or
            a setting does not fit the machine.
        DiskFullError: the volume has too little for a run that has a checkpoint: it had enough before.
    """
    check_context(settings, shape, machine)
    is_on_cpu = not machine.limits.device
    if settings.activation_checkpointing == "selective" and (is_on_cpu or is_uncompiled(settings, shape)):
        reason = "this machine has no GPU" if is_on_cpu else "layers of LAYOUT=rows and recurrent ones are not compiled"
        raise ConfigurationError(
            f"ACTIVATION_CHECKPOINTING is selective, where the compiler chooses what to recompute, but {reason}; set "
            "true, false or auto"
        )
    work = chosen_work(settings, shape, machine)
    need = needed(shape, work)
    _log(settings, work, need, machine.limits)
    if machine.engine is not None and not machine.engine.tokens:
        raise ConfigurationError(
            "ENGINE_MAX_TOTAL_TOKENS is unset, so SGLang would fill the GPU, which it shares with the trainer "
            f"(ENGINE_SLEEPS); set it to {engine_tokens(shape, work, machine.limits)}, which fit beside the trainer, "
            "or less"
        )
    for place, name, parts, there in _places(work, need, machine.limits):
        usable = int(there * USABLE) if place in ("device", "generating") else there
        least = {part: size for part, size in parts.items() if place != "host" or part not in LENGTHS}
        if sum(least.values()) > usable:
            kind = DiskFullError if place == "volume" and saved_steps(settings.checkpoint_dir) else ConfigurationError
            raise kind(
                f"MODEL_NAME={settings.model_name} with {machine.nodes} x {machine.ranks_per_node} ranks needs "
                f"{gigabytes(sum(least.values()))} of {name} ({_largest(least)}), and can use {gigabytes(usable)}; "
                f"{_score_remedy(shape, least)}{REMEDIES[place]}"
            )
    return work


def _score_remedy(shape: ModelShape, parts: Mapping[str, int]) -> str:
    """Return what makes the scores of attention fewer, if there are any."""
    if "scores of attention" not in parts:
        return ""
    return "lower MAX_NEW_TOKENS, " if shape.obstacle else "set LAYOUT=auto, whose trees keep no scores of attention, "


def _places(work: Work, need: Need, limits: Limits) -> Iterator[tuple[str, str, dict[str, int], int]]:
    """Yield each place that is needed, with its name, the bytes of its parts, and the bytes that are there."""
    for place, name in PLACES.items():
        parts = {} if place == "device" and work.device == "cpu" else getattr(need, place)
        if parts:
            yield place, name, parts, getattr(limits, "device" if place == "generating" else place)


def _largest(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {gigabytes(size)}" for part, size in sorted(parts.items(), key=lambda one: -one[1])[:4])


def _log(settings: TrainerSettings, work: Work, need: Need, limits: Limits) -> None:
    """Log the needs and what is there, what was chosen for GPUs, and slow or doubtful choices."""
    for _, name, parts, there in _places(work, need, limits):
        sizes = {part.replace(" ", "_"): gigabytes(size) for part, size in parts.items()}
        log.info(f"preflight: {name}", needs=gigabytes(sum(parts.values())), has=gigabytes(there), **sizes)
    if work.device == "cuda":
        log.info(
            "preflight: chosen",
            activation_checkpointing=work.checkpointing,
            micro_batch_tokens=work.micro_batch_tokens,
            shard_parameters=work.frees_parameters,
            copies_of_the_state=work.replicas,
            cpu_offload=work.has_offload,
        )
    if work.has_offload and settings.cpu_offload == "auto":
        log.warning("preflight: the state stays in host memory (CPU_OFFLOAD), and steps take longer")
    if need.total("host") > limits.host:
        log.warning("preflight: full micro-batches would not fit into memory; lower MICRO_BATCH_TOKENS")


def check_context(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> None:
    """Check that CONTEXT_PARALLEL_SIZE divides the ranks and fits the heads of the model and its teachers.

    Raises:
        ConfigurationError: it does not; the message has the sizes that do.
    """
    ranks, models = machine.nodes * machine.ranks_per_node, (shape, *shape.teachers)
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0 and all(model.has_heads_for(n) for model in models)]
    if settings.context_parallel_size not in sizes:
        heads = ", ".join(f"{model.heads} and {model.kv_heads}" for model in models)
        raise ConfigurationError(
            f"CONTEXT_PARALLEL_SIZE is {settings.context_parallel_size}, which must divide the {ranks} ranks of "
            f"ppo-trainer and share the attention and key-value heads ({heads}); allowed is "
            f"{', '.join(map(str, sizes))}"
        )


def gigabytes(size: int) -> str:
    """Return a number of bytes as text: in GiB, or below 1 GiB in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def chosen_work(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Work:
    """Return the work that settings ask for, with what they leave open chosen for the machine."""
    work = choose(settings, shape, work_of(settings, shape, machine), machine.limits)
    kept, size = plan_records(settings, machine.limits.volume - needed(shape, work).total("volume"))
    return replace(work, record_groups=kept, record_bytes=size)


def engine_tokens(shape: ModelShape, work: Work, limits: Limits) -> int:
    """Return the most tokens, a multiple of 1024, whose keys and values fit beside the trainer; at least 0."""
    assert work.engine is not None, "only then does an engine share the GPUs"
    need = needed(shape, work)
    left = USABLE * limits.device - need.total("generating") + need.generating["keys and values"]
    return max(0, int(left / work.engine.token_bytes(shape)) // 1024 * 1024)


def engine_beside(settings: TrainerSettings, shape: ModelShape, gpus: int, memory: int) -> EngineBeside | None:
    """Return the engine that shares GPUs with the trainer (ENGINE_SLEEPS), by the variables of this node's environment.

    Its ``tokens`` are 0 where SGLang, without ENGINE_MAX_TOTAL_TOKENS, takes all memory that it finds.

    Args:
        settings: the run's settings.
        shape: the model.
        gpus: GPUs of the node.
        memory: bytes of a GPU without those of a sleeping engine (``find_limits``); 0 without GPUs.

    Raises:
        ConfigurationError: an engine needs more than the node has.
    """
    if not settings.engine_sleeps or not memory:
        return None
    rollout = RolloutSettings.load()
    number_bytes = 4 if rollout.engine_dtype is ComputeType.FLOAT32 else 2
    facts = SizeFacts(read_config(settings.model_name), number_bytes * shape.parameters, memory + ENGINE_ASLEEP)
    engine = choose_engine(rollout, gpus)
    unset = max(engine.default_tokens, rollout.engine_context_length or 0) if engine.default_tokens else 0
    split = engine.split(rollout, gpus, lambda: facts)
    tokens = rollout.engine_max_total_tokens or unset
    graphs = graph_sequences(rollout, split.engines) if engine.kind is EngineKind.SGLANG else 0
    graph_bytes = GRAPH_BYTES * max(0, graphs - COUNTED_GRAPHS)
    return EngineBeside(split.tensor_parallel, tokens, number_bytes, engine.keeps_weights_asleep, graph_bytes)


def compare_asleep(settings: TrainerSettings, ranks: Ranks) -> None:
    """Log what is held of the fullest GPU besides the trainer's tensors, and what the preflight assumed. A collective.

    Called while the engines sleep for the first time, because their own part of it has been measured nowhere.
    """
    if ranks.device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(ranks.device)
    held = max(ranks.gather_json(total - free - torch.cuda.memory_reserved(ranks.device)))
    if not ranks.is_main:
        return
    shape = shape_of(settings)
    engine = engine_beside(settings, shape, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), total - ENGINE_ASLEEP)
    assert engine is not None, "only engines that share the GPUs sleep"
    assumed = CUDA_CONTEXT + engine.asleep(shape)
    figures = {"held": gigabytes(held), "assumed": gigabytes(assumed)}
    if held > assumed:
        log.warning(
            "sleeping engines and CUDA hold more of a GPU than the preflight assumed; lower MICRO_BATCH_TOKENS if a "
            "step runs out of memory",
            **figures,
        )
    else:
        log.info("sleeping engines and CUDA hold no more of a GPU than the preflight assumed", **figures)


def shape_of(settings: TrainerSettings) -> ModelShape:
    """Return the shape of MODEL_NAME with those of the teachers beside it, which can teach it.

    Raises:
        ConfigurationError: a configuration cannot be loaded, or a teacher cannot teach this student.
    """
    check_teachers(settings)
    shape, *teachers = (ModelShape.of(c, trust_remote_code=settings.trust_remote_code) for c in configs_of(settings))
    return replace(shape, teachers=tuple(teachers))


def configs_of(settings: TrainerSettings) -> list[PretrainedConfig]:
    """Return the configurations of MODEL_NAME and of the teachers beside it.

    Raises:
        ConfigurationError: one cannot be loaded.
    """
    return [load_config(settings), *(load_teacher_config(settings, name) for name in settings.teacher_models)]


def preflight(settings: TrainerSettings, ranks: Ranks) -> tuple[TrainerSettings, Ranks, VolumeRoom]:
    """Return what a run has, the same on every rank: settings without ``auto``, the mesh, the volume. A collective.

    Raises:
        ConfigurationError: the model cannot be loaded, or something does not fit; raised on every rank.
        DiskFullError: the volume of a run that has a checkpoint has no room for more; raised on every rank.
    """
    chosen = choose_compute(settings, ranks)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if ranks.world_size > 1 else 1
    local = find_limits(ranks.device, settings.run_dir, is_shared=settings.engine_sleeps)
    limits = local.smallest(ranks.gather_json(vars(local)) if ranks.world_size > 1 else [])

    def choices() -> dict[str, Any]:
        shape = shape_of(settings)
        bytes_ = getattr(torch, chosen.compute_type).itemsize
        engine = engine_beside(settings, shape, ranks_per_node, limits.device)
        machine = Machine(ranks.world_size // ranks_per_node, ranks_per_node, bytes_, limits, engine)
        work = check(settings, shape, machine)
        changes = {
            "activation_checkpointing": work.checkpointing,
            "micro_batch_tokens": work.micro_batch_tokens,
            "shard_parameters": work.frees_parameters,
            "cpu_offload": work.has_offload,
            "record_groups": work.record_groups,
            "layout": choose_layout(settings, configs_of(settings)),
        }
        volume = needed(shape, work).total("volume") - work.record_bytes
        return {"replicas": work.replicas, "volume": volume, "changes": changes}

    found = ranks.on_main(choices, ConfigurationError, DiskFullError)
    settings = settings.model_copy(update=found["changes"] | {"layout": Layout(found["changes"]["layout"])})
    ranks = ranks.replicated(found["replicas"]).in_contexts(settings.context_parallel_size).laid_out(settings.layout)
    return settings, ranks, VolumeRoom(settings.run_dir, found["volume"])
