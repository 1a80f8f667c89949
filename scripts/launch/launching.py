"""The output and the launch of ``grpo launch``: the differences from the file, the size on the cluster, the launch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
import yaml
from rich.console import Console
from rich.table import Table

from local_runner import spec
from local_runner.launch import grpo_command
from scripts.launch import job_group_text, skypilot
from scripts.launch.plan import ROOT, VOLUME, Plan, Size, gibibytes, variables_of
from scripts.launch.sizes import parse_gpus
from services.core.endpoints import Task
from services.core.errors import ConfigurationError

CHECK = Path(__file__).with_name("check.yaml")
CHECKS = {"check-trainer": Task.TRAINER, "check-rollout": Task.ROLLOUT_SERVER}
"""The task whose GPU each task of CHECK tries."""
CONTROLLER = "and, once for all jobs, SkyPilot's controller: 4 CPUs, 16 GB"
WIDTH = 120
"""Columns of the output."""


def directory_of(model: str, size: Size, file: Path) -> Path:
    """Return the directory of a model's YAMLs for a job group and a size, so that those of two sizes stay."""
    named = {
        "": size.gpus,
        "rollout-": size.rollout_gpus,
        "rollout-nodes-": size.rollout_nodes,
        "trainer-nodes-": size.trainer_nodes,
    }
    kind = [] if file.stem == "jobgroup" else [file.stem]
    parts = [Path(model).name, *kind, *(f"{prefix}{value}" for prefix, value in named.items() if value)]
    return Path(".cache/launch") / re.sub(r"[:, ]+", "-", "-".join(parts)).lower()


