"""The plan of ``grpo launch``: the job group's file with what follows from model, nodes and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import yaml

from local_runner import checks, nodes, spec
from local_runner.nodes import LocalRun
from scripts.launch import job_group_text
from scripts.launch.sizes import Tier, balanced, derive, parse_gpus
from services.core.endpoints import Task, is_colocated
from services.core.errors import ConfigurationError
from services.core.sources import load_sources
from services.data_server.settings import DataSettings, check_file, named_files
from services.engines.settings import RolloutSettings
from trainer.capacity.shape import find_model
from trainer.config import TrainerSettings

ROOT = Path(__file__).parents[2]
VOLUME = ROOT / "jobgroups" / "volume.yaml"
PRESET = ROOT / "examples/gpu.env"
"""Settings of a batch that fills GPUs."""
COLOCATED = ROOT / "jobgroups/colocated.yaml"
IMAGES = {Task.TRAINER.value: "trainer", Task.ROLLOUT_SERVER.value: "rollout"}
"""The Dockerfile's target by task; all other tasks have ``services``, and a trainer with engines ``colocated``."""
TAGGED = re.compile(r"[^@]*[^/:@]:[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""The name of an image with its tag; the colon of a registry's port is before a slash."""
OTHER_ENGINES = {"ROLLOUT_ENGINE", "CUDA_VISIBLE_DEVICES", "ENGINE_SLEEPS"}
"""Settings of engines without CUDA or without GPUs of their own."""


@dataclass(frozen=True)
class Size:
    """The options that say how large a job group is; what is None stays as the job group's file has it."""

    model: str | None = None
    rollout_nodes: int | None = None
    trainer_nodes: int | None = None
    gpus: str | None = None
    rollout_gpus: str | None = None


@dataclass(frozen=True)
class Plan:
    """A job group of a given size."""

    model: str
    tiers: dict[str, Tier]
    """The nodes of rollout-server and ppo-trainer."""
    derived: set[str]
    """The names of the settings that follow from the size."""
    preset: set[tuple[str, str]]
    """The tasks and keys whose values the preset gives, because no option does."""
    notes: list[str]
    """Cautions, and the reason for the number of rollout nodes where it is chosen."""
    volume: int
    """Gibibytes of the volume."""
    text: str
    """The job group's YAML."""


def plan_of(
    file: Path,
    size: Size,
    options: Mapping[str, str],
    chosen: dict[str, str],
    secrets: dict[str, str],
    image: str | None,
    preset: Mapping[str, str] | None,
) -> Plan:
    """Derive a job group's sizes, and write them into the text of its file.

    Args:
        file: the job group's file.
        size: the options about model, nodes and GPUs.
        options: the settings of the options.
        chosen: the settings that go with the file, such as MODE.
        secrets: values of the job group's secrets.
        image: the images of `make image`.
        preset: the settings that ``options`` replace; with them go one trainer node, and as many rollout nodes as keep
            both tiers busy. None: the file's.

    Raises:
        ConfigurationError: the settings are not valid together, or the GPUs are too small for the model.
    """
    before = file.read_text(encoding="utf-8")
    written = job_group_text.values(before).get((Task.TRAINER, "envs.MODEL_NAME"), "")
    model = find_model(size.model or options.get("MODEL_NAME") or written)
    settings = {**(preset or {}), **options, "MODEL_NAME": model.name}
    tiers = _tiers(before, size if preset is None else replace(size, trainer_nodes=size.trainer_nodes or 1))
    group = spec.load(file, spec.Overrides(settings | chosen, secrets))
    loaded = _loaded(group, settings | chosen | secrets)
    trainer, rollout = _settings(loaded, group, options)
    sizes, reason = derive(trainer, rollout, model, tiers), ""
    if preset is not None and not size.rollout_nodes and not OTHER_ENGINES.intersection(options):
        tiers, reason = balanced(trainer, rollout, model, tiers, sizes.work)
        sizes = derive(trainer, rollout, model, tiers)
    changes = sizes.changes | variables_of(group, sizes.derived | settings | chosen) | _images(group, image)
    of_preset = set() if preset is None else _of_preset(changes, size, preset.keys() - options.keys())
    of_preset |= {(Task.ROLLOUT_SERVER.value, "num_nodes")} if reason else set()
    return Plan(
        model=model.name,
        tiers=tiers,
        derived=sizes.derived.keys() - settings.keys(),
        preset=of_preset,
        notes=[*_left_behind(_named_paths(loaded)), *([reason] if reason else [])],
        volume=max(sizes.volume, gibibytes(str(yaml.safe_load(VOLUME.read_text("utf-8"))["size"]))),
        text=job_group_text.edited(before, changes),
    )


def _of_preset(changes: Mapping[tuple[str, str], str], size: Size, names: Set[str]) -> set[tuple[str, str]]:
    """Return the tasks and keys that the preset changes: the settings ``names``, and the number of trainer nodes."""
    keys = {(task, key) for task, key in changes if key.removeprefix(f"{job_group_text.ENVS}.") in names}
    return keys if size.trainer_nodes else {*keys, (Task.TRAINER.value, "num_nodes")}


def gibibytes(size: str) -> int:
    """Return the gibibytes of a volume's size in SkyPilot's form, such as ``200Gi``, ``1Ti`` or ``200``.

    Raises:
        ConfigurationError: the size has another form.
    """
    match = re.fullmatch(r"(\d+)(Gi|Ti|)", size)
    if match is None:
        raise ConfigurationError(f"jobgroups/volume.yaml: size {size}: expected a number with Gi or Ti, such as 200Gi")
    return int(match[1]) * (1024 if match[2] == "Ti" else 1)


def group_of(
    options: Mapping[str, str],
    size: Size,
    *,
    colocate: bool,
    asynchronous: bool,
    agent: str | None = None,
    environment: str | None = None,
) -> tuple[Path, dict[str, str]]:
    """Return the job group's file, and the variables that say the same as the options of ``grpo launch``.

    Args:
        options: the settings of the options.
        size: the options about nodes and GPUs.
        colocate: run the engines on the trainer's GPUs.
        asynchronous: generate while the step trains.
        agent: the agent that answers the prompts; default: AGENT of the settings.
        environment: the environment whose episodes the model plays; default: ENVIRONMENT of the settings.

    Raises:
        ConfigurationError: the options do not go together.
    """
    if colocate or is_colocated(options):
        return _colocated_group(options, size, has_others=bool(asynchronous or agent or environment))
    if options.get("PUBLISH_TRANSPORT") == "local":
        raise ConfigurationError(
            "PUBLISH_TRANSPORT is local, but the job group's trainer and engines run on different hosts; leave it out, "
            "or have them share GPUs by --colocate"
        )
    agent, environment = agent or options.get("AGENT"), environment or options.get("ENVIRONMENT")
    if agent and environment:
        raise ConfigurationError("give --agent or --environment, not both: each answers the prompts")
    mode = {"MODE": "async"} if asynchronous else {}
    if _ways(options) - {"completion"}:
        # It has the services of every way. A source says itself what it does not share with the others.
        named = {"ENVIRONMENT": environment} if environment else {}
        return ROOT / "jobgroups/environment.yaml", {"ROLLOUT": "completion"} | named | mode
    if options.get("ROLLOUT") == "program":
        return ROOT / "jobgroups/agent.yaml", {"ROLLOUT": "program", "AGENT": ""} | mode
    if agent:
        return ROOT / "jobgroups/agent.yaml", {"AGENT": agent} | mode
    if environment:
        return ROOT / "jobgroups/environment.yaml", {"ENVIRONMENT": environment} | mode
    return ROOT / ("jobgroups/async.yaml" if asynchronous else "jobgroup.yaml"), {}


def _colocated_group(options: Mapping[str, str], size: Size, *, has_others: bool) -> tuple[Path, dict[str, str]]:
    """Return the file of engines on the trainer's GPUs, and the transport that several nodes and adapters need."""
    if has_others or size.rollout_nodes or size.rollout_gpus:
        raise ConfigurationError(
            "--colocate has no rollout nodes for --rollout-nodes and --rollout-gpus, no services for --agent and "
            "--environment, and engines that sleep while the trainer trains, so not --async; leave one out"
        )
    shares = (size.trainer_nodes or 1) == 1 and options.get("LORA_RANK", "0") == "0"
    return COLOCATED, {} if shares or "PUBLISH_TRANSPORT" in options else {"PUBLISH_TRANSPORT": "disk"}


def _ways(options: Mapping[str, str]) -> set[str]:
    """Return the ways of rolling out that the sources name; empty without SOURCES.

    Raises:
        ConfigurationError: the file is not valid, or SkyPilot would not upload it.
    """
    if not (name := options.get("SOURCES")):
        return set()
    if Path(name).is_absolute() or Path(name).resolve() != (ROOT / name).resolve():
        raise ConfigurationError(
            f"SOURCES is {name!r}, but nodes get the files below {ROOT}: put it there, and name it from there, as in "
            "SOURCES=mix.yaml"
        )
    return {source.settings.get("rollout", "completion") for source in load_sources(Path(name)).all}


def preset_of(options: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return the settings of PRESET that go with the options: NCCL needs engines with CUDA and GPUs of their own."""
    preset = spec.env_file(PRESET)
    if OTHER_ENGINES.intersection(options) or file.resolve() == COLOCATED:
        del preset["PUBLISH_TRANSPORT"]
    return preset


def _tiers(text: str, size: Size) -> dict[str, Tier]:
    """Return the nodes of the job group's tasks with GPUs: those of the options, else those of the file."""
    written = {document["name"]: document for document in list(yaml.safe_load_all(text))[1:]}
    tiers = {}
    for task, count, gpus in (
        (Task.ROLLOUT_SERVER, size.rollout_nodes, size.rollout_gpus or size.gpus),
        (Task.TRAINER, size.trainer_nodes, size.gpus),
    ):
        if task in written:
            choices = gpus or ",".join(written[task]["resources"]["accelerators"])
            tiers[task.value] = Tier(count or written[task].get("num_nodes", 1), parse_gpus(choices))
    return tiers


def _loaded(group: spec.JobGroup, given: Mapping[str, str]) -> list[checks.Loaded]:
    """Load the settings of all tasks as the nodes of a cluster will, once each name that is given is known."""
    checks.check_names(group, given, {})
    with nodes.allocate(group) as addresses:
        run = LocalRun(group, run_id="launch", shared_dir=Path("/shared"), addresses=addresses)
        return checks.load_all(run)


def _named_paths(loaded: Sequence[checks.Loaded]) -> dict[str, str]:
    """Return the models and files that settings name, with their variables."""
    named: dict[str, str] = {}
    for _, _, settings in loaded:
        named |= {path: "MODEL_NAME" for path in [getattr(settings, "model_name", None)] if path}
        named |= dict.fromkeys(getattr(settings, "teacher_models", ()), "TEACHER_MODEL")
        for own in settings.by_source().values() if isinstance(settings, DataSettings) else ():
            named |= {str(path): variable for variable, path in named_files(own).items()}
    return named


def _left_behind(named: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each model and file of this machine that SkyPilot does not upload."""
    ignored = [line[1:] for line in (ROOT / ".skyignore").read_text("utf-8").splitlines() if line.startswith("/")]
    for path, variable in named.items():
        if Path(path).is_absolute() or not Path(path).exists():
            continue
        is_below = Path(path).resolve() == (ROOT / path).resolve()
        if not is_below or any(fnmatch(Path(path).parts[0], pattern) for pattern in ignored):
            yield (
                f"caution: nodes do not get {variable}={path}: SkyPilot uploads what is below {ROOT}, without what "
                ".skyignore names; put it there, or on the volume, as in /shared/models/NAME"
            )


def _settings(
    loaded: Sequence[checks.Loaded], group: spec.JobGroup, options: Mapping[str, str]
) -> tuple[TrainerSettings, RolloutSettings]:
    """Check how the settings of the tasks go together, and return those of the trainer and of the engines.

    Raises:
        ConfigurationError: they do not go together, or not with the job group's services, or a file that they name from
            here cannot have rows.
    """
    for path, variable in _named_paths(loaded).items():
        if variable not in ("MODEL_NAME", "TEACHER_MODEL") and not Path(path).is_absolute():
            check_file(variable, Path(path))
    checks.check_together(loaded, group)
    found = {name: one.settings for name, one in checks.by_class(loaded).items()}
    trainer, rollout = found["TrainerSettings"], found["RolloutSettings"]
    assert isinstance(trainer, TrainerSettings), "its class"
    assert isinstance(rollout, RolloutSettings), "its class"
    if "ENGINE_MAX_TOTAL_TOKENS" not in options:  # the file's number is for its own model and GPUs
        rollout = rollout.model_copy(update={"engine_max_total_tokens": None})
    return trainer, rollout


def variables_of(group: spec.JobGroup, variables: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return the variables as values to write, each into the tasks that read it; a library's variable into all."""
    readers = checks.tasks_by_variable()
    return {
        (task.name, f"{job_group_text.ENVS}.{name}"): job_group_text.scalar(value)
        for name, value in variables.items()
        for task in group.tasks
        if name in task.declared or not set(task.components).isdisjoint(readers.get(name.upper(), [task.name]))
    }


def _images(group: spec.JobGroup, image: str | None) -> dict[tuple[str, str], str]:
    """Return each task's image among those of `make image` as a value to write; nothing without an ``image``.

    Raises:
        ConfigurationError: the image has no tag, to which `make image` appends the part.
    """
    if image is None:
        return {}
    if not TAGGED.fullmatch(image):
        raise ConfigurationError(
            f"--image {image} has no tag; give the one of `make image`: --image {image.partition('@')[0]}:v1"
        )
    parts = {task.name: image_part(task) for task in group.tasks}
    return {(task, "resources.image_id"): f"docker:{image}-{part}" for task, part in parts.items()}


def image_part(task: spec.TaskSpec) -> str:
    """Return the Dockerfile's target with what a task installs."""
    return "colocated" if len(task.components) > 1 else IMAGES.get(task.name, "services")
