"""The sizes of a job group that follow from a model and its nodes, by the functions of the trainer's preflight.

``benchmarks.scaling`` plans with the same functions how many nodes a model needs.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.launch.models import MEMORY, WEIGHT_BYTES, Model, config_of, find_model
from services.core.errors import ConfigurationError
from services.engines.engine import choose_engine
from services.engines.placement import SizeFacts, Split
from services.engines.settings import RolloutSettings
from trainer.config import TrainerSettings
from trainer.preflight.check import Machine, NameNodes, check
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import (
    ENGINE_ASLEEP,
    GIB,
    PROCESS_BYTES,
    PROMPT_TOKENS,
    USABLE,
    EngineBeside,
    Limits,
    Need,
    needed,
)

PRESET = Path(__file__).parents[2] / "examples/gpu.env"
"""Settings of a batch that fills GPUs."""
NODE_GPUS = (1, 2, 4, 8)
GPU = "H100"
"""The card of a plan."""
MEAN_PROMPT_TOKENS = 150
"""Mean length of a prompt, as far as an engine's cache is concerned."""
LEAST_SEQUENCES = 16
"""Completions that an engine must be able to hold at the same time."""
DISK_SECONDS = 1.0
"""Publishing through the volume stays if it takes no longer, because a restarted worker needs the volume anyway."""
_ENOUGH = 1 << 62
"""Bytes of a place whose size is derived and not given."""
WITHOUT_BFLOAT16 = ("T4", "V100", "V100-32GB", "P100", "P40", "P4", "M60", "K80", "RTX6000")
"""Cards before Ampere, by SkyPilot's names."""
_GPUS = re.compile(r"([A-Za-z0-9-]+)(?::(\d+))?")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node: SkyPilot's name of the card, and the number."""

    name: str
    count: int

    def __str__(self) -> str:
        """Return the GPUs as SkyPilot writes them."""
        return f"{self.name}:{self.count}"

    @property
    def memory(self) -> int:
        """Bytes of one GPU."""
        return MEMORY[self.name]


@dataclass(frozen=True)
class Tier:
    """The nodes of rollout-server or ppo-trainer."""

    nodes: int
    choices: tuple[Gpus, ...]
    """The GPUs of a node, in the order in which SkyPilot tries them."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a job group that follow from its model and its nodes."""

    changes: dict[tuple[str, str], str]
    """The values to write into the job group, by task and key."""
    volume: int
    """Gibibytes of the volume."""
    derived: dict[str, str]
    """The settings that follow: MIN_WORKERS for the GPUs that have the fewest engines, and on GPUs that the trainer
    shares ENGINE_MAX_TOTAL_TOKENS for those with the least room."""
    need: Need
    """The trainer's bytes on the first choice of GPUs."""


@dataclass(frozen=True)
class Assumptions:
    """Values that depend on a cluster; measured values should replace them."""

    train_utilisation: float = 0.30
    """Share of the FLOP/s that forward and backward passes reach."""
    prefill_utilisation: float = 0.40
    decode_utilisation: float = 0.50
    """Share of the memory's bandwidth that decoding reaches."""
    iteration_overhead: float = 0.004
    """Seconds of a decoding iteration besides reading memory: scheduling, sampling, tensor parallel exchange."""
    node_bandwidth: float = 25e9
    """Bytes a second between nodes: gradients, gathered parameters, broadcast weights."""
    volume_bandwidth: float = 2e9
    """Bytes a second of the shared volume, for all its readers together."""
    cache_share: float = 0.85
    """Share of an engine's memory for weights and caches."""


ASSUMED = Assumptions()


@dataclass(frozen=True)
class Layout:
    """The numbers of nodes and of GPUs of a node."""

    rollout_nodes: int
    rollout_gpus: int
    """GPUs of a node; one engine spans them all."""
    trainer_nodes: int
    trainer_gpus: int
    rollout_card: str = GPU
    trainer_card: str = GPU
    shares_gpus: bool = False
    """The engines' nodes and GPUs are the trainer's."""

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        rollout = 0 if self.shares_gpus else self.rollout_nodes * self.rollout_gpus
        return rollout + self.trainer_nodes * self.trainer_gpus


