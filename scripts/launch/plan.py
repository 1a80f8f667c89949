"""The plan of ``grpo launch``: the job group's file with what follows from model, nodes and settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import yaml

from local_runner import checks, nodes, skypilot, spec
from local_runner.nodes import LocalRun
from scripts.launch.images import images_of, tasks_of, with_images
from scripts.launch.sizes import Sizes, Tier, derive, parse_gpus
from services.core.endpoints import Task, component_of, is_colocated
from services.core.errors import ConfigurationError
from services.core.sources import load_sources
from services.data_server.settings import HARBOR, DataSettings, check_file, named_files
from services.data_server.task_sets import datasets_of, passed_tasks
from services.engines.settings import RolloutSettings
from trainer.capacity.seconds import StepSeconds
from trainer.capacity.shape import Model, find_model
from trainer.capacity.work import describe_layout
from trainer.config import Mode, TrainerSettings

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "examples/gpu.env"
"""Settings of a batch that fills GPUs."""
COLOCATED = ROOT / "jobgroups/colocated.yaml"
IMAGES = {Task.TRAINER.value: "trainer", Task.ROLLOUT_SERVER.value: "rollout"}
"""The Dockerfile's target by task; all other tasks have ``services``, and a trainer with engines ``colocated``."""
TAGGED = re.compile(r"[^@]*[^/:@]:[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""The name of an image with its tag; the colon of a registry's port is before a slash."""
OTHER_ENGINES = {"ROLLOUT_ENGINE", "CUDA_VISIBLE_DEVICES", "ENGINE_SLEEPS"}
"""Settings of engines without CUDA or without GPUs of their own."""
OTHER_TERMS = {"KL_COEF", "ENTROPY_COEF", "CRITIC", "TEACHER_MODEL", "TEACHER_URL", "METHOD", "SOURCES"}
"""Settings with which groups of equal rewards may teach something, too."""
ASYNCHRONOUS = {"MODE": "async", "MAX_STALENESS": "1"}
"""The preset of a job group whose forecast it shortens; with it new weights reach engines in place."""
OF_MODES = {"MODE", "TRAIN_WHILE_GENERATING", "ENGINE_DETERMINISTIC", "PUBLISH_IN_PLACE"}
"""Settings with which a launch leaves the mode as it is."""

Changes = dict[tuple[str, str], str]
"""Values to write into a job group, by task and key."""


@dataclass(frozen=True)
class Request:
    """The options of ``grpo launch`` that are no settings; what is None stays as the job group's file has it."""

    model: str | None = None
    rollout_nodes: int | None = None
    trainer_nodes: int | None = None
    gpus: str | None = None
    rollout_gpus: str | None = None
    colocate: bool = False
    asynchronous: bool = False
    agent: str | None = None
    environment: str | None = None
    image: str | None = None
    stock: bool = False
    max_images: int = 20


@dataclass(frozen=True)
class Plan:
    """A job group of a given size."""

    name: str
    """Model, job group, nodes and GPUs, as the name of a directory."""
    file: Path
    """The file of the repository from which it differs."""
    text: str
    """Its YAML."""
    sources: Mapping[tuple[str, str], str]
    """By task and key: ``given`` by an option, ``derived`` from the size, or from the ``preset`` for GPUs."""
    volume: int
    """Gibibytes that the volume needs."""
    notes: Sequence[str]
    """Cautions, and the forecast of a step."""


def plan_of(request: Request, options: Mapping[str, str], secrets: Mapping[str, str]) -> Plan:
    """Derive a job group's sizes, and write them into the text of its file.

    Unless it is ``request.stock``, the settings of PRESET come first, and with them one trainer node.

    Args:
        request: the options but for settings.
        options: the settings of the options.
        secrets: values of the job group's secrets.

    Raises:
        ConfigurationError: the options or settings do not go together, or the GPUs are too small for the model.
    """
    file, chosen = group_of(options, request)
    before = file.read_text(encoding="utf-8")
    written = skypilot.values(before).get((Task.TRAINER, "envs.MODEL_NAME"), "")
    model = find_model(request.model or options.get("MODEL_NAME") or written)
    preset: dict[str, str] = {} if request.stock else _preset(options, file)
    given = {**options, "MODEL_NAME": model.name, **chosen}
    group, loaded = _loaded(file, preset | given, secrets)
    adapters = [f"caution: {text}" for text in checks.check_adapters(loaded, config=model.config)]
    tiers = _tiers(before, request)
    trainer, sizes = _sizes(loaded, options, model, tiers)
    is_open = not (request.stock or (OF_MODES | OTHER_ENGINES).intersection(options))
    if is_open and _gains_from_overlap(trainer, sizes.seconds):
        preset |= ASYNCHRONOUS
        group, loaded = _loaded(file, preset | given, secrets)
    counts = {(task, "num_nodes"): str(tier.nodes) for task, tier in tiers.items()}
    asked: dict[str, int | None] = {Task.TRAINER: request.trainer_nodes, Task.ROLLOUT_SERVER: request.rollout_nodes}
    if tasks := tasks_of(loaded):
        trainer.total_steps(len(tasks))
    images = images_of(tasks, loaded, before, request.max_images)
    of_options = {key: count for key, count in counts.items() if asked[key[0]]} | _images(group, request.image)
    gpus = {(task, "resources.accelerators"): f"[{', '.join(map(str, tier.choices))}]" for task, tier in tiers.items()}
    by_source: dict[str, Changes] = {
        "derived": sizes.resources | _variables(group, sizes.settings),
        "preset": counts | _variables(group, preset),
        "given": of_options | gpus | _variables(group, given),
    }
    changes = {key: value for part in by_source.values() for key, value in part.items()}
    return Plan(
        name=_name(Path(model.name).name, file.stem, tiers),
        file=file,
        text=(text := with_images(skypilot.edited(before, changes), images)),
        sources=_sources(by_source, text, images),
        volume=sizes.volume,
        notes=[*adapters, *_left_behind(loaded), *_needs(images), *_forecast(trainer, model, sizes, preset)],
    )


def _sizes(
    loaded: Sequence[checks.Loaded], options: Mapping[str, str], model: Model, tiers: Mapping[str, Tier]
) -> tuple[TrainerSettings, Sizes]:
    """Return the trainer's settings, and the sizes that follow from them and those of the engines."""
    found = checks.settings_by_class(loaded)
    rollout: RolloutSettings = found["RolloutSettings"]
    if "ENGINE_MAX_TOTAL_TOKENS" not in options:  # the file's number is for its own model and GPUs
        rollout = rollout.model_copy(update={"engine_max_total_tokens": None})
    return found["TrainerSettings"], derive(found["TrainerSettings"], rollout, model, tiers)


def _needs(images: Mapping[str, int]) -> Iterator[str]:
    """Yield what the pods of images need, and how many tasks each has."""
    if images:
        counted = ", ".join(f"{image} ({count} task{'s'[: count != 1]})" for image, count in images.items())
        yield f"environment-servers are in the images {counted}; each must have bash and apt-get, which was not checked"


def _sources(by_source: Mapping[str, Changes], text: str, images: Collection[str]) -> dict[tuple[str, str], str]:
    """Return the source of each value of a job group; those that images of tasks bring are ``derived``."""
    named = {key: source for source, part in by_source.items() for key in part}
    if images:
        named.pop((Task.ENVIRONMENT_SERVER, "resources.image_id"), None)
    return {(task, key): named.get((component_of(task), key), "derived") for task, key in skypilot.values(text)}


def _gains_from_overlap(settings: TrainerSettings, seconds: StepSeconds | None) -> bool:
    """Return whether a synchronous run would learn faster asynchronously, by the forecast of its steps."""
    is_faster = seconds is not None and seconds.asynchronous < seconds.synchronous
    return is_faster and settings.mode is Mode.SYNC and not settings.dynamic_sampling_tries


def _forecast(settings: TrainerSettings, model: Model, sizes: Sizes, preset: Mapping[str, str]) -> Iterator[str]:
    """Yield the layout of micro-batches, and if it is known how long a step takes in both modes."""
    yield f"layout of micro-batches: {describe_layout(settings, model.shape)}"
    if (seconds := sizes.seconds) is not None:
        text = f"a step, by forecast: {seconds.synchronous:.1f} s synchronous"
        parts = f"generating {seconds.generate:.1f}, training {seconds.train:.1f}, publishing {seconds.publish:.1f}"
        undo = "; --env MODE=sync trains synchronously" if ASYNCHRONOUS.items() <= preset.items() else ""
        yield f"{text} ({parts}), {seconds.asynchronous:.1f} s asynchronous with MAX_STALENESS=1{undo}"


def _name(model: str, group: str, tiers: Mapping[str, Tier]) -> str:
    parts = [model, group, *(f"{tier.nodes}x{','.join(map(str, tier.choices))}" for tier in tiers.values())]
    return re.sub(r"[:, ]+", "-", "-".join(parts)).lower()


def group_of(options: Mapping[str, str], request: Request) -> tuple[Path, dict[str, str]]:
    """Return the job group's file, and the variables that say the same as the options of ``grpo launch``.

    Raises:
        ConfigurationError: the options do not go together.
    """
    if request.colocate or is_colocated(options):
        return COLOCATED, _of_shared_gpus(options, request)
    if options.get("PUBLISH_TRANSPORT") == "local":
        raise ConfigurationError("PUBLISH_TRANSPORT=local needs trainer and engines on the same GPUs: give --colocate")
    agent, environment = request.agent or options.get("AGENT"), request.environment or options.get("ENVIRONMENT")
    if options.get("DATASET", "").startswith(HARBOR) and not agent:
        environment = environment or "sandbox"
    if agent and environment:
        raise ConfigurationError("give --agent or --environment, not both: each answers the prompts")
    mode = {"MODE": "async"} if request.asynchronous else {}
    if _ways(options) - {"completion"}:
        # It has the services of every way. A source says itself what it does not share with the others.
        named = {"ENVIRONMENT": environment} if environment else {}
        return ROOT / "jobgroups/environment.yaml", {"ROLLOUT": "completion"} | named | mode
    if options.get("ROLLOUT") == "program" and not environment:
        return ROOT / "jobgroups/agent.yaml", {"ROLLOUT": "program", "AGENT": ""} | mode
    if agent:
        return ROOT / "jobgroups/agent.yaml", {"AGENT": agent} | mode
    if environment:
        return ROOT / "jobgroups/environment.yaml", {"ENVIRONMENT": environment} | mode
    return ROOT / ("jobgroups/async.yaml" if request.asynchronous else "jobgroup.yaml"), {}


def _of_shared_gpus(options: Mapping[str, str], request: Request) -> dict[str, str]:
    """Return the transport that several nodes and adapters need where engines run on the trainer's GPUs."""
    if any((request.asynchronous, request.agent, request.environment, request.rollout_nodes, request.rollout_gpus)):
        raise ConfigurationError(
            "--colocate has neither rollout nodes nor services of agents, and its engines sleep while the trainer "
            "trains; leave it out, or --rollout-nodes, --rollout-gpus, --agent, --environment and --async"
        )
    shares = (request.trainer_nodes or 1) == 1 and options.get("LORA_RANK", "0") == "0"
    return {} if shares or "PUBLISH_TRANSPORT" in options else {"PUBLISH_TRANSPORT": "disk"}


def _ways(options: Mapping[str, str]) -> set[str]:
    """Return the ways of rolling out that the sources name; empty without SOURCES.

    Raises:
        ConfigurationError: the file is not valid, or SkyPilot would not upload it.
    """
    if not (name := options.get("SOURCES")):
        return set()
    if Path(name).is_absolute() or Path(name).resolve() != (ROOT / name).resolve():
        raise ConfigurationError(
            f"SOURCES is {name!r}, but nodes get the files below {ROOT}; put it there, as in SOURCES=mix.yaml"
        )
    return {source.settings.get("rollout", "completion") for source in load_sources(Path(name))}


def _preset(options: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return the settings of PRESET that no option replaces; of tasks, a batch has half of them at most.

    NCCL needs engines with CUDA and GPUs of their own, and groups are dropped only where nothing is learned from them.
    """
    unfit = {"PUBLISH_TRANSPORT"} if OTHER_ENGINES.intersection(options) or file == COLOCATED else set()
    unfit |= {"DROP_EQUAL_GROUPS"} if OTHER_TERMS.intersection(options) else set()
    preset = {name: value for name, value in spec.env_file(PRESET).items() if name not in {*options, *unfit}}
    if (dataset := options.get("DATASET", "")).startswith(HARBOR) and "BATCH_SIZE" in preset:
        most = max(1, len(passed_tasks(dataset)[0]) // 2)
        preset["BATCH_SIZE"] = str(min(int(preset["BATCH_SIZE"]), most))
    return preset


def _tiers(text: str, request: Request) -> dict[str, Tier]:
    """Return the nodes of the job group's tasks with GPUs: those of the options, else of the preset or the file."""
    written = {document["name"]: document for document in list(yaml.safe_load_all(text))[1:]}
    tiers = {}
    for task, count, gpus in (
        (Task.ROLLOUT_SERVER, request.rollout_nodes, request.rollout_gpus or request.gpus),
        (Task.TRAINER, request.trainer_nodes or (None if request.stock else 1), request.gpus),
    ):
        if task in written:
            choices = gpus or ",".join(written[task]["resources"]["accelerators"])
            tiers[task.value] = Tier(count or written[task].get("num_nodes", 1), parse_gpus(choices))
    return tiers


def _loaded(
    file: Path, settings: Mapping[str, str], secrets: Mapping[str, str]
) -> tuple[spec.JobGroup, list[checks.Loaded]]:
    """Load a job group and the settings of all tasks as the nodes of a cluster will, and check them.

    Raises:
        ConfigurationError: a name is unknown, the settings do not go together or not with the job group's services, or
            a file that they name from here cannot have rows.
    """
    group = spec.load(file, spec.Overrides(settings, secrets))
    checks.check_names(group, {**settings, **secrets}, {})
    with nodes.allocate(group) as addresses:
        run = LocalRun(group, run_id="launch", shared_dir=Path("/shared"), addresses=addresses)
        loaded = checks.load_all(run)
    for path, variable in _named_paths(loaded).items():
        if variable not in ("MODEL_NAME", "TEACHER_MODEL") and not Path(path).is_absolute():
            check_file(variable, Path(path))
    checks.check_together(loaded, group)
    return group, loaded


def _named_paths(loaded: Sequence[checks.Loaded]) -> dict[str, str]:
    """Return the models and files that settings name, with their variables."""
    named: dict[str, str] = {}
    for _, _, settings in loaded:
        named |= {path: "MODEL_NAME" for path in [getattr(settings, "model_name", None)] if path}
        named |= dict.fromkeys(getattr(settings, "teacher_models", ()), "TEACHER_MODEL")
        for own in settings.by_source().values() if isinstance(settings, DataSettings) else ():
            named |= {str(path): variable for variable, path in named_files(own).items()}
    return named


def _left_behind(loaded: Sequence[checks.Loaded]) -> Iterator[str]:
    """Yield a sentence for each model, file and directory of tasks of this machine that SkyPilot does not upload."""
    named = {path: name for path, name in _named_paths(loaded).items() if not Path(path).is_absolute()}
    for _, _, settings in loaded:
        for dataset in datasets_of(settings) if isinstance(settings, DataSettings) else ():
            named[dataset.removeprefix(HARBOR)] = "DATASET"
    ignored = [line[1:] for line in (ROOT / ".skyignore").read_text("utf-8").splitlines() if line.startswith("/")]
    for path, variable in named.items():
        if not Path(path).exists() or Path(path).is_relative_to("/shared"):
            continue
        is_below = not Path(path).is_absolute() and Path(path).resolve() == (ROOT / path).resolve()
        if not is_below or any(fnmatch(Path(path).parts[0], pattern) for pattern in ignored):
            uploads = f"SkyPilot uploads what is below {ROOT}, without what .skyignore names"
            yield f"caution: nodes do not get {variable}={path}: {uploads}; put it there, or in /shared/models/NAME"


def _variables(group: spec.JobGroup, variables: Mapping[str, str]) -> Changes:
    """Return the variables as values to write, each into the tasks that read it; a library's variable into all."""
    readers = checks.tasks_by_variable()
    for name, tasks in readers.items():
        if name.startswith(("CODE_", "DATASET", "SANDBOX")):
            # Environments have questions and boxes, too.
            tasks.append(Task.ENVIRONMENT_SERVER)
    return {
        (task.name, f"{skypilot.ENVS}.{name}"): skypilot.scalar(value)
        for name, value in variables.items()
        for task in group.tasks
        if name in task.declared or not set(task.components).isdisjoint(readers.get(name.upper(), [task.name]))
    }


def _images(group: spec.JobGroup, image: str | None) -> Changes:
    """Return each task's image among those of `make image` as a value to write; nothing without an ``image``.

    Raises:
        ConfigurationError: the image has no tag, to which `make image` appends the part.
    """
    if image is None:
        return {}
    if not TAGGED.fullmatch(image):
        raise ConfigurationError(f"--image {image} has no tag; give that of `make image`, as in NAME:v1")
    parts = {task.name: image_part(task) for task in group.tasks}
    return {(task, "resources.image_id"): f"docker:{image}-{part}" for task, part in parts.items()}


def image_part(task: spec.TaskSpec) -> str:
    """Return the Dockerfile's target with what a task installs."""
    return "colocated" if len(task.components) > 1 else IMAGES.get(task.name, "services")
