"""The comparison of a run's needs with what its nodes have: a short table in the log, and a refusal.

``preflight`` is the check on the ranks, with rank 0's choice of mesh; the dry run calls ``check`` (``__main__.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from services.core.endpoints import mapped_addresses
from services.core.errors import ConfigurationError
from services.core.files import saved_steps
from services.core.logs import get_logger
from services.core.machine import ComputeType
from services.engines.engine import choose_engine
from services.engines.placement import SizeFacts, read_config
from services.engines.settings import RolloutSettings
from trainer.config import TrainerSettings, Transport
from trainer.model.loading import choose_compute, load_config
from trainer.model.ranks import Ranks
from trainer.model.saving import DiskFullError
from trainer.model.teachers import check_teachers, load_teacher_config
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import (
    ENGINE_ASLEEP,
    GIB,
    PROMPT_TOKENS,
    USABLE,
    EngineBeside,
    Limits,
    Need,
    VolumeRoom,
    Work,
    choose,
    find_limits,
    needed,
    plan_records,
    work_of,
)

log = get_logger(__name__)


PLACES = {
    "device": "GPU memory",
    "generating": "GPU memory while the engine generates",
    "host": "host memory of a node",
    "shm": "/dev/shm",
    "volume": "the volume of the run directory",
}
ON_GPU = ("device", "generating")
LENGTHS = ("activations", "logits and backward pass")
"""Parts that are smaller for completions shorter than MAX_NEW_TOKENS. On a CPU they warn and refuse nothing."""
NODE_GPUS = (1, 2, 4, 8)
LEAST_TOKENS = 1024
"""The smallest MICRO_BATCH_TOKENS that is proposed."""
ADAPTERS = 32
"""The LORA_RANK that is proposed."""

NameNodes = Callable[[int, int], str]
"""Returns where to write a number of trainer nodes and of GPUs of a node."""


def name_in_file(nodes: int, gpus: int) -> str:
    """Return a number of nodes and GPUs with the keys of the job group's file."""
    size = f"{nodes} node{'s'[: nodes > 1]} of {gpus} GPU{'s'[: gpus > 1]}"
    return f"{size} (num_nodes and accelerators of ppo-trainer in the job group's file)"


@dataclass(frozen=True)
class Machine:
    """The ranks that a run has, and what each may use."""

    nodes: int
    ranks_per_node: int
    compute_bytes: int
    limits: Limits
    engine: EngineBeside | None = None
    """The engine on the same GPUs, if there is one."""


Way = tuple[str, TrainerSettings, Machine]
"""A change that may help: its text, and the settings and the machine with it."""


def check(settings: TrainerSettings, shape: ModelShape, machine: Machine, name_nodes: NameNodes = name_in_file) -> Work:
    """Return the work with what the settings leave open chosen; log the needs and what is there, place by place.

    Args:
        settings: the run's settings.
        shape: the model.
        machine: the ranks and what each may use.
        name_nodes: names nodes and GPUs in a refusal that proposes others.

    Raises:
        ConfigurationError: a place has too little; the message has the sizes and the setting that would fit. Or
            ACTIVATION_CHECKPOINTING is `selective` without GPUs.
        DiskFullError: the volume has too little for a run that has a checkpoint: it had enough before.
    """
    check_context(settings, shape, machine)
    work = chosen_work(settings, shape, machine)
    if work.device == "cpu" and work.checkpointing == "selective":
        raise ConfigurationError(
            "ACTIVATION_CHECKPOINTING=selective: layers are compiled only on GPUs, and the compiler chooses what to "
            "recompute; on this machine set true, false or auto"
        )
    need, limits = needed(shape, work), machine.limits
    for place, name in PLACES.items():
        if parts := _parts(need, work, place):
            sizes = {part.replace(" ", "_"): gigabytes(size) for part, size in parts.items()}
            total, there = gigabytes(sum(parts.values())), gigabytes(getattr(limits, place))
            log.info(f"preflight: {name}", needs=total, has=there, **sizes)
    if work.device == "cuda":
        _log_choice(settings, shape, machine, work, name_nodes)
    _check_limit_of_keys(settings, shape, machine, work)
    for place in PLACES:
        if not _fits(need, work, limits, place):
            resumes = place == "volume" and bool(saved_steps(settings.checkpoint_dir))
            kind = DiskFullError if resumes else ConfigurationError
            raise kind(_refusal(settings, shape, machine, work, place, name_nodes))
    if need.total("host") > limits.host:
        tokens = next(_micro_batches_that_fit(settings, shape, machine), None)
        remedy = f"MICRO_BATCH_TOKENS={tokens}" if tokens else "a smaller MAX_NEW_TOKENS, or more memory"
        log.warning("preflight: full micro-batches would not fit into memory", remedy=remedy)
    return work


