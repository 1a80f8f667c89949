"""TRL's GRPOTrainer on the demo task: run by an interpreter that has TRL, not by this project's.

    python benchmarks/common/trl_grpo.py '{"model": ..., "questions": "questions.jsonl", "steps": 3, ...}'

Prints a line of JSON for every step: {"step", "seconds", "reward"}. It imports nothing of this project, so that TRL has
its own versions of everything. The settings that are not named are TRL's defaults; gradient checkpointing, which saves
memory for time, is off, as it is in ours.
"""

import json
import sys
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1.0 where the completion is the answer and nothing else, but for white space around it."""
    return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints every step; ends at a mean reward over three steps, or a time, when one is asked for."""

    def __init__(self, target: float | None, limit_seconds: float | None) -> None:
        self.target = target
        self.end = None if limit_seconds is None else time.perf_counter() + limit_seconds
        self.rewards: list[float] = []
        self.started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Called once a step, with logging_steps=1."""
        if not logs or "reward" not in logs:
            return
        now = time.perf_counter()
        self.rewards.append(float(logs["reward"]))
        print(json.dumps({"step": state.global_step, "seconds": now - self.started, "reward": self.rewards[-1]}))
        sys.stdout.flush()
        self.started = now
        last = self.rewards[-3:]
        if self.target is not None and len(last) == 3 and sum(last) / 3 >= self.target:
            control.should_training_stop = True
        if self.end is not None and now > self.end:
            control.should_training_stop = True


def main() -> None:
    """Trains as the JSON on the command line says."""
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
        bf16=work["bf16"],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=work["seed"],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        reward_funcs=exact_match,
        args=config,
        train_dataset=dataset,
        callbacks=[Report(work["target"], work["limit_seconds"])],
    )
    trainer.train()


if __name__ == "__main__":
    main()
