"""The sizes of a job group that follow from its model and its nodes, by the trainer's capacity model."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.settings import Method
from services.engines.engine import choose_engine
from services.engines.placement import SizeFacts, Split
from services.engines.settings import RolloutSettings
from trainer.capacity.check import check, engine_tokens
from trainer.capacity.need import ENGINE_ASLEEP, GIB, PROCESS_BYTES, EngineBeside, Work, cached_tokens, needed
from trainer.capacity.seconds import (
    MEAN_PROMPT_TOKENS,
    WEIGHT_BYTES,
    Batch,
    StepSeconds,
    generate_seconds,
    publish_seconds,
    train_seconds,
)
from trainer.capacity.shape import CARDS, Card, Model, ModelShape, find_model
from trainer.capacity.work import PROMPT_TOKENS, Limits, Machine
from trainer.config import Rollout, TrainerSettings, Transport

LEAST_SEQUENCES = 16
"""Completions that an engine must be able to hold at the same time."""
_ENOUGH = 1 << 62
"""Bytes of a place whose size is derived and not given."""
_GPUS = re.compile(r"([A-Za-z0-9-]+)(?::([1-9]\d*))?")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node: SkyPilot's name of the card, and the number."""

    name: str
    count: int

    def __str__(self) -> str:
        """Return the GPUs as SkyPilot writes them."""
        return f"{self.name}:{self.count}"

    @property
    def card(self) -> Card:
        """The card."""
        return CARDS[self.name]


@dataclass(frozen=True)
class Tier:
    """The nodes of rollout-server or ppo-trainer."""

    nodes: int
    choices: tuple[Gpus, ...]
    """The GPUs of a node, in the order in which SkyPilot tries them."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a job group that follow from its model and its nodes."""

    seconds: StepSeconds | None
    """The forecast of a step; None on shared GPUs, with METHOD=sft, and for agents and environments, whose own time is
    unknown."""
    resources: dict[tuple[str, str], str]
    """The CPUs and gigabytes of the nodes, by task and key."""
    settings: dict[str, str]
    """MIN_WORKERS for the GPUs that have the fewest engines, and on GPUs that the trainer shares
    ENGINE_MAX_TOTAL_TOKENS for those with the least room."""
    volume: int
    """Gibibytes of the volume."""


def parse_gpus(text: str) -> tuple[Gpus, ...]:
    """Return the GPUs of ``H100:8`` or ``H100:8,A100-80GB:8``.

    Raises:
        ConfigurationError: a card is unknown, or the text has another form.
    """
    cards = {name.lower(): name for name in CARDS}
    choices = []
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        if match is None or match[1].lower() not in cards:
            raise ConfigurationError(
                f"--gpus {text}: give NAME:COUNT, such as H100:8 or H100:8,A100-80GB:8, of {', '.join(CARDS)}; for "
                "another card that computes in bfloat16, write `accelerators` into a copy of jobgroup.yaml"
            )
        choices.append(Gpus(cards[match[1].lower()], int(match[2] or 1)))
    return tuple(choices)


