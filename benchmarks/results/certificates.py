"""Certificates of ``grpo chaos``: the demos with faults in all of their components, and the same without."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from benchmarks.harness import ROOT
from benchmarks.job import JOB_GROUP
from benchmarks.results import job_runs
from benchmarks.results.job_runs import Figures
from benchmarks.results.runs import Result, Results, Run
from local_runner.chaos import FILE, KILL
from local_runner.spec import env_file
from services.core.files import read_records

GROUPS = {
    "make demo": JOB_GROUP,
    "make demo-agent": ROOT / "jobgroups/agent.yaml",
    "make demo-environment": ROOT / "jobgroups/environment.yaml",
}
_ROLLOUTS = {"make demo": "completion", "make demo-agent": "agent", "make demo-environment": "environment"}
SETTINGS = {
    name: env_file(ROOT / f"examples/{name.removeprefix('make ')}.env") | {"ROLLOUT": rollout}
    for name, rollout in _ROLLOUTS.items()
}
PLAN = ("--every", "5s", "--for", "50s", "--small")


def disturb(run: Run) -> Result:
    """Run a demo twice, once with faults, and return the figures of the certificate."""
    before = job_runs.processor_seconds()
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "scripts.grpo", "chaos", str(GROUPS[run.task]), *PLAN]
        command += ["--seed", str(run.seed), "--run-id", "disturbed", "--shared-dir", directory]
        command += [word for name, value in run.settings.items() for word in ("--env", f"{name}={value}")]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        run_dir = Path(directory) / "runs/disturbed"
        if not (run_dir / FILE).exists():
            raise SystemExit(f"{done.stdout[-3000:]}\nerror: grpo chaos ended with {done.returncode}")
        result = job_runs.measured(run, read_records(run_dir / "metrics.jsonl"))
        result.figures |= figures_of(orjson.loads((run_dir / FILE).read_bytes()))
    result.processor_seconds = job_runs.processor_seconds() - before
    return result


def figures_of(certificate: dict[str, Any]) -> Figures:
    """Return the numbers of a certificate; ``equal`` and ``passed`` are 1 for yes."""
    faults = certificate["faults"]
    healthy = [fault["healthy_after"] for fault in faults if fault["healthy_after"] is not None]
    return {
        "kills": sum(fault["fault"]["kind"] == KILL for fault in faults),
        "stops": sum(fault["fault"]["kind"] != KILL for fault in faults),
        "components": len({fault["fault"]["node"] for fault in faults}),
        "restarts": sum((certificate["outcome"] or {"restarts": {}})["restarts"].values()),
        "longest": max(healthy, default=math.nan),
        "groups": certificate["groups"],
        "trained_twice": len(certificate["trained_twice"]),
        "equal": float(certificate["weights_equal"] is True),
        "passed": float(not certificate["problems"]),
    }


def row(results: Results, task: str) -> str:
    """Return the cells of a demo's certificate: faults, restarts, groups trained twice, equal weights."""
    found = [result.figures for result in results if result.task == task]
    if not found:
        return " | ".join(["not run", *[""] * 6])
    total = {name: sum(figures[name] for figures in found) for name in found[0]}
    n, longest = len(found), max(figures["longest"] for figures in found)
    return " | ".join(
        (
            f"{total['kills']:.0f} and {total['stops']:.0f}",
            f"{total['components'] / n:.0f}",
            f"{total['restarts']:.0f}",
            f"{longest:.0f} s",
            f"{total['trained_twice']:.0f} of {total['groups']:.0f}",
            "yes" if total["equal"] == n else f"in {total['equal']:.0f} of {n}",
            "yes" if total["passed"] == n else f"{total['passed']:.0f} of {n}",
        )
    )


def verdicts(results: Results) -> str:
    """Return in how many certificates everything holds, over all demos."""
    passed = sum(result.figures["passed"] for result in results)
    faults = sum(result.figures["kills"] + result.figures["stops"] for result in results)
    return f"{passed:.0f} of {len(results)} runs with {faults:.0f} faults in all"
