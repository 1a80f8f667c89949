"""Measure data-server, reward-server and replay-buffer under the loads that they are built for.

    python -m benchmarks.services [--quick] [--rounds N] [--only reward,data,replay]

Each service runs in its own process, as in a job group. This program measures it over HTTP: latencies at the client and
the resident memory of the service and its children. The load comes from the same machine, so every number includes its
cost. The table shows the rounds' median, least and most; a target is met if the median meets it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common.ending import end_in_order
from benchmarks.common.figures import spread
from benchmarks.common.service_data import bench_data
from benchmarks.common.service_replay import bench_replay
from benchmarks.common.service_reward import bench_reward
from benchmarks.common.serving import Result


def measure(only: Sequence[str], *, quick: bool, model: str | None) -> list[Result]:
    """Return all measurements of the services in ``only``; ``model`` is the data-server's tokenizer."""
    results: list[Result] = []
    if "reward" in only:
        results += bench_reward(quick)
    if "data" in only:
        results += bench_data(quick, model)
    if "replay" in only:
        results += bench_replay(quick)
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Print a table; return 1 if a target is missed, unless ``--no-fail`` is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller loads")
    parser.add_argument("--rounds", type=int, help="how often; by default 3, once with --quick")
    parser.add_argument("--only", default="reward,data,replay", help="services, with commas")
    parser.add_argument("--model", help="tokenizer for the data-server: a hub name or a directory")
    parser.add_argument("--no-fail", action="store_true", help="end with 0 where a target is missed, too")
    arguments = parser.parse_args(given)
    end_in_order()
    measured = defaultdict[tuple[str, str], list[Result]](list)
    for _ in range(arguments.rounds or (1 if arguments.quick else 3)):
        for result in measure(arguments.only.split(","), quick=arguments.quick, model=arguments.model):
            measured[result.service, result.what].append(result)
    medians = []
    for results in measured.values():
        values = [result.value for result in results]
        median = replace(results[0], value=statistics.median(values))
        medians.append(median)
        target = "" if median.target is None else f"{'>=' if median.at_least else '<='} {median.target:g}"
        mark = {None: "", True: "met", False: "MISSED"}[median.is_met]
        sys.stdout.write(
            f"{median.service:14} {median.what:44} {spread(values, 1):>28} {median.unit:4} {target:9} {mark}\n"
        )
    return int(not arguments.no_fail and any(median.is_met is False for median in medians))


if __name__ == "__main__":
    sys.exit(main())
