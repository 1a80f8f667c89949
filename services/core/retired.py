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
    "EVAL_LOST_SECONDS": "an evaluation gives up when no server has answered for 600 s",
    "EVAL_PROMPT_SECONDS": "a prompt of an evaluation may take 600 s at one server",
    "EVAL_RESAMPLES": "intervals are of 2000 resamples",
    "EVAL_START_SECONDS": "an evaluation waits 60 s for servers that run already, and an hour in a job group",
    "EVAL_WORKFLOW": "set EVAL_AGENT to an agent such as evaluation.math_agent:solve; unset, one completion answers",
}
"""The instruction for each retired variable, by the variable's name."""
