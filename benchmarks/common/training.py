"""Updates of the trainer, and bare forward and backward passes, in processes of their own that measure themselves."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import psutil
import torch
from torch import Tensor

from services.core import memory
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.config import TrainerSettings
from trainer.model.learner import Learner
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks, join_ranks

RESULT_PREFIX = "result: "
DEADLINE_SECONDS = 500.0

What = Literal["update", "bare"]


@dataclass(frozen=True)
class Work:
    """The update that is measured."""

    model: str
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 40
    completion_tokens: int = 12
    rounds: int = 3
    shares_prompts: bool = True
    """Whether a group's prompt is computed once; otherwise the update gets every completion as a group of its own."""

    @property
    def trained_tokens(self) -> int:
        """Tokens of all sequences, each with its own copy of the prompt: what a trainer is paid for."""
        return self.prompts * self.group_size * (self.prompt_tokens + self.completion_tokens)

    @property
    def completion_positions(self) -> int:
        """Tokens that have a log-probability."""
        return self.prompts * self.group_size * self.completion_tokens

    def groups(self, vocabulary: int, seed: int) -> list[TrainingGroup]:
        """Groups of random tokens with advantages of both signs."""
        rng = random.Random(seed)

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(count)]

        def sequence(index: int) -> TrainingSequence:
            logprobs = [-rng.random() for _ in range(self.completion_tokens)]
            return TrainingSequence(ids(self.completion_tokens), logprobs, 1.0 if index % 2 else -1.0)

        groups = [
            TrainingGroup(ids(self.prompt_tokens), [sequence(i) for i in range(self.group_size)], str(number))
            for number in range(self.prompts)
        ]
        if self.shares_prompts:
            return groups
        return [
            TrainingGroup(group.prompt_ids, [sequence], f"{group.group_id}-{i}")
            for group in groups
            for i, sequence in enumerate(group.sequences)
        ]


@dataclass(frozen=True)
class Reply:
    """What one process measured of itself."""

    seconds: list[float]
    """By round, all ranks together; without the first, which warms up."""
    peak_bytes: int
    resting_bytes: int
    """Between two rounds: weights, optimizer state, libraries."""

    @property
    def needed_bytes(self) -> int:
        """What a round needs while it lasts: activations, gradients, logits."""
        return self.peak_bytes - self.resting_bytes


def run(work: Work, what: What, ranks: int, threads: int) -> list[Reply]:
    """Measures in fresh processes, joined as torchrun would join them; by rank.

    Raises:
        SystemExit: one failed, or took longer than DEADLINE_SECONDS.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    # As the bare pass computes, whatever the processor.
    environment |= {"OMP_NUM_THREADS": str(threads), "MODEL_NAME": work.model, "COMPUTE_TYPE": "float32"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.common.training", what, json.dumps(asdict(work))],
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + DEADLINE_SECONDS
    try:
        return [_reply(process, rank, end) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _reply(process: subprocess.Popen[str], rank: int, end: float) -> Reply:
    try:
        output, _ = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise SystemExit(f"error: rank {rank} took longer than {DEADLINE_SECONDS:g} s") from None
    lines = [line for line in output.splitlines() if line.startswith(RESULT_PREFIX)]
    if process.returncode or not lines:
        raise SystemExit(f"error: rank {rank} ended with {process.returncode}; its output is above")
    return Reply(**json.loads(lines[-1].removeprefix(RESULT_PREFIX)))


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_here(work: Work, what: What) -> Reply:
    """What one process does."""
    settings = TrainerSettings.load()
    memory.keep()
    seconds = []
    with join_ranks() as ranks:
        round_ = (
            _bare_round(work) if what == "bare" else _update_round(settings, work, load_policy(settings, ranks), ranks)
        )
        for number in range(work.rounds + 1):
            ranks.barrier()
            started = time.perf_counter()
            round_(number)
            ranks.barrier()
            seconds.append(time.perf_counter() - started)
    memory.release()
    resting = psutil.Process().memory_info().rss
    # Kibibytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Reply(seconds[1:], peak, resting)


def _update_round(settings: TrainerSettings, work: Work, policy: Policy, ranks: Ranks) -> Callable[[int], Any]:
    learner = Learner(settings, policy, ranks, reference=None, total_steps=work.rounds + 1)
    vocabulary = policy.config.vocab_size
    return lambda number: learner.update(work.groups(vocabulary, number), number)


def _bare_round(work: Work) -> Callable[[int], None]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, attn_implementation="sdpa")

    def forward_and_backward(number: int) -> None:
        rows = [
            group.prompt_ids + sequence.completion_ids
            for group in work.groups(model.config.vocab_size, number)
            for sequence in group.sequences
        ]
        ids = torch.tensor(rows)
        logits = cast("Tensor", model(input_ids=ids, use_cache=False, logits_to_keep=work.completion_tokens + 1).logits)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, -work.completion_tokens :].flatten()
        )
        loss.backward()
        model.zero_grad()

    return forward_and_backward


if __name__ == "__main__":
    _what: What = "bare" if sys.argv[1] == "bare" else "update"
    print(RESULT_PREFIX + json.dumps(asdict(measure_here(Work(**json.loads(sys.argv[2])), _what))), flush=True)
