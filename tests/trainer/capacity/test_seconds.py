"""The seconds of a step count what decoding costs besides the weights that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainer.capacity.need import cached_tokens
from trainer.capacity.seconds import (
    MEAN_PROMPT_TOKENS,
    Batch,
    StepSeconds,
    generate_seconds,
    publish_seconds,
    train_seconds,
)
from trainer.capacity.shape import CARDS, CONFIGS, ModelShape
from trainer.capacity.work import Limits, Machine, choose, work_of
from trainer.config import TrainerSettings

H100 = CARDS["H100"]
SHAPES = {label: ModelShape.of(CONFIGS[label][1]) for label in ("0.5B", "8B")}
SMALL, LARGE = SHAPES["0.5B"], SHAPES["8B"]
BATCH = Batch(128, 16, 500, 2048)


def one_prompt_too_many() -> float:
    """Seconds by which 8B takes longer for the first prompt whose sequences wait for a place in the cache."""
    room = cached_tokens(LARGE, 1, H100.memory) / (MEAN_PROMPT_TOKENS + 500)
    fitting, more = (replace(BATCH, prompts=int(room / 16) + extra) for extra in (0, 1))
    return generate_seconds(LARGE, more, H100, 1, 1) - generate_seconds(LARGE, fitting, H100, 1, 1)


def iteration(vocabulary: int) -> float:
    """Milliseconds that 2,048 sequences add to an iteration, with so large a vocabulary."""
    shape, twice = replace(SMALL, vocabulary=vocabulary), replace(BATCH, prompts=2 * BATCH.prompts)
    more = generate_seconds(shape, twice, H100, 1, 4) - generate_seconds(shape, BATCH, H100, 1, 4)
    return 4 * more / BATCH.completion_tokens * 1000


def train_share(label: str) -> float:
    """The share of an H100's operations that training a model reaches."""
    shape, memory = SHAPES[label], H100.memory
    settings = TrainerSettings.load(batch_size=128, group_size=16, max_new_tokens=1000)
    flat = work_of(settings, shape, Machine(1, 8, 2, Limits(memory, 0, 0, 0)))
    work = choose(settings, shape, flat, Limits(memory, 0, 0, 0))
    tokens = 0.7 * 128 * (MEAN_PROMPT_TOKENS + 16 * 499)
    return 6 * shape.parameters * tokens / (8 * H100.flops) / train_seconds(shape, BATCH, H100, work)


CORRECTED: list[tuple[str, Callable[[], float], float, float]] = [
    ("sequences too many cost their part of a wave, not all 2,048 iterations", one_prompt_too_many, 0, 1),
    ("Python costs 10 to 15 microseconds a sequence and iteration", lambda: iteration(0), 2048 * 0.010, 2048 * 0.020),
    ("sampling over 152,000 entries costs some milliseconds more", lambda: iteration(151_936) - iteration(0), 4, 5),
    ("a broadcast of 8B takes more than its bytes", lambda: publish_seconds(LARGE, 3, by_volume=False), 2, 4),
    ("small models train at the share that was measured", lambda: train_share("0.5B"), 0.249, 0.251),
    ("larger ones, too", lambda: train_share("8B"), 0.389, 0.391),
]


@pytest.mark.parametrize(("why", "found", "least", "most"), CORRECTED, ids=[row[0] for row in CORRECTED])
def test_each_part_of_a_step_has_its_seconds(why: str, found: Callable[[], float], least: float, most: float) -> None:
    assert least <= found() <= most, why


def test_an_engine_decodes_at_the_speed_of_launches_beyond_1024_sequences_on_every_card() -> None:
    launches = 500 * 24 * 4e-4  # 500 iterations of 24 layers
    for card in ("L40S", "H100"):
        few, graphs, beyond = (
            generate_seconds(SMALL, replace(BATCH, prompts=prompts), CARDS[card], 1, 1) for prompts in (63, 64, 65)
        )
        assert graphs - few < launches / 4
        assert beyond - graphs > launches / 4


def test_an_asynchronous_step_takes_the_longer_part_and_a_little_for_its_age() -> None:
    seconds = StepSeconds(generate=20.0, train=10.0, publish=2.0)
    assert seconds.synchronous == 32.0
    assert 20.0 < seconds.asynchronous < 20.5
    alone = StepSeconds(generate=20.0, train=0.05, publish=0.05)
    assert alone.asynchronous > alone.synchronous, "there is nothing to hide"
