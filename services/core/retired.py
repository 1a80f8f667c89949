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
    "ENGINE_MAX_QUEUED_REQUESTS": "it is always 4096; for SGLang, put --max-queued-requests into SGLANG_EXTRA_FLAGS",
    "ENGINE_PREFILL_TOKENS": "it is always 2048",
    "ENGINE_THREADS": "set OMP_NUM_THREADS instead",
    "SGLANG_MEM_FRACTION": "put --mem-fraction-static into SGLANG_EXTRA_FLAGS",
    "SGLANG_ATTENTION_BACKEND": "put --attention-backend into SGLANG_EXTRA_FLAGS",
    "SGLANG_TOOL_CALL_PARSER": "put --tool-call-parser into SGLANG_EXTRA_FLAGS",
    "ROUTER_POLICY": "put --policy into ROUTER_EXTRA_FLAGS",
    "ROUTER_IMBALANCE": "put --balance-abs-threshold into ROUTER_EXTRA_FLAGS",
    "ROUTER_HEALTH_INTERVAL_SECONDS": "put --health-check-interval-secs into ROUTER_EXTRA_FLAGS",
    "ROUTER_REQUEST_SECONDS": "put --request-timeout-secs into ROUTER_EXTRA_FLAGS",
    "ROUTER_CIRCUIT_FAILURES": "put --cb-failure-threshold into ROUTER_EXTRA_FLAGS",
    "ROUTER_CIRCUIT_SECONDS": "put --cb-timeout-duration-secs into ROUTER_EXTRA_FLAGS",
    "ROUTER_RETRIES": "put --retry-max-retries into ROUTER_EXTRA_FLAGS",
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
    "ADVANTAGE_EPS": "it is always 1e-4",
    "ICEPOP_LOW": "it is always 0.5, the paper's",
    "ICEPOP_HIGH": "it is always 5, the paper's",
    "LOGIT_CHUNK_TOKENS": "it is always 256",
    "LORA_ALPHA": "it is always 32; change LEARNING_RATE instead",
    "MAX_SKIPPED_STEPS": "it is always 3",
    "LOGGED_GROUPS": "samples.jsonl always has the first 8 groups of a step",
    "GENERATION_CONCURRENCY": "it is always the larger of BATCH_SIZE and 64",
    "GENERATION_DEADLINE_SECONDS": "it is always the larger of 600 and a tenth of MAX_NEW_TOKENS",
    "FRESH_WAIT_SECONDS": "it is always 900",
    "PUBLISH_DEADLINE_SECONDS": "it is always 600",
    "PUBLISH_BUCKET_MIB": "it is always 1024",
    "PUBLISH_PROBE_TOLERANCE": "it is always 0.1",
    "PUBLISHED_VERSIONS_KEPT": "it is always 2",
}
"""The instruction for each retired variable, by the variable's name."""
