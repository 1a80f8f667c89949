"""Train on questions by TRL's GRPOTrainer. An interpreter that has TRL runs this file.

    python benchmarks/trl_grpo.py '{"model": ..., "questions": "questions.jsonl", "steps": 3, ...}'

Every step prints a line of JSON: {"rewards": mean, "tokens", "seconds"}. This file imports nothing of this project, so
that TRL gets its own versions of all libraries. ``options`` are settings of GRPOConfig; those that are not named have
TRL's defaults. ``reward`` is a function of prompt and completion as FILE:NAME, in place of the exact answer. Gradient
checkpointing, which takes time to save memory, is off on both sides.
"""

import json
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1.0 for each completion that is the answer alone, except for white space around it."""
    return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]


def reward_of_file(place: str) -> Callable[..., list[float]]:
    """Return the function FILE:NAME of a prompt and a completion as a reward function of TRL."""
    file, _, name = place.rpartition(":")
    function = runpy.run_path(file)[name]

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(function(*pair)) for pair in zip(prompts, completions, strict=True)]

    return reward


class Report(TrainerCallback):  # type: ignore[misc]
    """A callback that prints every step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print a step; the trainer calls this once a step, because logging_steps is 1."""
        if not logs or "reward" not in logs:
            return
        now = time.perf_counter()
        tokens = logs.get("completions/mean_length", 0.0) * args.per_device_train_batch_size
        step = {"rewards": float(logs["reward"]), "tokens": round(tokens), "seconds": now - self.started}
        print(json.dumps(step), flush=True)
        self.started = now


def main() -> None:
    """Train as the JSON on the command line says."""
    work = json.loads(sys.argv[1])
    torch.set_num_threads(work["threads"])
    dataset = load_dataset("json", data_files=work["questions"], split="train")
    config = GRPOConfig(
        output_dir=work["directory"],
        per_device_train_batch_size=work["prompts"] * work["group_size"],
        num_generations=work["group_size"],
        max_completion_length=work["completion_tokens"],
        learning_rate=work["learning_rate"],
        lr_scheduler_type="constant",
        max_steps=work["steps"],
        use_cpu=not torch.cuda.is_available(),
        bf16=work.get("dtype") == "bfloat16",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=work["seed"],
        disable_tqdm=True,
        **work.get("options", {}),
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        reward_funcs=reward_of_file(work["reward"]) if "reward" in work else exact_match,
        args=config,
        train_dataset=dataset,
        callbacks=[Report()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
