"""Variables that earlier versions read: a program that finds one set ends and says what to do instead."""

from __future__ import annotations

_FLAGS = "give --host and --port on the command line"
_ENDPOINTS = "the status page listens where JOBGROUP_ENDPOINTS says, by default on port 8004"

RETIRED: dict[str, str] = {
    "DATA_SERVER_LISTEN_HOST": _FLAGS,
    "DATA_SERVER_LISTEN_PORT": _FLAGS,
    "ROLLOUT_SERVER_LISTEN_HOST": _FLAGS,
    "ROLLOUT_SERVER_LISTEN_PORT": _FLAGS,
    "ENGINE_LISTEN_PORT": "give --engine-port on the rollout-server's command line",
    "REWARD_SERVER_LISTEN_HOST": _FLAGS,
    "REWARD_SERVER_LISTEN_PORT": _FLAGS,
    "REPLAY_BUFFER_LISTEN_HOST": _FLAGS,
    "REPLAY_BUFFER_LISTEN_PORT": _FLAGS,
    "ENVIRONMENT_SERVER_LISTEN_HOST": _FLAGS,
    "ENVIRONMENT_SERVER_LISTEN_PORT": _FLAGS,
    "EVALUATION_HEAD_LISTEN_HOST": _FLAGS,
    "EVALUATION_HEAD_LISTEN_PORT": _FLAGS,
    "TRAINER_LISTEN_HOST": _ENDPOINTS,
    "TRAINER_LISTEN_PORT": _ENDPOINTS,
    "CATEGORY_COLUMN": "the category is the column `category`; rename yours",
    "DATASET_CACHE_DIR": "set HF_DATASETS_CACHE instead, a variable of the library datasets",
    "DATA_SHUFFLE": "set CURRICULUM=source for the order of the source",
    "DATA_STATE_DIR": "cursors are kept in the run directory, below SHARED_DIR",
    "FEW_SHOT_COUNT": "it is always 4",
    "REWARD_MAX_PENDING": "it is always 20,000",
    "REWARD_OVERLONG_BUFFER_TOKENS": "set OVERLONG_BUFFER instead, the trainer's penalty for length",
    "REWARD_OVERLONG_MAX_TOKENS": "set OVERLONG_BUFFER instead, the trainer's penalty for length",
}
"""The instruction for each retired variable, by the variable's name."""
