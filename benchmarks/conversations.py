"""Measure an episode of several turns against one completion as long: what the engine's prefix cache saves.

    python -m benchmarks.conversations --model .cache/models/smollm2-135m [--sessions 8] [--quick] [--json FILE]

Sessions play at once. An episode samples ``--turn-tokens`` in each turn and appends ``--tool-tokens`` after each turn
but the last; the completion as long samples as many tokens as both have together. Without the cache, it is flushed
before every turn. All are measured in turn on one rollout node with the real router in front.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.harness import spread
from benchmarks.rollouts import REQUEST_SECONDS, rollout_nodes
from services.clients.rollout import ROUTING_KEY
from services.core.machine import cores

TARGET = 1.3
"""The most that an episode may take, in times of the completion."""
LONG = "one completion as long"


@dataclass
class Side:
    """One way of sampling as many tokens, and the seconds of its rounds."""

    name: str
    play: Callable[[], None]
    seconds: list[float] = field(default_factory=list)

    def add_round(self) -> str:
        """Add a round; return what to print of it."""
        started = time.perf_counter()
        self.play()
        self.seconds.append(time.perf_counter() - started)
        return f"{self.seconds[-1]:.1f} s"


def made_up_tokens(seed: str, count: int) -> list[int]:
    """Return token ids that no other seed begins with."""
    draw = random.Random(seed)
    return [draw.randrange(1000, 10_000) for _ in range(count)]


class Player:
    """Sessions that play at once, and each time with other tokens."""

    def __init__(self, http: httpx.Client, given: argparse.Namespace) -> None:
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


def measure(url: str, given: argparse.Namespace) -> list[Side]:
    """Measure all rounds."""
    limits = httpx.Limits(max_connections=given.sessions)
    with httpx.Client(base_url=url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as http:
        player = Player(http, given)
        sides = [
            Side(LONG, player.complete),
            Side(f"an episode of {given.turns} turns", lambda: player.converse(flushes=False)),
            Side("the same without the cache", lambda: player.converse(flushes=True)),
        ]
        harness.say("warming up")
        player.converse(flushes=False)
        harness.in_turn(sides, given.rounds, Side.add_round)
    return sides


def show(sides: Sequence[Side], given: argparse.Namespace) -> Table:
    """Return seconds, and the ratio to the completion, as a table."""
    base = statistics.median(next(side.seconds for side in sides if side.name == LONG))
    rows = [(side.name, spread(side.seconds), f"{statistics.median(side.seconds) / base:.2f}") for side in sides]
    return harness.table(
        f"{given.sessions} session(s) at once: prompts of {given.prompt_tokens} tokens, {given.turn_tokens} a turn, "
        f"{given.tool_tokens} after it; {given.dtype}, {cores()} cores; to reach: at most {TARGET}",
        ("", "seconds", "of the completion"),
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = harness.CommandLine("conversations", rounds=3, quick="one round")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="model directory")
    parser.add_argument("--sessions", type=int, default=8, help="that play at once")
    parser.add_argument("--turns", type=int, default=4, help="of an episode")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of a session's first prompt")
    parser.add_argument("--turn-tokens", type=int, default=32, help="sampled in a turn")
    parser.add_argument("--tool-tokens", type=int, default=16, help="appended after a turn")
    parser.add_dtype()
    given = parser.parse(arguments)
    with rollout_nodes(given.model, given.dtype, 1) as url:
        sides = measure(url, given)
    harness.finish(given, [show(sides, given)], {side.name: side.seconds for side in sides})


if __name__ == "__main__":
    main()
