"""The plan of a run: its model, data, steps, memory, disk and nodes, and cautions about its settings."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from local_runner.checks import Loaded, ask, by_class, check_adapters, context_of, settings_by_class
from local_runner.nodes import LocalRun, gpus_of, tiers_have_own_gpus
from services.core.errors import ConfigurationError
from services.core.settings import Settings
from services.core.sources import Source
from services.data_server.settings import HARBOR, DataSettings, generator_of, is_path
from services.run_page.progress import counted

READ_SECONDS = 600.0
"""Longest time that the rows may take to be read before a run."""
_SHOWN_ELSEWHERE = {*Settings.model_fields, "model_name", "dataset", "reward_fn"}


class Plan:
    """The settings of a run's tasks, with the numbers of its rows and the estimates of memory and disk."""

    def __init__(self, run: LocalRun, loaded: Sequence[Loaded], *, is_dry_run: bool, right: str | None = None) -> None:
        """Read the rows of files; in a dry run read any rows, render the prompts, try rewards, and estimate memory.

        Args:
            run: the run.
            loaded: the settings of its tasks.
            is_dry_run: read and render all rows.
            right: the form of a right answer, with which built-in rewards are tried, too.

        Raises:
            ConfigurationError: the data-server would refuse the rows, or they are too few for one step.
        """
        self._run, self._found = run, by_class(loaded)
        self._settings = settings_by_class(loaded)
        self._trainer, self._data = (self._settings.get(name) for name in ("TrainerSettings", "DataSettings"))
        self._rows: dict[str, Any] = {}
        self._needs: dict[str, Any] = {}
        self._tried: dict[str, Any] = {}
        of_files = self._data is not None and any(
            is_path(own.dataset) or generator_of(own.dataset) == HARBOR for own in self._data.by_source().values()
        )
        if self._data is not None and (is_dry_run or of_files):
            self._read_rows(is_dry_run, right)
        if self._trainer is not None and self.has_all_rows:
            self._trainer.total_steps(self._rows["train"])
        if is_dry_run and self._trainer is not None and Path(self._trainer.model_name).expanduser().is_dir():
            self._needs = self._ask("TrainerSettings", "torch", "trainer.capacity")

    def _ask(self, name: str, package: str, module: str, *arguments: str) -> dict[str, Any]:
        """Return the facts that a module prints in the environment of these settings' task; empty without any."""
        if find_spec(package) is None:
            return {}
        task = self._found[name].task
        try:
            return dict(json.loads(ask(self._run, task, module, *arguments, seconds=READ_SECONDS) or "{}"))
        except TimeoutError:
            return {}
        except ConfigurationError as error:
            raise ConfigurationError(f"{task.name}: {error}") from error

    def _read_rows(self, is_dry_run: bool, right: str | None) -> None:
        """Read the rows, and in a dry run try the rewards of answers to some of them."""
        tries = (right is not None and "RewardSettings" in self._found) or (is_dry_run and self._has_own_rewards)
        with TemporaryDirectory() as directory:
            items = Path(directory) / "items.jsonl"
            options = ["--items", str(items)] if tries else ["--rows"] * (not is_dry_run)
            self._rows = self._ask("DataSettings", "datasets", "services.data_server.look", *options)
            if items.exists():
                module = "services.reward_server.own_code"
                self._ask("RewardSettings", "services", module, str(items))
                self._tried = self._ask("RewardSettings", "services", module, str(items), "--answers", right or "{}")

    @property
    def has_all_rows(self) -> bool:
        """True if all rows were read, and not the first ones of a dataset on the hub."""
        return bool(self._rows.get("is_whole"))

    @property
    def _has_own_rewards(self) -> bool:
        reward = self._settings.get("RewardSettings")
        functions = [f for own in reward.by_source().values() for f in own.functions] if reward is not None else []
        return any(function.is_users or function.name == "code" for function in functions)

    def cautions(self) -> Iterator[str]:
        """Yield sentences on settings that are allowed but probably a mistake."""
        if (reward := self._settings.get("RewardSettings")) is not None:
            for source, own in reward.by_source().items():
                if own.caution:
                    yield f"source {source}: {own.caution}" if source else own.caution
        if self._trainer is not None:
            yield from self._trainer.cautions
        yield from check_adapters([*self._found.values()], self._run)
        if self._trainer is not None and self.has_all_rows:
            train, held_out = self._rows["train"], self._rows["held_out"]
            batch, wanted, steps = self._trainer.batch_size, self._trainer.max_steps, self._trainer.total_steps(train)
            if train < batch:
                yield f"BATCH_SIZE is {batch}, but {train} rows are trained on: a batch has prompts more than once"
            prompts = self._trainer.eval_prompts
            if 0 < held_out < prompts and "eval_prompts" in self._trainer.model_fields_set:
                yield f"EVAL_PROMPTS is {prompts}, but {held_out} rows are held out; raise DATASET_HELD_OUT"
            if steps < wanted:
                yield f"{train + held_out} rows, {held_out} held out, are enough for {steps} of MAX_STEPS={wanted}"
        yield from self.reward_problems()
        yield from self._needs.get("notes", ())

    def reward_problems(self) -> Iterator[str]:
        """Yield a sentence for each source whose answers' rewards cannot be learned from."""
        for source, tried in self._tried.items():
            has_turns = self._trainer is not None and self._trainer.by_source()[source].way.has_turns
            if (problem := reward_problem(tried)) and not has_turns:
                yield f"rewards{f' of {source}' if source else ''}: {problem}"

    def check(self) -> None:
        """Check what a dry run has found.

        Raises:
            ConfigurationError: the run would not start here, or no answer would have a reward.
        """
        made = next(path for path in (self._run.run_dir, *self._run.run_dir.parents) if path.exists())
        if not made.is_dir() or not os.access(made, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{self._run.run_dir} cannot be made in {made}; give another --shared-dir")
        for source, tried in self._tried.items():
            if tried["answers"] and len(tried["failures"]) == tried["answers"]:
                answers = f"answer of {source}" if source else "answer"
                raise ConfigurationError(f"no {answers} has a reward: {tried['failures'][0]}")
        if refusal := self._needs.get("refusal"):
            raise ConfigurationError(refusal)

    def show(self, console: Console) -> None:
        """Print the plan."""
        table = Table(show_header=False, title=f"run {self._run.run_id}", title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in self._lines():
            table.add_row(name, Text(value))
        console.print(table)

    def _lines(self) -> Iterator[tuple[str, str]]:
        trainer, data, reward = self._trainer, self._data, self._settings.get("RewardSettings")
        if trainer is not None:
            yield "model", trainer.model_name
        if data is not None and data.sources is None:
            yield "data", f"{data.dataset}{_found(self._rows)}"
        if reward is not None and reward.sources is None:
            has_tasks = data is not None and generator_of(data.dataset) == HARBOR
            yield "reward", "the tests of the tasks" if has_tasks else reward.reward_fn
        if data is not None and data.sources is not None:
            yield from (("source", line) for line in data.of_sources(self._source_line).values())
        if trainer is not None:
            all_steps = trainer.total_steps(self._rows["train"]) if self.has_all_rows else trainer.max_steps
            steps = all_steps or "as the rows give"
            answers = "" if trainer.sources else f" with {self._answers(trainer)}"
            yield "steps", f"{steps}, each of {trainer.batch_size} prompts{answers}"
            yield "a step trains", self._when_trained()
        yield "not by default", ", ".join(dict.fromkeys(self._changed())) or "nothing"
        if self._needs:
            need, has = self._needs["need"], self._needs["has"]
            place, name = ("device", "GPU") if has["device"] else ("host", "trainer node")
            yield "layout", self._needs["layout"]
            yield "memory", f"{decimal(sum(need[place].values()))} of each {name}; there is {decimal(has[place])}"
            parts = ", ".join(f"{part} {decimal(size)}" for part, size in need["volume"].items())
            yield "disk", f"{decimal(sum(need['volume'].values()))} ({parts}); there is {decimal(has['volume'])}"
        yield "nodes", ", ".join(self._nodes())

    def _when_trained(self) -> str:
        """Return when the trainer trains on a batch, and if it waits for all of it, why."""
        trainer, are_apart = self._trainer, tiers_have_own_gpus(self._run)
        assert trainer is not None
        if trainer.mode.value == "async":
            return "on the groups of collectors, which generate meanwhile"
        if trainer.trains_while_generating(are_tiers_apart=are_apart):
            return "on its first groups while the others are generated"
        by_place = "TRAIN_WHILE_GENERATING=false" if are_apart else "engines share processors or GPUs with the trainer"
        return f"once its batch is whole ({trainer.whole_batch_reason or by_place})"

    def _source_line(self, data: DataSettings, source: Source) -> str:
        """Return share, data, reward and answers of a source."""
        trainer, reward = (
            self._settings[name].by_source()[source.name] if name in self._settings else None
            for name in ("TrainerSettings", "RewardSettings")
        )
        rows = self._rows.get("sources", {}).get(source.name, {}) if source.name else self._rows
        share = "only evaluated" if source.eval_only else f"ratio {source.ratio:g}"
        parts = [f"{source.name}, {share}: {data.dataset}{_found(rows)}"]
        parts += [] if trainer is None else [f"{trainer.rollout.value}, {self._answers(trainer)}"]
        if reward is not None and (trainer is None or trainer.rollout.value != "environment"):
            parts.append(f"reward {reward.reward_fn}")
        return "; ".join(parts)

    def _answers(self, trainer: Any) -> str:
        """Return the number and length of a prompt's answers, and the length of a preset's first prompt."""
        from services.harnesses import harness_of

        answers = f"{trainer.group_size} answers of at most {trainer.answer_tokens} tokens"
        harness = harness_of(trainer.agent_command)
        if harness is None:
            return answers
        context = context_of(trainer, getattr(self._settings.get("RolloutSettings"), "engine_context_length", None))
        first = f"whose first prompt has about {harness.first_prompt:,} tokens and the task"
        known = f"{context:,} tokens" if context else "not known here"
        return f"{answers} by {harness.name} {harness.version}, {first}; the context is {known}"

    def _changed(self) -> Iterator[str]:
        """Yield the settings that differ from their defaults."""
        for settings in self._settings.values():
            for name in sorted(settings.model_fields_set - _SHOWN_ELSEWHERE):
                if getattr(settings, name) != type(settings).model_fields[name].default:
                    yield f"{name.upper()}={getattr(settings, name)}"

    def _nodes(self) -> Iterator[str]:
        for task in self._run.group.tasks:
            gpus = [", ".join(gpus_of(self._run, task, rank)) for rank in range(task.num_nodes)]
            yield f"{task.name} {task.num_nodes}" + (f" (GPU {'; '.join(gpus)})" if any(gpus) else "")


def reward_problem(tried: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the rewards of answers to a source's rows, as ``reward_server.own_code`` tries them."""
    rows, failures = tried["rows"], tried["failures"]
    if failures and not tried["answers"]:
        return f"no answer was tried, because {failures[0]}"
    if failures:
        return f"{len(failures)} of {tried['answers']} answers have no reward, the first with {failures[0]}"
    if rows and not any(len({reward for reward in row.values() if reward is not None}) > 1 for row in rows):
        truths = "a right, an empty and" if any(row.get("right") is not None for row in rows) else "an empty and"
        return f"{truths} a senseless answer have the same reward at each of {len(rows)} prompts; make them differ"
    return None


def _found(rows: Mapping[str, Any]) -> str:
    """Return what was found of rows, as the end of a sentence that names their dataset."""
    if not rows.get("is_whole"):
        return ": the first rows can be used" if rows else ", not read"
    left_out = f"; left out: {counted(Counter(rows['refused']))}" if rows["refused"] else ""
    return f": {rows['train']} rows to train on, {rows['held_out']} held out{left_out}"
