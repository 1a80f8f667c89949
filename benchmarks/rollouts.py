"""Measure how many tokens a second the rollout workers generate, against transformers' own ``generate``.

    python -m benchmarks.rollouts --model .cache/models/smollm2-135m            # ours: nodes and router
    python -m benchmarks.rollouts --model .cache/models/smollm2-135m --url http://127.0.0.1:30000

Without ``--url`` it starts rollout nodes as a job group would, with the real router in front; ROLLOUT_ENGINE and the
other variables of the rollout-server are read from the environment. With it, it measures a running SGLang, router or
rollout node. Every round measures ours, prompts one after the other, and a batch, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.harness import spread
from benchmarks.common.job import running, write_job_group
from services.clients.rollout import ROUTING_KEY
from services.core.endpoints import ROUTER_PORT, Task
from services.core.machine import cores

START_SECONDS = 600.0
REQUEST_SECONDS = 120.0
ONE_BY_ONE = 4
"""Prompts of a round that are computed one after the other."""
BATCHES = 4
"""Batches of a round that a server computes."""


@dataclass
class Side:
    """One way of generating, and the measurements of its rounds."""

    name: str
    generate: Callable[[], float]
    """Does a round and returns its tokens a second."""
    tokens_per_second: list[float] = field(default_factory=list)

    def add_round(self) -> str:
        """Add a round; return what to print of it."""
        self.tokens_per_second.append(self.generate())
        return f"{self.tokens_per_second[-1]:.0f} tokens/s"


def prompts(count: int) -> list[str]:
    """Return different questions of about the same length without a common beginning."""
    return [f"{7 * i + 13} plus {11 * i + 5} is a sum. What is it? Answer with just the number." for i in range(count)]


@contextmanager
def rollout_nodes(model: Path, dtype: str, count: int) -> Iterator[str]:
    """Run rollout nodes, and give the router's URL once all workers are registered."""
    settings, task = {"MODEL_NAME": model.resolve(), "ENGINE_DTYPE": dtype}, Task.ROLLOUT_SERVER
    router = (f"{task}-0", ROUTER_PORT)

    def are_registered() -> bool:
        reply = job.get(*router, "/workers")
        return reply is not None and len(reply.json()["workers"]) == count

    with tempfile.TemporaryDirectory() as name:
        path = write_job_group(Path(name), "jobgroup.yaml", {}, only=[task])
        with running(Path(name), path, settings, {task: count}) as job:
            job.wait(are_registered, START_SECONDS)
            yield str(job.url(*router))


def server(url: str, given: argparse.Namespace) -> Callable[[], float]:
    """Return a function that generates by a server with SGLang's /generate, ``--batch-size`` completions at a time."""
    sampling = {"max_new_tokens": given.new_tokens, "temperature": 1.0, "ignore_eos": True}
    request = {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
    token = os.environ.get("JOBGROUP_TOKEN") if given.url else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def generate() -> float:
        limits = httpx.Limits(max_connections=given.batch_size)
        with (
            httpx.Client(headers=headers, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as http,
            ThreadPoolExecutor(given.batch_size) as pool,
        ):

            def complete(prompt: str) -> int:
                # A key of its own, as our client gives each request.
                key = {ROUTING_KEY: secrets.token_hex(8)}
                reply = http.post(f"{url}/generate", json=request | {"text": prompt}, headers=key).raise_for_status()
                return int(reply.json()["meta_info"]["completion_tokens"])

            started = time.perf_counter()
            tokens = sum(pool.map(complete, prompts(BATCHES * given.batch_size)))
            return tokens / (time.perf_counter() - started)

    return generate


def transformers(given: argparse.Namespace) -> Callable[[Sequence[Sequence[str]]], float]:
    """Return a function that completes batches by transformers in this process and returns tokens a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(cores())
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    length = {"min_new_tokens": given.new_tokens, "max_new_tokens": given.new_tokens}

    def generate(batches: Sequence[Sequence[str]]) -> float:
        tokens = 0
        started = time.perf_counter()
        for batch in batches:
            inputs = tokenizer(list(batch), return_tensors="pt", padding=True)
            sampled = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, **length)
            tokens += (sampled.shape[1] - inputs["input_ids"].shape[1]) * len(batch)
        return tokens / (time.perf_counter() - started)

    return generate


def measure(url: str, given: argparse.Namespace) -> list[Side]:
    """Measure all rounds; the server comes first and warms up before."""
    ours = server(url, given)
    workers = "" if given.url else f", {given.num_workers} worker(s)"
    sides = [Side(f"server, {given.batch_size} in flight{workers}", ours)]
    if not given.skip_baselines:
        theirs = transformers(given)
        one, batch = [[prompt] for prompt in prompts(ONE_BY_ONE)], [prompts(given.batch_size)]
        sides.append(Side("transformers generate, one after the other", lambda: theirs(one)))
        sides.append(Side(f"transformers generate, batch of {given.batch_size}", lambda: theirs(batch)))
    harness.say("warming up")
    ours()
    harness.in_turn(sides, given.rounds, Side.add_round)
    return sides


def show(sides: Sequence[Side], given: argparse.Namespace) -> Table:
    """Return tokens a second, and the ratio of the server, the first side, to each, as a table."""
    ours = statistics.median(sides[0].tokens_per_second)
    rows = []
    for side in sides:
        ratio = ours / statistics.median(side.tokens_per_second)
        rows.append((side.name, spread(side.tokens_per_second, 0), f"{ratio:.1f}x"))
    return harness.table(
        f"completions of {given.new_tokens} tokens, {given.dtype}, {cores()} cores",
        ("", "tokens/s", "server to it"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("rollouts", rounds=3, quick="one round")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="model directory")
    parser.add_argument("--url", help="a running SGLang, router or rollout node, whose token is JOBGROUP_TOKEN")
    parser.add_argument("--num-workers", type=int, default=2, help="rollout nodes to start; they share the cores")
    parser.add_argument("--batch-size", type=int, default=64, help="completions in flight at once")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each completion")
    parser.add_dtype()
    parser.add_argument("--skip-baselines", action="store_true", help="measure the server alone")
    given = parser.parse(arguments)
    if given.url:
        sides = measure(given.url.rstrip("/"), given)
    else:
        with rollout_nodes(given.model, given.dtype, given.num_workers) as url:
            sides = measure(url, given)
    harness.finish(given, [show(sides, given)], {side.name: side.tokens_per_second for side in sides})


if __name__ == "__main__":
    main()
