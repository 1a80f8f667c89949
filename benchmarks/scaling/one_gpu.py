"""The memory of one GPU that engine and trainer share, at its two fullest moments, with examples/one-gpu.env.

The bytes are those of the trainer's preflight. The engine's weights, keys and values follow from the model;
``ENGINE_ASLEEP`` and ``ENGINE_AWAKE``, which are the rest of it, are assumed and not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.harness import ROOT
from benchmarks.scaling.roofline import RECOMPUTES
from local_runner.spec import env_file
from scripts.launch.models import CONFIGS, MEMORY, WEIGHT_BYTES, Model
from scripts.launch.tables import table as lines
from services.engines.settings import RolloutSettings
from trainer.config import TrainerSettings
from trainer.config.sections import Checkpointing
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import ENGINE_ASLEEP, GIB, USABLE, EngineBeside, Limits, choose, needed, work_of

PRESET = ROOT / "examples/one-gpu.env"
LABELS = ("0.5B", "1.5B")
CARDS = {"16 GB": 16_000 * 2**20, "24 GB": MEMORY["L4"]}
"""Bytes that programs see of a card."""


@dataclass(frozen=True)
class Shared:
    """The bytes of a card at its two fullest moments."""

    card: int
    training: int
    """The trainer within a step, and the engine asleep."""
    generating: int
    """The trainer between steps, and the engine awake."""
    host: int
    """Memory of the machine: the trainer's, and the sleeping engine's weights."""
    recomputes: Checkpointing

    @property
    def usable(self) -> float:
        """The bytes that can be filled, as the trainer's preflight reckons them."""
        return USABLE * (self.card - ENGINE_ASLEEP) + ENGINE_ASLEEP

    @property
    def fits(self) -> bool:
        """True when both moments fit."""
        return max(self.training, self.generating) <= self.usable


def shared(model: Model, settings: TrainerSettings, engine_tokens: int, card: int) -> Shared:
    """Return the memory of a model's training and generation on a card of ``card`` bytes."""
    limits = Limits(device=card - ENGINE_ASLEEP, host=0, shm=0, volume=0)
    engine = EngineBeside(gpus=1, tokens=engine_tokens)
    flat = work_of(settings, model.shape, memory=card, nodes=1, ranks_per_node=1, compute_bytes=WEIGHT_BYTES)
    work = choose(settings, model.shape, replace(flat, engine=engine), limits)
    need = needed(model.shape, work)
    return Shared(
        card=card,
        training=need.total("device") + ENGINE_ASLEEP,
        generating=need.total("generating") + ENGINE_ASLEEP,
        host=need.total("host") + engine.weights(model.shape),
        recomputes=work.checkpointing,
    )


def table() -> str:
    """Return the memory of each model, with adapters and whole, on each card."""
    preset = {name.lower(): value for name, value in env_file(PRESET).items()}
    settings, tokens = TrainerSettings.load(**preset), RolloutSettings.load(**preset).engine_max_total_tokens
    assert tokens is not None, "the preset gives it"
    rows = []
    for label in LABELS:
        name, config = CONFIGS[label]
        model = Model(label, name, ModelShape.of(config))
        for rank in (settings.lora_rank, 0):
            for card, memory in CARDS.items():
                moments = shared(model, settings.model_copy(update={"lora_rank": rank}), tokens, memory)
                sizes = (
                    f"{size / GIB:.1f}" for size in (moments.training, moments.generating, moments.usable, moments.host)
                )
                flags = (RECOMPUTES[moments.recomputes], "yes" if moments.fits else "no")
                rows.append([f"{label} {'adapters' if rank else 'whole'}", card, *sizes, *flags])
    return "\n".join(lines(["GiB", "card", "training", "generating", "usable", "host", "recomputes", "fits"], rows))
