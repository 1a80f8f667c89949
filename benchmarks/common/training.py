"""Updates of the trainer, and bare forward and backward passes, each measured in processes of its own."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.common import harness
from services.core import machine
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.config import TrainerSettings
from trainer.model.learner import Learner
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks, join_ranks
from trainer.preflight.check import preflight

DEADLINE_SECONDS = 500.0


@dataclass(frozen=True)
class Work:
    """The batch of an update."""

    model: str
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 40
    completion_tokens: int = 12
    """Tokens that the model samples in each turn."""
    turns: int = 1
    result_tokens: int = 0
    """Tokens of a tool's result, between two turns."""
    rewrites_history: bool = False
    """True for an agent that keeps the second half of a turn only, as chat templates without earlier reasoning do. Each
    turn is then a sequence of its own; otherwise an episode is one."""
    rounds: int = 3
    shares_prompts: bool = True
    """True to compute equal prefixes of a group once; otherwise every sequence comes as its own group."""
    is_bare: bool = False
    """True for the bare pass instead of the trainer's update."""
    dtype: str = "float32"
    """``float32``, ``bfloat16``, or ``auto`` for the trainer's choice: what is computed in. Weights are float32."""

    @property
    def trained_tokens(self) -> int:
        """Tokens of all sequences, each with its own copy of the prompt."""
        return self.prompts * self.group_size * (self.prompt_tokens + self.completion_tokens)

    def groups(self, vocabulary: int, seed: int) -> list[TrainingGroup]:
        """Return groups of random tokens with advantages of both signs."""
        rng = random.Random(seed)

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(count)]

        def sequences(index: int) -> Iterator[TrainingSequence]:
            history: list[int] = []
            trained: list[bool] = []
            for turn in range(self.turns):
                sampled, result = ids(self.completion_tokens), ids(self.result_tokens)
                tokens, mask = history + sampled, trained + [True] * len(sampled)
                if self.rewrites_history or turn == self.turns - 1:
                    logprobs = [-rng.random() for _ in tokens]
                    yield TrainingSequence(tokens, logprobs, [1.0 if index % 2 else -1.0] * len(tokens), mask)
                if self.rewrites_history:
                    history += sampled[len(sampled) // 2 :] + result
                    trained = [False] * len(history)
                else:
                    history, trained = tokens + result, mask + [False] * len(result)

        groups = [
            TrainingGroup(ids(self.prompt_tokens), [s for i in range(self.group_size) for s in sequences(i)], str(n))
            for n in range(self.prompts)
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


def run(work: Work, ranks: int, threads: int) -> list[Rank]:
    """Measure in new processes, which join as under torchrun.

    Raises:
        SystemExit: a process failed, or took longer than DEADLINE_SECONDS.
    """
    port = str(harness.free_port())
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": str(threads), "MODEL_NAME": work.model, "COMPUTE_TYPE": work.dtype}
    environment |= {"LOCAL_WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "benchmarks.common.training", json.dumps(asdict(work))]
    environments = [{**os.environ, **environment, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
    with harness.programs([command] * ranks, environments, DEADLINE_SECONDS) as processes:
        outputs = [harness.output_of(process, f"rank {rank}") for rank, process in enumerate(processes)]
    return [Rank(**json.loads(output.splitlines()[-1])) for output in outputs]


# --- in a process of its own -----------------------------------------------------------------------------------------


def measure_here(work: Work) -> Rank:
    """Measure as one rank in this process."""
    machine.keep_freed_memory()
    seconds = []
    with join_ranks() as ranks:
        do_round = _bare(work) if work.is_bare else _update(work, ranks)
        for number in range(work.rounds + 1):
            ranks.barrier()
            started = time.perf_counter()
            do_round(number)
            ranks.barrier()
            seconds.append(time.perf_counter() - started)
    # getrusage counts kibibytes on Linux and bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Rank(seconds[1:], peak)


def _update(work: Work, ranks: Ranks) -> Callable[[int], Any]:
    settings = TrainerSettings.load()
    if ranks.device.type == "cuda":
        settings, ranks = preflight(settings, ranks)
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
        with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16"):
            logits = cast("Tensor", model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, -last:].flatten()).backward()
        model.zero_grad()

    return forward_and_backward


if __name__ == "__main__":
    measured = measure_here(Work(**json.loads(sys.argv[1])))
    print(f"\n{json.dumps(asdict(measured))}", flush=True)
