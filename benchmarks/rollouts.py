"""Tokens a second of the rollout workers, and what their prefix cache saves in episodes of several turns."""

from __future__ import annotations

import os
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import DTYPE, MODEL, Benchmark, Given, Option, Side
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
EPISODE_TARGET = 1.3
"""The most that an episode may take, in times of the completion."""


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


def server(url: str, given: Given) -> Callable[[], float]:
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


def transformers(given: Given) -> Callable[[Sequence[Sequence[str]]], float]:
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


def measure_speed(given: Given) -> list[Side]:
    """Measure how many tokens a second the rollout workers generate, against transformers' own `generate`.

    Without --url it starts rollout nodes as a job group would, with the real router in front; ROLLOUT_ENGINE and the
    other variables of the rollout-server are read from the environment. With it, it measures a running SGLang, router
    or rollout node. Every round measures ours, prompts one after the other, and a batch, so that all see the same
    machine.
    """
    if given.url:
        return _measure_speed(given.url.rstrip("/"), given)
    with rollout_nodes(given.model, given.dtype, given.num_workers) as url:
        return _measure_speed(url, given)


def _measure_speed(url: str, given: Given) -> list[Side]:
    """Measure all rounds; the server comes first and warms up before."""

    def side(name: str, generate: Callable[[], float]) -> Side:
        return Side(name, lambda _: {"tokens/s": generate()})

    ours = server(url, given)
    workers = "" if given.url else f", {given.num_workers} worker(s)"
    sides = [side(f"server, {given.batch_size} in flight{workers}", ours)]
    if not given.skip_baselines:
        theirs = transformers(given)
        one, batch = [[prompt] for prompt in prompts(ONE_BY_ONE)], [prompts(given.batch_size)]
        sides.append(side("transformers generate, one after the other", lambda: theirs(one)))
        sides.append(side(f"transformers generate, batch of {given.batch_size}", lambda: theirs(batch)))
    harness.say("warming up")
    ours()
    return harness.in_turn(sides, given.rounds)


def speed_tables(given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return tokens a second, and the ratio of the server, the first side, to each."""
    columns: harness.Columns = {
        "": harness.name_of,
        "tokens/s": lambda side: side.spread("tokens/s", 0),
        "server to it": lambda side: f"{sides[0].median('tokens/s') / side.median('tokens/s'):.1f}x",
    }
    return [harness.table(f"completions of {given.new_tokens} tokens, {given.dtype}, {cores()} cores", sides, columns)]


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


def made_up_tokens(seed: str, count: int) -> list[int]:
    """Return token ids that no other seed begins with."""
    draw = random.Random(seed)
    return [draw.randrange(1000, 10_000) for _ in range(count)]


class Player:
    """Sessions that play at once, and each time with other tokens."""

    def __init__(self, http: httpx.Client, given: Given) -> None:
        self._http, self._given = http, given
        self._plays = 0

    def complete(self) -> None:
        """Have each session sample everything in one completion."""
        given = self._given
        count = given.turns * given.turn_tokens + (given.turns - 1) * given.tool_tokens
        self._turn(self._begin(), count)

    def converse(self, *, flushes: bool) -> None:
        """Have each session play its episode; ``flushes`` empties the cache before every turn."""
        given = self._given
        conversations = self._begin()
        for turn in range(given.turns):
            if flushes:
                self._http.post("/flush_cache").raise_for_status()
            sampled = self._turn(conversations, given.turn_tokens)
            for session, ids in enumerate(conversations):
                ids += sampled[session] + made_up_tokens(f"tool {turn} {session}", given.tool_tokens)

    def _begin(self) -> list[list[int]]:
        """Return a new prompt for each session."""
        self._plays += 1
        names = [f"{self._plays} {session}" for session in range(self._given.sessions)]
        return [made_up_tokens(name, self._given.prompt_tokens) for name in names]

    def _turn(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return ``count`` tokens after each prompt, sampled at once."""
        sampling = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True}

        def sample(session: int) -> list[int]:
            body: dict[str, Any] = {"input_ids": prompts[session], "sampling_params": sampling, "return_logprob": True}
            headers = {ROUTING_KEY: f"{self._plays} {session}"}
            reply = self._http.post("/generate", json=body, headers=headers).raise_for_status()
            ids: list[int] = reply.json()["output_ids"]
            return ids

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(sample, range(len(prompts))))


def timed(name: str, play: Callable[[], None]) -> Side:
    """Return a side whose rounds are the seconds of ``play``."""

    def measure(_round: int) -> Mapping[str, float]:
        started = time.perf_counter()
        play()
        return {"seconds": time.perf_counter() - started}

    return Side(name, measure)


def measure_conversations(given: Given) -> list[Side]:
    """Measure an episode of several turns against one completion as long: what the engine's prefix cache saves.

    Sessions play at once. An episode samples --turn-tokens in each turn and appends --tool-tokens after each turn but
    the last; the completion as long samples as many tokens as both have together. Without the cache, it is flushed
    before every turn. All are measured in turn on one rollout node with the real router in front.
    """
    limits = httpx.Limits(max_connections=given.sessions)
    with (
        rollout_nodes(given.model, given.dtype, 1) as url,
        httpx.Client(base_url=url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as http,
    ):
        player = Player(http, given)
        sides = [
            timed("one completion as long", player.complete),
            timed(f"an episode of {given.turns} turns", lambda: player.converse(flushes=False)),
            timed("the same without the cache", lambda: player.converse(flushes=True)),
        ]
        harness.say("warming up")
        player.converse(flushes=False)
        return harness.in_turn(sides, given.rounds)


def conversation_tables(given: Given, sides: Sequence[Side]) -> list[Table]:
    """Return seconds, and the ratio to the completion, the first side."""
    title = (
        f"{given.sessions} session(s) at once: prompts of {given.prompt_tokens} tokens, {given.turn_tokens} a turn, "
        f"{given.tool_tokens} after it; {given.dtype}, {cores()} cores; to reach: at most {EPISODE_TARGET}"
    )
    columns: harness.Columns = {
        "": harness.name_of,
        "seconds": lambda side: side.spread("seconds"),
        "of the completion": lambda side: f"{side.median('seconds') / sides[0].median('seconds'):.2f}",
    }
    return [harness.table(title, sides, columns)]


CONVERSATIONS = Benchmark(
    measure=measure_conversations,
    tables=conversation_tables,
    rounds=3,
    options={
        "model": MODEL,
        "sessions": Option(8, "that play at once"),
        "turns": Option(4, "of an episode"),
        "prompt-tokens": Option(256, "of a session's first prompt"),
        "turn-tokens": Option(32, "sampled in a turn"),
        "tool-tokens": Option(16, "appended after a turn"),
        "dtype": DTYPE,
    },
)
