"""``grpo launch``: a job group of a given size, launched with SkyPilot.

It writes the job group's YAML for the model, the nodes and the GPUs that are given, with the memory, the volume and the
settings that follow from them; shows what differs from the file of the repository and what it takes on the cluster; and
launches it, once somebody has said yes. ``plan.py`` and ``sizes.py`` derive all that is written; they import torch,
which --help does without.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Column, Table
from typer import Option

from local_runner import skypilot, spec
from local_runner.launch import grpo_command
from services.core import logs
from services.core.endpoints import Task, component_of
from services.core.errors import ConfigurationError

if TYPE_CHECKING:
    from scripts.launch.plan import Plan

CONTROLLER = "and, once for all jobs, SkyPilot's controller: 4 CPUs, 16 GB"
VOLUME = skypilot.ROOT / "jobgroups/volume.yaml"
WIDTH = 120
"""Columns of the output."""

Text = str | None
Texts = list[str] | None
COUNT = "Nodes; default: one of ppo-trainer and the file's of rollout-server; with --stock, the file's."
Count = Annotated[int | None, Option(min=1, help=COUNT)]
MODEL = "A name on the hub, or a directory with its config.json; default: MODEL_NAME of the settings, else the file's."
GPUS = "GPUs of a node, such as H100:8, or H100:8,A100-80GB:8 in the order to try."
OUTPUT = "Directory for the YAMLs; default: .cache/launch/, by model, nodes and GPUs."
IMAGES = "Images of the tasks of DATASET=harbor:DIR, each of which has a pod for its environment-server."
STOCK = "Leave out examples/gpu.env and its numbers of nodes: start from the file alone."


def main(
    context: typer.Context,
    model: Annotated[Text, Option(help=MODEL)] = None,
    rollout_nodes: Count = None,
    trainer_nodes: Count = None,
    gpus: Annotated[Text, Option(help=GPUS)] = None,
    rollout_gpus: Annotated[Text, Option(help="GPUs of a rollout node; default: --gpus.")] = None,
    asynchronous: Annotated[bool, Option("--async", help="Generate while the step trains.")] = False,
    colocate: Annotated[bool, Option("--colocate", help="Engines on the trainer's GPUs, which take turns.")] = False,
    agent: Annotated[Text, Option(help="MODULE:FUNCTION of an agent that answers the prompts.")] = None,
    environment: Annotated[Text, Option(help="The environment whose episodes the model plays.")] = None,
    env: Annotated[Texts, Option(help="NAME=VALUE, a setting. Repeatable.")] = None,
    env_file: Annotated[list[Path] | None, Option(help="File of NAME=VALUE lines; --env wins. Repeatable.")] = None,
    secret: Annotated[Texts, Option(help="NAME or NAME=VALUE, such as HF_TOKEN. Repeatable.")] = None,
    image: Annotated[Text, Option(help="The images that `make image IMAGE=...` built and pushed.")] = None,
    max_images: Annotated[int, Option(min=1, help=IMAGES)] = 20,
    output: Annotated[Path | None, Option(help=OUTPUT)] = None,
    stock: Annotated[bool, Option("--stock", help=STOCK)] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Write and show the YAMLs, and launch nothing.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
) -> int | None:
    """Launch a job group of a given size on a cluster, or with --dry-run show what would be launched."""
    # Somebody who wants to see the options must not pay for GPUs.
    if all(getattr(context.get_parameter_source(name), "name", "") == "DEFAULT" for name in context.params):
        typer.echo(context.get_help())
        typer.echo("For example: grpo launch --model Qwen/Qwen2.5-0.5B-Instruct --gpus L4:1 --dry-run")
        raise typer.Exit(2)
    from scripts.launch.plan import Request, plan_of

    logs.configure("launch", "error")
    settings = spec.env_files(env_file or []) | spec.assignments(env or [], "--env")
    secrets = spec.assignments(secret or [], "--secret")
    nodes = (rollout_nodes, trainer_nodes)
    request = Request(
        model, *nodes, gpus, rollout_gpus, colocate, asynchronous, agent, environment, image, stock, max_images
    )
    plan = plan_of(request, settings, secrets)
    files = write(plan, output or Path(".cache/launch", plan.name))
    # A program gets the job's number.
    return start(files, secrets, dry_run=dry_run, yes=yes)


def write(plan: Plan, directory: Path) -> tuple[Path, Path]:
    """Write a job group and its volume, print how the job group differs from its file, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    files = directory / "jobgroup.yaml", directory / VOLUME.name
    files[0].write_text(plan.text, "utf-8")
    volume = VOLUME.read_text("utf-8")
    present_size = str(yaml.safe_load(volume)["size"])
    gibibytes = max(plan.volume, _gibibytes(present_size))
    files[1].write_text(re.sub(r"(?m)^size:.*$", f"size: {gibibytes}Gi", volume), "utf-8")
    old = skypilot.values(plan.file.read_text("utf-8"))
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for (task, key), value in skypilot.values(plan.text).items():
        if value != (present := old.get((component_of(task), key), "-")):
            row = key.removeprefix(f"{skypilot.ENVS}."), present, value, plan.sources[task, key]
            rows.setdefault(row, []).append(task)
    if _gibibytes(present_size) != gibibytes:
        rows["size", present_size, f"{gibibytes}Gi", "derived"] = [VOLUME.name]
    changes = [[", ".join(tasks), *(cell.strip("'") or "''" for cell in row)] for row, tasks in rows.items()]
    _print_table(["changed in", "key", "file", "here", "source"], changes)
    if any(source == "preset" for *_, source in rows):
        print("preset: a batch that fills the GPUs (examples/gpu.env); options replace it, and --stock leaves it out")
    _print_table(["\non the cluster", "\nnodes", "\nGPUs", "\nCPUs", "\nGB"], _footprint(files[0]))
    print(f"a volume of {gibibytes} GiB, {CONTROLLER}", *plan.notes, sep="\n")
    print(f"\nwritten: {files[0]} and {files[1]}", flush=True)
    return files


