"""Tokens a second of the rollout workers."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import DTYPE, MODEL, Args, Benchmark, Option, Side
from benchmarks.job import running, write_job_group
from services.clients.rollout import ROUTING_KEY
from services.core.endpoints import ROUTER_PORT, Task
from services.core.machine import cores

START_SECONDS = 600.0
REQUEST_SECONDS = 120.0
ONE_BY_ONE = 4
"""Prompts of a round that are computed one after the other."""
BATCHES = 4
"""Batches of a round that a server computes."""


def prompts(count: int) -> list[str]:
    """Return different questions of about the same length without a common beginning."""
    return [f"{7 * i + 13} plus {11 * i + 5} is a sum. What is it? Answer with just the number." for i in range(count)]


@contextmanager
def rollout_nodes(model: str, dtype: str, count: int) -> Iterator[str]:
    """Run rollout nodes, and give the router's URL once all workers are registered."""
    settings, task = {"MODEL_NAME": Path(model).resolve(), "ENGINE_DTYPE": dtype}, Task.ROLLOUT_SERVER
    router = (f"{task}-0", ROUTER_PORT)

    def are_registered() -> bool:
        reply = job.get(*router, "/workers")
        return reply is not None and len(reply.json()["workers"]) == count

    with tempfile.TemporaryDirectory() as name:
        path = write_job_group(Path(name), "jobgroup.yaml", {}, only=[task])
        with running(Path(name), path, settings, {task: count}) as job:
            job.wait(are_registered, START_SECONDS)
            yield str(job.url(*router))


def server(url: str, args: Args) -> Callable[[], float]:
    """Return a function that generates by a server with SGLang's /generate, ``--batch-size`` completions at a time."""
    sampling = {"max_new_tokens": args.new_tokens, "temperature": 1.0, "ignore_eos": True}
    request = {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
    token = os.environ.get("JOBGROUP_TOKEN") if args.url else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    def generate() -> float:
        limits = httpx.Limits(max_connections=args.batch_size)
        with (
            httpx.Client(headers=headers, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as http,
            ThreadPoolExecutor(args.batch_size) as pool,
        ):

            def complete(prompt: str) -> int:
                # A key of its own, as our client gives each request.
                key = {ROUTING_KEY: secrets.token_hex(8)}
                reply = http.post(f"{url}/generate", json=request | {"text": prompt}, headers=key).raise_for_status()
                return int(reply.json()["meta_info"]["completion_tokens"])

            started = time.perf_counter()
            tokens = sum(pool.map(complete, prompts(BATCHES * args.batch_size)))
            return tokens / (time.perf_counter() - started)

    return generate


def transformers(args: Args) -> Callable[[Sequence[Sequence[str]]], float]:
    """Return a function that completes batches by transformers in this process and returns tokens a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(cores())
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    length = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}

    def generate(batches: Sequence[Sequence[str]]) -> float:
        tokens = 0
        started = time.perf_counter()
        for batch in batches:
            inputs = tokenizer(list(batch), return_tensors="pt", padding=True)
            sampled = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, **length)
            tokens += (sampled.shape[1] - inputs["input_ids"].shape[1]) * len(batch)
        return tokens / (time.perf_counter() - started)

    return generate


def measure_speed(args: Args) -> list[Side]:
    """Measure how many tokens a second the rollout workers generate, against transformers' own `generate`.

    Without --url it starts rollout nodes as a job group would, with the real router in front; ROLLOUT_ENGINE and the
    other variables of the rollout-server are read from the environment. With it, it measures a running SGLang, router
    or rollout node. Every round measures ours, prompts one after the other, and a batch, so that all see the same
    machine.
    """
    if args.url:
        return _measure_speed(args.url.rstrip("/"), args)
    with rollout_nodes(args.model, args.dtype, args.num_workers) as url:
        return _measure_speed(url, args)


def _measure_speed(url: str, args: Args) -> list[Side]:
    """Measure all rounds; the server comes first and warms up before."""

    def side(name: str, generate: Callable[[], float]) -> Side:
        return Side(name, lambda _: {"tokens/s": generate()})

    ours = server(url, args)
    workers = "" if args.url else f", {args.num_workers} worker(s)"
    sides = [side(f"server, {args.batch_size} in flight{workers}", ours)]
    if not args.skip_baselines:
        theirs = transformers(args)
        one, batch = [[prompt] for prompt in prompts(ONE_BY_ONE)], [prompts(args.batch_size)]
        sides.append(side("transformers generate, one after the other", lambda: theirs(one)))
        sides.append(side(f"transformers generate, batch of {args.batch_size}", lambda: theirs(batch)))
    harness.say("warming up")
    ours()
    return harness.in_turn(sides, args.rounds)


def speed_tables(args: Args, sides: Sequence[Side]) -> list[Table]:
    """Return tokens a second, and the ratio of the server, the first side, to each."""
    columns: harness.Columns = {
        "": harness.name_of,
        "tokens/s": lambda side: side.spread("tokens/s", 0),
        "server to it": lambda side: f"{sides[0].median('tokens/s') / side.median('tokens/s'):.1f}x",
    }
    return [harness.table(f"completions of {args.new_tokens} tokens, {args.dtype}, {cores()} cores", sides, columns)]


SPEED = Benchmark(
    measure=measure_speed,
    tables=speed_tables,
    rounds=3,
    options={
        "model": MODEL,
        "url": Option(None, "a running SGLang, router or rollout node, whose token is JOBGROUP_TOKEN"),
        "num-workers": Option(2, "rollout nodes to start; they share the cores"),
        "batch-size": Option(64, "completions in flight at once"),
        "new-tokens": Option(32, "tokens of each completion"),
        "dtype": DTYPE,
        "skip-baselines": Option(False, "measure the server alone"),
    },
)
