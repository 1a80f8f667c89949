"""The plan of a run: what it will train on, for how many steps, with which memory and disk, and what looks wrong."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from local_runner.commands import shown_path
from local_runner.environment import Run, gpus_of
from local_runner.learning import counted
from local_runner.own_code import all_settings, ask
from services.core.settings import Settings
from services.data_server.files import is_path

READ_SECONDS = 600.0
"""Longest time that the rows may take to be read before a run, which goes on without."""
_SHOWN_ELSEWHERE = {*Settings.model_fields, "model_name", "dataset", "reward_fn"}


class Plan:
    """The settings of a run's tasks, with what was found out about its rows and its needs."""

    def __init__(self, run: Run, *, is_dry_run: bool) -> None:
        """Read the rows; in a dry run also render the prompts, and estimate memory and disk.

        Raises:
            ConfigurationError: the data-server would refuse the rows, or they are too few for one step.
        """
        self._run = run
        self._tasks = {type(settings).__name__: task for task, _, settings in all_settings(run)}
        self._settings: dict[str, Any] = {type(settings).__name__: settings for _, _, settings in all_settings(run)}
        self._trainer, self._data = (self._settings.get(name) for name in ("TrainerSettings", "DataSettings"))
        self._rows: dict[str, Any] = {}
        if self._data is not None and (is_dry_run or is_path(self._data.dataset)):
            self._rows = self._ask("DataSettings", "services.data_server.look", *([] if is_dry_run else ["--rows"]))
        if self._trainer is not None and self._rows.get("is_whole"):
            self._trainer.total_steps(self._rows["train"])
        self._needs: dict[str, Any] = {}
        if is_dry_run and self._trainer is not None and Path(self._trainer.model_name).expanduser().is_dir():
            self._needs = self._ask("TrainerSettings", "trainer.preflight.estimate")

    def _ask(self, settings: str, module: str, *arguments: str) -> dict[str, Any]:
        """Return what a module of a component prints as JSON, or why it is not known."""
        needed = "torch" if module.startswith("trainer") else "pyarrow"
        if importlib.util.find_spec(needed) is None:
            return {"unread": f"{needed} is not installed here"}
        try:
            answer: dict[str, Any] = json.loads(
                ask(self._run, self._tasks[settings], module, *arguments, seconds=READ_SECONDS)
            )
        except TimeoutError as error:
            return {"unread": str(error)}
        return answer

    def cautions(self) -> Iterator[str]:
        """Yield what is allowed, and hardly meant."""
        if (reward := self._settings.get("RewardSettings")) is not None and reward.caution:
            yield reward.caution
        if self._trainer is not None and self._rows.get("is_whole"):
            train, held_out = self._rows["train"], self._rows["held_out"]
            if train < self._trainer.batch_size:
                yield f"a batch has prompts twice: BATCH_SIZE is {self._trainer.batch_size}, of {_count(train, 'row')}"
            if (steps := self._trainer.total_steps(train)) < self._trainer.max_steps:
                yield (
                    f"{_count(train + held_out, 'row')}, {held_out} held out: {_count(steps, 'step')} of "
                    f"MAX_STEPS={self._trainer.max_steps}; give more rows, or a larger NUM_EPOCHS"
                )
        if self._needs.get("refusal"):
            yield f"on this machine it would not start: {self._needs['refusal']}"

    def show(self, console: Console) -> None:
        """Print the plan."""
        table = Table(show_header=False, title=f"run {self._run.run_id}", title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in self._lines():
            table.add_row(name, value)
        console.print(table)

    def _lines(self) -> Iterator[tuple[str, str]]:
        trainer, reward = self._trainer, self._settings.get("RewardSettings")
        if trainer is not None:
            yield "model", trainer.model_name
        if self._data is not None:
            yield "data", f"{self._data.dataset}: {self._found_rows()}"
        if reward is not None:
            yield "reward", reward.reward_fn
        if trainer is not None:
            yield "steps", self._steps()
        yield "not the default", ", ".join(f"{name}={value}" for name, value in self._changed().items()) or "nothing"
        yield from self._sizes()
        yield "where", f"{shown_path(self._run.run_dir)}, on this machine"
        yield "nodes", ", ".join(map(self._nodes, self._run.group.tasks))

    def _found_rows(self) -> str:
        if "unread" in self._rows:
            return f"not looked for ({self._rows['unread']})"
        if not self._rows["is_whole"]:
            return "its first rows can be used"
        left_out = f"; left out are {counted(self._rows['refused'])}" if self._rows["refused"] else ""
        return f"{_count(self._rows['train'], 'row')} to train on, {self._rows['held_out']} held out{left_out}"

    def _steps(self) -> str:
        trainer = self._trainer
        each = f"{trainer.batch_size} prompts x {trainer.group_size} answers of at most {trainer.longest_answer} tokens"
        if self._rows.get("is_whole"):
            return f"{trainer.total_steps(self._rows['train'])}, each of {each}"
        return f"{f'at most {trainer.max_steps}' if trainer.max_steps else 'by the rows'}, each of {each}"

    def _changed(self) -> dict[str, str]:
        """Return the settings that differ from their defaults, by variable."""
        return {
            name.upper(): f"{getattr(settings, name)}"
            for settings in self._settings.values()
            for name in sorted(settings.model_fields_set - _SHOWN_ELSEWHERE)
            if getattr(settings, name) != type(settings).model_fields[name].default
        }

    def _sizes(self) -> Iterator[tuple[str, str]]:
        if not self._needs:
            return
        if "unread" in self._needs:
            yield "memory", f"not known ({self._needs['unread']})"
            return
        need, has = self._needs["need"], self._needs["has"]
        place, name = ("device", "of each GPU") if has["device"] else ("host", "of each trainer node")
        yield "memory", f"{decimal(sum(need[place].values()))} {name}; there is {decimal(has[place])}"
        parts = ", ".join(f"{name} {decimal(size)}" for name, size in need["volume"].items())
        yield "disk", f"{decimal(sum(need['volume'].values()))} ({parts}); there is {decimal(has['volume'])}"

    def _nodes(self, task: Any) -> str:
        gpus = [", ".join(gpus_of(self._run, task, rank)) for rank in range(task.num_nodes)]
        return f"{task.name} {task.num_nodes}" + (f" (GPU {'; '.join(gpus)})" if any(gpus) else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s'[: number != 1]}"
