"""Updates of the trainer, and bare forward and backward passes, each measured in processes of its own."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import psutil
import torch
from torch import Tensor

from benchmarks.common import harness
from services.core import memory
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.config import TrainerSettings
from trainer.model.learner import Learner
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks, join_ranks

DEADLINE_SECONDS = 500.0

Kind = Literal["update", "bare"]


@dataclass(frozen=True)
class Work:
    """The batch of an update."""

    model: str
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 40
    completion_tokens: int = 12
    rounds: int = 3
    shares_prompts: bool = True
    """True to compute a group's prompt once; otherwise every completion comes as its own group."""

    @property
    def trained_tokens(self) -> int:
        """Tokens of all sequences, each with its own copy of the prompt."""
        return self.prompts * self.group_size * (self.prompt_tokens + self.completion_tokens)

    def groups(self, vocabulary: int, seed: int) -> list[TrainingGroup]:
        """Return groups of random tokens with advantages of both signs."""
        rng = random.Random(seed)

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(count)]

        def sequence(index: int) -> TrainingSequence:
            logprobs = [-rng.random() for _ in range(self.completion_tokens)]
            advantages = [1.0 if index % 2 else -1.0] * self.completion_tokens
            return TrainingSequence(ids(self.completion_tokens), logprobs, advantages)

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
class Rank:
    """The measurements of one rank."""

    seconds: list[float]
    """Seconds of each round for all ranks together, without the first round, which warms up."""
    peak_bytes: int
    resting_bytes: int
    """Memory between two rounds: weights, optimizer state, libraries."""

    @property
    def needed_bytes(self) -> int:
        """Memory that only a round needs: activations, gradients, logits."""
        return self.peak_bytes - self.resting_bytes


def run(work: Work, kind: Kind, ranks: int, threads: int) -> list[Rank]:
    """Measure in new processes, which join as under torchrun.

    Raises:
        SystemExit: a process failed, or took longer than DEADLINE_SECONDS.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    # The bare pass computes in float32, whatever the processor.
    environment |= {"OMP_NUM_THREADS": str(threads), "MODEL_NAME": work.model, "COMPUTE_TYPE": "float32"}
    command = [sys.executable, "-m", "benchmarks.common.training", kind, json.dumps(asdict(work))]
    environments = [{**os.environ, **environment, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
    with harness.programs([command] * ranks, environments, DEADLINE_SECONDS) as processes:
        outputs = [harness.output_of(process, f"rank {rank}") for rank, process in enumerate(processes)]
    return [Rank(**json.loads(output.splitlines()[-1])) for output in outputs]


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_here(work: Work, kind: Kind) -> Rank:
    """Measure as one rank in this process."""
    memory.keep()
    seconds = []
    with join_ranks() as ranks:
        do_round = _bare(work) if kind == "bare" else _update(work, ranks)
        for number in range(work.rounds + 1):
            ranks.barrier()
            started = time.perf_counter()
            do_round(number)
            ranks.barrier()
            seconds.append(time.perf_counter() - started)
    memory.release()
    resting = psutil.Process().memory_info().rss
    # getrusage counts kibibytes on Linux and bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Rank(seconds[1:], peak, resting)


def _update(work: Work, ranks: Ranks) -> Callable[[int], Any]:
    settings = TrainerSettings.load()
    policy = load_policy(settings, ranks)
    learner = Learner(settings, policy, ranks, reference=None, total_steps=work.rounds + 1)
    return lambda number: learner.update(work.groups(policy.config.vocab_size, number), number)


def _bare(work: Work) -> Callable[[int], None]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, attn_implementation="sdpa")
    last = work.completion_tokens

    def forward_and_backward(number: int) -> None:
        groups = work.groups(model.config.vocab_size, number)
        ids = torch.tensor([group.prompt_ids + s.completion_ids for group in groups for s in group.sequences])
        logits = cast("Tensor", model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, -last:].flatten()).backward()
        model.zero_grad()

    return forward_and_backward


if __name__ == "__main__":
    measured = measure_here(Work(**json.loads(sys.argv[2])), "bare" if sys.argv[1] == "bare" else "update")
    print(f"\n{json.dumps(asdict(measured))}", flush=True)
