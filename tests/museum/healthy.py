"""Healthy runs of all kinds: rules that name a fault in one of them are wrong."""

from __future__ import annotations

import json
from pathlib import Path

FLOAT = {"COMPUTE_TYPE": "float32", "ENGINE_DTYPE": "float32", "PUBLISH_TYPE": "float32"}
PUBLISHED_SHORT = FLOAT | {"PUBLISH_TYPE": "bfloat16"}
SHORT = {"COMPUTE_TYPE": "bfloat16", "ENGINE_DTYPE": "bfloat16", "PUBLISH_TYPE": "bfloat16"}
AGENT = {"ROLLOUT": "agent", "AGENT": "tests.e2e.agents:twice", "MAX_NEW_TOKENS": "6"}
AGENT |= {"BATCH_SIZE": "4", "GROUP_SIZE": "4", "MAX_STEPS": "8"}  # a client takes 40 ms
ENVIRONMENT = {
    "ROLLOUT": "environment",
    "DATASET": "seeds",
    "ENVIRONMENT": "tests.e2e.agents:Moods",
    "DATASET_CONFIG": "",
}
TAUGHT = {"TEACHER_MODEL": "{teacher}", "REWARD_WEIGHT": "0"}
HARD = {"DATASET_CONFIG": '{"digits": [2], "template": "{a}{op}{b}="}', "REWARD_FN": "tests.museum.rewards:close"}


def seed(number: int) -> dict[str, str]:
    """Return the settings of another seed."""
    return {"SEED": str(number), "DATA_SEED": str(number)}


HEALTHY: dict[str, dict[str, str]] = {
    "float32": FLOAT,
    "float32, seed 1": FLOAT | seed(1),
    "float32, seed 2": FLOAT | seed(2),
    "published in bfloat16": PUBLISHED_SHORT,
    "published in bfloat16, seed 1": PUBLISHED_SHORT | seed(1),
    "bfloat16": SHORT,
    "bfloat16, seed 1": SHORT | seed(1),
    "bfloat16, seed 2": SHORT | seed(2),
    "bfloat16, 24 steps": SHORT | {"MAX_STEPS": "24", "EVAL_EVERY": "12"},
    "40 steps": FLOAT | {"MAX_STEPS": "40", "NUM_EPOCHS": "9", "EVAL_EVERY": "10"},
    "asynchronous": FLOAT | {"MODE": "async"},
    "asynchronous, bfloat16": SHORT | {"MODE": "async", "MAX_STALENESS": "2"} | seed(1),
    "LoRA": FLOAT | {"LORA_RANK": "4", "LEARNING_RATE": "3e-4"},
    "LoRA, bfloat16": SHORT | {"LORA_RANK": "4", "LEARNING_RATE": "2e-4"} | seed(1),
    "agent": FLOAT | AGENT,
    "agent, bfloat16": SHORT | AGENT | seed(1),
    "environment": FLOAT | ENVIRONMENT,
    "environment, bfloat16": SHORT | ENVIRONMENT | seed(1),
    "replay": FLOAT | {"REPLAY_GROUPS": "4"},
    "SFT": FLOAT | {"METHOD": "sft", "DATASET": "{rows}", "DATASET_CONFIG": "", "EVAL_PROMPTS": "0"},
    "distillation": FLOAT | TAUGHT,
    "distillation beside rewards": SHORT | TAUGHT | {"REWARD_WEIGHT": "1"},
    "sources": FLOAT
    | {"SOURCES": "{sources}", "REWARD_FN": "", "PROMPT_STYLE": "", "DATASET": "", "DATASET_CONFIG": ""},
    "2 x 2 updates": FLOAT | {"UPDATES_PER_BATCH": "2", "EPOCHS_PER_BATCH": "2"},
    "critic": FLOAT | {"ADVANTAGE": "gae", "GROUP_SIZE": "4", "CRITIC_LEARNING_RATE": "1e-3", "MAX_STEPS": "24"},
    "cispo": PUBLISHED_SHORT | {"LOSS": "cispo"},
    "GSPO, RLOO": FLOAT | {"LOSS": "gspo", "ADVANTAGE": "rloo"},
    "deviation of the batch, KL": FLOAT | {"ADVANTAGE": "batch_std", "KL_COEF": "0.01"},
    "temperature 0.7": SHORT | {"TEMPERATURE": "0.7"},
    "temperature 1.2, entropy": FLOAT | {"TEMPERATURE": "1.2", "ENTROPY_COEF": "0.001"},
    "dynamic sampling": FLOAT | {"DYNAMIC_SAMPLING_TRIES": "2"} | HARD,
    "two engines": PUBLISHED_SHORT | {"engines": "2"},
    "hard, own reward": SHORT | HARD | {"GROUP_SIZE": "4", "LEARNING_RATE": "3e-4"},
    "masked at three tokens": FLOAT | {"MAX_NEW_TOKENS": "3", "MASK_TRUNCATED": "true"},
}


def chosen(settings: dict[str, str], files: Path, teacher: Path) -> dict[str, str]:
    """Return settings with the paths of their files, which are written to ``files``."""
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"question": row["prompt"], "answer": row["completion"]} for row in rows]
    (files / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    sources = [
        {"name": name, "ratio": ratio, "dataset": "arithmetic", "prompt_style": "plain", "rollout": "completion",
         "reward_fn": "exact_match", "dataset_config": {"operations": operation, "template": "{a}{op}{b}="}}
        for name, ratio, operation in (("sums", 3, "+"), ("differences", 1, "-"))
    ]  # fmt: skip
    (files / "sources.yaml").write_text(json.dumps(sources))
    paths = {
        "teacher": teacher,
        "rows": files / "rows.jsonl",
        "questions": files / "questions.jsonl",
        "sources": files / "sources.yaml",
    }
    return {
        name: str(paths[value[1:-1]]) if value[:1] == "{" and value[1:-1] in paths else value
        for name, value in settings.items()
    }