def parse_gpus(text: str) -> tuple[Gpus, ...]:
    """Return the GPUs of ``H100:8`` or ``H100:8,A100-80GB:8``.

    Raises:
        ConfigurationError: a card is unknown, or the text has another form.
    """
    choices = []
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        if match is None or match[2] == "0":
            raise ConfigurationError(f"--gpus {text}: expected NAME:COUNT, such as H100:8 or H100:8,A100-80GB:8")
        name = next((card for card in MEMORY if card.lower() == match[1].lower()), None)
        if name is None:
            why = (
                "is unknown, and so is its memory; write it under `accelerators` of ppo-trainer and rollout-server in "
                "a copy of jobgroup.yaml, and give the copy to `sky jobs launch`"
            )
            if match[1].upper() in WITHOUT_BFLOAT16:
                why = "has no bfloat16, in which trainer and engines compute; take another card"
            raise ConfigurationError(f"--gpus {text}: {match[1]} {why}; known are {', '.join(MEMORY)}")
        choices.append(Gpus(name, int(match[2] or 1)))
    return tuple(choices)


def gibibytes(size: str) -> int:
    """Return the gibibytes of a volume's size in SkyPilot's form, such as ``200Gi``, ``1Ti`` or ``200``.

    Raises:
        ConfigurationError: the size has another form.
    """
    match = re.fullmatch(r"(\d+)(Gi|Ti|)", size)
    if match is None:
        raise ConfigurationError(f"jobgroups/volume.yaml: size {size}: expected a number with Gi or Ti, such as 200Gi")
    return int(match[1]) * (1024 if match[2] == "Ti" else 1)


def derive(
    settings: TrainerSettings, rollout_settings: RolloutSettings, model: Model, rollout: Tier | None, trainer: Tier
) -> Sizes:
    """Return the sizes that follow from the settings, the model and the nodes; without ``rollout`` they are colocated.

    Raises:
        ConfigurationError: GPUs are too small for the model; the message says what would fit.
    """
    # By default records take a part of the volume's room, whatever its size.
    settings = settings.model_copy(update={"record_groups": settings.record_groups or "off"})
    shape = replace(model.shape, teachers=tuple(find_model(name).shape for name in settings.teacher_models))
    if rollout is None:
        return _derive_colocated(settings, rollout_settings, model, shape, trainer)
    _check_engines(settings, model, rollout.choices)
    engines = {gpus: engines_of(rollout_settings, model, gpus) for gpus in rollout.choices}
    if settings.min_workers > (most := rollout.nodes * min(engines.values())):
        raise ConfigurationError(
            f"MIN_WORKERS is {settings.min_workers}, but {rollout.nodes} x {min(engines.values())} engines are {most}; "
            f"leave it out, or give more --rollout-nodes"
        )
    written: dict[tuple[str, str], str] = {}
    volume, needs = 0, {gpus: trainer_need(settings, shape, trainer, gpus) for gpus in trainer.choices}
    for gpus, rollout_gpus in itertools.product(trainer.choices, rollout.choices):
        need = needs[gpus]
        layout = Layout(rollout.nodes, rollout_gpus.count, trainer.nodes, gpus.count)
        for key, value in changes(model, layout, need, engines[rollout_gpus]).items():
            written[key] = max(written.get(key, value), value, key=_amount)
        volume = max(volume, volume_gibibytes(need))
    for task, tier in (("rollout-server", rollout), ("ppo-trainer", trainer)):
        written[task, "resources.accelerators"] = f"[{', '.join(map(str, tier.choices))}]"
    derived = {"MIN_WORKERS": str(min_workers(rollout.nodes, min(engines.values())))}
    return Sizes(written, volume, derived, needs[trainer.choices[0]])


