"""The files of a run directory: settings, metrics, samples, TensorBoard events, summary and model card."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from huggingface_hub import ModelCardData

from services.core.endpoints import Task
from services.core.files import atomic_write
from services.core.logs import get_logger
from services.http import provenance
from services.protocol.base import ComponentRecord
from services.protocol.groups import Group, TokenSequence
from services.run_page.diagnosis import Finding
from services.run_page.directory import FIRST_FAILURE, Run
from services.run_page.rules import NOTE, WRONG
from trainer.algorithm.packing import TrainingGroup
from trainer.algorithm.training_groups import scored as scored_sequences
from trainer.config import Mode, TrainerSettings
from trainer.reporting import metrics as exported_metrics
from trainer.reporting.group_facts import GroupFacts
from trainer.reporting.group_records import GroupRecorder
from trainer.reporting.step_metrics import failures, reward_counts
from trainer.reporting.trackers import Tracker

log = get_logger(__name__)

LOGGED_GROUPS = 8
"""Groups a step in samples.jsonl: enough to read, and a few hundred kilobytes a step at most."""
LOGGED_TOKENS = 16_384
"""Tokens a step in samples.jsonl, each with its text and numbers: some twenty bytes a token."""
TOKENS_A_CHARACTER = 4
"""A character of UTF-8 has at most four bytes, and a token at least one."""

Decode = Callable[[list[int]], str]
"""Returns the text of token ids, with special tokens."""


class RunFiles:
    """The writer of the run directory; on rank 0 only."""

    def __init__(
        self,
        settings: TrainerSettings,
        resumed_step: int,
        decode: Decode,
        services: Mapping[Task, ComponentRecord] | None = None,
        has_room: Callable[[int], bool] = lambda _size: True,
        facts: GroupFacts | None = None,
    ) -> None:
        """Open the run directory and drop an earlier attempt's summary and its records after ``resumed_step``.

        Args:
            settings: the trainer's settings.
            resumed_step: the last step whose records stay.
            decode: returns the text of token ids, with special tokens.
            services: the settings and versions of the services, for config.json.
            has_room: returns whether the volume has room for a number of bytes and for the run's other files.
            facts: counts facts about groups; by default without those about special tokens.
        """
        from torch.utils.tensorboard.writer import SummaryWriter

        self.settings = settings
        self._samples = SampleRecords(decode)
        self._facts = facts or GroupFacts(settings)
        self.directory = settings.run_dir
        self.directory.mkdir(parents=True, exist_ok=True)
        self._services = services or {}
        self._write_config()
        if settings.sources is not None:
            atomic_write(self.directory / "sources.yaml", settings.sources.read_bytes())
        for name in ("metrics.jsonl", "samples.jsonl"):
            _drop_after(self.directory / name, resumed_step)
        self.groups = GroupRecorder(settings, resumed_step, has_room)
        # A run that starts again from step 0 repeats the evaluation before the first step.
        kept_evaluations = resumed_step or -1
        _drop_after(self.directory / "evaluations.jsonl", kept_evaluations)
        # The outcome of an earlier attempt is not the run's any more.
        for name in ("summary.json", FIRST_FAILURE):
            (self.directory / name).unlink(missing_ok=True)
        self._tensorboard = SummaryWriter(str(self.directory / "tensorboard"), purge_step=kept_evaluations + 1)
        self._tracker = Tracker(settings)
        self._succeeded = False
        self._run = Run(self.directory)
        self.findings: list[Finding] = []
        """What is wrong with the run, as of the last ``diagnose``."""

    def record_samples(self, step: int, groups: Sequence[Group], trained: Sequence[TrainingGroup] = ()) -> None:
        """Append samples of a step's ``groups``, with the advantages that ``trained`` has."""
        _append(self.directory / "samples.jsonl", self._samples.of_step(step, groups, trained))

    def record_step(
        self, step: int, metrics: dict[str, float], scored: Sequence[Group], trained: Sequence[TrainingGroup] = ()
    ) -> None:
        """Append a step's metrics.

        Args:
            step: number of the step.
            metrics: by column.
            scored: its groups, and those that dynamic sampling dropped.
            trained: the groups as the loss saw them.
        """
        facts = self._facts.of_step(scored, trained)
        counts = {"reward_counts": reward_counts(scored), "failures": failures(scored), "facts": facts}
        _append(self.directory / "metrics.jsonl", [{"step": step, "time": time.time(), **metrics, **counts}])
        exported_metrics.count_step(step)
        self.show(step, metrics)

    def diagnose(self, accuracy_before: float | None) -> None:
        """Judge the recorded steps, log what is newly found, and export it to Prometheus.

        Args:
            accuracy_before: the lower end of the accuracy before the first step, if it is known.
        """
        known = {(finding.rule, finding.severity) for finding in self.findings}
        try:
            self.findings = self._run.findings(accuracy_before)
        except Exception as error:  # noqa: BLE001  # what only looks at a run must not end it
            log.warning("the run could not be diagnosed", reason=repr(error))
        for finding in self.findings:
            if finding.severity != NOTE and (finding.rule, finding.severity) not in known:
                (log.error if finding.severity == WRONG else log.warning)(str(finding))
        exported_metrics.export_findings((finding.rule, finding.severity) for finding in self.findings)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show metrics of a step, or of an evaluation outside the steps, in Prometheus, TensorBoard and the tracker."""
        exported_metrics.export(metrics)
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tracker.log(metrics, step)

    def keep_batch(self, step: int, groups: Sequence[TrainingGroup]) -> Path:
        """Write the groups of an update that was not finite to a file, and return its path."""
        path = self.directory / f"diverged-step-{step:06d}.json"
        try:
            records = [vars(group) | {"sequences": [s.model_dump() for s in group.sequences]} for group in groups]
            for record in records:
                record.pop("branches", None)
            path.write_bytes(orjson.dumps(records, option=orjson.OPT_SERIALIZE_NUMPY))
        except OSError as error:
            log.error("the last batch is not written", path=str(path), reason=str(error))
        return path

    def record_evaluation(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Append greedy completions of a few held-out prompts, the same prompts at each evaluation."""
        _append(self.directory / "evaluations.jsonl", [{"step": step, **sample} for sample in samples])

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, and after a success the card of the model."""
        self._write_config()  # again, because components that started late have left their records by now
        findings = [vars(finding) for finding in self.findings]
        _write_json(self.directory / "summary.json", summary | {"findings": findings})
        self._succeeded = summary["status"] == "succeeded"
        if summary["status"] == "succeeded" and (self.directory / "model").is_dir():
            write_card(self.directory)

    def _write_config(self) -> None:
        """Write config.json: the settings and versions of every component."""
        left = [Task.ROLLOUT_SERVER]
        if self.settings.mode is Mode.ASYNC and not self.settings.collector_in_process:
            left.append(Task.COLLECTOR)
        left_records = {task: provenance.read_record(self.directory, task) for task in left}
        components = {Task.TRAINER: provenance.describe(self.settings), **self._services}
        records = components | {task: record for task, record in left_records.items() if record is not None}
        content = {task.value: record.model_dump() for task, record in records.items()}
        _write_json(self.directory / "config.json", {"components": content})

    def close(self) -> None:
        """Write buffered events, remove records of groups that are not kept, and end the run at the tracker."""
        self.groups.prune()
        try:
            self._tensorboard.close()
        except OSError as error:
            # Not raised, because it would hide the reason why the run ended.
            log.warning("TensorBoard's events are incomplete", reason=str(error))
        self._tracker.finish(succeeded=self._succeeded)


def _append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as stream:
            stream.write(b"".join(orjson.dumps(record) + b"\n" for record in records))
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # the disk was too full to create it
            os.truncate(path, size)  # a full disk may have taken a part of a line
        raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_write(path, orjson.dumps(value, option=orjson.OPT_INDENT_2))


def _drop_after(path: Path, step: int) -> None:
    """Keep the records up to ``step``; drop later ones, and a line that a kill cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or orjson.loads(line)["step"] > step:
            break
        kept.append(line)
    atomic_write(path, b"".join(kept))


