"""Faults in the components of a run by a seeded plan, and a certificate of what they changed.

``python -m tests.chaos jobgroup.yaml --every 4 --length 20 --env-file examples/demo.env --small --env MAX_STEPS=12
--env CHECKPOINT_EVERY=2`` runs the job group twice, the second time with faults. Other options than those of ``--help``
are options of ``grpo run``. Links between components are not cut, because that needs root and network
namespaces, and files are never touched. Exit code 1: the run failed, took a step or a group twice, or ended with other
weights than the undisturbed one, which compares only on a CPU and in synchronous mode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import filecmp
import functools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from local_runner import nodes, processes, spec
from local_runner.supervisor import LOST_NODES
from services.core.endpoints import Task
from services.core.files import read_records
from services.run_page import components
from services.run_page.directory import Nodes, Run
from trainer.reporting.group_records import GroupRecords

KILL, STOP = "kill", "stop"
FILE = "chaos.json"
SHORTEST_STOP, LONGEST_STOP = 1.0, 8.0
"""Seconds of a stop: far below those after which a component that hangs counts as lost."""
WAIT_SECONDS = 1800.0
"""Longest wait for the first step of a run, and for a component to be healthy again."""
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Fault:
    """A planned fault: the seconds after the first step, the node, its kind, and the seconds of a stop."""

    at: float
    node: str
    kind: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Strike:
    """A fault as it came, and the seconds until the task's nodes were healthy again; None if they never were."""

    fault: Fault
    healthy_after: float | None


def main(arguments: Sequence[str]) -> int:
    """Run a job group undisturbed and disturbed, and print the certificate; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("job_group", type=Path)
    parser.add_argument("--every", type=float, default=30.0, help="One fault comes in each of these seconds.")
    parser.add_argument("--length", type=float, default=600.0, help="The seconds of the plan.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="append", choices=(KILL, STOP), help="Repeatable. Default: both.")
    parser.add_argument("--run-id", default="disturbed")
    parser.add_argument("--shared-dir", type=Path, default=Path())
    given, others = parser.parse_known_args(arguments)
    run_dir = (given.shared_dir / "runs" / given.run_id).resolve()
    quiet = run_dir.with_name(f"{given.run_id}-quiet")
    if run_dir.exists() or quiet.exists():
        parser.error(f"{run_dir} or {quiet} exists; give another --run-id")
    command = [sys.executable, "-m", "scripts.grpo", "run", str(given.job_group), *others]
    command += ["--shared-dir", str(given.shared_dir), "--run-id"]
    subprocess.run([*command, quiet.name], check=True)
    draw = functools.partial(plan, given.seed, given.every, given.length, given.fault or (KILL, STOP))
    with subprocess.Popen([*command, run_dir.name]) as process:
        strikes = inject(run_dir, spec.load(spec.find(given.job_group)), draw, lambda: process.poll() is not None)
        process.wait()
    certificate = certify(run_dir, strikes, quiet)
    content = orjson.dumps(certificate, option=orjson.OPT_INDENT_2)
    (run_dir / FILE).write_bytes(content)
    print(content.decode())
    return 1 if certificate["problems"] else 0


def plan(seed: int, every: float, length: float, kinds: Sequence[str], kills: Mapping[str, int]) -> list[Fault]:
    """Return one fault within each ``every`` of ``length`` seconds. Every node has one before any has a second one.

    A node whose task has had its kills is stopped instead, or left out where ``kinds`` has no stop.

    Args:
        seed: the same seed and nodes give the same plan.
        every: the seconds in which one fault comes.
        length: the seconds of the plan.
        kinds: KILL, STOP or both.
        kills: how often each node, such as ``ppo-trainer-0``, may be killed; the nodes of a task share that number.
    """
    generator, deck = random.Random(seed), list[str]()
    longest, faults = max(SHORTEST_STOP, min(LONGEST_STOP, every)), list[Fault]()
    for number in range(int(length // every)):
        deck = deck or generator.sample(sorted(kills), len(kills))
        at, node = round(every * (number + generator.random()), 1), deck.pop()
        kind, seconds = generator.choice(kinds), round(generator.uniform(SHORTEST_STOP, longest), 1)
        used = sum(fault.kind == KILL and task_of(fault.node) == task_of(node) for fault in faults)
        if kind == KILL and used < kills[node]:
            faults.append(Fault(at, node, KILL))
        elif STOP in kinds:
            faults.append(Fault(at, node, STOP, seconds))
    return faults


def inject(
    run_dir: Path,
    group: spec.JobGroup,
    draw: Callable[[Mapping[str, int]], list[Fault]],
    is_over: Callable[[], bool],
) -> list[Strike]:
    """Draw the plan at the first step, and inject one fault after the other until all have come or the run is over.

    The plan's clock stands still until a component is healthy again, so that the run gets ahead between faults.
    """
    metrics, strikes = run_dir / "metrics.jsonl", list[Strike]()
    if not until(lambda: metrics.exists() and metrics.stat().st_size > 0, is_over):
        return strikes
    running, start, paused = Run(run_dir).nodes, time.monotonic(), 0.0
    assert running is not None
    survived = {t.name: LOST_NODES if t.recover_on_exit_codes else t.max_restarts_on_errors for t in group.tasks}
    for fault in draw({node: survived[task_of(node)] for node in running.states}):
        while time.monotonic() < start + paused + fault.at and not is_over():
            time.sleep(POLL_SECONDS)
        until(functools.partial(is_healthy, running, fault.node), is_over)
        began = time.monotonic()
        if is_over():
            break
        print(f"chaos: {fault.kind} {fault.node}", flush=True)
        gone = hit(running, fault)
        is_back = until(functools.partial(is_healthy, running, fault.node, gone), is_over)
        paused += (seconds := time.monotonic() - began)
        strikes.append(Strike(fault, round(seconds, 1) if is_back else None))
    return strikes


def hit(running: Nodes, fault: Fault) -> set[psutil.Process]:
    """Kill all processes of a node, or stop them for the fault's seconds; return those that its task loses."""
    victims = sorted(processes.marked(f"{running.mark}/{fault.node}"), key=psutil.Process.create_time)
    if fault.kind == STOP:
        script = 'kill -STOP "$@"; sleep "$0"; kill -CONT "$@"'
        pids = [str(process.pid) for process in victims]
        # A process of its own, which Ctrl-C does not reach: the stop ends even if this process is killed meanwhile.
        command = ["sh", "-c", script, str(fault.seconds), *pids]
        subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL).wait()
        return set()
    ended = set(processes.marked(*_marks(running, fault.node)))
    # A node's first process is its oldest. It dies first, so that it reports nothing of the others.
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return ended