def write(plan: Plan, text: str, file: Path, directory: Path) -> tuple[Path, Path]:
    """Write a job group and its volume, print how the job group differs from its file, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    files = directory / (file.name if file == CHECK else "jobgroup.yaml"), directory / VOLUME.name
    files[0].write_text(text, "utf-8")
    volume = re.sub(r"(?m)^size:.*$", f"size: {plan.volume}Gi", VOLUME.read_text("utf-8"))
    files[1].write_text(volume, "utf-8")
    # Refuses what SkyPilot would ignore, such as a key that is there twice.
    spec.load(files[0])
    _print_changes(file.read_text(encoding="utf-8"), text, plan)
    if file != CHECK:
        for note in plan.notes:
            print(note)
    print(f"\nwritten: {files[0]} and {files[1]}", flush=True)
    return files


def _print_changes(before: str, after: str, plan: Plan) -> None:
    """Print what differs from the file, and what the job group takes on the cluster."""
    old, new = job_group_text.values(before), job_group_text.values(after)
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for (task, key), value in new.items():
        if value != (present := old.get((task, key), "-")):
            name = key.rpartition(".")[2]
            source = "derived" if name in plan.derived or name in ("cpus", "memory") else "given"
            source = "preset" if (task, key) in plan.preset else source
            rows.setdefault((key.removeprefix(f"{job_group_text.ENVS}."), present, value, source), []).append(task)
    size = str(yaml.safe_load(VOLUME.read_text("utf-8"))["size"])
    if gibibytes(size) != plan.volume:
        rows["size", size, f"{plan.volume}Gi", "derived"] = [VOLUME.name]
    changes = [[", ".join(tasks), *(cell.strip("'") or "''" for cell in row)] for row, tasks in rows.items()]
    _print_table(["changed in", "key", "file", "here", "source"], changes)
    if plan.preset:
        print("preset: a batch that fills the GPUs (examples/gpu.env); options replace it, and --stock leaves it out")
    _print_table(["\non the cluster", "\nnodes", "\nGPUs", "\nCPUs", "\nGB"], _footprint(after))
    print(f"a volume of {plan.volume} GiB, {CONTROLLER}")


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*header, box=None, pad_edge=False, header_style="")
    for row in rows:
        table.add_row(*row)
    Console(width=WIDTH, markup=False, highlight=False).print(table)


def _footprint(text: str) -> list[list[str]]:
    """Return the nodes, GPUs, CPUs and gigabytes that each task asks for at least, and their sums."""
    rows = []
    for task in list(yaml.safe_load_all(text))[1:]:
        resources, count = task["resources"], task.get("num_nodes", 1)
        gpus = max((choice.count for one in resources.get("accelerators", []) for choice in parse_gpus(one)), default=0)
        sizes = [gpus, *(int(resources[key].rstrip("+")) for key in ("cpus", "memory"))]
        rows.append([task["name"], count, *(count * size for size in sizes)])
    rows.append(["together", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
    return [list(map(str, row)) for row in rows]


def check_group(plan: Plan, options: Mapping[str, str]) -> str:
    """Return the job group that tries the cluster for a plan."""
    before, written = CHECK.read_text("utf-8"), job_group_text.values(plan.text)
    images = " ".join({value.strip("'"): None for (_, key), value in written.items() if key == "resources.image_id"})
    changes = variables_of(spec.load(CHECK), {**options, "MODEL_NAME": plan.model, "CHECK_IMAGES": images})
    for name, task in CHECKS.items():
        cards = ", ".join(f"{choice.name}:1" for choice in plan.tiers.get(task, plan.tiers[Task.TRAINER]).choices)
        changes[name, "resources.accelerators"] = f"[{cards}]"
        changes[name, "resources.image_id"] = written[Task.DATA_SERVER, "resources.image_id"]
    return job_group_text.edited(before, changes)


def start(
    files: tuple[Path, Path], text: str, secrets: Mapping[str, str], *, dry_run: bool, yes: bool, tasks: Sequence[str]
) -> int | None:
    """Have SkyPilot check the files, launch them unless it is a dry run, and print the commands that follow.

    Return the job's number, None where nothing is launched.

    Raises:
        ConfigurationError: SkyPilot is not installed and needed, or refuses the files.
    """
    python, job, error = skypilot.interpreter(), None, ""
    if python is None and not dry_run:
        raise ConfigurationError(f"SkyPilot is not installed: {skypilot.INSTALL}")
    if not (dry_run or yes):
        _confirm(text, secrets)
    if python is not None:
        job, error = skypilot.ask(python, files, secrets, launch=not dry_run)
        if dry_run and error.startswith("ConnectionError"):
            print(f"SkyPilot's loader could not check it without a network: {error}")
        elif error:
            raise ConfigurationError(f"SkyPilot refuses it: {error}; try `sky check kubernetes` and `sky api info`")
        elif dry_run:
            print("SkyPilot's loader accepts it")
    if job is None:
        _print_commands(files, secrets)
        return None
    logs_of = " and ".join(f"sky jobs logs {job} {task}" for task in tasks)
    print(f"job {job}; its log: {logs_of}; to end it: sky jobs cancel {job}")
    return job


def _confirm(text: str, secrets: Mapping[str, str]) -> None:
    """Ask whether to launch a job group; without a terminal, print the command that launches it, and exit with 2."""
    _, count, gpus, *_ = _footprint(text)[-1]
    size = f"{count} nodes with {gpus} GPUs"
    if sys.stdin.isatty():
        typer.confirm(f"Launch {size}?", abort=True)
        return
    typed = sys.argv[sys.argv.index("launch") + 1 :]
    for name, value in secrets.items():
        typed = [word.removesuffix(f"={value}") if f"{name}=" in word else word for word in typed]
    command = shlex.join([grpo_command(), "launch", *typed, "--yes"])
    print(f"launch: there is no terminal on which to ask about {size}; to launch them: {command}", file=sys.stderr)
    raise typer.Exit(2)


def _print_commands(files: tuple[Path, Path], secrets: Mapping[str, str]) -> None:
    """Print the commands that launch the files."""
    options = [part for name in secrets for part in ("--secret", name)]
    if not ROOT.samefile("."):
        # SkyPilot uploads the current directory.
        print(f"to launch it, first: cd {shlex.quote(str(ROOT))}")
        files = files[0].resolve(), files[1].resolve()
    print(f"to launch it: sky volumes apply {shlex.quote(str(files[1]))}")
    print(f"              {shlex.join(['sky', 'jobs', 'launch', str(files[0]), *options])}")