class SampleRecords:
    """The maker of records; it remembers the texts of the vocabulary's tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._before: list[int] = []
        """A token to decode others after, because some tokenizers leave out a space at the beginning of a text."""

    def of_step(
        self, step: int, groups: Sequence[Group], trained: Sequence[TrainingGroup] = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield the records of the first LOGGED_GROUPS groups of a step; docs/guides/operating.md explains the fields.

        Args:
            step: number of the step.
            groups: the step's fresh groups.
            trained: the groups as the loss saw them, from which the advantages are taken.
        """
        by_id = {group.group_id: group for group in trained if not group.is_replayed}
        room = LOGGED_TOKENS
        for group in groups[:LOGGED_GROUPS]:
            sequences = by_id[group.group_id].sequences if group.group_id in by_id else []
            seen = {id(e): s for e, s in zip(scored_sequences(group), sequences, strict=False)}
            rendered = self._decode(group.prompt_ids)
            self._before = self._before or group.prompt_ids[:1]
            for e in group.sequences:
                record = _record(step, group, e) | {"rendered_prompt": rendered}
                if e.tokens <= room:
                    room -= e.tokens
                    record["spans"] = list(self._spans(e, seen.get(id(e))))
                yield record

    def _spans(self, e: TokenSequence, trained: TokenSequence | None) -> Iterator[dict[str, Any]]:
        """Yield the tokens of an experience in spans: text that was read, or tokens that one policy version sampled.

        Sampled tokens have their log-probabilities and, if they were trained on, one advantage for all or one each.
        """
        labels = np.where(e.mask, e.policy_versions, -1).tolist()
        for version, places in groupby(range(len(labels)), key=labels.__getitem__):
            first, *rest = places
            span = slice(first, first + len(rest) + 1)
            if version < 0:
                yield {"text": self._decode(e.completion_ids[span].tolist())}
                continue
            yield {
                "version": version,
                "tokens": self.token_texts(e.completion_ids[span].tolist()),
                "logprobs": [round(logprob, 3) for logprob in e.logprobs[span].tolist()],
                "advantages": _advantages(trained, span),
            }

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Tokens that are a part of a character have none but the last, which has it."""
        texts: list[str] = []
        partial: list[int] = []
        for token in ids:
            text = self._texts.get(token)
            if text is None:
                text = self._texts[token] = self._text([token])
            if partial:
                text = self._text([*partial, token])
            is_whole = "\N{REPLACEMENT CHARACTER}" not in text or len(partial) + 1 == TOKENS_A_CHARACTER
            partial = [] if is_whole else [*partial, token]
            texts.append(text if is_whole else "")
        if partial:
            texts[-1] = self._text(partial)
        return texts

    def _text(self, ids: list[int]) -> str:
        return self._decode([*self._before, *ids]).removeprefix(self._decode(self._before))


def _record(step: int, group: Group, e: TokenSequence) -> dict[str, Any]:
    record = {
        "step": step,
        "group_id": group.group_id,
        "prompt": group.prompt.prompt,
        "ground_truth": group.prompt.ground_truth,
        "completion": e.completion,
        "reward": e.reward,
        "finish_reason": e.finish_reason.value,
        "policy_version": e.oldest_version,
        "tokens": e.tokens,
        "trained_tokens": e.trained_tokens,
        "result": e.scoring.model_dump(mode="json", exclude_none=True),
    }
    if group.prompt.source:
        record["source"] = group.prompt.source
    if group.prompt.row:
        record["row"] = group.prompt.shown_row
    if e.turns:
        record["turn_rewards"] = [turn.reward for turn in e.turns]
    if e.episode is not None:
        figures = (group.episode_figures or {}).get(e.episode)
        messages = [message.model_dump(exclude_defaults=True) for message in e.messages or ()]
        record |= {"episode": e.episode, **(figures.model_dump() if figures else {}), "messages": messages}
    return record


def _advantages(trained: TokenSequence | None, span: slice) -> float | list[float] | None:
    """Return the advantage of a span's tokens, or of each where they differ; None if they are not trained on."""
    if trained is None or trained.advantages is None or not trained.mask[span].any():
        return None
    advantages = [float(f"{advantage:.4g}") for advantage in trained.advantages[span].tolist()]
    return advantages[0] if len(set(advantages)) == 1 else advantages


