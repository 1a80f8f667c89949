"""``grpo rehearse``: a run of two steps on this machine before GPUs are rented, with a stand-in for its model.

Data, template, rewards, agents, environments and the judge are the launch's own. docs/guides/kubernetes.md has an
example. What imports torch is imported once it is needed, because --help does without.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from local_runner import checks, run, spec
from local_runner.launch import Launch
from local_runner.plan import Plan
from local_runner.run import Env, EnvFiles, Secrets
from services.chat.prompts import IGNORES_TOOLS, ChatPrompts
from services.chat.tokenizers import load_tokenizer
from services.core import logs
from services.core.errors import ConfigurationError, first_line
from services.core.files import read_records, remove_directory
from services.core.models import model_files
from services.data_server.settings import PromptStyle
from services.http.problems import ProblemError
from services.run_page.directory import Run
from trainer.config import TrainerSettings
from trainer.rollouts.groups import OWN_REASONS

LAYERS = 2
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
"""The sizes of a stand-in, as far as the model has them."""
ON_PROCESSORS = {
    "CUDA_VISIBLE_DEVICES": "",
    "ROLLOUT_ENGINE": "embedded",
    "PUBLISH_TRANSPORT": "disk",
    "MIN_WORKERS": "1",
    "MICRO_BATCH_TOKENS": "1024",
}
"""The settings without which the launch's would need GPUs, several nodes or much memory."""
MOST_SIZES = {"group_size": 4, "eval_prompts": 2, "max_new_tokens": 64}
"""Most answers, held-out prompts and tokens of the run; random weights seldom end an answer by themselves."""
RUN_ID = "rehearsal"
_LEFT_OUT = re.compile(r"no completion could be generated prompt_id=(\S+) reason=(['\"])(?P<reason>.*)\2$")
"""The trainer's warning of a prompt whose every answer failed."""


