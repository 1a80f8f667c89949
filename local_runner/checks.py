"""Checks of a run before anything starts: names and values of variables, number of engines, models, files, functions.

A component ignores the variables of others, because ``--env`` reaches every task, so no component notices a misspelt
name. A component's module ``own_code`` imports the user's functions as the component will, in a separate process with
the node's environment, because an import may take memory, print, or read variables. The modules that read data and
models do the same.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from local_runner.nodes import LocalRun, check_gpus, gpus_of, node_environment
from local_runner.spec import JobGroup, TaskSpec, nearest
from services.core.endpoints import COLOCATE_VARIABLE, Task, is_colocated
from services.core.errors import ConfigurationError
from services.core.files import check_model, check_model_directory, read_object
from services.core.machine import VISIBLE_GPUS_VARIABLE
from services.core.removed import removed_among
from services.core.settings import Method, Settings
from services.core.sources import Source
from services.data_server.settings import HARBOR, DataSettings, check_file, generator_of, named_files
from services.engines.settings import EngineKind, RolloutSettings
from services.reward_columns import JUDGES
from services.reward_server.settings import RELATIVE, RewardSettings

if TYPE_CHECKING:
    from trainer.config import TrainerSettings


@dataclass(frozen=True)
class Reader:
    """A settings class, by module and name, and the tasks whose components read it."""

    heading: str
    """The heading of its table in docs/configuration.md."""
    module: str
    name: str
    tasks: tuple[str, ...]

    def settings_class(self) -> type[Settings]:
        """Import and return the class."""
        settings: type[Settings] = getattr(importlib.import_module(self.module), self.name)
        return settings


READERS = (
    Reader("Trainer and collectors", "trainer.config", "TrainerSettings", (Task.TRAINER, Task.COLLECTOR)),
    Reader("data-server", "services.data_server.settings", "DataSettings", (Task.DATA_SERVER, "evaluate")),
    Reader("rollout-server", "services.engines.settings", "RolloutSettings", (Task.ROLLOUT_SERVER,)),
    Reader("reward-server", "services.reward_server.settings", "RewardSettings", (Task.REWARD_SERVER,)),
    Reader("replay-buffer", "services.replay_buffer.settings", "ReplaySettings", (Task.REPLAY_BUFFER,)),
    Reader("gateway", "services.gateway.settings", "GatewaySettings", (Task.GATEWAY,)),
    Reader(
        "environment-server", "services.environment_server.settings", "EnvironmentSettings", (Task.ENVIRONMENT_SERVER,)
    ),
    Reader("evaluation-head", "services.evaluation_head.settings", "HeadSettings", (Task.EVALUATION_HEAD,)),
    Reader("Evaluation of checkpoints", "evaluation.settings", "EvaluationSettings", ("evaluate",)),
)
"""In the order of docs/configuration.md."""

S = TypeVar("S", bound=Settings)


class Loaded(NamedTuple):
    """The settings of a task, as its first node will load them."""

    task: TaskSpec
    reader: Reader
    settings: Settings


def by_class(loaded: Sequence[Loaded]) -> dict[str, Loaded]:
    """Return what was loaded by the name of its class; the trainer's, where collectors read the same class."""
    found: dict[str, Loaded] = {}
    for one in loaded:
        if one.reader.name not in found or one.task.name == Task.TRAINER:
            found[one.reader.name] = one
    return found


def settings_by_class(loaded: Sequence[Loaded]) -> dict[str, Any]:
    """Return the settings of ``by_class``."""
    return {name: one.settings for name, one in by_class(loaded).items()}