# --- the model card, made from the run directory alone, so that it can be made again ---------------------------------

CARD = "README.md"
_OF_THIS_RUN = ("shared_dir", "run_id", "log_level", "model_name")
"""Settings that say nothing about the model, or stand elsewhere in the card."""
_SECRET = "**********"


def write_card(run_dir: Path) -> Path:
    """Write the card of a finished run into its ``model`` directory; return the card's path.

    The card has no secret, because config.json has none, and no path of the machine beyond a file's name.
    """
    run = Run(run_dir)
    card = run_dir / "model" / CARD
    atomic_write(card, "\n".join(_card(run)).encode())
    return card


def _card(run: Run) -> Iterator[str]:
    summary, trainer = run.summary, run.components.get(Task.TRAINER.value, {})
    settings = trainer.get("settings", {})
    method = str(settings.get("advantage", "grpo"))
    base, dataset = _named(summary.get("model")), _named(summary.get("dataset"))
    is_on_hub = not Path(str(summary.get("model"))).exists() and base.count("/") <= 1
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "verifiable-rewards", method],
    )
    yield f"---\n{data.to_yaml()}\n---"
    yield f"# {run.name}\n"
    yield (
        f"{base}, trained for {summary.get('steps', 0)} steps on {dataset} with verifiable rewards "
        f"(`ADVANTAGE={method}`, `LOSS={settings.get('loss', '')}`).\n"
    )
    yield from _table("| | before | after |\n|---|---|---|", _results(summary))
    yield "## Settings\n\nThose that differ from the defaults, by component:\n"
    yield from _table("| component | setting | value |\n|---|---|---|", _changed(run.components))
    yield "## Software\n"
    packages = dict(trainer.get("packages", {}))
    commit = trainer.get("commit")
    yield from _table("| | |\n|---|---|", [("commit", str(commit))] * bool(commit) + sorted(packages.items()))