def _log_choice(
    settings: TrainerSettings, shape: ModelShape, machine: Machine, work: Work, name_nodes: NameNodes
) -> None:
    """Log what was chosen for GPUs, and what would do without a slow choice that nobody asked for."""
    log.info(
        "preflight: chosen",
        activation_checkpointing=work.checkpointing,
        micro_batch_tokens=work.micro_batch_tokens,
        shard_parameters=work.frees_parameters,
        copies_of_the_state=work.replicas,
        cpu_offload=work.has_offload,
    )
    if work.has_offload and settings.cpu_offload == "auto":
        resident = settings.model_copy(update={"cpu_offload": False})
        ways = (*_settings_to_fit(resident, shape, machine), *_nodes_to_fit(resident, machine, name_nodes))
        log.warning(
            "preflight: no GPU holds the state, so it stays in host memory, and steps take longer",
            without_it=_first_fitting(shape, work, iter(ways)) or "more or larger GPUs",
        )


def _check_limit_of_keys(settings: TrainerSettings, shape: ModelShape, machine: Machine, work: Work) -> None:
    """Check that an engine on the trainer's GPUs has a limit of keys and values, if there is room for any.

    Raises:
        ConfigurationError: it has none; the message has the largest.
    """
    if machine.engine is None or machine.engine.tokens:
        return
    if tokens := engine_tokens_that_fit(settings, shape, machine, work):
        raise ConfigurationError(
            "ENGINE_MAX_TOTAL_TOKENS is unset, so SGLang would fill the GPU, which it shares with the trainer "
            f"(ENGINE_SLEEPS), before the trainer has loaded its model; set ENGINE_MAX_TOTAL_TOKENS={tokens}, which is "
            "what fits beside the trainer, or less"
        )


