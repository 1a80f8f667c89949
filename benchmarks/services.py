"""Measure data-server, reward-server and replay-buffer under the loads for which they are built.

    python -m benchmarks.services [--quick] [--rounds N] [--only reward,data,replay] [--json FILE]

Each service runs as a process of its own, as in a job group, and gets its load over HTTP. Latencies are measured at the
client; memory is resident in the service and its children. The load comes from the same machine, so its cost is in
every number. The table shows median, least and most of the rounds. A target is met if the median meets it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.common import harness, service_data, service_replay, service_reward
from benchmarks.common.harness import spread
from benchmarks.common.service import Measured, Record


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure; return 1 if a target is missed, unless --no-fail is given."""
    parser = harness.CommandLine("services", rounds=3, quick="smaller loads, one round")
    parser.add_argument("--only", default="reward,data,replay", help="services, with commas")
    parser.add_argument("--model", help="tokenizer for the data-server: a hub name or a directory")
    parser.add_argument("--no-fail", action="store_true", help="end with 0 even if a target is missed")
    given = parser.parse(arguments)
    records = {"reward": Record("reward-server"), "data": Record("data-server"), "replay": Record("replay-buffer")}

    def measure(record: Record) -> str:
        if record is records["reward"]:
            service_reward.measure(record, quick=given.quick)
        elif record is records["data"]:
            service_data.measure(record, quick=given.quick, model=given.model)
        else:
            service_replay.measure(record, quick=given.quick)
        return f"{len(record.measured)} figures"

    chosen = [record for name, record in records.items() if name in given.only.split(",")]
    harness.in_turn(chosen, given.rounds, measure)
    measured = [one for record in chosen for one in record.measured.values()]
    rows = [(one.service, one.what, spread(one.values, 1), one.unit, one.target, _mark(one)) for one in measured]
    columns = ("service", "load", "median (least to most)", "unit", "target", "")
    harness.finish(given, [harness.table("services under load", columns, rows)], measured)
    return int(not given.no_fail and not all(one.is_met for one in measured))


def _mark(one: Measured) -> str:
    if not one.target:
        return ""
    return "met" if one.is_met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
