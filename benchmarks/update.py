"""The trainer's update alone, on random tokens, in processes that join as under torchrun.

The trainer's settings are read from the environment (SHARD_PARAMETERS=false, LORA_RANK=8, LAYOUT=rows, ...). As one
process: ``python -m benchmarks.update '{"model": "DIRECTORY", "prompts": 1, "prompt_tokens": 1000}'``.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.load import Figure
from local_runner.nodes import free_port
from services.core import machine
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason
from trainer.algorithm.packing import TrainingGroup
from trainer.capacity.check import preflight
from trainer.config import TrainerSettings
from trainer.model.learner import Learner
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks

DEADLINE_SECONDS = 500.0


@dataclass(frozen=True)
class Work:
    """The batch of an update."""

    model: str
    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 40
    completion_tokens: int = 12
    rounds: int = 3

    @property
    def tokens(self) -> int:
        """Tokens that are computed; the prompt of a group counts once."""
        return self.prompts * (self.prompt_tokens + self.group_size * self.completion_tokens)

    def groups(self, vocabulary: int, seed: int) -> list[TrainingGroup]:
        """Return groups of random tokens with advantages of both signs."""
        rng = random.Random(seed)

        def ids(count: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(count)]

        def sequence(index: int) -> TokenSequence:
            return TokenSequence(
                completion_ids=ids(self.completion_tokens),
                logprobs=[-rng.random() for _ in range(self.completion_tokens)],
                policy_versions=[0] * self.completion_tokens,
                advantages=[1.0 if index % 2 else -1.0] * self.completion_tokens,
                finish_reason=FinishReason.STOP,
            )

        return [
            TrainingGroup(ids(self.prompt_tokens), [sequence(i) for i in range(self.group_size)], str(n))
            for n in range(self.prompts)
        ]


@dataclass(frozen=True)
class Rank:
    """The measurements of one rank."""

    seconds: list[float]
    """Seconds of each round for all ranks together, without the first round, which warms up."""
    peak_bytes: int
    parameters: int


def run(work: Work, ranks: int, threads: int) -> list[Rank]:
    """Measure in new processes.

    Raises:
        SystemExit: a process failed, or took longer than DEADLINE_SECONDS.
    """
    joined = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "MODEL_NAME": work.model}
    joined |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", __name__, json.dumps(asdict(work))]
    environments = [{**os.environ, **joined, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes = [subprocess.Popen(command, env=one, stdout=subprocess.PIPE, text=True) for one in environments]
    try:
        outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"error: an update took longer than {DEADLINE_SECONDS:g} s") from error
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("error: an update failed; its messages are above")
    return [Rank(**json.loads(output.splitlines()[-1])) for output in outputs]


def figures(work: Work, ranks: int = 1) -> Iterator[Figure]:
    """Measure an update, its useful operations (6 a parameter and token), and the memory of rank 0."""
    threads = 4 if torch.cuda.is_available() else max(machine.cores() // ranks, 1)
    first = run(work, ranks, threads)[0]
    seconds = sum(first.seconds) / len(first.seconds)
    yield Figure("update", seconds, "s")
    yield Figure("tokens", work.tokens / seconds, "1/s")
    yield Figure("operations a rank", 6e-12 * first.parameters * work.tokens / seconds / ranks, "TFLOP/s")
    yield Figure("peak memory", first.peak_bytes / 1e9, "GB")


def measure_here(work: Work) -> Rank:
    """Measure as one rank in this process."""
    machine.keep_freed_memory()
    seconds = []
    with join_ranks() as ranks:
        settings = TrainerSettings.load()
        if is_on_gpu := ranks.device.type == "cuda":
            settings, ranks, _room = preflight(settings, ranks)
        ranks = ranks.laid_out(settings.layout)
        policy = load_policy(settings, ranks)
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        learner = Learner(settings, policy, ranks, total_steps=work.rounds + 1)
        for number in range(work.rounds + 1):
            ranks.barrier()
            began = time.perf_counter()
            learner.update(work.groups(policy.config.vocab_size, number), number)
            ranks.barrier()
            seconds.append(time.perf_counter() - began)
    return Rank(seconds[1:], torch.cuda.max_memory_allocated() if is_on_gpu else _peak_resident(), parameters)


def _peak_resident() -> int:
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux's getrusage counts what the process that started this one had, too.
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    return int(peak) * 1024


if __name__ == "__main__":
    measured = measure_here(Work(**json.loads(sys.argv[1])))
    print(f"\n{json.dumps(asdict(measured))}", flush=True)
