"""``grpo launch``: a job group of a given size, launched with SkyPilot.

It writes the job group's YAML for the model, the nodes and the GPUs that are given, with the memory, the volume and the
settings that follow from them; shows what differs from the file of the repository and what it takes on the cluster; and
launches it, once somebody has said yes. With --check, it launches two small pods that try the cluster instead.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml
from typer import Option

from local_runner import checks, nodes, spec
from local_runner.directory import grpo_command
from local_runner.nodes import Run
from scripts.launch import job_group_text, skypilot
from scripts.launch.models import Model, find_model
from scripts.launch.prediction import Batch, choose_rollout_nodes, trainer_shares
from scripts.launch.sizes import (
    ASSUMED,
    PRESET,
    Layout,
    Sizes,
    Tier,
    derive,
    engines_of,
    gibibytes,
    parse_gpus,
    publish_seconds,
    publishing,
)
from scripts.launch.tables import table, wrapped
from services.core import logs
from services.core.endpoints import Task, is_colocated
from services.core.errors import ConfigurationError
from services.core.sources import load_sources
from services.engines.settings import RolloutSettings
from trainer.config import Rollout, TrainerSettings

ROOT = Path(__file__).parents[2]
VOLUME = ROOT / "jobgroups" / "volume.yaml"
CHECK = Path(__file__).with_name("check.yaml")
CHECKS = {"check-trainer": Task.TRAINER, "check-rollout": Task.ROLLOUT_SERVER}
"""The task whose GPU each task of CHECK tries."""
CONTROLLER = "and, once for all jobs, SkyPilot's controller: 4 CPUs, 16 GB"
IMAGES = {Task.TRAINER.value: "trainer", Task.ROLLOUT_SERVER.value: "rollout"}
"""The Dockerfile's target by task; all other tasks have ``services``, and a trainer with engines ``colocated``."""
COLOCATED = ROOT / "jobgroups/colocated.yaml"
TAGGED = re.compile(r"[^@]*[^/:@]:[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""The name of an image with its tag; the colon of a registry's port is before a slash."""
WIDTH = 120
"""Columns of the output."""
OTHER_ENGINES = {"ROLLOUT_ENGINE", "CUDA_VISIBLE_DEVICES", "ENGINE_SLEEPS"}
"""Settings of engines without CUDA or without GPUs of their own."""

Count = Annotated[
    int | None, Option(min=1, help="Nodes; default: chosen by the model and its GPUs; with --stock, the file's.")
]


def main(
    context: typer.Context,
    model: Annotated[
        str | None,
        Option(
            help="A name on the hub, or a directory with its config.json; default: MODEL_NAME of the settings, else "
            "that of the job group's file."
        ),
    ] = None,
    rollout_nodes: Count = None,
    trainer_nodes: Count = None,
    gpus: Annotated[
        str | None, Option(help="GPUs of a node, such as H100:8, or H100:8,A100-80GB:8 in the order to try.")
    ] = None,
    rollout_gpus: Annotated[str | None, Option(help="GPUs of a rollout node; default: --gpus.")] = None,
    asynchronous: Annotated[bool, Option("--async", help="Generate while the step trains.")] = False,
    colocate: Annotated[
        bool,
        Option("--colocate", help="Engines and trainer take turns on the same GPUs; --gpus of each trainer node."),
    ] = False,
    agent: Annotated[str | None, Option(help="MODULE:FUNCTION of an agent that answers the prompts.")] = None,
    environment: Annotated[str | None, Option(help="The environment whose episodes the model plays.")] = None,
    env: Annotated[list[str] | None, Option(help="NAME=VALUE, a setting. Repeatable.")] = None,
    env_file: Annotated[list[Path] | None, Option(help="File of NAME=VALUE lines; --env wins. Repeatable.")] = None,
    secret: Annotated[list[str] | None, Option(help="NAME or NAME=VALUE, such as HF_TOKEN. Repeatable.")] = None,
    image: Annotated[str | None, Option(help="The images that `make image IMAGE=...` built and pushed.")] = None,
    output: Annotated[
        Path | None, Option(help="Directory for the YAMLs; default: .cache/launch/, by model, GPUs and nodes.")
    ] = None,
    stock: Annotated[
        bool, Option("--stock", help="Leave out examples/gpu.env and its numbers of nodes: start from the file alone.")
    ] = False,
    check: Annotated[
        bool,
        Option("--check", help="Launch two small pods that try driver, images, hub, volume and network instead."),
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Write and show the YAMLs, and launch nothing.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Launch a job group of a given size on a cluster, or with --dry-run show what would be launched."""
    _require_options(context)
    size = Size(model, rollout_nodes, trainer_nodes, gpus, rollout_gpus)
    logs.configure("launch", "error")
    options = spec.env_files(env_file or []) | spec.assignments(env or [], "--env")
    secrets = spec.assignments(secret or [], "--secret")
    if colocate or is_colocated(options):
        file, chosen = colocated_group(options, size, [asynchronous, agent, environment])
    else:
        file, chosen = job_group_of(options, asynchronous=asynchronous, agent=agent, environment=environment)
    plan = plan_of(file, size, options, chosen, secrets, image, None if stock else preset_of(options, file))
    text = _check_group(plan, options) if check else plan.text
    files = _write(plan, text, CHECK if check else file, output or _directory(plan.model, size, file))
    _launch(files, text, secrets, dry_run=dry_run, yes=yes, tasks=tuple(CHECKS) if check else (Task.TRAINER,))


def _require_options(context: typer.Context) -> None:
    """Without options, print the help and exit with 2: somebody who wants to see the options must not pay for GPUs."""
    if all(getattr(context.get_parameter_source(name), "name", "") == "DEFAULT" for name in context.params):
        typer.echo(context.get_help())
        typer.echo("For example: grpo launch --model Qwen/Qwen2.5-0.5B-Instruct --gpus L4:1 --dry-run")
        raise typer.Exit(2)


@dataclass(frozen=True)
class Size:
    """The options that say how large a job group is; what is None stays as the job group's file has it."""

    model: str | None
    rollout_nodes: int | None
    trainer_nodes: int | None
    gpus: str | None
    rollout_gpus: str | None


@dataclass(frozen=True)
class Plan:
    """A job group of a given size."""

    model: Model
    tiers: dict[str, Tier]
    """The nodes of rollout-server and ppo-trainer."""
    variables: dict[str, str]
    """The settings: those of the options, and those that follow from the size."""
    derived: set[str]
    """The names of the settings that follow from the size."""
    preset: set[tuple[str, str]]
    """The tasks and keys whose values the preset gives, because no option does."""
    reason: str
    """The reason for the number of rollout nodes; empty where it is the file's or the option's."""
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
        preset: the settings that those of the options replace; with them go one trainer node, and as many rollout nodes
            as keep both tiers busy. None: the file's.
    """
    before = file.read_text()
    written = job_group_text.values(before)[Task.TRAINER, "envs.MODEL_NAME"]
    model = find_model(size.model or options.get("MODEL_NAME") or written)
    settings = {**(preset or {}), **options, "MODEL_NAME": model.name}
    tiers = _tiers(before, size if preset is None else replace(size, trainer_nodes=size.trainer_nodes or 1))
    group = spec.load(file, spec.Overrides(settings | chosen, secrets))
    checks.check_names(group, settings | chosen | secrets, {})
    is_open = preset is not None and not size.rollout_nodes and not OTHER_ENGINES.intersection(options)
    chosen_tiers, sizes, reason = _sizes(group, model, tiers, options, is_open=is_open)
    wanted = sizes.derived | settings | chosen
    changes = sizes.changes | _variables(group, wanted) | _images(group, image)
    of_preset = set() if preset is None else _of_preset(changes, size, preset.keys() - options.keys())
    of_preset |= {(Task.ROLLOUT_SERVER.value, "num_nodes")} if chosen_tiers != tiers else set()
    return Plan(
        model=model,
        tiers=chosen_tiers,
        variables=wanted,
        derived=sizes.derived.keys() - settings.keys(),
        preset=of_preset,
        reason=reason,
        volume=max(sizes.volume, gibibytes(str(yaml.safe_load(VOLUME.read_text())["size"]))),
        text=job_group_text.edited(before, changes),
    )


def _rollouts(options: Mapping[str, str]) -> set[str]:
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


def job_group_of(
    options: Mapping[str, str], *, asynchronous: bool, agent: str | None = None, environment: str | None = None
) -> tuple[Path, dict[str, str]]:
    """Return the job group's file, and the variables that say the same.

    Args:
        options: the settings of the options.
        asynchronous: generate while the step trains.
        agent: the agent that answers the prompts; default: AGENT of the settings.
        environment: the environment whose episodes the model plays; default: ENVIRONMENT of the settings.

    Raises:
        ConfigurationError: an agent and an environment are given, or PUBLISH_TRANSPORT=local.
    """
    if options.get("PUBLISH_TRANSPORT") == "local":
        raise ConfigurationError(
            "PUBLISH_TRANSPORT is local, but the job group's trainer and engines run on different hosts; leave it out, "
            "or have them share GPUs by --colocate"
        )
    agent, environment = agent or options.get("AGENT"), environment or options.get("ENVIRONMENT")
    rollouts = _rollouts(options)
    if agent and environment:
        raise ConfigurationError("give --agent or --environment, not both: each answers the prompts")
    mode = {"MODE": "async"} if asynchronous else {}
    if rollouts - {"completion"}:
        # It has the services of every way. A source says itself what it does not share with the others.
        named = {"ENVIRONMENT": environment} if environment else {}
        return ROOT / "jobgroups/environment.yaml", {"ROLLOUT": "completion"} | named | mode
    if agent:
        return ROOT / "jobgroups/agent.yaml", {"AGENT": agent} | mode
    if environment:
        return ROOT / "jobgroups/environment.yaml", {"ENVIRONMENT": environment} | mode
    return ROOT / ("jobgroups/async.yaml" if asynchronous else "jobgroup.yaml"), {}


def colocated_group(options: Mapping[str, str], size: Size, others: Sequence[object]) -> tuple[Path, dict[str, str]]:
    """Return the file of the colocated job group, and the variables that its number of nodes and adapters need.

    Args:
        options: the settings of the options.
        size: the options about nodes and GPUs.
        others: the options for other job groups.

    Raises:
        ConfigurationError: an option is for engines or tasks that this job group does not have.
    """
    if size.rollout_nodes or size.rollout_gpus:
        raise ConfigurationError(
            "--colocate has no rollout nodes; give --trainer-nodes and --gpus, or leave --colocate out"
        )
    if any(others):
        raise ConfigurationError(
            "--colocate cannot go with --async, because engines sleep while the trainer trains, nor with --agent and "
            "--environment, whose services jobgroups/colocated.yaml does not have; leave one out"
        )
    shares = (size.trainer_nodes or 1) == 1 and options.get("LORA_RANK", "0") == "0"
    return COLOCATED, {} if shares or "PUBLISH_TRANSPORT" in options else {"PUBLISH_TRANSPORT": "disk"}


def preset_of(options: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return the settings of PRESET that go with the options: NCCL needs engines with CUDA and GPUs of their own."""
    preset = spec.env_file(PRESET)
    if OTHER_ENGINES.intersection(options) or file == COLOCATED:
        del preset["PUBLISH_TRANSPORT"]
    return preset


def _of_preset(changes: Mapping[tuple[str, str], str], size: Size, names: Set[str]) -> set[tuple[str, str]]:
    """Return the tasks and keys that the preset changes: the settings ``names``, and the number of trainer nodes."""
    keys = {(task, key) for task, key in changes if key.removeprefix(f"{job_group_text.ENVS}.") in names}
    return keys if size.trainer_nodes else {*keys, (Task.TRAINER.value, "num_nodes")}


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
            tiers[task.value] = Tier(count or written[task]["num_nodes"], parse_gpus(choices))
    return tiers


def _directory(model: Model, size: Size, file: Path) -> Path:
    """Return the directory of a model's YAMLs for a job group and a size, so that those of two sizes stay."""
    named = {
        "": size.gpus,
        "rollout-": size.rollout_gpus,
        "rollout-nodes-": size.rollout_nodes,
        "trainer-nodes-": size.trainer_nodes,
    }
    name = model.name.rstrip("/").rpartition("/")[2]
    kind = [] if file.stem == "jobgroup" else [file.stem]
    parts = [name, *kind, *(f"{prefix}{value}" for prefix, value in named.items() if value)]
    return Path(".cache/launch") / re.sub(r"[:, ]+", "-", "-".join(parts)).lower()


def _sizes(
    group: spec.JobGroup, model: Model, tiers: dict[str, Tier], options: Mapping[str, str], *, is_open: bool
) -> tuple[dict[str, Tier], Sizes, str]:
    """Check all settings, and return the nodes and the sizes that follow from them.

    The number of rollout nodes, if it ``is_open``, is chosen, and the reason returned. It stays where agents or
    environments answer the prompts, because the time that they take is unknown.
    """
    with nodes.allocate(group) as addresses:
        run = Run(group, run_id="launch", shared_dir=Path("/shared"), addresses=addresses)
        loaded = checks.load_all(run)
    [trainer] = [one for task, _, one in loaded if isinstance(one, TrainerSettings) and task.name == Task.TRAINER]
    [rollout] = [one for _, _, one in loaded if isinstance(one, RolloutSettings)]
    if "ENGINE_MAX_TOTAL_TOKENS" not in options:  # the file's number is for its own model and GPUs
        rollout = rollout.model_copy(update={"engine_max_total_tokens": None})
    sizes = derive(trainer, rollout, model, tiers.get(Task.ROLLOUT_SERVER), tiers[Task.TRAINER])
    if (
        not is_open
        or Task.ROLLOUT_SERVER not in tiers
        or any(one.rollout is not Rollout.COMPLETION for one in trainer.by_source().values())
    ):
        return tiers, sizes, ""
    present = tiers[Task.ROLLOUT_SERVER]
    engines = engines_of(rollout, model, present.choices[0])
    shares = trainer_shares(model, Batch.of(trainer), layout_of(tiers), engines)
    enough = {nodes: share for nodes, share in shares.items() if nodes * engines >= trainer.min_workers}
    count, reason = choose_rollout_nodes(enough, present.nodes)
    tiers = {**tiers, Task.ROLLOUT_SERVER.value: replace(present, nodes=count)}
    return tiers, derive(trainer, rollout, model, tiers[Task.ROLLOUT_SERVER], tiers[Task.TRAINER]), reason


def layout_of(tiers: Mapping[str, Tier]) -> Layout:
    """Return the layout with the first choice of GPUs."""
    trainer = tiers[Task.TRAINER]
    rollout = tiers.get(Task.ROLLOUT_SERVER, trainer)
    first, other = rollout.choices[0], trainer.choices[0]
    shares_gpus = Task.ROLLOUT_SERVER not in tiers
    return Layout(rollout.nodes, first.count, trainer.nodes, other.count, first.name, other.name, shares_gpus)


def _variables(group: spec.JobGroup, variables: Mapping[str, str]) -> dict[tuple[str, str], str]:
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


def _write(plan: Plan, text: str, file: Path, directory: Path) -> tuple[Path, Path]:
    """Write a job group and its volume, print how the job group differs from its file, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    files = directory / (file.name if file == CHECK else "jobgroup.yaml"), directory / VOLUME.name
    files[0].write_text(text)
    lines = VOLUME.read_text().splitlines()
    size = f"size: {plan.volume}Gi"
    files[1].write_text("\n".join(size if line.startswith("size:") else line for line in lines) + "\n")
    # Refuses what SkyPilot would ignore, such as a key that is there twice.
    spec.load(files[0])
    _print_changes(file.read_text(), text, plan)
    if file != CHECK:
        _advise(plan)
    print(f"\nwritten: {files[0]} and {files[1]}", flush=True)
    return files


def _print_changes(before: str, after: str, plan: Plan) -> None:
    """Print what differs from the file, and what the job group takes on the cluster."""
    old, new = job_group_text.values(before), job_group_text.values(after)
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for (task, key), value in new.items():
        if value != old.get((task, key)):
            name = key.rpartition(".")[2]
            origin = "derived" if name in plan.derived or name in ("cpus", "memory") else "given"
            origin = "preset" if (task, key) in plan.preset else origin
            rows.setdefault(
                (key.removeprefix(f"{job_group_text.ENVS}."), old.get((task, key), "-"), value, origin), []
            ).append(task)
    size = str(yaml.safe_load(VOLUME.read_text())["size"])
    if gibibytes(size) != plan.volume:
        rows["size", size, f"{plan.volume}Gi", "derived"] = [VOLUME.name]
    lines = [[", ".join(tasks), *(cell.strip("'") or "''" for cell in row)] for row, tasks in rows.items()]
    print(wrapped(["changed in", "key", "file", "here", "source"], lines, WIDTH))
    if plan.preset:
        print("preset: a batch that fills the GPUs (examples/gpu.env); options replace it, and --stock leaves it out")
    print("\n" + "\n".join(table(["on the cluster", "nodes", "GPUs", "CPUs", "GB"], _footprint(after))))
    print(f"a volume of {plan.volume} GiB, {CONTROLLER}")


def _advise(plan: Plan) -> None:
    """Print the reason for the number of rollout nodes, and advice that must be tried on the cluster first."""
    if plan.reason:
        print(plan.reason)
    if Task.ROLLOUT_SERVER not in plan.tiers:
        return
    layout = layout_of(plan.tiers)
    transport, seconds = publishing(plan.model, layout)
    if transport != "disk" and not {"PUBLISH_TRANSPORT", "LORA_RANK"}.intersection(plan.variables):
        print(
            f"publishing takes about {publish_seconds(plan.model, layout)['disk']:.0f} s a step through a volume of "
            f"{ASSUMED.volume_bandwidth / 1e9:g} GB/s, "
            f"and {seconds:.1f} s with --env PUBLISH_TRANSPORT={transport}, which nobody has run on GPUs yet"
        )


def _footprint(text: str) -> list[list[str]]:
    """Return the nodes, GPUs, CPUs and gigabytes that each task asks for at least, and their sums."""
    rows = []
    for task in list(yaml.safe_load_all(text))[1:]:
        resources, count = task["resources"], task.get("num_nodes", 1)
        gpus = max((choice.count for one in resources.get("accelerators", []) for choice in parse_gpus(one)), default=0)
        sizes = [gpus, *(int(resources[key].rstrip("+")) for key in ("cpus", "memory"))]
        rows.append([task["name"], count, *(count * size for size in sizes)])
    rows.append(["together", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
    return [list(map(str, row)) for row in rows]


def _check_group(plan: Plan, options: Mapping[str, str]) -> str:
    """Return the job group that tries the cluster for a plan."""
    before, written = CHECK.read_text(), job_group_text.values(plan.text)
    images = " ".join({value.strip("'"): None for (_, key), value in written.items() if key == "resources.image_id"})
    changes = _variables(spec.load(CHECK), {**options, "MODEL_NAME": plan.model.name, "CHECK_IMAGES": images})
    for name, task in CHECKS.items():
        cards = ", ".join(f"{choice.name}:1" for choice in plan.tiers.get(task, plan.tiers[Task.TRAINER]).choices)
        changes[name, "resources.accelerators"] = f"[{cards}]"
        changes[name, "resources.image_id"] = written[Task.DATA_SERVER, "resources.image_id"]
    return job_group_text.edited(before, changes)


def _launch(
    files: tuple[Path, Path], text: str, secrets: Mapping[str, str], *, dry_run: bool, yes: bool, tasks: Sequence[str]
) -> None:
    """Launch the files, unless it is a dry run, and print the commands that follow: the logs are those of ``tasks``."""
    job = _ask_skypilot(files, secrets, dry_run=dry_run, confirm=partial(_confirm, text, secrets, yes=yes))
    if job is None:
        _print_commands(files, secrets)
    else:
        logs_of = " and ".join(f"sky jobs logs {job} {task}" for task in tasks)
        print(f"job {job}; its log: {logs_of}; to end it: sky jobs cancel {job}")


def _confirm(text: str, secrets: Mapping[str, str], *, yes: bool) -> None:
    """Ask whether to launch a job group; without a terminal, print the command that launches it, and exit with 2."""
    if yes:
        return
    _, count, gpus, *_ = _footprint(text)[-1]
    size = f"{count} nodes with {gpus} GPUs"
    if sys.stdin.isatty():
        typer.confirm(f"Launch {size}?", abort=True)
        return
    typed = sys.argv[sys.argv.index("launch") + 1 :]
    for name, value in secrets.items():
        typed = [word.removesuffix(f"={value}") if f"{name}=" in word else word for word in typed]
    command = shlex.join([grpo_command(), "launch", *typed, "--yes"])
    print(f"launch: there is no terminal on which to ask about {size}; to launch them: {command}", file=sys.stderr)
    raise typer.Exit(2)


def _ask_skypilot(
    files: tuple[Path, Path], secrets: Mapping[str, str], *, dry_run: bool, confirm: Callable[[], None]
) -> int | None:
    """Have SkyPilot check the files, and launch them unless it is a dry run; return the job's number.

    Raises:
        ConfigurationError: SkyPilot is not installed and needed, or refuses the files.
    """
    python = skypilot.interpreter()
    if python is None:
        if dry_run:
            return None
        raise ConfigurationError(f"SkyPilot is not installed: {skypilot.INSTALL}")
    if not dry_run:
        confirm()
    job, error = skypilot.ask(python, files, secrets, launch=not dry_run)
    if dry_run and error.startswith("ConnectionError"):
        print(f"SkyPilot's loader could not check it without a network: {error}")
        return None
    if error:
        raise ConfigurationError(f"SkyPilot refuses it: {error}; try `sky check kubernetes` and `sky api info`")
    if dry_run:
        print("SkyPilot's loader accepts it")
    return job


def _print_commands(files: tuple[Path, Path], secrets: Mapping[str, str]) -> None:
    """Print the commands that launch the files."""
    options = [part for name in secrets for part in ("--secret", name)]
    if not ROOT.samefile("."):
        # SkyPilot uploads the current directory.
        print(f"to launch it, first: cd {shlex.quote(str(ROOT))}")
        files = files[0].resolve(), files[1].resolve()
    print(f"to launch it: sky volumes apply {shlex.quote(str(files[1]))}")
    print(f"              {shlex.join(['sky', 'jobs', 'launch', str(files[0]), *options])}")
