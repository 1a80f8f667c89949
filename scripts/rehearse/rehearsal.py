"""The rehearsal of a launch: its checks, its prompts and rewards, what it will take, and a run here with a stand-in."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import AutoConfig

from local_runner import checks, nodes, processes, spec
from local_runner.doctor import checks_before_rows
from local_runner.launch import Launch
from local_runner.plan import Plan, reward_problem
from local_runner.processes import in_this_python
from local_runner.view import duration
from scripts.launch.models import MEMORY, WEIGHT_BYTES
from scripts.launch.plan import Plan as LaunchPlan
from scripts.launch.plan import layout_of
from scripts.launch.prediction import Batch, generate_seconds, train_seconds
from scripts.launch.sizes import cached_sequences, engines_of, publishing
from scripts.rehearse import stand_in
from services.chat.prompts import IGNORES_TOOLS, ChatPrompts
from services.chat.tokenizers import load_tokenizer
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import read_records, remove_directory
from services.core.models import context_length
from services.data_server.settings import PromptStyle
from services.embedded_engine.compute.loading import end_token_ids
from services.http.problems import ProblemError
from services.run_page.directory import Run
from services.run_page.progress import counted
from trainer.config import Mode, TrainerSettings
from trainer.preflight.check import gigabytes
from trainer.rollouts.groups import OWN_REASONS

ON_PROCESSORS = {
    "CUDA_VISIBLE_DEVICES": "",
    "ROLLOUT_ENGINE": "embedded",
    "PUBLISH_TRANSPORT": "disk",
    "MIN_WORKERS": "1",
    "MICRO_BATCH_TOKENS": "1024",
}
"""The settings without which the launch's would need GPUs, several nodes or much memory."""
RANDOM_TOKENS = 64
"""Most tokens of a completion of random weights, which seldom ends by itself."""
LEFT_OUT_SHARE = 0.1
"""The share of rows that are left out from which on the data count as a mistake."""
ITEMS = "items.jsonl"
"""The file with what rewards get of each prompt."""
REWARD_SECONDS = 300.0
"""Longest time of the answers that are scored before the run."""
LEAST_SCORE_SECONDS = 1.0
"""The seconds of a step's rewards from which on they can be too slow: in a shorter step they cost little."""
RUN_ID = "rehearsal"
"""The id of the run."""


def default_model() -> str:
    """Return the model of a run that names none."""
    return str(TrainerSettings.model_fields["model_name"].default)


