"""The end of a run: its outcome, rewards and duration, and complete commands to copy for what may come next."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from local_runner.checks import READERS, load_settings, tasks_by_variable
from local_runner.directory import all_runs, grpo_command, shown_path, usage
from local_runner.nodes import Run, node_environment
from local_runner.progress import GrowingFile, advice, counted, failed, new_steps
from local_runner.view import duration
from services.core.endpoints import Task
from services.core.errors import EXIT_CONFIGURATION
from services.core.files import read_object
from services.core.settings import Settings

if TYPE_CHECKING:
    from trainer.config import TrainerSettings

_EVALUATED_AS: dict[str, Task] = {
    "evaluate": Task.TRAINER,
    **{task: task for task in (Task.DATA_SERVER, Task.REWARD_SERVER, Task.ROLLOUT_SERVER)},
}
"""The task of a run whose variables an evaluation takes over, by the first task of the settings' reader."""
_OWN = {*Settings.model_fields, "model_name"}
"""The settings that an evaluation never takes from a run."""


@dataclass(frozen=True)
class Launch:
    """The command line that started a run, without its ``--run-id``."""

    job_group: Path
    env: Sequence[str] = ()
    env_files: Sequence[Path] = ()
    in_files: Mapping[str, str] = field(default_factory=dict)
    """The variables of these files."""
    secrets: Sequence[str] = ()
    """The names alone, because the values must not appear on a terminal."""
    num_nodes: Sequence[str] = ()
    small: bool = False
    shared_dir: Path = Path()

    def again(self, run_id: str, *env: str) -> list[str]:
        """Return the command that continues the run, with ``env`` in place of earlier values of its variables."""
        replaced = {assignment.partition("=")[0] for assignment in env}
        kept = [assignment for assignment in self.env if assignment.partition("=")[0] not in replaced]
        options = [*_repeated("--env-file", self.env_files), *_repeated("--env", [*kept, *env])]
        options += _repeated("--secret", self.secrets)
        options += _repeated("--num-nodes", self.num_nodes)
        options += ["--small"] if self.small else []
        if self.shared_dir != Path():
            options += ["--shared-dir", str(self.shared_dir)]
        return [grpo_command(), "run", str(self.job_group), *options, "--run-id", run_id]


def trainer_summary(run: Run, since: float) -> dict[str, Any]:
    """Return the trainer's summary.json; empty if it has written none after ``since``, a time of ``time.time``."""
    path = run.run_dir / "summary.json"
    return read_object(path) if path.exists() and path.stat().st_mtime >= since else {}