LIBRARIES = (
    *("AWS_", "AZURE_", "CUBLAS_", "CUDA_", "DNNL_", "DYLD_", "FI_", "FLASHINFER_", "GIT_", "GLIBC_", "GLOO_"),
    *("GOMP_", "GOOGLE_", "HF_", "HSA_", "HUGGING", "KMP_", "KUBE", "LC_", "LD_", "LIBC_", "MALLOC_", "MKL_", "NCCL_"),
    *("NVIDIA_", "NVTE_", "OMP_", "ONEDNN_", "OPENAI_", "OPENBLAS_", "OTEL_", "PIP_", "PYTHON", "PYTORCH_", "RAY_"),
    *("REQUESTS_", "ROCR_", "RUST_", "S3_", "SGLANG_", "SGL_", "SKYPILOT_", "SSL_", "TOKENIZERS_", "TORCH", "TRITON_"),
    *("TRANSFORMERS_", "UCX_", "UV_", "VIRTUAL_ENV", "WANDB_", "XDG_"),
)
"""The prefixes of variables that libraries and the system read."""

SYSTEM = {"CI", "DEBUG", "HOME", "HOSTNAME", "LANG", "NO_COLOR", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"}
LIKE_A_SETTING = 0.9
"""A library's variable counts as a misspelt setting if it is at least this similar to one (difflib's ratio)."""
ASK_ENGINES = (Task.GATEWAY, Task.COLLECTOR)
"""The tasks beside the trainer whose components send requests to the engines."""
IMPORT_SECONDS = 120.0
"""Longest time that the import of a component's functions may take."""
_SHELL_WORDS = {".", "case", "cd", "eval", "exec", "export", "for", "if", "set", "source", "ulimit", "umask", "while"}
"""Words with which a shell command may begin that are not programs."""
ERROR = "error: "
"""The beginning of the line in which ``exit_code_of`` names an error."""


def check_names(group: JobGroup, options: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Check that a component reads every given variable; a name that the job group's file declares passes.

    Args:
        group: the job group.
        options: variables of the command line, which a component of this job group must read.
        files: variables of files, which may serve several job groups, so a component of any may read them.

    Raises:
        ConfigurationError: no component reads a variable; the message has the nearest name.
    """
    if sentences := removed_among((*options, *files)):
        raise ConfigurationError("; ".join(sentences))
    readers = tasks_by_variable()
    tasks = {component for task in group.tasks for component in task.components}
    declared = {name for task in group.tasks for name in task.declared}
    problems = []
    for name in dict.fromkeys((*options, *files)):
        if name in declared or _is_foreign(name, readers):
            continue
        if name.upper() not in readers:
            near = nearest(name.upper(), {*readers, *declared}, "nearest setting")
            remedy = "If your own code reads it, declare it under `envs` of its task in the job group's file"
            problems.append(f"{name} is read by no component{near}. {remedy}")
        elif name in options and not tasks.intersection(readers[name.upper()]):
            owners = " and ".join(readers[name.upper()])
            problems.append(f"{name} is read by {owners} alone, which job group {group.name} does not have")
    if problems:
        raise ConfigurationError("; ".join(problems))


def tasks_by_variable() -> dict[str, list[str]]:
    """Return the tasks whose components read a variable, by the variable's name."""
    tasks: dict[str, list[str]] = {}
    for reader in READERS:
        for field in reader.settings_class().model_fields:
            tasks.setdefault(field.upper(), []).extend(reader.tasks)
    return tasks


def load_all(run: LocalRun) -> list[Loaded]:
    """Load and return the settings of every task.

    Raises:
        ConfigurationError: a value is not allowed; the message names the tasks that refuse it.
    """
    loaded = []
    problems: list[tuple[str, str]] = []
    for task in run.group.tasks:
        for reader in READERS:
            if not set(task.components).isdisjoint(reader.tasks):
                try:
                    loaded.append(Loaded(task, reader, load_settings(run, task, reader.settings_class())))
                except ConfigurationError as error:
                    problems.append((task.name, str(error)))
    _refuse(problems)
    return loaded


def _refuse(problems: Iterable[tuple[str, str]]) -> None:
    """Raise a ConfigurationError that names each problem once, with its tasks, if there are problems."""
    tasks: dict[str, list[str]] = {}
    for task, problem in problems:
        tasks.setdefault(problem, []).append(task)
    if tasks:
        raise ConfigurationError("; ".join(f"{', '.join(names)}: {problem}" for problem, names in tasks.items()))


def load_settings(run: LocalRun, task: TaskSpec, settings_class: type[S]) -> S:
    """Return the settings that the first node of ``task`` will load.

    Raises:
        ConfigurationError: a value is not allowed.
    """
    with _environment(node_environment(run, task, 0)):
        return settings_class.load()


def _is_foreign(name: str, settings: Iterable[str]) -> bool:
    """Return whether a library or the system reads ``name``, and it is not a misspelt setting."""
    upper = name.upper()
    if upper in settings:
        return False
    if upper in SYSTEM or upper.endswith("_PROXY"):
        return True
    return upper.startswith(LIBRARIES) and not difflib.get_close_matches(upper, settings, 1, LIKE_A_SETTING)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replace this process's environment by ``variables`` within the context."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_engines(run: LocalRun, loaded: Sequence[Loaded]) -> None:
    """Check that there are MIN_WORKERS engines, whose given sizes fit a node's GPUs and a model on this machine.

    Where this machine has no GPUs, those that the job group asks for count, because the same settings go to a cluster.

    Raises:
        ConfigurationError: there are fewer engines than MIN_WORKERS, or a size does not divide the GPUs of a node or
            the attention heads of the model; or engines and trainer cannot share GPUs, or the engine lacks the model's
            code.
    """
    check_shared_gpus(run, loaded)
    min_workers = max((getattr(settings, "min_workers", 1) for _, _, settings in loaded), default=1)
    has_code = any(getattr(settings, "trust_remote_code", False) for _, _, settings in loaded)
    for task, _, settings in loaded:
        if not isinstance(settings, RolloutSettings):
            continue
        each, n_gpus = 1, len(gpus_of(run, task, 0)) or task.gpus_per_node
        if n_gpus or has_code:
            # Only now: most runs on one machine have no GPUs, and begin the sooner without these imports.
            from services.engines.engine import choose_engine
            from services.engines.placement import read_config

            try:
                check_model_directory(settings.model_name)
                config = read_config(settings.model_name) if Path(settings.model_name).is_dir() else None
                engine = choose_engine(settings, n_gpus)
                if has_code and config and engine.kind is EngineKind.EMBEDDED:
                    _check_model_code(settings.model_name, config)
                each = engine.check_sizes(settings, n_gpus, config) if n_gpus else 1
            except ConfigurationError as error:
                raise ConfigurationError(f"{task.name}: {error}") from error
        if min_workers > task.num_nodes * each:
            raise ConfigurationError(
                f"MIN_WORKERS is {min_workers}, but {task.name} has {task.num_nodes} x {each} engines here; lower it, "
                f"or give --num-nodes {task.name}={math.ceil(min_workers / each)}"
            )


def _check_model_code(model: str, config: Mapping[str, Any]) -> None:
    """Check that transformers knows a model whose own code the embedded engine would have to run."""
    if "auto_map" not in config or importlib.util.find_spec("transformers") is None:
        return  # without transformers, which only the tasks' environments may have, the engine's start says the same
    if config.get("model_type") not in importlib.import_module("transformers").CONFIG_MAPPING:
        raise ConfigurationError(
            f"MODEL_NAME={model} is of a type {config.get('model_type')!r} with code of its own, which the embedded "
            "engine does not run; choose a model of transformers, or ROLLOUT_ENGINE=sglang"
        )


def check_shared_gpus(run: LocalRun, loaded: Sequence[Loaded]) -> None:
    """Check that engines and trainer have the same GPUs where these share memory (PUBLISH_TRANSPORT=local).

    Raises:
        ConfigurationError: they have others.
    """
    if not any(getattr(settings, "publish_transport", None) == "local" for _, _, settings in loaded):
        return
    tasks = {task.name: task for task, _, _ in loaded if task.name in (Task.TRAINER, Task.ROLLOUT_SERVER)}
    given = {tuple(sorted(gpu for n in range(t.num_nodes) for gpu in gpus_of(run, t, n))) for t in tasks.values()}
    if len(given) > 1:
        remedy = f"give --small --env {VISIBLE_GPUS_VARIABLE}={','.join(run.gpus)}, or PUBLISH_TRANSPORT=broadcast"
        raise ConfigurationError(f"PUBLISH_TRANSPORT is local, but trainer and engines have different GPUs; {remedy}")


def check_adapters(
    loaded: Sequence[Loaded], run: LocalRun | None = None, config: Mapping[str, Any] | None = None
) -> list[str]:
    """Check that SGLang, if it is the engine, loads the run's adapters; return cautions where nobody has tried.

    Args:
        loaded: the settings of all tasks.
        run: the run on this machine; None on a cluster, whose nodes have the GPUs that the job group asks for.
        config: the language model's configuration; None: that of MODEL_NAME, if it can be read.

    Raises:
        ConfigurationError: SGLang does not load adapters of this type of model.
    """
    trainer, engines = settings_by_class(loaded).get("TrainerSettings"), by_class(loaded).get("RolloutSettings")
    if trainer is None or engines is None or not (trainer.lora_rank and trainer.needs_engines):
        return []
    # Only now, as in check_engines.
    from services.engines.engine import choose_engine
    from services.engines.placement import read_config
    from trainer.model.families import check_sglang_lora

    assert isinstance(engines.settings, RolloutSettings)
    n_gpus = engines.task.gpus_per_node if run is None else len(gpus_of(run, engines.task, 0))
    if choose_engine(engines.settings, n_gpus).kind is not EngineKind.SGLANG:
        return []
    kind = (config or read_config(trainer.model_name) or {}).get("model_type")
    is_tried = check_sglang_lora(kind, trainer.lora_rank)
    untried = f"LORA_RANK is {trainer.lora_rank}, and nobody has loaded adapters of model type {kind!r} in SGLang"
    return [untried] if kind is not None and not is_tried else []


def check_before_rows(run: LocalRun, loaded: Sequence[Loaded]) -> None:
    """Check a run as far as its rows do not matter.

    Raises:
        ConfigurationError: GPUs, engines, services, files or functions are wrong.
    """
    check_gpus(run)
    check_engines(run, loaded)
    check_adapters(loaded, run)
    check_together(loaded, run.group)
    check_own_code(run, loaded)


def check_together(loaded: Sequence[Loaded], group: JobGroup) -> None:
    """Check how the settings of the tasks go together, and with the job group's services.

    Raises:
        ConfigurationError: they do not go together.
    """
    found = settings_by_class(loaded)
    trainer: TrainerSettings | None = found.get("TrainerSettings")
    reward: RewardSettings | None = found.get("RewardSettings")
    if trainer is None:
        return
    if reward is not None:
        _check_judge(reward, trainer)
        _check_formula(reward, trainer)
    _check_lengths(trainer, getattr(found.get("RolloutSettings"), "engine_context_length", None))
    if any(task.name == Task.TRAINER for task in group.tasks):
        data = found["DataSettings"].by_source() if "DataSettings" in found else {}
        has_tasks = {source: generator_of(own.dataset) == HARBOR for source, own in data.items()}
        trainer.of_sources(lambda own, source: _check_services(own, group, has_tasks.get(source.name, False)))


def _check_services(settings: TrainerSettings, group: JobGroup, has_tasks: bool) -> None:
    """Check that the job group has the services that the method, evaluations and the ways of rolling out need.

    With ``has_tasks`` the dataset is ``harbor:DIR``, whose tasks are played in boxes of environment-servers.
    """
    if not settings.needs_engines:
        return
    tasks = {component for task in group.tasks for component in task.components}
    missing = sorted({Task.ROLLOUT_SERVER.value, Task.REWARD_SERVER.value} - tasks)
    if settings.method is Method.SFT and missing:
        raise ConfigurationError(f"EVAL_EVERY needs {' and '.join(missing)}; take jobgroup.yaml, or set EVAL_EVERY=0")
    has_own_engines = any(task.name == Task.ROLLOUT_SERVER for task in group.tasks)
    is_colocating = any(COLOCATE_VARIABLE in task.declared for task in group.tasks)
    colocate = f"{COLOCATE_VARIABLE} is {str(settings.colocate).lower()}"
    if (settings.colocate and has_own_engines) or (is_colocating and Task.ROLLOUT_SERVER not in tasks):
        file = "jobgroups/colocated.yaml" if settings.colocate else "jobgroup.yaml"
        raise ConfigurationError(f"{colocate}, which job group {group.name} does not fit; take {file}")
    asking = [task for task in group.tasks if task.name in ASK_ENGINES]
    if apart := [task.name for task in asking if is_colocated(task.environment) != settings.colocate]:
        raise ConfigurationError(f"{colocate}, but not for {' and '.join(apart)}; give all tasks the same value")
    rollout = f"ROLLOUT is {settings.rollout.value}"
    if has_tasks and settings.rollout.value not in ("program", "environment"):
        remedy = "set ROLLOUT=environment, or ROLLOUT=program with AGENT_COMMAND"
        raise ConfigurationError(f"{rollout}, but the tasks of a DATASET {HARBOR}DIR are played in boxes; {remedy}")
    needed = [*settings.way.services, *([Task.ENVIRONMENT_SERVER] if has_tasks else [])]
    if lacking := sorted({task.value for task in needed} - tasks):
        file = "jobgroups/agent.yaml" if lacking == [Task.GATEWAY.value] else "jobgroups/environment.yaml"
        raise ConfigurationError(
            f"{rollout}, which needs {' and '.join(lacking)}, but job group {group.name} has none; take {file}"
        )


def check_own_code(run: LocalRun, loaded: Sequence[Loaded]) -> None:
    """Check that the files exist and the functions can be imported that the settings of the run's tasks name.

    Raises:
        ConfigurationError: one does not exist or cannot be used; the message names the tasks that need it.
    """
    problems = ((one.task.name, (*_missing_files(one.settings), *_failed_import(run, one))) for one in loaded)
    _refuse((task, problem) for task, of_task in problems for problem in of_task)


def _check_judge(reward: RewardSettings, trainer: TrainerSettings) -> None:
    """Check that the trainer waits longer than a judge may take, and that held-out completions have a reward."""
    if not any(name in JUDGES for name in reward.names):
        return

    def check(own: TrainerSettings, source: Source) -> None:
        rewards = reward.by_source()[source.name]
        is_relative = all(function.name in RELATIVE for function in rewards.functions)
        if is_relative and own.evaluates and own.rollout.value == "completion":
            raise ConfigurationError(
                f"REWARD_FN={rewards.reward_fn} cannot score a held-out answer alone; add math=1, or set EVAL_PROMPTS=0"
            )

    trainer.of_sources(check)


def context_of(trainer: TrainerSettings, engine_context: int | None) -> int | None:
    """Return the most tokens that prompt and answer may have together; None where only the engines know it."""
    config = read_object(Path(trainer.model_name).expanduser() / "config.json")
    config |= config.get("text_config") or {}
    # Engines extend the context by a model's scaled rotations.
    return engine_context or (None if config.get("rope_scaling") else config.get("max_position_embeddings"))


def _check_lengths(trainer: TrainerSettings, engine_context: int | None) -> None:
    """Check that the longest answer of each source, and a preset's first prompt, fit in the engines' context."""
    if not trainer.needs_engines:
        return
    context = context_of(trainer, engine_context)

    from services.harnesses import check_context, harness_of

    def check(own: TrainerSettings, source: Source) -> None:
        if context is not None and own.max_new_tokens >= context:
            limit = f"prompt and answer share a context of {context} tokens (MODEL_NAME={own.model_name})"
            raise ConfigurationError(f"MAX_NEW_TOKENS is {own.max_new_tokens}, but {limit}; lower it")
        harness = harness_of(own.agent_command)
        if harness is not None and context is not None:
            check_context(harness, own.max_new_tokens, context)

    trainer.of_sources(check)


def _check_formula(reward: RewardSettings, trainer: TrainerSettings) -> None:
    """Check that the reward-server's rewards are those that ADVANTAGE needs; agents and environments give others."""
    if any(own.way.has_turns for own in trainer.by_source().values()):
        return
    if unknown := ", ".join(sorted((trainer.component_weights or {}).keys() - set(reward.names))):
        raise ConfigurationError(f"GDPO_WEIGHTS names {unknown}, but REWARD_FN has {', '.join(reward.names)}")
    below = ", ".join(f.name for own in reward.by_source().values() for f in own.functions if f.weight < 0)
    if trainer.advantage == "maxrl" and below:
        raise ConfigurationError(f"REWARD_FN gives {below} a negative weight, which ADVANTAGE=maxrl cannot have")


def ask(run: LocalRun, task: TaskSpec, module: str, *arguments: str, seconds: float = IMPORT_SECONDS) -> str:
    """Run a module as the first node of ``task`` would, and return what it prints.

    Raises:
        ConfigurationError: the module ends with an error, which is the message.
        TimeoutError: it takes more than ``seconds``.
    """
    command = [sys.executable, "-m", "services.core.imports", module, *arguments]
    environment = node_environment(run, task, 0)
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{module} takes more than {seconds:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{' '.join(command)} ended with exit code {done.returncode}"]
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        raise ConfigurationError((errors or lines)[-1])
    return done.stdout


def _missing_files(settings: Settings) -> Iterator[str]:
    try:
        if model := getattr(settings, "model_name", None):
            check_model(model)
        for teacher in getattr(settings, "teacher_models", ()):
            check_model(teacher, "TEACHER_MODEL")
        for command in getattr(settings, "agent_commands", ()):
            _check_program(command)
    except ConfigurationError as error:
        yield str(error)
    if not isinstance(settings, DataSettings):
        return
    for source, own in settings.by_source().items():
        try:
            for variable, path in named_files(own).items():
                check_file(variable, path)
        except ConfigurationError as error:
            yield f"SOURCES {settings.sources}, source {source!r}: {error}" if source else str(error)


def _check_program(command: str) -> None:
    """Check that the program of AGENT_COMMAND can be found: a preset's, or the first word if it is one."""
    from services.harnesses import check_installed, harness_of

    harness = harness_of(command)
    if harness is not None:
        check_installed(harness)
        return
    word = command.split()[0]
    if re.fullmatch(r"[\w./+-]+", word) and word not in _SHELL_WORDS and shutil.which(word) is None:
        problem = f"AGENT_COMMAND {command!r}: no program {word} is on PATH or in {Path.cwd()}"
        raise ConfigurationError(f"{problem}; install it, or give its path")


def _failed_import(run: LocalRun, loaded: Loaded) -> Iterator[str]:
    functions = loaded.settings.own_functions
    if not functions:
        return
    try:
        printed = ask(run, loaded.task, f"{loaded.reader.module.rpartition('.')[0]}.own_code")
        for line in filter(lambda line: line.startswith("note: "), printed.splitlines()):
            print(line, file=sys.stderr)
    except TimeoutError:
        named = ", ".join(f"{variable}={value}" for variable, value in functions.items())
        yield f"{named}: the import takes more than {IMPORT_SECONDS:.0f} s; load what is large at the first call"
    except ConfigurationError as error:
        yield str(error)