@dataclass
class Rehearsal:
    """A launch that is tried: its settings, the stand-in, and what was found."""

    file: Path
    variables: dict[str, str]
    """The settings of the launch, those of its preset included."""
    secrets: dict[str, str]
    target: str
    small: stand_in.StandIn
    folder: Path
    changes: list[str] = field(default_factory=list)
    """The changes to make before the launch, a sentence each."""
    prompts: int = 2
    """Prompts of a step of the run here: at least one of each source."""
    is_refused: bool = False
    """True if `grpo run` would refuse the settings."""

    def line(self, label: str, text: str) -> None:
        """Print a line of the report."""
        Console().print(Text.assemble((f"{label:<16}", "bold"), self._named(text)), soft_wrap=True)

    def change(self, sentence: str) -> None:
        """Add a sentence, unless it is there."""
        if (sentence := self._named(sentence)) not in self.changes:
            self.changes.append(sentence)

    def _named(self, text: str) -> str:
        """Return a text with the name of the model in place of its stand-in's."""
        return text.replace(str(self.small.directory), self.target)

    @contextmanager
    def refusals(self, *, stop_run: bool = False) -> Iterator[None]:
        """Add the refusal that ends the context to the changes."""
        try:
            yield
        except ConfigurationError as error:
            self.change(str(error))
            self.is_refused |= stop_run

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return self.folder / "runs" / RUN_ID

    def introduce(self) -> None:
        """Print what stands in for the model, and remove what an earlier rehearsal has left in the directory."""
        remove_directory(self.run_dir)
        (self.folder / ITEMS).unlink(missing_ok=True)
        size = f"{self.small.parameters / 1e6:.1f}M parameters"
        text = f"{self.target} itself, {size}"
        if self.small.is_random:
            text = f"{size} with random weights, under the tokenizer, the templates and the context of {self.target}"
        self.line("stand-in", text)

    def _settings(self, changes: dict[str, str]) -> list[str]:
        """Return NAME=VALUE of all settings, with ON_PROCESSORS, the stand-in, and ``changes`` that a task reads."""
        readers, tasks = checks.tasks_by_variable(), {str(one["name"]) for one in spec.documents(self.file)[1:]}
        model = str(self.small.directory)
        teacher = {"TEACHER_MODEL": model} if self.variables.get("TEACHER_MODEL") else {}
        own = ON_PROCESSORS | changes | {"MODEL_NAME": model} | teacher
        read = {name: value for name, value in own.items() if tasks & set(readers.get(name, tasks))}
        return [f"{name}={value}" for name, value in (self.variables | read).items()]

    def check(self, right: str, plan: LaunchPlan | None) -> None:
        """Check what a dry run checks, then template, rows and rewards, and predict the launch."""
        with self.refusals(stop_run=True):
            group, _ = Launch(self.file, self._settings({}), secrets=list(self.secrets), small=True).group()
            with nodes.allocate(group) as addresses:
                run = nodes.Run(group, RUN_ID, self.folder, addresses, mark=f"rehearsal-{uuid.uuid4().hex}")
                loaded = checks.load_all(run)
                for part in checks_before_rows(run, loaded).values():
                    with self.refusals(stop_run=True):
                        part()
                settings: dict[str, Any] = {name: one.settings for name, one in checks.by_class(loaded).items()}
                self.prompts = max(self.prompts, len(settings["TrainerSettings"].by_source()))
                self._check_template(settings)
                items, has_all_rows = self.folder / ITEMS, False
                with self.refusals(stop_run=True):
                    has_all_rows = self._show_rows(Plan(run, loaded, is_dry_run=True, items_file=items))
                if items.exists():
                    prompts = [json.loads(line) for line in items.open(encoding="utf-8")]
                    self._check_lengths(settings, prompts)
                    tried = None
                    with self.refusals():
                        tried = self._check_rewards(run, loaded, settings, items, right)
                    if plan is not None:
                        lengths = [length for *_, length in prompts]
                        self._predict(plan, lengths, tried, has_all_rows=has_all_rows)

    def _check_template(self, settings: Mapping[str, Any]) -> None:
        """Check the end tokens, and what conversations need of the chat template."""
        trainer, data = settings["TrainerSettings"], settings["DataSettings"]
        folder, tokenizer = self.small.directory, load_tokenizer(str(self.small.directory))
        ends = end_token_ids(folder, AutoConfig.from_pretrained(folder), tokenizer)
        if not ends:
            self.change(
                f"{self.target} has no end token, so that every answer is cut off at MAX_NEW_TOKENS; give eos_token_id "
                "in its generation_config.json"
            )
        has_turns = any(own.way.has_turns for own in trainer.by_source().values())
        is_chat = has_turns or any(own.prompt_style is not PromptStyle.PLAIN for own in data.by_source().values())
        if has_turns and not tokenizer.chat_template:
            self.change(f"{self.target} has no chat template, which agents and environments need; give a chat model")
        if not is_chat or not tokenizer.chat_template:
            return
        prompts, question = ChatPrompts(tokenizer, data.chat_template_args), [{"role": "user", "content": "question"}]
        with suppress(ProblemError):  # a template that refuses this question; the rows show whether it takes them
            if prompts.render(question, None, {}) == prompts.render(question, None, {}, adds_generation_prompt=False):
                self.change(
                    f"the chat template of {self.target} has no generation prompt, so that the model continues the "
                    "user's turn; let it begin the assistant's turn where add_generation_prompt is true"
                )
        close, _ = prompts.suffix_parts({"role": "assistant", "content": "answer"}, question, None, {}) or ("", "")
        first = next(iter(prompts.encode(close)), -1)
        token = tokenizer.added_tokens_decoder.get(first)
        if ends and token is not None and token.special and first not in ends:
            known = ", ".join(repr(prompts.token_text(end)) for end in sorted(ends))
            self.change(
                f"the chat template of {self.target} ends an answer with {token.content!r}, which is not an end token "
                f"({known}), so that answers are cut off at MAX_NEW_TOKENS; add it to eos_token_id in its "
                "generation_config.json"
            )

    def _show_rows(self, plan: Plan) -> bool:
        """Print the rows that are left out and the cautions of a dry run; return whether all rows were read."""
        for caution in plan.cautions():
            self.line("note", caution)
        if plan.left_out:
            n, total = plan.left_out.total(), plan.rows + plan.left_out.total()
            self.line("rows left out", f"{n} of {total} ({counted(plan.left_out)})")
            if n >= LEFT_OUT_SHARE * total:
                self.change(f"{n} of {total} rows are left out: {counted(plan.left_out)}; correct them, or remove them")
        return plan.has_all_rows

    def _check_lengths(self, settings: Mapping[str, Any], prompts: Sequence[Any]) -> None:
        """Print the prompts' tokens, and compare them and the longest answer with the context."""
        lengths = [length for *_, length in prompts]
        text = f"{len(lengths)}, of {statistics.fmean(lengths):.0f} tokens on average and {max(lengths)} at most"
        limit = getattr(settings.get("RolloutSettings"), "engine_context_length", None)
        context = limit or context_length(str(self.small.directory), "MODEL_NAME")
        self.line("prompts", f"{text}; the context is {context}")
        answers = {name: own.max_new_tokens for name, own in settings["TrainerSettings"].by_source().items()}
        over: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for prompt_id, item, length in prompts:
            if length + answers[source := item.get("source", "")] > context:
                over[source].append((prompt_id, length))
        for source, found in over.items():
            prompt_id, length = max(found, key=lambda one: one[1])
            self.change(
                f"{len(found)} prompts{_of(source)} have no room for answers of {answers[source]} tokens in a context "
                f"of {context}: {prompt_id} has {length}; lower MAX_NEW_TOKENS, or set "
                f"MAX_PROMPT_TOKENS={max(context - answers[source], 1)}"
            )

    def _check_rewards(
        self, run: nodes.Run, loaded: Sequence[checks.Loaded], settings: Mapping[str, Any], items: Path, right: str
    ) -> float | None:
        """Score right, empty and senseless answers to some prompts; return the answers scored a second.

        Agents and environments, whose rewards are their own, are left to the run.
        """
        trainer = settings["TrainerSettings"]
        scored = [source for source, own in trainer.by_source().items() if not own.way.has_turns]
        if not scored or not trainer.needs_rewards or "RewardSettings" not in settings:
            return None
        module, arguments = "services.reward_server.own_code", (str(items), "--answers", right)
        task = checks.by_class(loaded)["RewardSettings"].task
        tried = json.loads(checks.ask(run, task, module, *arguments, seconds=REWARD_SECONDS))
        for source in scored:
            self._check_reward(settings["RewardSettings"].by_source()[source].reward_fn, source, tried[source])
        seconds = sum(one["seconds"] for one in tried.values())
        return float(sum(one["answers"] for one in tried.values()) / max(seconds, 1e-9))

    def _check_reward(self, reward_fn: str, source: str, tried: Mapping[str, Any]) -> None:
        """Print the rewards of a source's answers, and add what is wrong with them to the changes."""
        rows, failures, name = tried["rows"], tried["failures"], f"REWARD_FN={reward_fn}{_of(source)}"
        by_kind = {kind: [row[kind] for row in rows if row.get(kind) is not None] for kind in _KINDS}
        means = [f"{kind} {statistics.fmean(rewards):.3g}" for kind, rewards in by_kind.items() if rewards]
        differ = sum(len({reward for reward in row.values() if reward is not None}) > 1 for row in rows)
        text = f"mean of answers: {', '.join(means) or 'none'}; they differ at {differ} of {len(rows)} prompts"
        rate = tried["answers"] / max(tried["seconds"], 1e-9)
        self.line("rewards", f"{reward_fn}{_of(source)}: {text}; {rate:.0f} answers/s on this machine")
        if failures and not tried["answers"]:
            self.change(f"{name}: no answer was tried, because {failures[0]}; a rehearsal needs the judge, too")
        elif problem := reward_problem(tried):
            form = "" if failures else "; --right 'TEXT {}' gives the form of a right answer"
            self.change(f"{name}: {problem}{form}")

    def _predict(self, plan: LaunchPlan, lengths: Sequence[int], rate: float | None, *, has_all_rows: bool) -> None:
        """Print the memory, the seconds of a step and the GPU-hours of the launch; compare rewards with the rest.

        Args:
            plan: the launch.
            lengths: the tokens of each prompt.
            rate: answers that the rewards score a second here; None where there are none.
            has_all_rows: False if there may be more prompts.
        """
        for caution in plan.cautions:
            self.line("caution", caution)
        trainer, tier, layout = plan.trainer, plan.tiers[Task.TRAINER], layout_of(plan.tiers)
        parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in plan.need.device.items())
        has = gigabytes(MEMORY[layout.trainer_card])
        self.line("trainer's GPUs", f"{gigabytes(plan.need.total('device'))} of {has} each: {parts}")
        tokens = round(statistics.fmean(lengths))
        batch = replace(Batch.of(trainer), prompt_tokens=tokens)
        engines = engines_of(plan.rollout, plan.model, plan.tiers.get(Task.ROLLOUT_SERVER, tier).choices[0])
        gpus, memory = layout.rollout_gpus // engines, MEMORY[layout.rollout_card]
        answer, limit = tokens + batch.longest, plan.variables.get("ENGINE_MAX_TOTAL_TOKENS")
        held = int(limit) // answer if limit else cached_sequences(plan.model, answer, gpus, memory)
        weights = gigabytes(plan.model.parameters * WEIGHT_BYTES)
        self.line("engines", f"{weights} of weights on {gpus} x {gigabytes(memory)}, room for {held} longest answers")
        alone = replace(layout, rollout_gpus=gpus, rollout_nodes=layout.rollout_nodes * engines)
        seconds = {
            "generate": generate_seconds(plan.model, batch, alone),
            "score": batch.work.completions / rate if rate else 0.0,
            "train": train_seconds(plan.model, batch, layout),
            "publish": publishing(plan.model, layout)[1],
        }
        rollouts, learning = seconds["generate"] + seconds["score"], seconds["train"] + seconds["publish"]
        step = max(rollouts, learning) if trainer.mode is Mode.ASYNC else rollouts + learning
        phases = ", ".join(f"{phase} {value:.1f} s" for phase, value in seconds.items())
        self.line("step on GPUs", f"expected {step:.0f} s: {phases} (docs/guides/larger-model.md)")
        hours = step * layout.gpus / 3600
        if steps := trainer.total_steps(len(lengths)) if has_all_rows else trainer.max_steps:
            text = f"expected {duration(steps * step)} for {steps} steps, {steps * hours:.1f} GPU-hours"
        else:
            text = f"expected {hours:.2g} GPU-hours a step, of which there are as many as the dataset's rows give,"
        self.line("launch", f"{text} on {layout.gpus} GPUs")
        if seconds["score"] > max(step / 2, LEAST_SCORE_SECONDS):
            self.change(
                f"rewards would take {seconds['score']:.0f} s of a step of {step:.0f} s: {rate:.1f} answers/s here, "
                f"and {batch.work.completions:.0f} a step; make REWARD_FN faster, or raise REWARD_WORKERS, or "
                "JUDGE_CONCURRENCY of a judge"
            )

    def run(self, steps: int, minutes: float) -> None:
        """Run some steps of the job group on this machine, and add what failed to the changes."""
        if self.is_refused:
            self.line("run", "left out, because it would be refused")
            return
        self.line("run", f"{steps} steps of {self.file.name} on this machine, at most {minutes:g} minutes")
        launch = Launch(
            self.file,
            self._settings(self._sizes(steps)),
            secrets=list(self.secrets),
            small=True,
            shared_dir=self.folder,
        )
        command = in_this_python([*launch.again(RUN_ID), "--plain"])
        with (
            (self.folder / "output.txt").open("w") as output,
            processes.running(command, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            try:
                process.wait(60 * minutes)
            except subprocess.TimeoutExpired:
                self.change(f"the run took more than --minutes {minutes:g}; its logs are kept with --keep DIR")
        if error := Run(self.run_dir).error:
            self.change(f"the run failed: {error}")
        elif process.returncode and not self.changes:
            lines = (self.folder / "output.txt").read_text("utf-8").splitlines() or ["nothing"]
            self.change(f"the run ended with exit code {process.returncode}; it printed last: {lines[-1]}")
        self._read()

    def _sizes(self, steps: int) -> dict[str, str]:
        """Return the settings of a small run."""
        asked = {name: int(self.variables.get(name, default)) for name, default in _COUNTS.items()}
        sizes = {"BATCH_SIZE": max(self.prompts, asked["UPDATES_PER_BATCH"]), "GROUP_SIZE": min(4, asked["GROUP_SIZE"])}
        sizes |= {"MAX_STEPS": steps, "EVAL_PROMPTS": min(2, asked["EVAL_PROMPTS"]), "CHECKPOINT_EVERY": 0}
        if self.small.is_random:
            most = max(RANDOM_TOKENS, asked["OVERLONG_BUFFER"] + 1)
            sizes["MAX_NEW_TOKENS"] = min(most, asked["MAX_NEW_TOKENS"])
        return {name: str(size) for name, size in sizes.items()}

    def _read(self) -> None:
        """Print what the run recorded, and add the failures of its answers to the changes."""
        run_dir = self.run_dir
        lines = read_records(run_dir / "metrics.jsonl")
        samples = read_records(run_dir / "samples.jsonl")
        text = "random text: " if self.small.is_random else ""
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for sample in samples:
            if sample["reward"] is not None:
                rewards[sample.get("source", "")].append(sample["reward"])
        for source, values in rewards.items():
            counts = ", ".join(f"{value:g} x {count}" for value, count in sorted(Counter(values).items())[:8])
            self.line("sampled", f"{text}rewards{_of(source)} {counts}")
        if lines:
            means = {
                name: statistics.fmean(line[name] for line in lines if name in line)
                for name in _SHOWN
                if name in lines[-1]
            }
            figures = ", ".join(f"{label} {means[name]:.3g}" for name, label in _SHOWN.items() if name in means)
            self.line("answers", f"{text}{figures}")
        failures: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for reason, count, example in (failure for line in lines for failure in line.get("failures", ())):
            failures[reason] += count
            examples.setdefault(reason, example)
        for reason, count in failures.items():
            sentence = f"{count} answers failed ({reason}): {examples[reason]}"
            is_own = reason in OWN_REASONS or reason in ("reward_error", "reward_timeout")
            self.change(sentence) if is_own else self.line("failed", sentence)
        for found in map(_LEFT_OUT.search, _lines(run_dir / "logs" / "ppo-trainer-0.log")):
            if found and not any(found["reason"] in change for change in self.changes):
                self.change(f"prompts such as {found['prompt']} have no answer: {found['reason']}")
        if any(IGNORES_TOOLS in line for line in _lines(run_dir / "logs" / "gateway-0.log")):
            self.change(
                f"{IGNORES_TOOLS}, so that {self.target} never sees them; give a model whose template has `tools`, or "
                "describe them in a message"
            )

    def verdict(self, command: str) -> int:
        """Print whether the launch is ready, or what to change; return the exit code, 0 or 1."""
        print()
        if not self.changes:
            print(f"ready: {command}")
            return 0
        print("what to change:")
        for number, sentence in enumerate(self.changes, start=1):
            print(f"{number}. {sentence}")
        return 1


_COUNTS = {
    name.upper(): TrainerSettings.model_fields[name].default
    for name in ("updates_per_batch", "group_size", "eval_prompts", "overlong_buffer", "max_new_tokens")
}
_LEFT_OUT = re.compile(r"no completion could be generated prompt_id=(?P<prompt>\S+) reason=(['\"])(?P<reason>.*)\2$")
"""The trainer's warning of a prompt whose every answer failed."""
_KINDS = ("right", "empty", "nonsense")
_SHOWN = {
    "truncation_rate": "share cut off",
    "length_mean": "tokens",
    "turns_mean": "turns",
    "seconds_step": "seconds a step here",
}
"""The metrics of a run that the report has, with their names there."""


def _of(source: str) -> str:
    return f" of {source}" if source else ""


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
