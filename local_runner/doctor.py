"""``grpo doctor``: what this machine can do, and what a job group would find on it and in its pods, as one table."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from typer import Exit, Option

from local_runner import checks, spec
from local_runner.launch import Launch
from local_runner.nodes import LocalRun
from local_runner.plan import Plan
from local_runner.run import Env, EnvFiles, NumNodes, Secrets, SharedDir, planned
from services.core import machine
from services.core.endpoints import Task
from services.core.errors import EXIT_CONFIGURATION, ConfigurationError
from services.core.toolchain import missing_tools
from services.engines.sglang import check_installed
from services.sandbox.backends import AUTOMATIC, BackendName, Interpreter
from services.sandbox.box import Box
from services.sandbox.kernel import Limits
from services.sandbox.probe import attack

GOOD, BAD, NOTE = "[green]yes[/]", "[red]no[/]", "-"
_RUNS = 20
"""Programs whose time is measured in each sandbox."""

Row = tuple[str, str, str]
"""A line of the table: what it is about, GOOD, BAD or NOTE, and the facts."""
JobGroup = Annotated[
    Path | None, Option("--job-group", metavar="JOBGROUP", help="Check this job group's settings and pods, too.")
]


def main(
    job_group: JobGroup = None,
    env: Env = None,
    env_file: EnvFiles = None,
    secret: Secrets = None,
    num_nodes: NumNodes = None,
    shared_dir: SharedDir = Path(),
) -> None:
    """Show what this machine can do, and with --job-group whether that job group could run here and in its pods."""
    console = Console()
    table = Table("", "", "facts", title="this machine", title_justify="left")
    rows = [*_of_machine(shared_dir.resolve()), *_of_sandboxes()]
    if job_group is not None:
        path = spec.find(job_group)
        rows += _of_pods(path)
        launch = Launch(path, env or (), env_file or (), secret or (), num_nodes or (), shared_dir=shared_dir)
        rows += _of_job_group(launch)
    for subject, state, facts in rows:
        table.add_row(Text(subject), state, Text(facts))
    console.print(table)
    if job_group is not None and any(state == BAD for subject, state, _ in rows if subject.startswith("job group")):
        raise Exit(EXIT_CONFIGURATION)


def _of_machine(shared_dir: Path) -> Iterator[Row]:
    yield "system", NOTE, f"{platform.platform()}, Python {platform.python_version()}, {machine.cores()} cores"
    yield "memory", NOTE, decimal(machine.host_memory())
    for subject, path in (("shared memory", Path("/dev/shm")), ("disk", shared_dir)):
        if path.is_dir():
            yield subject, NOTE, f"{decimal(shutil.disk_usage(path).free)} free in {path}"
    gpus, memory = machine.visible_gpus(), machine.gpu_memory()
    driver = machine.driver_version()
    if gpus:
        yield "GPUs", GOOD, f"{len(gpus)} of {decimal(memory or 0)} at least, driver {driver}"
    else:
        yield "GPUs", NOTE, f"none{f', although there is driver {driver}' if driver else ''}"
    yield from _of_engines(has_gpus=bool(gpus))


def _of_engines(*, has_gpus: bool) -> Iterator[Row]:
    """Yield the engines that are installed, and on a machine with GPUs what trainer and SGLang lack to compile."""
    engines = {"SGLang": ["sglang"], "the embedded engine": ["torch", "sglang_router"]}
    installed = [name for name, modules in engines.items() if all(map(find_spec, modules))]
    python, problem = os.environ.get("SGLANG_PYTHON"), ""
    if python:
        try:
            check_installed("sglang", "sglang", python)
            installed.append(python)
        except ConfigurationError as error:
            problem = str(error)
    yield "engine", BAD if problem or not installed else GOOD, problem or ", ".join(installed) or "none"
    interpreters = [("the trainer's kernels", sys.executable, False)]
    if not problem and (python or "SGLang" in installed):
        interpreters.append(("SGLang's kernels", python or sys.executable, True))
    for subject, interpreter, for_engine in interpreters if has_gpus else ():
        missing = missing_tools(interpreter, for_engine=for_engine)
        lacks = "; ".join(f"{tool}: {remedy}" for tool, remedy in missing.items())
        yield subject, BAD if missing else GOOD, f"missing {lacks}" if missing else "all tools that compile them"


def _of_sandboxes() -> Iterator[Row]:
    interpreter = Interpreter.find(os.environ.get("SANDBOX_PYTHON") or sys.executable)
    for backend in AUTOMATIC:
        problems = asyncio.run(attack(backend, interpreter, writes=True))
        if problems:
            yield f"sandbox {backend}", BAD, ", ".join(problems)
            continue
        start, run = asyncio.run(_speed(backend, interpreter))
        yield f"sandbox {backend}", GOOD, f"every attack fails; start {start:.0f} ms, a program {run:.0f} ms"


async def _speed(backend: BackendName, interpreter: Interpreter) -> tuple[float, float]:
    """Return the milliseconds that a box takes to start, and the median of those that a program takes in it."""
    began = time.perf_counter()
    box = await Box(backend, interpreter, Limits()).start()
    times = [time.perf_counter() - began]
    for _ in range(_RUNS):
        began = time.perf_counter()
        await box.run("script", source="print(1)")
        times.append(time.perf_counter() - began)
    await box.close()
    return 1000 * times[0], 1000 * median(times[1:])


def _of_pods(path: Path) -> Iterator[Row]:
    """Yield the image of each task's pods, and what those of reward-server allow code, as far as the file says."""
    for document in spec.documents(path)[1:]:
        resources = document.get("resources") or {}
        pod = ((document.get("config") or {}).get("kubernetes") or {}).get("pod_config") or {}
        image = str(resources.get("image_id", "SkyPilot's own image")).removeprefix("docker:")
        runs_code = document.get("name") == Task.REWARD_SERVER
        sandbox = f"; sandbox: {sandbox_in_pod(pod.get('spec') or {})}" if runs_code else ""
        yield f"pod of {document.get('name')}", NOTE, image + sandbox