def _gibibytes(size: str) -> int:
    """Return the gibibytes of a volume's size in SkyPilot's form, such as ``200Gi``, ``1Ti`` or ``200``.

    Raises:
        ConfigurationError: the size has another form.
    """
    match = re.fullmatch(r"(\d+)(Gi|Ti|)", size)
    if match is None:
        raise ConfigurationError(f"jobgroups/volume.yaml: size {size}: expected a number with Gi or Ti, such as 200Gi")
    return int(match[1]) * (1024 if match[2] == "Ti" else 1)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*(Column(name, overflow="fold") for name in header), box=None, pad_edge=False, header_style="")
    for row in rows:
        table.add_row(*row)
    Console(width=WIDTH, markup=False, highlight=False).print(table)


def _footprint(file: Path) -> list[list[str]]:
    """Return the nodes, GPUs, CPUs and gigabytes that each task asks for at least, and their sums.

    Raises:
        ConfigurationError: SkyPilot would ignore something in the file, such as a key that is there twice.
    """
    rows = []
    for task, document in zip(spec.load(file).tasks, spec.documents(file)[1:], strict=True):
        sizes = [task.gpus_per_node, *(int(document["resources"][key].rstrip("+")) for key in ("cpus", "memory"))]
        rows.append([task.name, task.num_nodes, *(task.num_nodes * size for size in sizes)])
    rows.append(["together", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
    return [list(map(str, row)) for row in rows]


def start(files: tuple[Path, Path], secrets: Mapping[str, str], *, dry_run: bool, yes: bool) -> int | None:
    """Have SkyPilot check the files, launch them unless it is a dry run, and print the commands that follow.

    Return the job's number, None where nothing is launched.

    Raises:
        ConfigurationError: SkyPilot is not installed and needed, or refuses the files.
    """
    python, job, error = skypilot.interpreter(), None, ""
    if python is None and not dry_run:
        raise ConfigurationError(f"SkyPilot is not installed: {skypilot.INSTALL}")
    if not (dry_run or yes):
        _confirm(files[0], secrets)
    if python is not None:
        job, error = skypilot.ask(python, files, secrets, launch=not dry_run)
        if dry_run and error.startswith("ConnectionError"):
            print(f"SkyPilot's loader could not check it without a network: {error}")
        elif error:
            raise ConfigurationError(f"SkyPilot refuses it: {error}; try `sky check kubernetes` and `sky api info`")
        elif dry_run:
            print("SkyPilot's loader accepts it")
    else:
        print(f"SkyPilot is not installed, so its loader has not checked it: {skypilot.INSTALL}")
    if job is None:
        _print_commands(files, secrets)
        return None
    print(f"job {job}; its log: sky jobs logs {job} {Task.TRAINER}; to end it: sky jobs cancel {job}")
    return job


def _confirm(file: Path, secrets: Mapping[str, str]) -> None:
    """Ask whether to launch a job group; without a terminal, print the command that launches it, and exit with 2."""
    _, count, gpus, *_ = _footprint(file)[-1]
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
    if not skypilot.ROOT.samefile("."):
        # SkyPilot uploads the current directory.
        print(f"to launch it, first: cd {shlex.quote(str(skypilot.ROOT))}")
        files = files[0].resolve(), files[1].resolve()
    print(f"to launch it: sky volumes apply {shlex.quote(str(files[1]))}")
    print(f"              {shlex.join(['sky', 'jobs', 'launch', str(files[0]), *options])}")
