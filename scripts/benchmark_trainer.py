"""Measures the trainer's update alone: seconds, tokens a second, memory, against a bare forward and backward pass.

    python -m scripts.benchmark_trainer --model .cache/models/smollm2-135m [--ranks 1 2] [--json FILE]

Each case runs in fresh processes, joined as torchrun would join them. The bare pass is the same model's own forward and
backward over the same sequences, each with its own copy of the prompt, with the usual cross-entropy and no optimizer:
what anyone must pay at least who does not share prompts. The trainer's settings are read from the environment as always
(SHARD_PARAMETERS=false, LORA_RANK=8, ...).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from scripts.local.environment import cores
from trainer.config import TrainerSettings
from trainer.distributed import Ranks, join_ranks
from trainer.learner import Learner
from trainer.packing import TrainingGroup, TrainingSequence
from trainer.policy import Policy, load_policy

RESULT_PREFIX = "result: "


@dataclass(frozen=True)
class Work:
    """The update that is measured."""

    model: str
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 40
    completion_tokens: int = 12
    rounds: int = 5

    @property
    def trained_tokens(self) -> int:
        """Tokens of all sequences, each with its own copy of the prompt: what a trainer is paid for."""
        return self.prompts * self.group_size * (self.prompt_tokens + self.completion_tokens)

    def groups(self, vocabulary: int, seed: int) -> list[TrainingGroup]:
        """Groups of random tokens with advantages of both signs."""
        rng = random.Random(seed)

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(count)]

        def sequence(index: int) -> TrainingSequence:
            logprobs = [-rng.random() for _ in range(self.completion_tokens)]
            return TrainingSequence(ids(self.completion_tokens), logprobs, 1.0 if index % 2 else -1.0)

        return [
            TrainingGroup(ids(self.prompt_tokens), [sequence(i) for i in range(self.group_size)], str(number))
            for number in range(self.prompts)
        ]


@dataclass
class Case:
    """What was measured with one number of ranks."""

    ranks: int
    threads: int
    update_seconds: list[float] = field(default_factory=list)
    bare_seconds: list[float] = field(default_factory=list)
    """On one rank alone, with the threads of one rank."""
    peak_memory_gb: list[float] = field(default_factory=list)
    """By rank: the update's only, since each process runs one of the two."""

    def row(self, work: Work) -> list[str]:
        """Its line of the table."""
        update = statistics.median(self.update_seconds)
        bare = statistics.median(self.bare_seconds) if self.bare_seconds else None
        return [
            str(self.ranks),
            str(self.threads),
            f"{update:.2f} ({min(self.update_seconds):.2f} to {max(self.update_seconds):.2f})",
            f"{work.trained_tokens / update:.0f}",
            f"{bare:.2f}" if bare else "",
            f"{bare / update:.2f}" if bare else "",
            " + ".join(f"{used:.2f}" for used in self.peak_memory_gb),
        ]


def measure(work: Work, ranks: int, *, bare: bool) -> Case:
    """Runs one case in processes of its own."""
    threads = max(cores() // ranks, 1)
    case = Case(ranks, threads)
    case.update_seconds, case.peak_memory_gb = _run(work, ranks, threads, "update")
    if bare:
        case.bare_seconds, _ = _run(work, 1, threads * ranks, "bare")
    return case


def _run(work: Work, ranks: int, threads: int, what: str) -> tuple[list[float], list[float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": str(threads), "MODEL_NAME": work.model}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.benchmark_trainer", "--worker", what, "--work", json.dumps(asdict(work))],
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    replies = []
    for rank, process in enumerate(processes):
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith(RESULT_PREFIX)]
        if process.returncode or not lines:
            raise SystemExit(f"error: rank {rank} of {ranks} ended with {process.returncode}; its output is above")
        replies.append(json.loads(lines[-1].removeprefix(RESULT_PREFIX)))
    return replies[0]["seconds"], [reply["peak_memory_gb"] for reply in replies]


def work_on_rank(work: Work, what: str) -> None:
    """What one process of a case does; prints its measurement as the last line."""
    settings = TrainerSettings.load()
    with join_ranks() as ranks:
        policy = load_policy(settings, ranks)
        round_ = _update_round(settings, work, policy, ranks) if what == "update" else _bare_round(work)
        seconds = []
        for number in range(work.rounds + 1):
            ranks.barrier()
            started = time.perf_counter()
            round_(number)
            ranks.barrier()
            seconds.append(time.perf_counter() - started)
    # Kibibytes on Linux, bytes on macOS.
    scale = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9
    # The first round warms up.
    print(RESULT_PREFIX + json.dumps({"seconds": seconds[1:], "peak_memory_gb": memory}), flush=True)


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


def show(work: Work, cases: Sequence[Case]) -> Table:
    """The table of all cases."""
    table = Table(title=f"{work.prompts} prompts of {work.prompt_tokens} tokens, {work.group_size} completions of "
                  f"{work.completion_tokens} each")  # fmt: skip
    for name in ("ranks", "threads each", "update s", "tokens/s", "bare pass s", "bare / ours", "peak GB by rank"):
        table.add_column(name, justify="right")
    for case in cases:
        table.add_row(*case.row(work))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmark_trainer")
    defaults = Work("")
    parser.add_argument("--model", default=".cache/models/smollm2-135m", help="model directory or name")
    for name in ("prompts", "group_size", "prompt_tokens", "completion_tokens", "rounds"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    parser.add_argument("--no-bare", action="store_true", help="leave the bare pass out")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--worker", choices=("update", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work_on_rank(Work(**json.loads(given.work)), given.worker)
        return
    names = ("model", "prompts", "group_size", "prompt_tokens", "completion_tokens", "rounds")
    work = Work(**{name: getattr(given, name) for name in names})
    cases = [measure(work, ranks, bare=not given.no_bare) for ranks in given.ranks]
    Console().print(show(work, cases))
    if given.json:
        given.json.write_text(json.dumps({"work": asdict(work), "cases": [asdict(case) for case in cases]}, indent=2))


if __name__ == "__main__":
    main()