def sandbox_in_pod(pod: Mapping[str, Any]) -> str:
    """Return which sandbox a pod of this specification allows, by docs/security.md."""
    if "gvisor" in str(pod.get("runtimeClassName", "")).lower():
        return "bwrap, on gVisor's own kernel"
    container: Mapping[str, Any] = next(iter(pod.get("containers") or []), {})
    context = {**(pod.get("securityContext") or {}), **(container.get("securityContext") or {})}
    unconfined = [(context.get(name) or {}).get("type") for name in ("seccompProfile", "appArmorProfile")]
    if unconfined == ["Unconfined", "Unconfined"]:
        return "bwrap if the image has bubblewrap and the cluster allows these profiles, else landlock"
    return "landlock, if the nodes' kernel is 5.13 or newer with it; bwrap is refused by the default profiles"


def _planned(run: LocalRun, loaded: Sequence[checks.Loaded]) -> list[str]:
    """Return the cautions of a dry run; raise ConfigurationError where it refuses the run."""
    plan = Plan(run, loaded, is_dry_run=True)
    plan.check()
    return list(plan.cautions())


def _of_job_group(launch: Launch) -> Iterator[Row]:
    """Yield the results of a dry run's checks, up to one on which the others depend."""
    try:
        with planned(launch, None) as run:
            loaded = checks.load_all(run)
            yield "job group: settings", GOOD, f"{launch.job_group}: names and values of all tasks"
            parts = checks.before_rows(run, loaded) | {
                "rows, template, rewards, memory and disk": lambda: _planned(run, loaded)
            }
            for subject, part in parts.items():
                try:
                    notes = "; ".join(part() or [])
                    yield f"job group: {subject}", GOOD, f"unknown here: {notes}" if subject == "models" else notes
                except ConfigurationError as error:
                    yield f"job group: {subject}", BAD, str(error)
    except ConfigurationError as error:
        yield "job group: settings", BAD, str(error)
