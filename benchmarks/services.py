"""Measure data-server, reward-server and replay-buffer under the loads for which they are built.

    python -m benchmarks.services [--quick] [--rounds N] [--only reward-server,data-server,replay-buffer] [--json FILE]

Each service runs as a process of its own, as in a job group, and gets its load over HTTP. Latencies are measured at the
client; memory is resident in the service and its children. The load comes from the same machine, so its cost is in
every number. The table shows median, least and most of the rounds. A target is met if the median meets it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from benchmarks.common import harness, service_data, service_replay, service_reward
from benchmarks.common.harness import spread
from benchmarks.common.service import Figure

SERVICES = {
    "reward-server": service_reward.figures,
    "data-server": service_data.figures,
    "replay-buffer": service_replay.figures,
}
MISSED = "missed"


def row(service: str, rounds: Sequence[Figure]) -> tuple[str, ...]:
    """Return the table's row of a figure that was measured in several rounds."""
    first, values = rounds[0], [figure.value for figure in rounds]
    median, target = statistics.median(values), ""
    if first.at_least is not None:
        target = f">= {first.at_least:g}, {'met' if median >= first.at_least else MISSED}"
    if first.at_most is not None:
        target = f"<= {first.at_most:g}, {'met' if median <= first.at_most else MISSED}"
    return service, first.load, spread(values, 1), first.unit, target


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure; return 1 if a target is missed, unless --no-fail is given."""
    parser = harness.CommandLine("services", rounds=3, quick="smaller loads, one round")
    parser.add_argument("--only", default=",".join(SERVICES), help="services, with commas")
    parser.add_argument("--no-fail", action="store_true", help="end with 0 even if a target is missed")
    given = parser.parse(arguments)
    rows = []
    for name in given.only.split(","):
        rounds = [list(SERVICES[name](quick=given.quick)) for _ in range(given.rounds)]
        rows += [row(name, figures) for figures in zip(*rounds, strict=True)]
        harness.say(f"{name}: done")
    columns = ("service", "load", "median (least to most)", "unit", "target")
    harness.finish(given, [harness.table("services under load", columns, rows)], rows)
    return int(not given.no_fail and any(MISSED in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
