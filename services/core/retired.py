"""Variables that earlier versions read: a program that finds one ends and says what to do instead."""

from __future__ import annotations

RETIRED: dict[str, str] = {
    # data-server
    "CATEGORY_COLUMN": "the category is the column `category`; rename yours",
    "DATASET_CACHE_DIR": "set HF_DATASETS_CACHE instead, a variable of the library datasets",
    "DATA_SHUFFLE": "set CURRICULUM=source for the order of the source",
    "DATA_STATE_DIR": "cursors are kept in the run directory, below SHARED_DIR",
    "FEW_SHOT_COUNT": "it is always 4",
    # reward-server
    "REWARD_MAX_PENDING": "it is always 20,000",
    "REWARD_OVERLONG_BUFFER_TOKENS": "set OVERLONG_BUFFER instead, the trainer's penalty for length",
    "REWARD_OVERLONG_MAX_TOKENS": "set OVERLONG_BUFFER instead, the trainer's penalty for length",
}
"""By name: what holds now, or what to set instead."""
