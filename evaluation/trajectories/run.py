"""A run of grpo trajectories: plays the shards that are missing, and writes the table of results."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.identity import check_identity, held
from evaluation.trajectories import ratings
from evaluation.trajectories.arenas import Arena, open_arena
from evaluation.trajectories.plan import Plan, Shard, lineups_of
from evaluation.trajectories.play import ShardPlayer
from evaluation.trajectories.rows import read_summary, write_shard
from services.core.errors import ConfigurationError
from services.core.files import atomic_write
from services.evaluation_head.make_policy import make_policy
from services.evaluation_head.policy import Policy
from services.evaluation_head.settings import HeadSettings

MANIFEST = "manifest.json"
LOCK = ".lock"
RESULTS = "results.json"
REFRESH_SECONDS = 5.0
"""Time between two looks at the version of a model that a rollout server serves."""


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    environment: str | None
    server: str | None
    policies: str
    episodes: int
    seed: int
    shard_episodes: int
    at_once: int
    save_to: Path


async def generate(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Play what is missing in ``options.save_to`` and return the results; ``say`` gets a line for each shard.

    Raises:
        ConfigurationError: an option is wrong, or the directory holds another run.
        DependencyLostError: the environment server does not answer.
        ProblemError: a policy gives no actions.
    """
    settings = HeadSettings.load(
        head_policies=options.policies.replace(",", " "),
        head_batch_size=options.at_once,
        head_timeout_ms=0.0,
        head_llm_concurrency=options.at_once,
    )
    if not settings.policies:
        raise ConfigurationError("--policies is empty; name policies, as a=policies/cartpole,b=http://127.0.0.1:30000")
    async with AsyncExitStack() as stack:
        stack.enter_context(held(options.save_to / LOCK, "--save-to"))
        arena = await stack.enter_async_context(open_arena(options.environment, options.server, settings.token))
        policies = {
            name: await stack.enter_async_context(make_policy(name, target, settings))
            for name, target in settings.policies.items()
        }
        if misfits := [why for policy in policies.values() if (why := policy.misfit(arena.info))]:
            raise ConfigurationError("; ".join(misfits))
        plan = Plan(
            lineups_of(list(policies), arena.info.seats), options.episodes, options.seed, options.shard_episodes
        )
        _check_manifest(options, arena, settings.policies, policies)
        stack.callback(asyncio.create_task(_keep_fresh(policies)).cancel)
        await _play_missing(options, plan, arena, policies, say)
    results = results_of(options.save_to, plan, arena.info.seats)
    atomic_write(options.save_to / RESULTS, json.dumps(results, indent=2) + "\n")
    return results


def _check_manifest(options: Options, arena: Arena, targets: Mapping[str, str], policies: Mapping[str, Policy]) -> None:
    """Write everything that the episodes depend on to the manifest, or compare it with the manifest that is there."""
    manifest: dict[str, Any] = {"episodes": options.episodes, "seed": options.seed}
    manifest |= {"shard_episodes": options.shard_episodes}
    manifest |= {f"environment.{name}": value for name, value in arena.info.model_dump(mode="json").items()}
    manifest["policies"] = list(policies)
    for name, policy in policies.items():
        manifest[f"policies.{name}"] = targets[name]
        stats = policy.stats()
        if "file" in stats:
            manifest[f"policies.{name}.version"] = stats["version"]
            manifest[f"policies.{name}.sha256"] = hashlib.sha256(Path(stats["file"]).read_bytes()).hexdigest()
    path, is_used = options.save_to / MANIFEST, any(options.save_to.glob("shard-*.parquet"))
    if is_used and not path.exists():
        raise ConfigurationError(f"{options.save_to} has shards without {MANIFEST}; give another --save-to")
    check_identity(
        path,
        manifest,
        is_used=is_used,
        holds="episodes of other settings",
        option="--save-to",
    )


async def _play_missing(
    options: Options, plan: Plan, arena: Arena, policies: Mapping[str, Policy], say: Callable[[str], None]
) -> None:
    shards = list(plan.shards())
    for shard in shards:
        path = options.save_to / shard.name
        if path.exists():
            continue
        started = time.monotonic()
        played = await ShardPlayer(arena, policies, shard, plan.seed_of, options.at_once).play()
        if not played.attempts:
            reason = next(iter(played.left_out.values()))
            raise ConfigurationError(f"no episode of {shard.name} comes to its end: {reason}")
        table = played.rows.table(shard, played.attempts, plan.seed_of)
        first = shard.first_episode - shard.start
        summary = {
            "lineup": shard.lineup,
            "returns": [played.returns[i] for i in sorted(played.returns)],
            "steps": table.num_rows,
            "left_out": {str(first + i): why for i, why in sorted(played.left_out.items())},
        }
        write_shard(path, table, summary)
        rate = table.num_rows / (time.monotonic() - started)
        lost = f", {len(played.left_out)} left out" if played.left_out else ""
        say(
            f"{shard.name} of {len(shards)}: {' against '.join(shard.lineup)}, {len(played.returns)} episodes{lost}, "
            f"{table.num_rows} steps, {rate:.0f} steps/s"
        )


async def _keep_fresh(policies: Mapping[str, Policy]) -> None:
    """Follow the versions of models that others serve. A version in a directory stays the one in the manifest."""
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        for policy in policies.values():
            if "file" not in policy.stats():
                await policy.refresh()


def results_of(directory: Path, plan: Plan, seats: int) -> dict[str, Any]:
    """Return the results of all shards of a plan: the method, a row a policy, and the episodes that were left out.

    Raises:
        ConfigurationError: a file is not a shard.
    """
    games: dict[tuple[str, ...], list[list[float]]] = {lineup: [] for lineup in plan.lineups}
    steps: Counter[tuple[str, ...]] = Counter()
    left_out: dict[str, str] = {}
    for shard in plan.shards():
        summary = _summary_of(directory, shard)
        games[shard.lineup] += summary["returns"]
        steps[shard.lineup] += summary["steps"]
        left_out |= summary["left_out"]
    rows = ratings.mean_returns(games, steps) if seats == 1 else ratings.ratings(games)
    return {
        "method": "mean return" if seats == 1 else ratings.METHOD,
        "episodes": sum(map(len, games.values())),
        "steps": steps.total(),
        "policies": rows,
        "left_out": left_out,
    }


def _summary_of(directory: Path, shard: Shard) -> dict[str, Any]:
    try:
        return read_summary(directory / shard.name)
    except ValueError as error:
        raise ConfigurationError(f"{error}; remove it, and the same command plays its episodes again") from error
