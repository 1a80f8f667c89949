"""``grpo rehearse``: a launch tried on this machine before GPUs are rented, with a stand-in for its model.

Data, template, rewards, agents, environments and the judge are the launch's own. docs/guides/rehearsing.md has an
example. ``rehearsal.py`` imports torch, which --help does without.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from local_runner import spec
from local_runner.processes import exit_on_signals
from local_runner.run import Env, EnvFiles, Secrets
from scripts.launch.__main__ import Count
from services.core import logs

if TYPE_CHECKING:
    from scripts.launch.plan import Size


def main(
    path: Annotated[
        Path | None, typer.Argument(metavar="JOBGROUP", help="The job group's YAML; default: that of `grpo launch`.")
    ] = None,
    model: Annotated[str | None, Option(help="A name on the hub, or a directory; no weights are read.")] = None,
    env: Env = None,
    env_file: EnvFiles = None,
    secret: Secrets = None,
    gpus: Annotated[str | None, Option(help="GPUs of a node of the launch, such as H100:8.")] = None,
    rollout_gpus: Annotated[str | None, Option(help="GPUs of a rollout node; default: --gpus.")] = None,
    rollout_nodes: Count = None,
    trainer_nodes: Count = None,
    asynchronous: Annotated[bool, Option("--async", help="Generate while the step trains.")] = False,
    colocate: Annotated[bool, Option("--colocate", help="As `grpo launch --colocate`.")] = False,
    stock: Annotated[bool, Option("--stock", help="As `grpo launch --stock`: without examples/gpu.env.")] = False,
    right: Annotated[str, Option(help="The form of a right answer; {} stands for the ground truth.")] = "{}",
    steps: Annotated[int, Option(min=0, help="Steps of the run; 0 leaves it out.")] = 2,
    minutes: Annotated[float, Option(min=0.1, help="Longest time of the run.")] = 15,
    keep: Annotated[Path | None, Option(metavar="DIR", help="Keep the run and the stand-in in this directory.")] = None,
) -> None:
    """Try a launch here before renting GPUs: its data, template, rewards and agents, with a stand-in for the model."""
    from scripts.launch.plan import ASYNC, COLOCATED, Size, group_of, has_engines, plan_of, preset_of
    from scripts.rehearse import stand_in
    from scripts.rehearse.rehearsal import Rehearsal, default_model

    logs.configure("rehearse", "error")
    exit_on_signals()  # leaves no directory and no run
    options = spec.env_files(env_file or []) | spec.assignments(env or [], "--env")
    secrets = spec.assignments(secret or [], "--secret")
    target = model or options.get("MODEL_NAME") or default_model()
    size = Size(target, rollout_nodes, trainer_nodes, gpus, rollout_gpus)
    own = None if path is None else spec.find(path).resolve()
    colocate, asynchronous = colocate or own == COLOCATED, asynchronous or own == ASYNC
    file, chosen = group_of(options, size, colocate=colocate, asynchronous=asynchronous)
    if is_own := own is not None and own != file:
        file, chosen, stock = own, {}, True
    preset = None if stock else preset_of(options, file)
    os.environ |= secrets
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = (keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        settings = (preset or {}) | options | chosen
        rehearsal = Rehearsal(file, settings, secrets, target, stand_in.make(target, folder / "stand-in"), folder)
        rehearsal.introduce()
        plan = None
        with rehearsal.refusals():
            plan = plan_of(file, size, options, chosen, secrets, None, preset) if has_engines(file) else None
        rehearsal.check(right, plan)
        if steps:
            rehearsal.run(steps, minutes)
    given: dict[str, Sequence[object]] = {"--env-file": env_file or (), "--env": env or (), "--secret": [*secrets]}
    flags = {"--async": asynchronous, "--colocate": colocate, "--stock": stock}
    command = _own_command(path, target, given) if is_own else _launch_command(target, size, flags, given)
    raise typer.Exit(rehearsal.verdict(command))


def _words(given: Mapping[str, Sequence[object]]) -> list[str]:
    return [word for name, values in given.items() for value in values for word in (name, str(value))]


def _own_command(path: Path | None, target: str, given: Mapping[str, Sequence[object]]) -> str:
    """Return the command that launches a job group's file which `grpo launch` does not take."""
    words = _words({**given, "--env": [f"MODEL_NAME={target}", *given["--env"]]})
    return shlex.join(["sky", "jobs", "launch", str(path), *words])


def _launch_command(target: str, size: Size, flags: Mapping[str, bool], given: Mapping[str, Sequence[object]]) -> str:
    """Return the command by which `grpo launch` launches what was rehearsed."""
    sizes = {"--gpus": size.gpus, "--rollout-gpus": size.rollout_gpus, "--rollout-nodes": size.rollout_nodes}
    sizes |= {"--trainer-nodes": size.trainer_nodes}
    options = {name: [value] for name, value in sizes.items() if value} | dict(given)
    chosen = (flag for flag, is_chosen in flags.items() if is_chosen)
    return shlex.join(["grpo", "launch", "--model", target, *chosen, *_words(options)])


if __name__ == "__main__":
    typer.run(main)