def is_healthy(running: Nodes, node: str, gone: Set[psutil.Process] = frozenset()) -> bool:
    """Return whether the task of a node runs without the processes ``gone``, and all of its nodes answer /health."""
    present = set(processes.marked(*_marks(running, node)))
    if not present or present & gone:
        return False
    others = [one for one in running.states if task_of(one) == task_of(node)]
    addresses = [nodes.health_address(running.endpoints, one) for one in others]

    async def are_up() -> bool:
        async with components.questioner() as http:
            return all([await components.ask_state(http, address) == components.UP for address in addresses if address])

    return asyncio.run(are_up())


def certify(run_dir: Path, strikes: Sequence[Strike], quiet: Path) -> dict[str, Any]:
    """Return the faults, the run's steps and groups, whether its weights equal those of ``quiet``, and problems."""
    outcome, records = Run(run_dir).outcome, GroupRecords(run_dir)
    steps = [line["step"] for line in read_records(run_dir / "metrics.jsonl")]
    heads = [records.head(step) for step in records.steps]
    uses = Counter(entry.group_id for head in heads for entry in head.groups if not entry.is_replayed)
    twice = sorted(group for group, count in uses.items() if count > 1)
    differing = _differing(run_dir, quiet)
    wrong = {
        "no fault came before the end of the run; give a shorter --every": not strikes,
        f"the run did not succeed: {outcome.get('reason', 'it has no outcome')}": outcome.get("exit_code") != 0,
        f"metrics.jsonl lacks steps, or has some twice: {steps}": steps != [*range(1, len(steps) + 1)],
        "no step has a record of its groups (RECORD_GROUPS), so nobody knows which were trained twice": not heads,
        f"groups trained twice: {', '.join(twice)}": twice,
        f"other weights than those of {quiet.name}: {', '.join(differing or ())}": differing,
    }
    return {
        "faults": [asdict(strike) for strike in strikes],
        "restarts": outcome.get("restarts"),
        "steps": len(steps),
        "steps_with_records": len(heads),
        "groups": len(uses),
        "trained_twice": twice,
        "weights_equal": None if differing is None else not differing,
        "problems": [problem for problem, is_so in wrong.items() if is_so],
    }


def _differing(run_dir: Path, quiet: Path) -> list[str] | None:
    """Return the files of weights that differ; None where no two runs are equal to the bit."""
    undisturbed = Run(quiet)
    if undisturbed.settings(Task.TRAINER).get("mode") == "async" or undisturbed.summary["device"] != "cpu":
        return None
    weights = [path for folder in ("model", "critic") for path in quiet.glob(f"{folder}/*.safetensors")]
    pairs = {str(path.relative_to(quiet)): (run_dir / path.relative_to(quiet), path) for path in weights}
    return [name for name, (a, b) in pairs.items() if not (a.exists() and filecmp.cmp(a, b, shallow=False))]


def until(condition: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
    """Wait until a condition holds, and return True; False when the run is over or WAIT_SECONDS have passed before."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_over() and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(POLL_SECONDS)
    return False


def task_of(node: str) -> str:
    """Return the task of a node, such as ``ppo-trainer`` for ``ppo-trainer-0``."""
    return node.rpartition("-")[0]


def _marks(running: Nodes, node: str) -> list[str]:
    return [f"{running.mark}/{one}" for one in running.states if task_of(one) == task_of(node)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
