"""The sizes of a job group that follow from a model and its nodes, by the functions of the trainer's preflight and of
``benchmarks.scaling plan``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from benchmarks.scaling import report, roofline
from benchmarks.scaling.models import CONFIGS
from benchmarks.scaling.plan import LEAST_SEQUENCES, NODE_GPUS, WEIGHT_BYTES, Batch, Layout, Model, cached_sequences
from services.core.errors import ConfigurationError, first_line
from services.rollout_server.placement import Known, split_node
from services.rollout_server.settings import EngineKind, RolloutSettings
from trainer.config import TrainerSettings
from trainer.preflight.check import Machine, NameNodes, check
from trainer.preflight.limits import Limits
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import needed

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
        return roofline.MEMORY[self.name]


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
    min_workers: int
    """MIN_WORKERS, for the GPUs that have the fewest engines."""


def parse_gpus(text: str) -> tuple[Gpus, ...]:
    """Return the GPUs of ``H100:8`` or ``H100:8,A100-80GB:8``.

    Raises:
        ConfigurationError: a card is unknown, or the text has another form.
    """
    found = []
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        if match is None or match[2] == "0":
            raise ConfigurationError(f"--gpus {text}: expected NAME:COUNT, such as H100:8 or H100:8,A100-80GB:8")
        name = next((known for known in roofline.MEMORY if known.lower() == match[1].lower()), None)
        if name is None:
            why = (
                "is unknown, and so is its memory; write it under `accelerators` of ppo-trainer and rollout-server in "
                "a copy of jobgroup.yaml, and give the copy to `sky jobs launch`"
            )
            if match[1].upper() in WITHOUT_BFLOAT16:
                why = "has no bfloat16, in which trainer and engines compute; take another card"
            raise ConfigurationError(f"--gpus {text}: {match[1]} {why}; known are {', '.join(roofline.MEMORY)}")
        found.append(Gpus(name, int(match[2] or 1)))
    return tuple(found)


def gibibytes(size: str) -> int:
    """Return the gibibytes of a volume's size in SkyPilot's form, such as ``200Gi``, ``1Ti`` or ``200``.

    Raises:
        ConfigurationError: the size has another form.
    """
    match = re.fullmatch(r"(\d+)(Gi|Ti|)", size)
    if match is None:
        raise ConfigurationError(f"volume.yaml: size {size}: expected a number with Gi or Ti, such as 200Gi")
    return int(match[1]) * (1024 if match[2] == "Ti" else 1)


def find_model(given: str) -> Model:
    """Return a model by its name on the hub, its directory, or its label in docs/scaling.md (such as 8B).

    Raises:
        ConfigurationError: there is no such model, or its configuration is not a decoder's.
    """
    for label, (name, config) in CONFIGS.items():
        if given in (label, name):
            return Model(label, name, ModelShape.of(config))
    try:
        return Model(Path(given).name, given, ModelShape.of(_config(given)))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"--model {given}: its config.json cannot be used ({first_line(error)}); give a name on the hub, a "
            f"directory with a config.json, or {', '.join(CONFIGS)}, whose shapes need no network"
        ) from error


@cache
def _config(name: str) -> PretrainedConfig:
    """Return the configuration of a model by its name; the models of docs/scaling.md need no network."""
    known = dict(CONFIGS.values())
    config: PretrainedConfig = known[name] if name in known else AutoConfig.from_pretrained(name)
    return config


def derive(
    settings: TrainerSettings, rollout_settings: RolloutSettings, model: Model, rollout: Tier, trainer: Tier
) -> Sizes:
    """Return the sizes that follow from the settings, the model and the nodes.

    Raises:
        ConfigurationError: GPUs are too small for the model; the message says what would fit.
    """
    _check_engines(settings, model, rollout.choices)
    engines = {gpus: _engines(rollout_settings, model, gpus) for gpus in rollout.choices}
    if settings.min_workers > (most := rollout.nodes * min(engines.values())):
        raise ConfigurationError(
            f"MIN_WORKERS is {settings.min_workers}, but {rollout.nodes} x {min(engines.values())} engines are {most}; "
            f"leave it out, or give more --rollout-nodes"
        )
    changes: dict[tuple[str, str], str] = {}
    volume = 0
    for gpus, rollout_gpus in _pairs(trainer.choices, rollout.choices):
        limits = Limits(device=gpus.memory, host=_ENOUGH, shm=_ENOUGH, volume=_ENOUGH)
        machine = Machine(trainer.nodes, gpus.count, WEIGHT_BYTES, limits)
        try:
            need = needed(model.shape, check(settings, model.shape, machine, _options(trainer, gpus)))
        except ConfigurationError as error:
            raise ConfigurationError(f"ppo-trainer on {gpus}: {error}") from error
        layout = Layout(rollout.nodes, rollout_gpus.count, trainer.nodes, gpus.count)
        for key, value in report.changes(model, layout, need, engines[rollout_gpus]).items():
            changes[key] = max(changes.get(key, value), value, key=_amount)
        volume = max(volume, report.volume_gibibytes(need))
    for task, tier in (("rollout-server", rollout), ("ppo-trainer", trainer)):
        changes[task, "resources.accelerators"] = f"[{', '.join(map(str, tier.choices))}]"
    return Sizes(changes, volume, report.min_workers(rollout.nodes, min(engines.values())))


def _options(trainer: Tier, gpus: Gpus) -> NameNodes:
    """Return a function that names trainer nodes by the options of ``grpo launch`` that change."""

    def name(nodes: int, count: int) -> str:
        options = [f"--trainer-nodes {nodes}"] if nodes != trainer.nodes else []
        options += [f"--gpus {gpus.name}:{count}"] if count != gpus.count else []
        return " ".join(options)

    return name


def _engines(settings: RolloutSettings, model: Model, gpus: Gpus) -> int:
    """Return the number of engines of a rollout node, as its launcher will choose it."""
    if settings.rollout_engine is EngineKind.EMBEDDED:
        return 1
    config = _config(model.name).to_dict()
    known = Known(config | config.get("text_config", {}), model.parameters * WEIGHT_BYTES, gpus.memory)
    return split_node(settings, gpus.count, lambda: known).engines


def _pairs(one: Sequence[Gpus], other: Sequence[Gpus]) -> list[tuple[Gpus, Gpus]]:
    return [(a, b) for a in one for b in other]


def _amount(size: str) -> float:
    """Return the number of ``32+``; 0 for other values."""
    return float(size.rstrip("+")) if size.rstrip("+").isdecimal() else 0


def _check_engines(settings: TrainerSettings, model: Model, choices: Sequence[Gpus]) -> None:
    """Check that the GPUs of a rollout node hold an engine's weights and the keys and values of some completions."""
    batch = replace(Batch(), completion_tokens=settings.longest_answer)
    for gpus in choices:
        if cached_sequences(model, batch, gpus.count, gpus.memory) >= LEAST_SEQUENCES:
            continue
        more = (n for n in NODE_GPUS if cached_sequences(model, batch, n, gpus.memory) >= LEAST_SEQUENCES)
        fitting = next(more, None)
        remedy = f"it fits with --rollout-gpus {gpus.name}:{fitting}" if fitting else "choose a smaller model"
        raise ConfigurationError(
            f"rollout-server on {gpus}: an engine of {model.name} needs its weights "
            f"({model.parameters * WEIGHT_BYTES / 1e9:.0f} GB) and room for {LEAST_SEQUENCES} completions of "
            f"{settings.longest_answer} tokens; a node has {gpus.count * gpus.memory / 1e9:.0f} GB; {remedy}"
        )