def check_context(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> None:
    """Check that CONTEXT_PARALLEL_SIZE divides the ranks and fits the heads of the model and its teachers.

    Raises:
        ConfigurationError: it does not; the message has the sizes that do.
    """
    sizes, size = context_sizes(shape, machine), settings.context_parallel_size
    if size not in sizes:
        models = ", ".join(f"{model.heads} and {model.kv_heads}" for model in (shape, *shape.teachers))
        raise ConfigurationError(
            f"CONTEXT_PARALLEL_SIZE is {size}, but ppo-trainer has {machine.nodes} x {machine.ranks_per_node} ranks, "
            f"which it must divide, and the model's attention and key-value heads are {models}, which cannot be shared "
            f"otherwise; allowed is {', '.join(map(str, sizes))}"
        )


def context_sizes(shape: ModelShape, machine: Machine) -> list[int]:
    """Return the values of CONTEXT_PARALLEL_SIZE that a model and its teachers allow on a machine."""
    ranks = machine.nodes * machine.ranks_per_node
    models = (shape, *shape.teachers)
    return [n for n in range(1, ranks + 1) if ranks % n == 0 and all(model.has_heads_for(n) for model in models)]


def gigabytes(size: int) -> str:
    """Return a number of bytes as text: in GiB, or below 1 GiB in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def chosen_work(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Work:
    """Return the work that settings ask for, with what they leave open chosen for the machine."""
    work = work_of(
        settings,
        shape,
        memory=machine.limits.device,
        nodes=machine.nodes,
        ranks_per_node=machine.ranks_per_node,
        compute_bytes=machine.compute_bytes,
    )
    work = choose(settings, shape, replace(work, engine=machine.engine), machine.limits)
    kept, size = plan_records(settings, machine.limits.volume - needed(shape, work).total("volume"))
    return replace(work, record_groups=kept, record_bytes=size)


def _parts(need: Need, work: Work, place: str) -> dict[str, int]:
    parts: dict[str, int] = {} if place == "device" and work.device == "cpu" else getattr(need, place)
    return parts


def _fits(need: Need, work: Work, limits: Limits, place: str) -> bool:
    there: float = getattr(limits, place) * (USABLE if place in ON_GPU else 1)
    return _size(need, work, place) <= there


def _size(need: Need, work: Work, place: str) -> int:
    """Return the bytes without which a run cannot work."""
    parts = _parts(need, work, place)
    return sum(size for part, size in parts.items() if not (place == "host" and part in LENGTHS))


def _refusal(
    settings: TrainerSettings, shape: ModelShape, machine: Machine, work: Work, place: str, name_nodes: NameNodes
) -> str:
    need = needed(shape, work)
    wanted, there = _size(need, work, place), getattr(machine.limits, place)
    largest = sorted(_parts(need, work, place).items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in largest)
    return (
        f"MODEL_NAME={settings.model_name} with {machine.nodes} x {machine.ranks_per_node} ranks needs "
        f"{gigabytes(wanted)} of {PLACES[place]} ({parts}); there is {gigabytes(there)}. "
        + _remedy(settings, shape, machine, work, place, name_nodes)
    )


def _remedy(
    settings: TrainerSettings, shape: ModelShape, machine: Machine, work: Work, place: str, name_nodes: NameNodes
) -> str:
    """Return what to change so that the place has enough."""
    wanted = _size(needed(shape, work), work, place)
    if place == "shm":
        other = ", or set PUBLISH_TRANSPORT=disk" if work.shares_versions else ""
        return f"Mount a memory volume of {math.ceil(wanted / GIB)}Gi at /dev/shm on the nodes of ppo-trainer{other}."
    if place == "volume":
        smaller = ({"record_groups": "off"}, {"checkpoints_kept": 1})
        fitting = (
            ", ".join(f"{name.upper()}={value}" for name, value in changes.items())
            for changes in smaller
            if _fits_volume(settings.model_copy(update=changes), shape, machine)
        )
        change = next(fitting, None)
        keep = f"Set {change}, or give" if change else "Give"
        # The local runner, which maps the addresses, has a directory in place of a volume.
        local = "a --shared-dir on another disk"
        size = f"`size: {math.ceil((wanted + machine.limits.volume_used) / GIB)}Gi`"
        more = local if mapped_addresses() else f"a new volume {size} or more (jobgroups/volume.yaml)"
        return f"{keep} {more}, or remove old runs (grpo clean)."
    if place == "host":
        # SkyPilot's unit of memory is 10^9 bytes, that of volumes 2^30.
        more = f"`memory: {math.ceil(wanted / 1e9)}+` in the job group's file"
        return f"Give ppo-trainer {more}, or more nodes, or set LORA_RANK={ADAPTERS}."
    kinds = (
        _settings_to_fit(settings, shape, machine),
        _nodes_to_fit(settings, machine, name_nodes),
        _fewer_keys(settings, shape, machine, work) if place == "generating" else iter(()),
        _by_volume(settings, shape, machine) if work.shares_on_gpus else iter(()),
        _offload(settings, shape, machine),
        _adapters(settings, machine),
    )
    by_settings, *others = (_first_fitting(shape, work, ways) for ways in kinds)
    if by_settings:
        return f"It fits with {by_settings}."
    if any(others):
        return f"It fits with {', or with '.join(filter(None, others))}."
    return "No number of GPUs of this size holds it; choose a smaller model."


def _fits_volume(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> bool:
    return needed(shape, chosen_work(settings, shape, machine)).total("volume") <= machine.limits.volume


def _first_fitting(shape: ModelShape, work: Work, ways: Iterator[Way]) -> str | None:
    """Return the text of the first way that takes no more memory than a GPU has."""
    for text, changed, machine in ways:
        need = needed(shape, chosen_work(changed, shape, machine))
        if all(_fits(need, work, machine.limits, place) for place in ON_GPU):
            return text
    return None


def _left_open(settings: TrainerSettings) -> TrainerSettings:
    return settings.model_copy(update={"activation_checkpointing": "auto", "shard_parameters": "auto"})


def _settings_to_fit(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Iterator[Way]:
    """Yield settings that take less memory of a GPU and train the same, the one with the least effect first."""
    open_ = _left_open(settings)
    if open_ != settings:
        yield "ACTIVATION_CHECKPOINTING=auto and SHARD_PARAMETERS=auto", open_, machine
    for tokens, smaller in _smaller_micro_batches(open_):
        yield f"MICRO_BATCH_TOKENS={tokens}", smaller, machine
    for size in context_sizes(shape, machine):
        if size > settings.context_parallel_size:
            shared = settings.model_copy(update={"context_parallel_size": size})
            yield f"CONTEXT_PARALLEL_SIZE={size}", shared, machine
            if open_ != settings:
                others = "ACTIVATION_CHECKPOINTING=auto and SHARD_PARAMETERS=auto"
                yield f"CONTEXT_PARALLEL_SIZE={size}, {others}", _left_open(shared), machine


def _nodes_to_fit(settings: TrainerSettings, machine: Machine, name_nodes: NameNodes) -> Iterator[Way]:
    """Yield more GPUs a node, then more nodes."""
    open_ = _left_open(settings)
    for nodes in range(machine.nodes, 33):
        for gpus in NODE_GPUS:
            if gpus >= machine.ranks_per_node:
                yield name_nodes(nodes, gpus), open_, replace(machine, nodes=nodes, ranks_per_node=gpus)


def _fewer_keys(settings: TrainerSettings, shape: ModelShape, machine: Machine, work: Work) -> Iterator[Way]:
    """Yield the engine with as many keys and values as fit, if they are enough for the longest completion."""
    assert machine.engine is not None, "only then is there such a place"
    tokens = engine_tokens_that_fit(settings, shape, machine, work)
    if tokens >= PROMPT_TOKENS + settings.longest_answer:
        fewer = replace(machine, engine=replace(machine.engine, tokens=tokens))
        yield f"ENGINE_MAX_TOTAL_TOKENS={tokens}", settings, fewer


def _by_volume(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Iterator[Way]:
    """Yield versions that no GPU has as a whole, then with the state in host memory."""
    by_volume = settings.model_copy(update={"publish_transport": Transport.DISK})
    yield "PUBLISH_TRANSPORT=disk", by_volume, machine
    for text, moved, there in _offload(by_volume, shape, machine):
        yield f"PUBLISH_TRANSPORT=disk, {text}", moved, there


def engine_tokens_that_fit(settings: TrainerSettings, shape: ModelShape, machine: Machine, work: Work) -> int:
    """Return the most tokens, a multiple of 1024, whose keys and values fit beside the trainer; at least 0."""
    assert machine.engine is not None, "only then does an engine share the GPUs"
    need = needed(shape, work)
    others = need.total("generating") - need.generating["keys and values"]
    left = USABLE * machine.limits.generating - others
    return max(0, int(left / machine.engine.token_bytes(shape)) // 1024 * 1024)


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
    return EngineBeside(split.tensor_parallel, tokens, number_bytes, keeps_weights=engine.keeps_weights_asleep)


def _offload(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Iterator[Way]:
    """Yield the state in host memory, with the memory that a node then needs."""
    if settings.lora_rank or settings.cpu_offload is True:
        return
    moved = _left_open(settings).model_copy(update={"cpu_offload": True})
    host = needed(shape, chosen_work(moved, shape, machine)).total("host")
    yield f"CPU_OFFLOAD=true and {gigabytes(host)} of host memory on each node", moved, machine


def _adapters(settings: TrainerSettings, machine: Machine) -> Iterator[Way]:
    """Yield adapters in place of the whole model, with smaller and smaller micro-batches."""
    if settings.lora_rank:
        return
    adapters = _left_open(settings).model_copy(update={"lora_rank": ADAPTERS})
    yield f"LORA_RANK={ADAPTERS}", adapters, machine
    for tokens, smaller in _smaller_micro_batches(adapters):
        yield f"LORA_RANK={ADAPTERS} and MICRO_BATCH_TOKENS={tokens}", smaller, machine


def _smaller_micro_batches(settings: TrainerSettings) -> Iterator[tuple[int, TrainerSettings]]:
    """Yield smaller values of MICRO_BATCH_TOKENS, the greatest first, with the settings that have them."""
    tokens = settings.micro_batch_tokens // 2
    while tokens >= LEAST_TOKENS:
        yield tokens, settings.model_copy(update={"micro_batch_tokens": tokens})
        tokens //= 2


def _micro_batches_that_fit(settings: TrainerSettings, shape: ModelShape, machine: Machine) -> Iterator[int]:
    """Yield the values of MICRO_BATCH_TOKENS with which everything fits into a node's memory, the greatest first."""
    for tokens, smaller in _smaller_micro_batches(settings):
        if needed(shape, chosen_work(smaller, shape, machine)).total("host") <= machine.limits.host:
            yield tokens


def shape_of(settings: TrainerSettings) -> ModelShape:
    """Return the shape of MODEL_NAME with those of the teachers beside it, which can teach it.

    Raises:
        ConfigurationError: a configuration cannot be loaded, or a teacher cannot teach this student.
    """
    check_teachers(settings)
    configs = [load_config(settings), *(load_teacher_config(settings, name) for name in settings.teacher_models)]
    shape, *teachers = (ModelShape.of(config, trust_remote_code=settings.trust_remote_code) for config in configs)
    return replace(shape, teachers=tuple(teachers))


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

    def choose() -> dict[str, Any]:
        shape = shape_of(settings)
        bytes_ = getattr(torch, chosen.compute_type).itemsize
        engine = engine_beside(settings, shape, ranks_per_node, limits.device)
        machine = Machine(ranks.world_size // ranks_per_node, ranks_per_node, bytes_, limits, engine)
        work = check(settings, shape, machine)
        return {
            "replicas": work.replicas,
            "checkpointing": work.checkpointing,
            "tokens": work.micro_batch_tokens,
            "frees": work.frees_parameters,
            "offload": work.has_offload,
            "record_groups": work.record_groups,
            "volume": needed(shape, work).total("volume") - work.record_bytes,
        }

    choices = ranks.on_main(choose, ConfigurationError, DiskFullError)
    changes = {
        "activation_checkpointing": choices["checkpointing"],
        "micro_batch_tokens": choices["tokens"],
        "shard_parameters": choices["frees"],
        "cpu_offload": choices["offload"],
        "record_groups": choices["record_groups"],
    }
    room = VolumeRoom(settings.run_dir, choices["volume"])
    ranks = ranks.replicated(choices["replicas"]).in_contexts(settings.context_parallel_size)
    return settings.model_copy(update=changes), ranks, room
