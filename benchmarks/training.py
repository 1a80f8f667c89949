"""The trainer's update alone against a bare pass, each measured in processes of its own."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import harness, models
from benchmarks.harness import DTYPE, Args, Benchmark, Option, Side
from services.core import machine
from services.core.machine import cores
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason
from trainer.algorithm.packing import TrainingGroup
from trainer.capacity.check import preflight
from trainer.config import TrainerSettings
from trainer.model.learner import Learner
from trainer.model.policy import load_policy
from trainer.model.ranks import Ranks, join_ranks

DEADLINE_SECONDS = 500.0
BARE_TARGET = 0.8
"""The aim, as a share of the bare pass's tokens a second."""


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
    """True to compute the prompt of a group once; otherwise every sequence comes as its own group."""
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

        def sequence(index: int) -> TokenSequence:
            return TokenSequence(
                completion_ids=ids(self.completion_tokens),
                logprobs=[-rng.random() for _ in range(self.completion_tokens)],
                policy_versions=[0] * self.completion_tokens,
                advantages=[1.0 if index % 2 else -1.0] * self.completion_tokens,
                finish_reason=FinishReason.STOP,
            )

        groups = [
            TrainingGroup(ids(self.prompt_tokens), [sequence(i) for i in range(self.group_size)], str(n))
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
    command = [sys.executable, "-m", "benchmarks.training", json.dumps(asdict(work))]
    environments = [{**os.environ, **environment, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(ranks)]
    with harness.programs([command] * ranks, environments, DEADLINE_SECONDS) as processes:
        outputs = [harness.output_of(process, f"rank {rank}") for rank, process in enumerate(processes)]
    return [Rank(**json.loads(output.splitlines()[-1])) for output in outputs]


def threads() -> int:
    """Return OMP_NUM_THREADS or the number of cores: the threads of all ranks together."""
    return int(os.environ.get("OMP_NUM_THREADS", cores()))


def measured_update(work: Work, ranks: int = 1, _round: int = 0) -> dict[str, Any]:
    """Return the seconds of each round of an update, and each rank's peak memory in GB."""
    by_rank = run(work, ranks, max(threads() // ranks, 1))
    return {"seconds": by_rank[0].seconds, "peak": [rank.peak_bytes / 1e9 for rank in by_rank]}


def measure_updates(args: Args) -> list[Side]:
    """Measure the trainer's update alone, by its seconds, tokens a second and memory, against a bare pass.

    Each case runs in new processes, which join as under torchrun. All cases have the same number of threads in total.
    The bare pass is the same model's own forward and backward over the same sequences, each with its own copy of the
    prompt, with the usual cross-entropy and no optimizer: the least cost without shared prompts. The trainer's settings
    are read from the environment (SHARD_PARAMETERS=false, LORA_RANK=8, ...).
    """
    work = harness.made_of(Work, args)
    sides = [Side("bare forward and backward", lambda _: measured_update(replace(work, is_bare=True)))]
    for ranks in args.ranks:
        for shares, how in ((True, "shared prompts"), (False, "each its prompt")):
            one = replace(work, shares_prompts=shares)
            sides.append(Side(f"{ranks} rank{'s' * (ranks > 1)}, {how}", partial(measured_update, one, ranks)))
    return harness.in_turn(sides, 1)


def update_tables(args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return seconds, tokens, and the ratio to the bare pass, the first side."""
    work = harness.made_of(Work, args)
    title = (
        f"{work.prompts} prompts of {work.prompt_tokens} tokens, {work.group_size} completions of "
        f"{work.completion_tokens} each, {work.dtype}; {threads()} threads in all; to reach: {BARE_TARGET} of the bare "
        "pass"
    )
    columns: harness.Columns = {
        "": harness.name_of,
        "seconds": lambda side: side.spread("seconds"),
        "tokens/s": lambda side: f"{work.trained_tokens / side.median('seconds'):.0f}",
        "of the bare pass": lambda side: f"{sides[0].median('seconds') / side.median('seconds'):.2f}",
        "peak GB by rank": lambda side: " + ".join(f"{peak:.2f}" for peak in side.values("peak")),
    }
    return [harness.table(title, sides, columns)]


UPDATES = Benchmark(
    measure=measure_updates,
    tables=update_tables,
    rounds=3,
    options={
        "model": Option(str(models.PRETRAINED), "model directory or name"),
        "prompts": Option(8),
        "group-size": Option(8),
        "prompt-tokens": Option(40),
        "completion-tokens": Option(12),
        "dtype": DTYPE,
        "ranks": Option([1, 2], "numbers of ranks to measure"),
    },
)


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
        settings, ranks, _room = preflight(settings, ranks)
    policy = load_policy(settings, ranks)
    learner = Learner(settings, policy, ranks, reference=None, total_steps=work.rounds + 1)
    return lambda number: learner.update(work.groups(policy.config.vocab_size, number), number)


def _bare(work: Work) -> Callable[[int], None]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32, attn_implementation="sdpa")
    last = work.completion_tokens

    def forward_and_backward(number: int) -> None:
        groups = work.groups(model.config.vocab_size, number)
        ids = torch.tensor([group.prompt_ids + s.completion_ids.tolist() for group in groups for s in group.sequences])
        with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16"):
            logits = cast("Tensor", model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, -last:].flatten()).backward()
        model.zero_grad()

    return forward_and_backward


if __name__ == "__main__":
    measured = measure_here(Work(**json.loads(sys.argv[1])))
    print(f"\n{json.dumps(asdict(measured))}", flush=True)
