"""``grpo evaluate-policy``: the returns of a policy in an environment.

The episodes are those of ``grpo trajectories`` with one policy, and its files; see docs/evaluation_head.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
from typer import Option

from evaluation.trajectories import RESULTS, SEEDS, Options, Shard, play, run, summary_of
from services.core import logs
from services.core.files import write_json
from services.protocol.rewards import Z, standard_error


async def evaluate(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Play the episodes that are missing in ``options.save_to``, write the results there, and return them.

    Raises:
        ConfigurationError: an option is wrong, policy and environment do not fit, or the directory holds another run.
        ProblemError: the policy gives no actions. The files that are whole are kept.
    """
    began = time.monotonic()
    shards, info = await play(options, say)
    results = {"environment": info.id} | _results(options, shards) | {"seconds": time.monotonic() - began}
    write_json(options.save_to / RESULTS, results)
    return results


def _results(options: Options, shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the results of all files."""
    episodes: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for shard in shards:
        path = options.save_to / shard.name
        summary, steps = summary_of(path), pq.read_table(path, columns=["seed", "version"]).to_pylist()
        versions = defaultdict(list)
        for step in steps:
            versions[step["seed"]].append(step["version"])
        episodes += [
            {"seed": seed, "episode_return": returns[0], "steps": len(of_seed), "versions": _in_order(of_seed)}
            for (seed, of_seed), returns in zip(versions.items(), summary["returns"], strict=True)
        ]
        left_out |= {str((options.seed + int(number)) % SEEDS): why for number, why in summary["left_out"].items()}
    returns = [episode["episode_return"] for episode in episodes]
    mean, error = statistics.fmean(returns), standard_error(returns)
    return {
        "policy": shards[0].lineup[0],
        "policy_versions": _in_order(version for episode in episodes for version in episode["versions"]),
        "mean_return": {"value": mean, "stderr": error, "low": mean - Z * error, "high": mean + Z * error},
        "steps": sum(episode["steps"] for episode in episodes),
        "left_out": left_out,
        "episodes": episodes,
    }


def _in_order(versions: Iterable[int | None]) -> list[int | None]:
    return sorted(set(versions), key=lambda version: -1 if version is None else version)


def main(
    save_to: Annotated[Path, Option(help="Directory of episodes and results. Resumes what is there.")],
    policies: Annotated[str, Option(help="The policy to load, name=target as in HEAD_POLICIES.")],
    environment: Annotated[str, Option(help="As ENVIRONMENT of an environment server.")] = "CartPole-v1",
    episodes: Annotated[int, Option(min=1, help="Episodes to play.")] = 100,
    at_once: Annotated[int, Option(min=1, max=1024, help="Episodes played at once.")] = 256,
    shard_episodes: Annotated[int, Option(min=1, help="Episodes in a file. A kill loses the unfinished file.")] = 256,
    seed: Annotated[
        int, Option(min=0, max=2**31 - 1, help="Seed of the first episode; the next has the next seed.")
    ] = 0,
) -> None:
    """Play episodes of a policy and write returns, their mean and its interval to results.json."""
    logs.configure("evaluate_policy", "warning")
    options = Options(environment, policies, episodes, seed, shard_episodes, at_once, save_to, is_single=True)

    async def work() -> None:
        _show(await evaluate(options, lambda line: print(line, file=sys.stderr, flush=True)), save_to)

    run(work, "evaluate-policy", save_to)


def _show(results: dict[str, Any], save_to: Path) -> None:
    for seed, reason in list(results["left_out"].items())[:5]:
        print(f"the episode of seed {seed} is left out: {reason}")
    mean = results["mean_return"]
    print(
        f"{results['policy']} in {results['environment']}: mean return {mean['value']:.2f} ({mean['low']:.2f} to "
        f"{mean['high']:.2f}) over {len(results['episodes'])} episodes in {results['seconds']:.1f} s; results in "
        f"{save_to / RESULTS}"
    )
