"""``grpo launch``: a job group of a given size, launched with SkyPilot.

It writes the job group's YAML for the model, the nodes and the GPUs that are given, with the memory, the volume and the
settings that follow from them; shows what differs from the file of the repository and what it takes on the cluster; and
launches it, once somebody has said yes. With --check, it launches two small pods that try the cluster instead.
``plan.py`` derives, ``launching.py`` shows and launches; both import torch, which --help does without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from local_runner import spec
from services.core import logs
from services.core.endpoints import Task

Text = str | None
Texts = list[str] | None
COUNT = "Nodes; default: chosen by the model and its GPUs; with --stock, the file's."
Count = Annotated[int | None, Option(min=1, help=COUNT)]
MODEL = "A name on the hub, or a directory with its config.json; default: MODEL_NAME of the settings, else the file's."
GPUS = "GPUs of a node, such as H100:8, or H100:8,A100-80GB:8 in the order to try."
OUTPUT = "Directory for the YAMLs; default: .cache/launch/, by model, GPUs and nodes."
STOCK = "Leave out examples/gpu.env and its numbers of nodes: start from the file alone."
CHECK = "Launch two small pods that try driver, images, hub, volume and network instead."


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
    output: Annotated[Path | None, Option(help=OUTPUT)] = None,
    stock: Annotated[bool, Option("--stock", help=STOCK)] = False,
    check: Annotated[bool, Option("--check", help=CHECK)] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Write and show the YAMLs, and launch nothing.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
) -> int | None:
    """Launch a job group of a given size on a cluster, or with --dry-run show what would be launched."""
    _require_options(context)
    from scripts.launch import launching, plan

    size = plan.Size(model, rollout_nodes, trainer_nodes, gpus, rollout_gpus)
    logs.configure("launch", "error")
    options = spec.env_files(env_file or []) | spec.assignments(env or [], "--env")
    secrets = spec.assignments(secret or [], "--secret")
    file, chosen = plan.group_of(
        options, size, colocate=colocate, asynchronous=asynchronous, agent=agent, environment=environment
    )
    preset = None if stock else plan.preset_of(options, file)
    planned = plan.plan_of(file, size, options, chosen, secrets, image, preset)
    text = launching.check_group(planned, options) if check else planned.text
    directory = output or launching.directory_of(planned.model, size, file)
    files = launching.write(planned, text, launching.CHECK if check else file, directory)
    tasks = tuple(launching.CHECKS) if check else (Task.TRAINER,)
    # A program gets the job's number.
    return launching.start(files, text, secrets, dry_run=dry_run, yes=yes, tasks=tasks)


def _require_options(context: typer.Context) -> None:
    """Without options, print the help and exit with 2: somebody who wants to see the options must not pay for GPUs."""
    if all(getattr(context.get_parameter_source(name), "name", "") == "DEFAULT" for name in context.params):
        typer.echo(context.get_help())
        typer.echo("For example: grpo launch --model Qwen/Qwen2.5-0.5B-Instruct --gpus L4:1 --dry-run")
        raise typer.Exit(2)