def _table(head: str, rows: Any) -> Iterator[str]:
    yield head
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""


def _results(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what was measured before and after training; accuracies with their 95% intervals."""
    if summary.get("accuracy_after") is not None:
        prompts = summary.get("accuracy_after_prompts")
        yield (
            f"accuracy, greedy, {prompts} held-out prompts",
            _accuracy(summary, "before"),
            _accuracy(summary, "after"),
        )
    for source, figures in summary.get("sources", {}).items():
        if (accuracies := figures.get("accuracies")) is not None:
            yield f"accuracy of {source}", f"{accuracies[0]:.3f}", f"{accuracies[-1]:.3f}"
    if summary.get("reward_first") is not None and summary.get("reward_last") is not None:
        steps = summary.get("reward_steps", 1)
        yield (
            f"mean training reward, first and last {'step' if steps == 1 else f'{steps} steps'}",
            f"{summary['reward_first']:.3f}",
            f"{summary['reward_last']:.3f}",
        )


def _accuracy(summary: Mapping[str, Any], when: str) -> str:
    low, value, high = (summary.get(f"accuracy_{when}{part}") for part in ("_low", "", "_high"))
    return "" if value is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def _changed(components: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield component, variable and value of the settings that differ from their defaults."""
    for component, record in components.items():
        for name in record.get("changed", ()):
            value = record.get("settings", {}).get(name)
            if name not in _OF_THIS_RUN and value != _SECRET:
                yield component, f"`{name.upper()}`", f"`{_named(value)}`"


def _named(value: Any) -> str:
    """Return a value as text; of a path on this machine the name alone."""
    text = str(value)
    return Path(text).name if text.startswith(("/", "~", ".")) else text