def show(console: Console, run: Run, launch: Launch | None, outcome: dict[str, Any], summary: dict[str, Any]) -> None:
    """Print the end of a run.

    Args:
        console: for the output.
        run: the run.
        launch: the command line that started it; None: a program did, and no commands are printed.
        outcome: the content of runner.json.
        summary: the trainer's summary.json; empty if the trainer has written none.
    """
    table = Table(show_header=False, title=f"run {run.run_id}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if summary:
        for name in ("model", "dataset", "device", "steps"):
            table.add_row(name, Text(str(summary.get(name))))
        table.add_row(*reward_change(summary))
        for source, figures in summary.get("sources", {}).items():
            accuracies = " → ".join(f"{accuracy:.3f}" for accuracy in figures["accuracies"] or ())
            reward = reward_change(figures)[1] + (f"; accuracy {accuracies}" if accuracies else "")
            table.add_row(Text(f"reward of {source}"), reward)
    steps = new_steps(GrowingFile(run.run_dir / "metrics.jsonl"))
    if (share := failed(steps)) is not None:
        table.add_row("failed completions", share)
    for name, value in outcome_rows(outcome, summary):
        table.add_row(name, Text(value))
    table.add_row("directory", Text(shown_path(run.run_dir)))
    table.add_row("disk space", decimal(usage(run.run_dir)[0]))
    console.print(table)
    if hint := advice(steps):
        console.print(Text(hint, "yellow"), soft_wrap=not console.is_terminal)
    if launch is None:
        return
    runs = all_runs(run.run_dir.parent)
    size = decimal(sum(usage(path)[0] for path in runs))
    place = shown_path(run.run_dir.parent)
    console.print(f"size of all runs in {place}/: {size}", highlight=False, soft_wrap=True)
    for purpose, command in next_commands(run, launch, summary, outcome.get("exit_code", 0)):
        # Each command is a line of its own and complete, to be copied, however narrow the terminal.
        console.print(Text(f"\n{purpose}:", "bold"))
        console.print(Text(f"  {command}"), soft_wrap=True)


def reward_change(rewards: dict[str, Any]) -> tuple[str, str]:
    """Return label and text for the mean rewards of the first and of the last steps, as summary.json has them."""
    steps, first, last = rewards.get("reward_steps", 0), rewards.get("reward_first"), rewards.get("reward_last")
    if first is None or last is None:
        return "mean reward", "none" if first is None else f"{first:.3f}, of the only step"
    label = "mean reward, first to last step" if steps == 1 else f"mean reward, first to last {steps} steps"
    return label, f"{first:.3f} → {last:.3f}"


def outcome_rows(outcome: dict[str, Any], summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of an ended run, with their labels, from its runner.json and summary.json, which may be empty."""
    rows = []
    left_out: Counter[str] = Counter(summary.get("rows_left_out"))
    if left_out:
        rows.append(("rows left out", f"{left_out.total()} of {summary['rows']} ({counted(left_out)})"))
    if summary.get("accuracy_after") is not None:
        rows += [_accuracy(summary, when) for when in ("before", "after")]
    if error := summary.get("evaluation_error"):
        rows.append(("last evaluation", f"no accuracy: {error}"))
    if outcome:
        rows.append(("outcome", outcome["reason"]))
        rows.append(("time of last attempt", duration(outcome["seconds"])))
    if summary.get("seconds") is not None:
        rows.append(("time of training, all attempts", duration(summary["seconds"])))
    if restarts := outcome.get("restarts"):
        rows.append(("restarts", ", ".join(f"{task} {count}" for task, count in restarts.items())))
    return rows


def _accuracy(summary: dict[str, Any], when: str) -> tuple[str, str]:
    """Return label and text of the accuracy ``before`` or ``after``, with its interval and its number of prompts."""
    parts = ("", "_low", "_high", "_prompts")
    value, low, high, prompts = (summary.get(f"accuracy_{when}{part}") for part in parts)
    if value is None:
        return f"accuracy {when}", "not measured"
    label = f"accuracy {when}, {prompts} held-out prompt{'' if prompts == 1 else 's'}"
    return label, f"{value:.3f} ({low:.3f} to {high:.3f})"


def next_commands(run: Run, launch: Launch, summary: dict[str, Any], exit_code: int) -> list[tuple[str, str]]:
    """Return purpose and command of everything that can be done with an ended run.

    Args:
        run: the run.
        launch: the command line that started it.
        summary: the trainer's summary.json; empty if the trainer has written none.
        exit_code: the run's exit code.
    """
    directory = shown_path(run.run_dir)
    has_checkpoint = any((run.run_dir / "checkpoints").glob("*"))
    corrected = ", after the correction" if exit_code == EXIT_CONFIGURATION else ""
    commands = [("look at it", shlex.join([grpo_command(), "view", directory]))]
    if summary.get("status") == "succeeded" and (run.run_dir / "model").exists():
        model = f"{directory}/model"
        settings = trainer_settings(run)
        # Episodes of an environment need the run's environment-servers, which only a run starts.
        if any(Task.ENVIRONMENT_SERVER not in own.way.services for own in settings.by_source().values()):
            evaluate = [grpo_command(), "evaluate", "--model", model, *_evaluated_as(run, launch)]
            commands.append(("evaluate", shlex.join(evaluate)))
        commands.append(
            ("chat with it and with the model it began as", shlex.join([grpo_command(), "chat", directory]))
        )
        if has_checkpoint:
            commands.append(
                ("train on", shlex.join(launch.again(run.run_id, *_twice(settings, int(summary["steps"])))))
            )
    elif has_checkpoint:
        commands.append((f"resume{corrected}", shlex.join(launch.again(run.run_id))))
    elif any(task.name == Task.TRAINER for task in run.group.tasks):
        commands.append((f"start again{corrected}", shlex.join(launch.again(run.run_id))))
    elsewhere = [] if launch.shared_dir == Path() else ["--runs", shown_path(run.run_dir.parent)]
    commands.append(("remove it", shlex.join([grpo_command(), "clean", directory])))
    commands.append(("list runs by size, and remove some", shlex.join([grpo_command(), "clean", *elsewhere])))
    return commands


def trainer_settings(run: Run) -> TrainerSettings:
    """Return the settings of the run's trainer."""
    [trainer] = [task for task in run.group.tasks if task.name == Task.TRAINER]
    [reader] = [reader for reader in READERS if Task.TRAINER in reader.tasks]
    return cast("TrainerSettings", load_settings(run, trainer, reader.settings_class()))


def _evaluated_as(run: Run, launch: Launch) -> list[str]:
    """Return the options that give an evaluation the run's settings, as far as it reads them.

    The --env-file options stay as they are. --env gives what the command line or the job group's own file has in place
    of their values and of the defaults.
    """
    assignments = {assignment.partition("=")[0]: assignment for assignment in launch.env}
    settings = tasks_by_variable()
    env = {name: assignment for name, assignment in assignments.items() if name.upper() not in settings}
    tasks = {task.name: task for task in run.group.tasks}
    for reader in READERS:
        task = tasks.get(_EVALUATED_AS.get(reader.tasks[0], ""))
        if task is None:
            continue
        variables = node_environment(run, task, 0)
        for setting, info in reader.settings_class().model_fields.items():
            name = setting.upper()
            if setting in _OWN or name in launch.secrets or name not in task.environment:
                continue
            if variables[name] != launch.in_files.get(name, str(info.default)):
                env[name] = assignments.get(name, f"{name}={variables[name]}")
    return [*_repeated("--env-file", launch.env_files), *_repeated("--env", list(env.values()))]


def _twice(settings: TrainerSettings, steps: int) -> list[str]:
    """Return the variables that let a run of ``steps`` steps continue to twice as many, with prompts for all."""
    limit = [f"MAX_STEPS={2 * steps}"] if settings.max_steps else []
    return [*limit, f"NUM_EPOCHS={2 * settings.num_epochs}"]


def _repeated(option: str, values: Sequence[object]) -> list[str]:
    return [part for value in values for part in (option, str(value))]