def _derive_colocated(
    settings: TrainerSettings, rollout_settings: RolloutSettings, model: Model, shape: ModelShape, trainer: Tier
) -> Sizes:
    """Return the sizes of a group whose trainer's nodes run the engines; see ``derive``."""
    written: dict[tuple[str, str], str] = {}
    volume, tokens, engines = 0, sys.maxsize, sys.maxsize
    needs: list[Need] = []
    # Room for one answer, if not for those of the settings; what is left over comes after that.
    least = PROMPT_TOKENS + settings.longest_answer
    for gpus in trainer.choices:
        split = split_of(rollout_settings, model, gpus)
        beside = EngineBeside(split.tensor_parallel, rollout_settings.engine_max_total_tokens or least)
        need = trainer_need(settings, shape, trainer, gpus, beside)
        left = USABLE * (gpus.memory - ENGINE_ASLEEP) - need.total("generating")
        step = math.ceil(settings.batch_size * settings.largest_group / (trainer.nodes * split.engines)) * least
        fits = beside.tokens + int(left / beside.token_bytes(shape))
        tokens, engines = min(tokens, fits, max(step, least)), min(engines, split.engines)
        host = need.total("host") + need.total("shm")
        host += split.engines * model.parameters * WEIGHT_BYTES + gpus.count * PROCESS_BYTES
        sizes = {"cpus": _rollout_cpus(gpus.count, split.engines) + 8, "memory": _rounded(96, host / GIB)}
        for key, size in sizes.items():
            name = ("ppo-trainer", f"resources.{key}")
            written[name] = max(written.get(name, ""), f"{size}+", key=_amount)
        volume = max(volume, volume_gibibytes(need))
        needs.append(need)
    written["ppo-trainer", "num_nodes"] = str(trainer.nodes)
    written["ppo-trainer", "resources.accelerators"] = f"[{', '.join(map(str, trainer.choices))}]"
    tokens = max(tokens // 1024 * 1024, least)
    derived = {"MIN_WORKERS": min_workers(trainer.nodes, engines), "ENGINE_MAX_TOTAL_TOKENS": tokens}
    return Sizes(written, volume, {name: str(value) for name, value in derived.items()}, needs[0])


def trainer_need(
    settings: TrainerSettings, shape: ModelShape, trainer: Tier, gpus: Gpus, beside: EngineBeside | None = None
) -> Need:
    """Return the bytes that the trainer needs on nodes with ``gpus``, which it shares with an engine if there is one.

    Raises:
        ConfigurationError: the GPUs are too small; the message says what would fit.
    """
    memory = gpus.memory - (ENGINE_ASLEEP if beside else 0)
    limits = Limits(device=memory, host=_ENOUGH, shm=_ENOUGH, volume=_ENOUGH)
    machine = Machine(trainer.nodes, gpus.count, WEIGHT_BYTES, limits, beside)
    # A node has as much memory as is asked for, and so would always offload rather than take more nodes.
    settings = settings.model_copy(update={"cpu_offload": settings.cpu_offload is True})
    try:
        return needed(shape, check(settings, shape, machine, _options(trainer, gpus)))
    except ConfigurationError as error:
        raise ConfigurationError(f"ppo-trainer on {gpus}: {error}") from error


def _options(trainer: Tier, gpus: Gpus) -> NameNodes:
    """Return a function that names trainer nodes by the options of ``grpo launch`` that change."""

    def name(nodes: int, count: int) -> str:
        options = [f"--trainer-nodes {nodes}"] if nodes != trainer.nodes else []
        options += [f"--gpus {gpus.name}:{count}"] if count != gpus.count else []
        return " ".join(options)

    return name


def engines_of(settings: RolloutSettings, model: Model, gpus: Gpus) -> int:
    """Return the number of engines of a rollout node, as its launcher will choose it."""
    return split_of(settings, model, gpus).engines


def split_of(settings: RolloutSettings, model: Model, gpus: Gpus) -> Split:
    """Return the engines into which a launcher will split the GPUs of its node."""

    def facts() -> SizeFacts:
        config = config_of(model.name).to_dict()
        return SizeFacts(config | config.get("text_config", {}), model.parameters * WEIGHT_BYTES, gpus.memory)

    return choose_engine(settings, gpus.count).split(settings, gpus.count, facts)


def _amount(size: str) -> float:
    """Return the number of ``32+``; 0 for other values."""
    return float(size.rstrip("+")) if size.rstrip("+").isdecimal() else 0


def _check_engines(settings: TrainerSettings, model: Model, choices: Sequence[Gpus]) -> None:
    """Check that the GPUs of a rollout node hold an engine's weights and the keys and values of some completions."""
    tokens = MEAN_PROMPT_TOKENS + settings.longest_answer
    for gpus in choices:
        if cached_sequences(model, tokens, gpus.count, gpus.memory) >= LEAST_SEQUENCES:
            continue
        more = (n for n in NODE_GPUS if cached_sequences(model, tokens, n, gpus.memory) >= LEAST_SEQUENCES)
        fitting = next(more, None)
        remedy = f"it fits with --rollout-gpus {gpus.name}:{fitting}" if fitting else "choose a smaller model"
        raise ConfigurationError(
            f"rollout-server on {gpus}: an engine of {model.name} needs its weights "
            f"({model.parameters * WEIGHT_BYTES / 1e9:.0f} GB) and room for {LEAST_SEQUENCES} completions of "
            f"{settings.longest_answer} tokens; a node has {gpus.count * gpus.memory / 1e9:.0f} GB; {remedy}"
        )


def cached_sequences(model: Model, tokens: int, gpus: int, memory: float) -> int:
    """Return how many sequences of ``tokens`` an engine's cache holds; 0 if the weights leave no room.

    ``memory`` is that of each of the engine's GPUs, in bytes.
    """
    free = gpus * memory * ASSUMED.cache_share - model.parameters * WEIGHT_BYTES
    return max(0, int(free / (model.kv_bytes * tokens)))


def publishing(model: Model, layout: Layout) -> tuple[str, float]:
    """Return PUBLISH_TRANSPORT and its seconds: every node reads the version from the volume, or gets a broadcast.

    On one node that engines and trainer share, the version is copied from GPU to GPU.
    """
    seconds = publish_seconds(model, layout)
    if layout.shares_gpus:
        transport = "local" if layout.trainer_nodes == 1 else "disk"
        return transport, seconds["broadcast" if transport == "local" else "disk"]
    transport = "disk" if seconds["disk"] <= max(DISK_SECONDS, seconds["broadcast"]) else "broadcast"
    return transport, seconds[transport]


def publish_seconds(model: Model, layout: Layout) -> dict[str, float]:
    """Return the seconds of publishing by PUBLISH_TRANSPORT."""
    size = model.parameters * WEIGHT_BYTES
    return {
        "disk": size * (1 + layout.rollout_nodes) / ASSUMED.volume_bandwidth,
        "broadcast": size / ASSUMED.node_bandwidth,
    }


def changes(model: Model, layout: Layout, need: Need, engines: int = 1) -> dict[tuple[str, str], str]:
    """Return the values to write into jobgroup.yaml, by task and key.

    Args:
        model: the model.
        layout: the nodes and their GPUs.
        need: the trainer's bytes.
        engines: engines of a rollout node, which share its GPUs. Each may hold a copy of the weights while it loads
            a version, and has a process for each of its GPUs.
    """
    rollout = engines * model.parameters * WEIGHT_BYTES + layout.rollout_gpus * PROCESS_BYTES
    return {
        ("rollout-server", "num_nodes"): str(layout.rollout_nodes),
        ("rollout-server", "resources.accelerators"): f"{layout.rollout_card}:{layout.rollout_gpus}",
        ("rollout-server", "resources.cpus"): f"{_rollout_cpus(layout.rollout_gpus, engines)}+",
        ("rollout-server", "resources.memory"): f"{_rounded(32, rollout / GIB)}+",
        ("ppo-trainer", "num_nodes"): str(layout.trainer_nodes),
        ("ppo-trainer", "resources.accelerators"): f"{layout.trainer_card}:{layout.trainer_gpus}",
        ("ppo-trainer", "resources.memory"): f"{_rounded(64, (need.total('host') + need.total('shm')) / GIB)}+",
    }


def volume_gibibytes(need: Need) -> int:
    """Return the size of the shared volume for one run, in hundreds, with a fifth for what else is on it."""
    return max(200, math.ceil(need.total("volume") * 1.2 / GIB / 100) * 100)


def min_workers(rollout_nodes: int, engines: int = 1) -> int:
    """Return MIN_WORKERS: a run continues with half of its workers, of which a rollout node has ``engines``."""
    return max(1, rollout_nodes * engines // 2)


def _rollout_cpus(gpus: int, engines: int) -> int:
    """Return the CPUs of a rollout node, in eights: one for each busy process.

    SGLang has a scheduler for each GPU, and for each engine an HTTP server with the tokenizer, and a detokenizer. The
    launcher and the router take one each.
    """
    return math.ceil((gpus + 2 * engines + 2) / 8) * 8


def _rounded(least: int, needed: float) -> int:
    """Return the gigabytes of a node: the present value, or a quarter more than needed."""
    return max(least, math.ceil(needed * 1.25 / 32) * 32)
