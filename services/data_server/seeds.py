"""Seeds as prompts, for ROLLOUT=environment: an episode of an environment begins with a seed instead of a question."""

from __future__ import annotations

import pyarrow as pa

TRAINING = range(10_000)
HELD_OUT = range(10_000, 11_000)
"""No held-out seed is a training seed, whatever DATA_SEED is."""


def tables() -> tuple[pa.Table, pa.Table]:
    """Return training and held-out seeds, with the columns question, answer and ground_truth, all of them text."""
    train, held_out = (
        pa.table(
            {
                "question": [f"The episode of seed {seed}" for seed in split],
                "answer": [str(seed) for seed in split],
                "ground_truth": [str(seed) for seed in split],
            }
        )
        for split in (TRAINING, HELD_OUT)
    )
    return train, held_out
