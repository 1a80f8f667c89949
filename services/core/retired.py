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
    "ENVIRONMENT_IDLE_SECONDS": "an episode that nobody steps for five minutes is dropped",
    "ENVIRONMENT_MAX_EPISODES": "a server holds up to 1,024 episodes; start another server for more",
    "DISCOVERY_SECONDS": "environment servers are looked for every 30 seconds, and at POST /discover",
    "DISCOVERY_TIMEOUT_SECONDS": "SkyPilot's API server has 60 seconds to answer",
    "HEAD_DRIVE": "set HEAD_DRIVE_EPISODES=0 to leave discovered servers alone",
    "HEAD_DRIVE_SEED": "the first episode on each server has seed 0; play more with HEAD_DRIVE_TOTAL",
    "HEAD_EPISODE_IDLE_SECONDS": "an episode that nothing is heard of for five minutes counts as lost",
    "HEAD_LLM_SECONDS": "a language model has 120 seconds to answer; lower HEAD_LLM_MAX_TOKENS if that is too short",
    "HEAD_MAX_EPISODE_STEPS": "an episode is given up after 100,000 steps; lower ENVIRONMENT_MAX_STEPS on its server",
    "HEAD_MAX_WAITING": "up to 4,096 states wait for a policy",
    "HEAD_PROBE_SECONDS": "discovered servers are asked for their health every 5 seconds",
    "HEAD_RELOAD_SECONDS": "new policy versions are looked for every 5 seconds",
    "HEAD_SILENT_SECONDS": "a pushing server's name is free after 15 silent seconds",
    "TRAINER_LISTEN_HOST": _ENDPOINTS,
    "TRAINER_LISTEN_PORT": _ENDPOINTS,
}
"""The instruction for each retired variable, by the variable's name."""
