"""The commands that a person may give next when a run has ended, whole, to be copied."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_runner.environment import Run
from services.core.endpoints import Task


@dataclass(frozen=True)
class Launch:
    """The command line that started a run, without its ``--run-id``."""

    job_group: Path
    env: Sequence[str] = ()
    env_files: Sequence[Path] = ()
    secrets: Sequence[str] = ()
    """The names alone: their values are not for a terminal."""
    num_nodes: Sequence[str] = ()
    shared_dir: Path = Path()

    def settings(self) -> list[str]:
        """Return the options that give variables."""
        options = [part for path in self.env_files for part in ("--env-file", str(path))]
        return options + [part for pair in self.env for part in ("--env", pair)]

    def again(self, run_id: str, *more: str) -> list[str]:
        """Return the command that goes on with the run."""
        options = [*self.settings(), *(part for pair in more for part in ("--env", pair))]
        options += [part for name in self.secrets for part in ("--secret", name)]
        options += [part for count in self.num_nodes for part in ("--num-nodes", count)]
        if self.shared_dir != Path():
            options += ["--shared-dir", str(self.shared_dir)]
        return [*module("scripts.run_local"), str(self.job_group), *options, "--run-id", run_id]


def next_commands(run: Run, launch: Launch, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what can be done with an ended run and the commands for it.

    Args:
        run: the run.
        launch: how it was started.
        summary: the trainer's summary.json; empty where there is none of this run.
    """
    directory = shown_path(run.run_dir)
    commands = [("look at it", shlex.join([*module("scripts.view"), directory]))]
    if summary.get("status") == "succeeded" and (run.run_dir / "model").exists():
        model = f"{directory}/model"
        serve = shlex.join([*module("services.embedded_engine"), "--host", "127.0.0.1"])
        evaluate = [*module("scripts.evaluate"), "--model", model, *launch.settings()]
        commands.append(("evaluate", shlex.join(evaluate)))
        commands.append(("chat (OpenAI's API)", f"MODEL_NAME={shlex.quote(model)} {serve}"))
        more = f"MAX_STEPS={2 * int(summary['steps'])}"
        commands.append(("train on", shlex.join(launch.again(run.run_id, more))))
    elif any((run.run_dir / "checkpoints").glob("*")):
        commands.append(("resume", shlex.join(launch.again(run.run_id))))
    elif any(task.name == Task.TRAINER for task in run.group.tasks):
        commands.append(("start again", shlex.join(launch.again(run.run_id))))
    elsewhere = [] if launch.shared_dir == Path() else ["--runs", shown_path(run.run_dir.parent)]
    commands.append(("list runs by size, and remove some", shlex.join([*module("scripts.clean"), *elsewhere])))
    return commands


def shown_path(path: Path) -> str:
    """Return ``path`` from here if it is below, else whole."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def module(name: str) -> list[str]:
    """Return the beginning of a command that runs the module ``name`` with this interpreter."""
    return [shown_path(Path(sys.prefix) / "bin" / "python"), "-m", name]
