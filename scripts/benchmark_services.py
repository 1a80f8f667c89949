"""Measures data-server, reward-server and replay-buffer under the loads that they are built for.

    python -m scripts.benchmark_services [--quick] [--only reward,data,replay] [--json FILE]

Each service runs as a process of its own, as in a job group, and is measured from here over HTTP: latencies at the
client, memory as resident in the service and its children. The load comes from the same machine, so its own cost is in
every number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.benchmarks.ending import end_in_order
from scripts.benchmarks.service_data import bench_data
from scripts.benchmarks.service_replay import bench_replay
from scripts.benchmarks.service_reward import bench_reward
from scripts.benchmarks.serving import Result


def measure(only: Sequence[str], *, quick: bool, model: str | None) -> list[Result]:
    """All measurements of the services named."""
    results: list[Result] = []
    if "reward" in only:
        results += bench_reward(quick)
    if "data" in only:
        results += bench_data(quick, model)
    if "replay" in only:
        results += bench_replay(quick)
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Prints a table; returns 1 where a target is missed, unless that is to be no failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller loads")
    parser.add_argument("--only", default="reward,data,replay", help="services, with commas")
    parser.add_argument("--model", help="tokenizer for the data-server: a hub name or a directory")
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    parser.add_argument("--no-fail", action="store_true", help="end with 0 where a target is missed, too")
    arguments = parser.parse_args(given)
    end_in_order()
    results = measure(arguments.only.split(","), quick=arguments.quick, model=arguments.model)
    for result in results:
        target = "" if result.target is None else f"{'>=' if result.at_least else '<='} {result.target:g}"
        mark = {None: "", True: "met", False: "MISSED"}[result.is_met]
        sys.stdout.write(
            f"{result.service:14} {result.what:48} {result.value:10.1f} {result.unit:4} {target:9} {mark}\n"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{**asdict(r), "is_met": r.is_met} for r in results], indent=1) + "\n")
    return int(not arguments.no_fail and any(result.is_met is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
