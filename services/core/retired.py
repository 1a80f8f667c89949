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
    "REPLAY_EXPERIENCE_CAPACITY": "100,000 experiences without tokens are kept",
    "REPLAY_QUEUE_CAPACITY": "65,536 fresh groups may wait; further ones are refused with 429",
    "REPLAY_SEED": "give a seed with each request for samples",
    "ENVIRONMENT_SERVER_LISTEN_HOST": _FLAGS,
    "ENVIRONMENT_SERVER_LISTEN_PORT": _FLAGS,
    "EVALUATION_HEAD_LISTEN_HOST": _FLAGS,
    "EVALUATION_HEAD_LISTEN_PORT": _FLAGS,
    "TRAINER_LISTEN_HOST": _ENDPOINTS,
    "TRAINER_LISTEN_PORT": _ENDPOINTS,
}
"""The instruction for each retired variable, by the variable's name."""
