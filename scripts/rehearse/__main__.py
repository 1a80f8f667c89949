"""``grpo rehearse``: a run of two steps on this machine before GPUs are rented, with a stand-in for its model.

Data, template, rewards, agents, environments and the judge are the launch's own. docs/guides/kubernetes.md has an
example. ``rehearsal.py`` imports torch, which --help does without.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from local_runner import spec
from local_runner.run import Env, EnvFiles, Secrets
from services.core import logs


def main(
    path: Annotated[
        Path | None, typer.Argument(metavar="JOBGROUP", help="The job group's YAML; default: that of `grpo launch`.")
    ] = None,
    model: Annotated[str | None, Option(help="A name on the hub, or a directory; no weights are read.")] = None,
    env: Env = None,
    env_file: EnvFiles = None,
    secret: Secrets = None,
    right: Annotated[str, Option(help="The form of a right answer; {} stands for the ground truth.")] = "{}",
    steps: Annotated[int, Option(min=0, help="Steps of the run; 0 leaves it out.")] = 2,
    minutes: Annotated[float, Option(min=0.1, help="Longest time of the run.")] = 15,
    keep: Annotated[Path | None, Option(metavar="DIR", help="Keep the run and the stand-in in this directory.")] = None,
) -> None:
    """Try a launch here before renting GPUs: its data, template, rewards and agents, with a stand-in for the model."""
    from scripts.launch.plan import Request, group_of
    from scripts.rehearse.rehearsal import Rehearsal, make_stand_in
    from trainer.config import TrainerSettings

    logs.configure("rehearse", "error")
    options = spec.env_files(env_file or []) | spec.assignments(env or [], "--env")
    secrets = spec.assignments(secret or [], "--secret")
    target = model or options.get("MODEL_NAME") or str(TrainerSettings.model_fields["model_name"].default)
    file, chosen = group_of(options, Request())
    if path is not None:
        file, chosen = spec.find(path).resolve(), {}
    os.environ |= secrets
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = (keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        make_stand_in(target, folder / "stand-in")
        rehearsal = Rehearsal(file, options | chosen, [*secrets], target, folder / "stand-in", folder)
        rehearsal.check(right)
        if steps and not rehearsal.changes:
            rehearsal.run(steps, minutes)
    raise typer.Exit(rehearsal.verdict())


if __name__ == "__main__":
    typer.run(main)
