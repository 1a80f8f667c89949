"""``grpo chaos``: faults in a run of this machine by a seeded plan, and a certificate of what they changed.

docs/guides/chaos.md has an example.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from typer import Option

from local_runner import directory, health, nodes, processes, spec
from local_runner.certificate import LIMITS, Fault, Strike, as_markdown, certify
from local_runner.directory import Nodes
from local_runner.fork import in_this_python
from local_runner.progress import GrowingFile
from local_runner.run import Command as Command  # refuses settings that are given as options
from local_runner.run import Env, EnvFiles, NumNodes, RunId, Secrets, SharedDir, Small, read_group
from local_runner.summary import Launch
from local_runner.supervisor import START_MARK, survived_kills
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import read_object, write_json
from services.run_page.directory import is_run

KILL, STOP = "kill", "stop"
KINDS = (KILL, STOP)
FILE = "chaos.json"
SHORTEST_STOP, LONGEST_STOP = 1.0, 8.0
"""Seconds of a stop: far below those after which a component that hangs counts as lost (HANG_SECONDS)."""
FIRST_STEP_SECONDS = 3600.0
"""Longest wait for the first step of a run, downloads included."""
HEALTHY_SECONDS = 1800.0
"""Longest wait for a component to be healthy again, the start of a large engine included."""
POLL_SECONDS = 0.3

Start = Callable[[Path], AbstractContextManager["subprocess.Popen[bytes]"]]
"""Starts the run of a directory, which ends with the context."""


def main(
    target: Annotated[str, typer.Argument(metavar="RUN|JOBGROUP", help="A run of this machine, or a group's YAML.")],
    every: Annotated[str, Option(help="One fault comes in each of these times.")] = "30s",
    length: Annotated[
        str, Option("--for", help="The length of the plan, which waits for components to be healthy.")
    ] = "10m",
    seed: Annotated[int, Option(help="The seed of the plan.")] = 0,
    fault: Annotated[list[str] | None, Option(help="kill or stop. Repeatable. Default: both.")] = None,
    quiet: Annotated[str | None, Option(help="An undisturbed run of equal settings. Default: one runs first.")] = None,
    no_compare: Annotated[bool, Option("--no-compare", help="Make no undisturbed run.")] = False,
    env: Env = None,
    env_file: EnvFiles = None,
    secret: Secrets = None,
    num_nodes: NumNodes = None,
    small: Small = False,
    run_id: RunId = None,
    shared_dir: SharedDir = Path(),
) -> None:
    """Kill and stop components of a run by a seeded plan, and certify that it lost nothing."""
    kinds = fault or [*KINDS]
    if unknown := set(kinds) - set(KINDS):
        raise ConfigurationError(f"--fault {', '.join(sorted(unknown))}: the faults are {' and '.join(KINDS)}")
    plan = Plan(_seconds("--every", every), _seconds("--for", length), seed, kinds)
    undisturbed = None if quiet is None else _undisturbed(quiet, shared_dir / "runs")
    if Path(target).suffix in (".yaml", ".yml"):
        path = spec.find(Path(target))
        group, overrides, in_files = read_group(
            path, env or [], env_file or [], secret or [], num_nodes or [], small=small
        )
        run_dir = shared_dir.resolve() / "runs" / (run_id or nodes.new_run_id(group))
        names = [*overrides.secrets]
        launch = Launch(path, env or (), env_file or (), in_files, names, num_nodes or (), small, shared_dir)
        environment = os.environ | overrides.secrets

        def start(run_dir: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
            again = launch.again(run_dir.name)
            return processes.running(in_this_python([*again, "--plain"]), env=environment)

        certificate = _disturb_new(group, run_dir, start, plan, undisturbed, is_compared=not no_compare)
    else:
        if env or env_file or secret or num_nodes or small or run_id:
            raise ConfigurationError(
                f"{target} is a run and keeps its settings; only a job group takes options for them"
            )
        run_dir = directory.find_run(target, shared_dir / "runs")
        certificate = _disturb_running(run_dir, plan, undisturbed)
    write_json(run_dir / FILE, {"plan": asdict(plan), **certificate})
    print(as_markdown(certificate), flush=True)
    raise typer.Exit(1 if certificate["problems"] else 0)


def _disturb_running(run_dir: Path, plan: Plan, undisturbed: Path | None) -> dict[str, Any]:
    """Disturb a run of this machine until it ends or the plan does; return the certificate.

    Raises:
        ConfigurationError: it does not run, or records too few steps.
    """
    running = _running(run_dir)
    trainer = read_object(run_dir / "config.json").get("components", {}).get(Task.TRAINER.value, {})
    _check_records(trainer.get("settings", {}).get("record_groups"))
    plan.draw(_kills_left(run_dir, running))
    return certify(run_dir, plan.inject(run_dir, lambda: not running.is_running()), undisturbed)


def _disturb_new(
    group: spec.JobGroup, run_dir: Path, start: Start, plan: Plan, undisturbed: Path | None, *, is_compared: bool
) -> dict[str, Any]:
    """Run a job group to its end with faults, an undisturbed one before it where it is needed; return the certificate.

    Raises:
        ConfigurationError: a run exists, or the undisturbed one failed.
    """
    [trainer] = [task.environment for task in group.tasks if task.name == Task.TRAINER] or [{}]
    first = is_compared and undisturbed is None and trainer.get("MODE") != "async"
    beside = run_dir.with_name(f"{run_dir.name}-quiet")
    for new in (run_dir, beside) if first else (run_dir,):
        if is_run(new):
            raise ConfigurationError(f"{new} exists, and faults need a new run: give another --run-id")
    _check_records(trainer.get("RECORD_GROUPS"))
    plan.draw(survived_kills(group))
    if trainer.get("CHECKPOINT_EVERY") == "0":
        print("note: CHECKPOINT_EVERY=0, so a killed trainer starts anew", flush=True)
    if first:
        with start(beside) as process:
            if code := process.wait():
                raise ConfigurationError(f"the undisturbed run {beside} ended with exit code {code}; see its logs")
    with start(run_dir) as process:
        strikes = plan.inject(run_dir, lambda: process.poll() is not None)
        process.wait()
    return certify(run_dir, strikes, beside if first else undisturbed)


@dataclass
class Plan:
    """One fault within each ``every`` of ``length`` seconds, drawn from a seed before anything happens."""

    every: float
    length: float
    seed: int
    kinds: Sequence[str] = KINDS
    faults: list[Fault] = field(default_factory=list)

    def draw(self, kills: Mapping[str, int]) -> None:
        """Draw and print the faults. Every node has one before any has a second one.

        A node whose task has had its kills is stopped instead, or left out where ``kinds`` has no stop.

        Args:
            kills: how often each node, such as ``ppo-trainer-0``, may be killed; the nodes of a task share that number.

        Raises:
            ConfigurationError: there is no fault.
        """
        generator, deck = random.Random(self.seed), list[str]()
        longest = max(SHORTEST_STOP, min(LONGEST_STOP, self.every))
        for number in range(int(self.length // self.every)):
            deck = deck or generator.sample(sorted(kills), len(kills))
            at, node = round(self.every * (number + generator.random()), 1), deck.pop()
            kind, seconds = generator.choice(self.kinds), round(generator.uniform(SHORTEST_STOP, longest), 1)
            used = sum(fault.kind == KILL and _task(fault.node) == _task(node) for fault in self.faults)
            if kind == KILL and used < kills[node]:
                self.faults.append(Fault(at, node, KILL))
            elif STOP in self.kinds:
                self.faults.append(Fault(at, node, STOP, seconds))
        if not self.faults:
            why = "--every is longer than --for" if self.every > self.length else "no task survives a kill; allow stops"
            raise ConfigurationError(f"the plan has no fault: {why}")
        print(f"plan of seed {self.seed}, in seconds after the first step:")
        for fault in self.faults:
            print(f"{fault.at:8.1f}  {fault}")
        print(f"note: {LIMITS}", flush=True)

    def inject(self, run_dir: Path, is_over: Callable[[], bool]) -> list[Strike]:
        """Inject one fault after the other from the first step on, until all have come or the run is over.

        The plan's clock stands still until a component is healthy again, so that the run gets ahead between faults.

        Raises:
            ConfigurationError: the run has no first step within FIRST_STEP_SECONDS.
        """
        metrics, strikes = run_dir / "metrics.jsonl", list[Strike]()
        if not _until(lambda: metrics.exists() and metrics.stat().st_size > 0, is_over, FIRST_STEP_SECONDS):
            if not is_over():
                raise ConfigurationError(f"{run_dir} had no first step within {FIRST_STEP_SECONDS:.0f} s; see its logs")
            return strikes
        running, start, paused = directory.read_nodes(run_dir), time.monotonic(), 0.0
        assert running is not None
        for fault in self.faults:
            due = start + paused + fault.at
            while time.monotonic() < due and not is_over():
                time.sleep(POLL_SECONDS)
            _until(functools.partial(is_healthy, running, fault.node), is_over, HEALTHY_SECONDS)
            began = time.monotonic()
            if is_over():
                break
            print(f"chaos: {fault}", flush=True)
            gone = hit(running, fault)
            is_back = _until(functools.partial(is_healthy, running, fault.node, gone), is_over, HEALTHY_SECONDS)
            paused += (seconds := time.monotonic() - began)
            strikes.append(Strike(fault, round(began - start, 1), round(seconds, 1) if is_back else None))
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
    ended = set(processes.marked(*_marks(running, _task(fault.node))))
    # A node's first process is its oldest. It dies first, so that it reports nothing of the others.
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return ended


def is_healthy(running: Nodes, node: str, gone: Set[psutil.Process] = frozenset()) -> bool:
    """Return whether the task of a node runs without the processes ``gone``, and all of its nodes answer /health."""
    task = _task(node)
    present = set(processes.marked(*_marks(running, task)))
    if not present or present & gone:
        return False
    addresses = [nodes.health_address(running.endpoints, one) for one in running.kills if _task(one) == task]

    async def are_up() -> bool:
        async with health.client() as http:
            return all([await health.state(http, address) == health.UP for address in addresses if address])

    return asyncio.run(are_up())


def _undisturbed(name: str, runs: Path) -> Path:
    """Return the directory of an undisturbed run that has succeeded."""
    run_dir = directory.find_run(name, runs)
    if (state := directory.state_of(run_dir)) != "succeeded":
        raise ConfigurationError(f"--quiet {name}: {state}; name a run that succeeded")
    return run_dir


def _running(run_dir: Path) -> Nodes:
    """Return the nodes of a run that runs on this machine.

    Raises:
        ConfigurationError: it does not, or its processes are not known.
    """
    running = directory.read_nodes(run_dir)
    if running is None or not running.is_running():
        raise ConfigurationError(f"{run_dir} does not run on this machine ({directory.state_of(run_dir)}); start it")
    if not running.mark or not processes.marked(running.mark):
        raise ConfigurationError(f"{run_dir} has no processes that this command can find; wait until its start is over")
    return running


def _check_records(record_groups: str | int | None) -> None:
    if record_groups == "off":
        raise ConfigurationError("RECORD_GROUPS=off: only records show which groups were trained twice; leave it unset")


def _kills_left(run_dir: Path, running: Nodes) -> dict[str, int]:
    """Return how often each node of a running run may still be killed; the restarts so far stand in its log."""
    left = {}
    for node, kills in running.kills.items():
        starts = [line for line in GrowingFile(run_dir / "logs" / f"{node}.log").new_lines() if line.startswith(_START)]
        last = starts[-1].split() if starts else []
        left[node] = kills - (int(last[-2]) if b"restart" in last else 0)
    return left


_START = START_MARK.encode()


def _until(condition: Callable[[], bool], is_over: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, and return True; False when the run is over or the seconds have passed before."""
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(POLL_SECONDS)
    return False


def _seconds(option: str, duration: str) -> float:
    try:
        if seconds := spec.seconds(duration):
            return seconds
        raise ValueError("it must be longer than 0")
    except ValueError as error:
        raise ConfigurationError(f"{option} {duration}: {error}") from error


def _task(node: str) -> str:
    return node.rpartition("-")[0]


def _marks(running: Nodes, task: str) -> list[str]:
    return [f"{running.mark}/{node}" for node in running.kills if _task(node) == task]