def derive(
    settings: TrainerSettings,
    rollout_settings: RolloutSettings,
    model: Model,
    tiers: Mapping[str, Tier],
) -> Sizes:
    """Return the sizes that follow from the settings, the model and the nodes; without a rollout tier it is colocated.

    Raises:
        ConfigurationError: GPUs are too small for the model.
    """
    # By default records take a part of the volume's room, whatever its size.
    settings = settings.model_copy(update={"record_groups": settings.record_groups or "off"})
    shape = replace(model.shape, teachers=tuple(find_model(name).shape for name in settings.teacher_models))
    trainer, is_colocated = tiers[Task.TRAINER], Task.ROLLOUT_SERVER not in tiers
    rollout = trainer if is_colocated else tiers[Task.ROLLOUT_SERVER]
    if not is_colocated:
        _check_engines(settings, model, rollout)
    splits = {gpus: _split(rollout_settings, model, gpus) for gpus in rollout.choices}
    work, memory, volume, tokens = _of_trainer(
        settings, rollout_settings, shape, trainer, splits if is_colocated else {}
    )
    seconds = None
    is_known = all(own.rollout is Rollout.COMPLETION for own in settings.by_source().values())
    if is_known and not is_colocated and settings.method is Method.RL:
        seconds = _forecast(settings, model, rollout, splits[rollout.choices[0]].engines, trainer.choices[0], work)
    engines = rollout.nodes * min(split.engines for split in splits.values())
    if settings.min_workers > engines:
        problem = f"MIN_WORKERS is {settings.min_workers}, but {rollout.nodes} nodes have {engines} engines"
        raise ConfigurationError(f"{problem}; leave it out, or give more --rollout-nodes")
    follows = {"MIN_WORKERS": max(1, engines // 2)}  # a run continues with half of its workers
    if is_colocated:
        follows["ENGINE_MAX_TOTAL_TOKENS"] = tokens
    # In hundreds, with a fifth for what else is on the volume.
    hundreds = max(2, math.ceil(volume * 1.2 / GIB / 100))
    resources = _resources(shape, splits, memory, is_colocated=is_colocated)
    return Sizes(seconds, resources, {name: str(n) for name, n in follows.items()}, 100 * hundreds)


def _of_trainer(
    settings: TrainerSettings,
    rollout_settings: RolloutSettings,
    shape: ModelShape,
    trainer: Tier,
    splits: Mapping[Gpus, Split],
) -> tuple[Work, int, int, int]:
    """Return the trainer's work on the first choice of GPUs, and the most that any choice needs of each other place.

    These are the bytes of a node's memory and of the volume. The last number is ENGINE_MAX_TOTAL_TOKENS of the engines
    that ``splits`` places on the trainer's GPUs, by the choice that has the least room for them.
    """
    least = PROMPT_TOKENS + settings.longest_answer
    works, memory, volume, tokens = [], 0, 0, sys.maxsize
    for gpus in trainer.choices:
        beside, engine_bytes = None, 0
        if split := splits.get(gpus):
            beside = EngineBeside(split.tensor_parallel, rollout_settings.engine_max_total_tokens or least)
            engine_bytes = _engine_bytes(shape, gpus, split)
            share = settings.batch_size * settings.largest_group / (trainer.nodes * split.engines)
            tokens = min(tokens, math.ceil(share) * least)
        work, limits = _trainer_work(settings, shape, trainer.nodes, gpus, beside)
        tokens = min(tokens, engine_tokens(shape, work, limits)) if beside else tokens
        need = needed(shape, work)
        memory = max(memory, need.total("host") + need.total("shm") + engine_bytes)
        volume = max(volume, need.total("volume"))
        works.append(work)
    return works[0], memory, volume, max(tokens // 1024 * 1024, least)


def _resources(
    shape: ModelShape, splits: Mapping[Gpus, Split], memory: int, *, is_colocated: bool
) -> dict[tuple[str, str], str]:
    """Return the CPUs and gigabytes of the nodes, by task and key; ``memory`` is of a trainer node."""
    # SGLang has a scheduler for each GPU, and for each engine an HTTP server with the tokenizer, and a detokenizer. The
    # launcher and the router take one each, and the trainer eight.
    cpus = max(math.ceil((gpus.count + 2 * split.engines + 2) / 8) * 8 for gpus, split in splits.items())
    gigabytes = f"{_gigabytes(96 if is_colocated else 64, memory)}+"
    trainer: dict[tuple[str, str], str] = {(Task.TRAINER, "resources.memory"): gigabytes}
    if is_colocated:
        return trainer | {(Task.TRAINER, "resources.cpus"): f"{cpus + 8}+"}
    most = max(_engine_bytes(shape, gpus, split) for gpus, split in splits.items())
    return trainer | {
        (Task.ROLLOUT_SERVER, "resources.cpus"): f"{cpus}+",
        (Task.ROLLOUT_SERVER, "resources.memory"): f"{_gigabytes(32, most)}+",
    }


def _engine_bytes(shape: ModelShape, gpus: Gpus, split: Split) -> int:
    """Return the host memory of a node's engines: each may hold a copy of the weights while it loads a version."""
    return split.engines * shape.parameters * WEIGHT_BYTES + gpus.count * PROCESS_BYTES


def _forecast(
    settings: TrainerSettings, model: Model, rollout: Tier, engines: int, trainer: Gpus, work: Work
) -> StepSeconds:
    """Return the seconds of a step with rollout nodes that have ``engines`` engines each on their first choice."""
    batch, by_volume, gpus = Batch.of(settings), settings.publish_transport is Transport.DISK, rollout.choices[0]
    return StepSeconds(
        generate_seconds(model.shape, batch, gpus.card, gpus.count // engines, rollout.nodes * engines),
        train_seconds(model.shape, batch, trainer.card, work),
        publish_seconds(model.shape, rollout.nodes, by_volume=by_volume),
    )


def _split(settings: RolloutSettings, model: Model, gpus: Gpus) -> Split:
    """Return the engines into which a launcher will split the GPUs of its node."""
    facts = SizeFacts(model.config, model.shape.parameters * WEIGHT_BYTES, gpus.card.memory)
    return choose_engine(settings, gpus.count).split(settings, gpus.count, lambda: facts)


def _trainer_work(
    settings: TrainerSettings, shape: ModelShape, nodes: int, gpus: Gpus, beside: EngineBeside | None
) -> tuple[Work, Limits]:
    """Return the trainer's work on nodes with ``gpus``, which it may share with an engine, and what a rank has.

    Raises:
        ConfigurationError: the GPUs are too small.
    """
    limits = Limits(gpus.card.memory - (ENGINE_ASLEEP if beside else 0), _ENOUGH, _ENOUGH, _ENOUGH)
    # A node has as much memory as is asked for, and so would always offload rather than take more nodes.
    settings = settings.model_copy(update={"cpu_offload": settings.cpu_offload is True})
    try:
        return check(settings, shape, Machine(nodes, gpus.count, WEIGHT_BYTES, limits, beside)), limits
    except ConfigurationError as error:
        raise ConfigurationError(f"ppo-trainer on {gpus}: {error}") from error


def _check_engines(settings: TrainerSettings, model: Model, rollout: Tier) -> None:
    """Check that the GPUs of a rollout node hold an engine's weights and the keys and values of some completions."""
    tokens = LEAST_SEQUENCES * (MEAN_PROMPT_TOKENS + settings.longest_answer)
    for gpus in rollout.choices:
        if cached_tokens(model.shape, gpus.count, gpus.card.memory) < tokens:
            weights, has = (n / 1e9 for n in (model.shape.parameters * WEIGHT_BYTES, gpus.count * gpus.card.memory))
            raise ConfigurationError(
                f"rollout-server on {gpus}: an engine of MODEL_NAME={model.name} needs {weights:.0f} GB of weights and "
                f"keys and values of {tokens} tokens, but a node has {has:.0f} GB; lower MAX_NEW_TOKENS, or give more "
                "or larger --rollout-gpus"
            )


def _gigabytes(least: int, needed: float) -> int:
    """Return the gigabytes of a node: the present value, or a quarter more than needed."""
    return max(least, math.ceil(needed * 1.25 / GIB / 32) * 32)