def main(
    path: Annotated[Path | None, typer.Argument(metavar="JOBGROUP", help="Default: that of `grpo launch`.")] = None,
    model: Annotated[str | None, Option(help="A name on the hub, or a directory; no weights are read.")] = None,
    env: Env = None,
    env_file: EnvFiles = None,
    secret: Secrets = None,
    right: Annotated[str, Option(help="The form of a right answer; {} stands for the ground truth.")] = "{}",
    steps: Annotated[int, Option(min=0, help="Steps of the run; 0 leaves it out.")] = 2,
    keep: Annotated[Path | None, Option(metavar="DIR", help="Keep the run and the stand-in in this directory.")] = None,
) -> None:
    """Try a launch here before renting GPUs: its data, template, rewards and agents, with a stand-in for the model."""
    from scripts.launch.plan import Request, group_of

    logs.configure("rehearse", "error")
    options = spec.env_files(env_file or []) | spec.assignments(env or [], "--env")
    secrets = spec.assignments(secret or [], "--secret")
    target = model or options.get("MODEL_NAME") or str(TrainerSettings.model_fields["model_name"].default)
    file, chosen = (spec.find(path).resolve(), {}) if path is not None else group_of(options, Request())
    os.environ |= secrets
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
        folder = (keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        make_stand_in(target, folder / "stand-in")
        rehearsal = Rehearsal(file, options | chosen, [*secrets], target, folder / "stand-in", folder)
        rehearsal.check(right)
        if steps and not rehearsal.changes:
            rehearsal.run(steps)
    print("\nwhat to change:" if rehearsal.changes else "\nready: give these settings to `grpo launch`")
    for number, sentence in enumerate(rehearsal.changes, start=1):
        print(f"{number}. {sentence}")
    raise typer.Exit(int(bool(rehearsal.changes)))


def make_stand_in(model: str, directory: Path) -> None:
    """Write the stand-in of a model on the hub, or in a directory, to ``directory``, in place of an earlier one.

    The architecture, the vocabulary, the special tokens, the templates, the generation settings and the context are the
    model's. No weights of the model are read or downloaded.

    Raises:
        ConfigurationError: the model's configuration cannot be loaded, or transformers has no causal language model
            of it. Or the model is in ``directory``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    source = model_files(model, with_weights=False)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"MODEL_NAME={model}: {first_line(error)}; rehearse another model") from error
    if source.resolve() == directory.resolve():
        raise ConfigurationError(f"MODEL_NAME={model} is where --keep writes the stand-in; give another --keep")
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if hasattr(config, name)}
    if kinds := getattr(config, "layer_types", None):
        sizes["layer_types"] = [*dict.fromkeys(kinds), *kinds][:LAYERS]
    for name, value in (sizes | {"num_hidden_layers": LAYERS, "tie_word_embeddings": True, "dtype": "float32"}).items():
        setattr(config, name, value)
    remove_directory(directory)
    disable_progress_bar()
    try:
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    # A configuration of another task, or whose sizes depend on others than those of SIZES.
    except Exception as error:
        raise ConfigurationError(
            f"MODEL_NAME={model}: transformers makes no small model of it ({first_line(error)}); rehearse another model"
        ) from error
    (directory / "generation_config.json").unlink(missing_ok=True)  # made of config.json, which has the end tokens
    for path in source.iterdir():
        is_read = path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(".index.json")
        if is_read and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)


@dataclass
class Rehearsal:
    """A launch that is tried: its settings, the stand-in, and what was found."""

    file: Path
    variables: dict[str, str]
    secrets: list[str]
    target: str
    small: Path
    """The directory of the stand-in."""
    folder: Path
    changes: list[str] = field(default_factory=list)
    """The changes to make before the launch, a sentence each."""
    sources: int = 1

    def line(self, label: str, text: str) -> None:
        """Print a line of the report."""
        print(f"{label:<8}{text.replace(str(self.small), self.target)}", flush=True)

    def change(self, sentence: str) -> None:
        """Add a sentence, with the model's name in place of its stand-in's, unless it is there."""
        if (sentence := sentence.replace(str(self.small), self.target)) not in self.changes:
            self.changes.append(sentence)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Add the refusal that ends the context to the changes."""
        try:
            yield
        except ConfigurationError as error:
            self.change(str(error))

    def launch(self, changes: Mapping[str, str]) -> Launch:
        """Return the command line with all settings, ON_PROCESSORS, the stand-in, and ``changes`` that a task reads."""
        readers, tasks = checks.tasks_by_variable(), {str(one["name"]) for one in spec.documents(self.file)[1:]}
        own = {**ON_PROCESSORS, **changes, "MODEL_NAME": str(self.small)}
        own |= {"TEACHER_MODEL": str(self.small)} if self.variables.get("TEACHER_MODEL") else {}
        read = {name: value for name, value in own.items() if tasks & set(readers.get(name, tasks))}
        env = [f"{name}={value}" for name, value in (self.variables | read).items()]
        return Launch(self.file, env, secrets=self.secrets, small=True, shared_dir=self.folder)

    def check(self, right: str) -> None:
        """Check what a dry run checks, with answers in the form ``right`` for the rewards, and the chat template."""
        with self.refusals(), run.planned(self.launch({}), RUN_ID) as planned:
            loaded = checks.load_all(planned)
            with self.refusals():
                checks.check_before_rows(planned, loaded)
            settings = checks.settings_by_class(loaded)
            self.sources = len(settings["TrainerSettings"].by_source())
            for problem in _template_problems(self.small, settings):
                self.change(problem)
            plan = Plan(planned, loaded, is_dry_run=True, right=right)
            for problem in plan.reward_problems():
                self.change(problem)
            for caution in plan.cautions():
                self.line("note", caution)
            plan.check()

    def run(self, steps: int) -> None:
        """Run some steps of the job group on this machine, and add what failed to the changes.

        Raises:
            typer.Exit: a signal stopped the run.
        """
        run_dir, launch = self.folder / "runs" / RUN_ID, self.launch(self._sizes(steps))
        remove_directory(run_dir)
        with (
            (self.folder / "output.txt").open("w") as stream,
            self.refusals(),
            run.planned(launch, RUN_ID) as planned,
        ):
            outcome = run.start(planned, launch, Console(file=stream))
            if outcome.exit_code and outcome.failed is None:
                raise typer.Exit(outcome.exit_code)
            self._read(run_dir)
            if error := Run(run_dir).error:
                self.change(f"the run failed: {error}")
            elif outcome.exit_code and not self.changes:
                self.change(f"the run did not succeed: {outcome.reason}")

    def _sizes(self, steps: int) -> dict[str, str]:
        """Return the settings of a small run: at least one prompt of each source."""
        fields = TrainerSettings.model_fields
        asked = {name: int(self.variables.get(name.upper(), fields[name].default)) for name in MOST_SIZES}
        sizes = {name.upper(): str(min(MOST_SIZES[name], size)) for name, size in asked.items()}
        batch = max(2, self.sources, int(self.variables.get("UPDATES_PER_BATCH", 1)))
        sizes |= {"CHECKPOINT_EVERY": "0", "OVERLONG_BUFFER": "0"}
        return sizes | {"BATCH_SIZE": str(batch), "MAX_STEPS": str(steps)}

    def _read(self, run_dir: Path) -> None:
        """Print what the run recorded, and add the failures of its answers to the changes."""
        for line in read_records(run_dir / "metrics.jsonl"):
            if "seconds_step" in line:
                told = {name: line[name] for name in ("reward_mean", "length_mean", "seconds_step") if name in line}
                self.line(f"step {line['step']}", ", ".join(f"{name} {value:.3g}" for name, value in told.items()))
            for reason, count, example in line.get("failures", ()):
                sentence = f"{count} answers failed ({reason}): {example}"
                is_own = reason in OWN_REASONS or reason in ("reward_error", "reward_timeout")
                self.change(sentence) if is_own else self.line("failed", sentence)
        for found in filter(None, map(_LEFT_OUT.search, Run(run_dir).log_end("ppo-trainer-0"))):
            if not any(found["reason"] in change for change in self.changes):
                self.change(f"prompts such as {found[1]} have no answer: {found['reason']}")
        if any(IGNORES_TOOLS in line for line in Run(run_dir).log_end("gateway-0")):
            self.change(f"{IGNORES_TOOLS}, so that {self.target} never sees them; give a template that has `tools`")


def _template_problems(folder: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each end token or part of the chat template that conversations need and the model lacks."""
    from transformers import AutoConfig

    from services.embedded_engine.loading import end_token_ids

    trainer, data = settings["TrainerSettings"], settings["DataSettings"]
    tokenizer = load_tokenizer(str(folder))
    ends = end_token_ids(folder, AutoConfig.from_pretrained(folder), tokenizer)
    if not ends:
        yield f"{folder} has no end token, so that every answer is cut off; give eos_token_id in generation_config.json"
    has_turns = any(own.way.has_turns for own in trainer.by_source().values())
    if has_turns and not tokenizer.chat_template:
        yield f"{folder} has no chat template, which agents and environments need; give a chat model"
    is_chat = has_turns or any(own.prompt_style is not PromptStyle.PLAIN for own in data.by_source().values())
    if not is_chat or not tokenizer.chat_template:
        return
    prompts, question = ChatPrompts(tokenizer, data.chat_template_args), [{"role": "user", "content": "question"}]
    with suppress(ProblemError):  # a template that refuses this question; the rows show whether it takes them
        if prompts.render(question, None, {}) == prompts.render(question, None, {}, adds_generation_prompt=False):
            yield f"the chat template of {folder} has no generation prompt, so that the model continues the user's turn"
    close, _ = prompts.suffix_parts({"role": "assistant", "content": "answer"}, question, None, {}) or ("", "")
    first = next(iter(prompts.codec.encode(close)), -1)
    token = tokenizer.added_tokens_decoder.get(first)
    if ends and token is not None and token.special and first not in ends:
        yield f"the chat template of {folder} ends an answer with {token.content!r}, which is not in eos_token_id"
