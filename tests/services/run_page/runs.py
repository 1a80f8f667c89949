"""Writes run directories such as the trainer leaves them, without a trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson


def metrics(step: int, level: float = 0.4) -> dict[str, Any]:
    """A line of metrics.jsonl; ``level`` is the reward at the start."""
    reward = 1 - (1 - level) * math.exp(-step / 100) + 0.03 * math.sin(step)
    record = {
        "step": step,
        "time": 1_700_000_000.0 + 2.5 * step,
        "groups": 4.0,
        "completions": 32.0,
        "unscorable": 0.0,
        "completion_tokens": 32.0 * 20,
        "length_mean": 20 + math.cos(step / 7),
        "length_max": 31.0,
        "truncation_rate": 0.05,
        "zero_variance_groups": float(step % 3),
        "staleness_mean": 0.0,
        "staleness_max": 0.0,
        "reward_mean": reward,
        "reward_std": 0.4,
        "reward_part_math": reward - 0.1,
        "reward_part_my_rewards:brevity": 0.5,
        "reward_counts": [[0.0, 20], [1.0, 12]],
        "loss": 0.02 * math.sin(step / 3),
        "entropy": 0.8 - 0.0004 * step,
        "kl_behaviour": 1e-4 * (1 + math.sin(step / 5)),
        "grad_norm": 1.5,
        "learning_rate": 1e-6,
        "replay_loss": 0.01,
        "seconds_generate": 1.2,
        "seconds_store": 0.05,
        "seconds_train": 0.9,
        "seconds_publish": 0.2,
        "seconds_step": 2.4,
        "trained_tokens_per_second": 700.0,
        "policy_version": float(step),
        "peak_memory_bytes": 5e8,
        "workers": 2.0,
        "lovely_metric": float(step),
    }
    if step % 20 == 0:
        record |= {"accuracy": min(1.0, reward), "accuracy_low": 0.3, "accuracy_high": 0.9}
        record |= {"eval_prompts": 42.0, "eval_left_out": 2.0}
    return record


def group(step: int, number: int, *, rewards: list[float | None], **fields: Any) -> list[dict[str, Any]]:
    """The lines of a group in samples.jsonl, one a reward."""
    shared = {
        "step": step,
        "group_id": f"run-0-{number}",
        "prompt": f"What is {number} plus 1?",
        "ground_truth": str(number + 1),
    }
    return [
        {
            **shared,
            "completion": f"I say {number + place}.",
            "reward": reward,
            "finish_reason": "stop",
            "policy_version": step - 1,
            "tokens": 6,
            "result": {
                "reward": reward,
                "status": "error" if reward is None else "scored",
                "extracted": str(number + place),
                "reason": "the verifier stumbled" if reward is None else "compared as numbers",
            },
            **fields,
        }
        for place, reward in enumerate(rewards)
    ]


def episodes(step: int, number: int) -> list[dict[str, Any]]:
    """The lines of a group of two episodes with a calculator: one that branches and is right, and one that fails."""
    ask = {"role": "user", "content": "What is 12*31?"}
    call = {"name": "calculate", "arguments": '{"expression": "12*31"}'}
    calling = {"role": "assistant", "tool_calls": [call], "sampled": True}
    result = {"role": "tool", "name": "calculate", "content": "372"}
    answers = [{"role": "assistant", "content": text, "sampled": True} for text in ("It is 372.", "372")]
    summary = {"role": "user", "content": "You found 372. Answer with just the number."}
    read = {"text": "<tool>372</tool><assistant>"}

    def sampled(version: int, words: str, advantages: Any) -> dict[str, Any]:
        tokens = words.split("|")
        return {"version": version, "tokens": tokens, "logprobs": [-0.25] * len(tokens), "advantages": advantages}

    right: dict[str, Any] = {"episode": 0, "turns": 3, "tool_calls": 1, "unparsed_tool_calls": 0, "branches": 1}
    wrong: dict[str, Any] = {"episode": 1, "turns": 1, "tool_calls": 0, "unparsed_tool_calls": 1, "branches": 0}
    used, unused = sampled(step - 1, "<call>|12|*31", [1.5, 0.75, 0.0]), {"text": "<call>12*31"}
    last, shorter = sampled(step, "It is| 372.", 0.75), sampled(step, "372", 0.75)
    told = [
        right | {"messages": [ask, calling, result, answers[0]], "spans": [used, read, last]},
        right | {"messages": [ask, calling, summary, answers[1]], "spans": [unused, read, shorter]},
        wrong | {"messages": [ask, answers[0]], "spans": [sampled(step - 1, "Hm|.", None)]},
    ]
    records = group(step, number, rewards=[1.0, 1.0, None], rendered_prompt="<user>What is 12*31?<assistant>")
    return [record | said for record, said in zip(records, told, strict=True)]


def held_out(step: int, number: int) -> dict[str, Any]:
    """A line of evaluations.jsonl: the greedy completion of a held-out prompt, which is right from step 20 on."""
    answer = {"prompt": f"What is {number} times 3?", "ground_truth": str(3 * number), "completion": f"{step} {number}"}
    return {"step": step, **answer, "reward": float(step >= 20), "finish_reason": "stop"}


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Appends lines, as the trainer does."""
    with path.open("ab") as stream:
        stream.write(b"".join(orjson.dumps(record) + b"\n" for record in records))


def component(settings: dict[str, Any], *, changed: Sequence[str] = (), **packages: str) -> dict[str, Any]:
    """A component's record in config.json."""
    return {"settings": settings, "changed": changed, "packages": {"python": "3.11.2", **packages}, "commit": None}


def write_run(
    path: Path, steps: int, *, level: float = 0.4, ended: bool = True, reward_fn: str = "math", **settings: Any
) -> Path:
    """A run of ``steps`` steps with two groups of samples a step: one whose rewards differ, one of equal rewards."""
    path.mkdir(parents=True)
    config = {"model_name": "Qwen/Qwen2.5-0.5B-Instruct", "batch_size": 4, "learning_rate": 1e-6, **settings}
    components = {
        "ppo-trainer": component(config, torch="2.13.0"),
        "reward-server": component({"reward_fn": reward_fn}, changed=[] if reward_fn == "math" else ["reward_fn"]),
    }
    (path / "config.json").write_bytes(orjson.dumps({"components": components}))
    append(path / "metrics.jsonl", [metrics(step, level) for step in range(1, steps + 1)])
    samples: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        samples += group(step, 2 * step, rewards=[0.0, 1.0, 0.0, 0.5])
        samples += group(step, 2 * step + 1, rewards=[1.0, 1.0])
    append(path / "samples.jsonl", samples)
    append(
        path / "evaluations.jsonl", [held_out(step, number) for step in range(0, steps + 1, 20) for number in (1, 2)]
    )
    if ended:
        summary = {"status": "succeeded", "steps": steps, "seconds": 2.5 * steps, "dataset": "gsm8k", "device": "cpu"}
        summary |= {
            "accuracy_before": level,
            "accuracy_before_low": 0.25,
            "accuracy_before_high": 0.55,
            "reward_first": 0.1 + 0.2,
        }
        (path / "summary.json").write_bytes(orjson.dumps(summary))
    return path
