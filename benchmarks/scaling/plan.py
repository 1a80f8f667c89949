"""Predict how many nodes a model needs, from a GPU's data sheet and assumed utilisations.

``Assumptions`` (``scripts/launch/sizes.py``) holds the values that are assumed and not
measured; ``python -m benchmarks.scaling plan`` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

from benchmarks.scaling.step import PHASES, Measured, Rates, Seconds, mean
from benchmarks.scaling.step import Work as StepWork
from local_runner.spec import env_file
from scripts.launch.models import CONFIGS, MEMORY, WEIGHT_BYTES, Model
from scripts.launch.sizes import (
    ASSUMED,
    GPU,
    LEAST_SEQUENCES,
    NODE_GPUS,
    PRESET,
    PROMPT_TOKENS,
    Assumptions,
    Layout,
    cached_sequences,
    changes,
    min_workers,
    publish_seconds,
    publishing,
    volume_gibibytes,
)
from scripts.launch.tables import table
from trainer.config import TrainerSettings, Transport
from trainer.preflight.shape import ModelShape
from trainer.preflight.sizes import USABLE, Limits, Work, choose, needed, work_of

MOST_NODES = 32
TRAINED_SHARE = 0.7
"""Share of groups with a gradient; the others have no variance."""
REPLAYED_GROUPS = 2
MICRO_BATCH_TOKENS = 16384
FLOPS = 989e12
"""Dense bfloat16 operations a second."""
BANDWIDTH = 3.35e12
"""Bytes a second of the GPU's memory."""


MODELS = {label: Model(label, CONFIGS[label][0], ModelShape.of(CONFIGS[label][1])) for label in ("0.5B", "8B", "70B")}


@dataclass(frozen=True)
class Batch:
    """The batch of a step."""

    prompts: int = 128
    group_size: int = 16
    prompt_tokens: int = PROMPT_TOKENS
    completion_tokens: int = 500
    """Mean length of a completion."""
    longest: int = 2048

    @property
    def cached_tokens(self) -> int:
        """The tokens of a completion of mean length and its prompt."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def work(self) -> StepWork:
        """The work of a step."""
        completions = self.prompts * self.group_size
        # The trainer does not read the last token of a completion.
        tokens_of_group = self.prompt_tokens + self.group_size * (self.completion_tokens - 1)
        return StepWork(
            completions=completions,
            tokens=self.prompts * self.prompt_tokens + completions * self.completion_tokens,
            longest=self.longest,
            trained_tokens=(self.prompts * TRAINED_SHARE + REPLAYED_GROUPS) * tokens_of_group,
        )


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a model on a layout."""

    layout: Layout
    seconds: Seconds
    transport: str
    """PUBLISH_TRANSPORT."""

    @property
    def asynchronous_seconds(self) -> float:
        """The seconds of a step with MODE=async, which makes groups while the trainer trains and publishes."""
        return max(self.seconds.rollouts, self.seconds.learning)


def predict(model: Model, batch: Batch, layout: Layout, measured: Rates) -> Prediction:
    """Predict a step's seconds. Scoring and the rest take the measured time, which does not depend on the model."""
    transport, publish = publishing(model, layout)
    seconds = Seconds(
        generate=generate_seconds(model, batch, layout),
        score=batch.work.completions * measured.score_completion,
        train=train_seconds(model, batch, layout),
        publish=publish,
        rest=measured.rest,
    )
    return Prediction(layout, seconds, transport)


def generate_seconds(model: Model, batch: Batch, layout: Layout) -> float:
    """Predict the seconds of generating. Sequences that an engine's cache cannot hold decode in a further wave."""
    work = batch.work
    bandwidth = layout.rollout_gpus * BANDWIDTH * ASSUMED.decode_utilisation
    token_compute = 2 * model.parameters / (layout.rollout_gpus * FLOPS * ASSUMED.prefill_utilisation)
    token_read = (batch.prompt_tokens + batch.completion_tokens / 2) * model.kv_bytes / bandwidth
    sequences = math.ceil(work.completions / layout.rollout_nodes)
    waves = math.ceil(sequences / cached_sequences(model, batch.cached_tokens, layout.rollout_gpus, MEMORY[GPU]))
    iteration = waves * (model.parameters * WEIGHT_BYTES / bandwidth + ASSUMED.iteration_overhead)
    decoded = work.completions * batch.completion_tokens * token_read + work.tokens * token_compute
    return work.longest * iteration + decoded / layout.rollout_nodes


def train_seconds(model: Model, batch: Batch, layout: Layout) -> float:
    """Predict the longer of computing and of exchanging parameters and gradients, which FSDP does at the same time."""
    ranks = layout.trainer_nodes * layout.trainer_gpus
    trained = batch.work.trained_tokens
    compute = 6 * model.parameters * trained / (ranks * FLOPS * ASSUMED.train_utilisation)
    if layout.trainer_nodes == 1:
        return compute
    # The update on replayed groups is a micro-batch of its own.
    chosen = work(model, batch, layout.trainer_nodes, layout.trainer_gpus)
    micro_batches = 1 + math.ceil(trained / ranks / chosen.micro_batch_tokens)
    if chosen.replicas > 1:
        # Replicas of the shards add up their float32 gradients once a step.
        exchanged = 2 * 4 * model.parameters
    else:
        # Every micro-batch gathers parameters before the forward and the backward pass, and reduces gradients after;
        # without SHARD_PARAMETERS, every step.
        exchanged = (micro_batches if chosen.frees_parameters else 1) * (2 * WEIGHT_BYTES + 4) * model.parameters
    share = (layout.trainer_nodes - 1) / layout.trainer_nodes
    return max(compute, exchanged * share / ASSUMED.node_bandwidth)


def layouts(model: Model, batch: Batch) -> Iterator[Layout]:
    """Yield every layout with enough memory, on the smallest nodes with enough memory."""
    rollout = next(
        n for n in NODE_GPUS if cached_sequences(model, batch.cached_tokens, n, MEMORY[GPU]) >= LEAST_SEQUENCES
    )
    for trainer in NODE_GPUS:
        fewest = next((n for n in range(1, MOST_NODES + 1) if fits(model, batch, n, trainer)), MOST_NODES + 1)
        # A model that needs several GPUs gets large nodes, because links between nodes are slower.
        if fewest > 1 and trainer < NODE_GPUS[-1]:
            continue
        for rollout_nodes in range(1, MOST_NODES + 1):
            for trainer_nodes in range(fewest, MOST_NODES + 1):
                yield Layout(rollout_nodes, rollout, trainer_nodes, trainer)


@cache
def work(model: Model, batch: Batch, nodes: int, gpus: int) -> Work:
    """Return the trainer's work on a number of nodes, as the preflight chooses it."""
    settings = TrainerSettings.load(batch_size=batch.prompts, group_size=batch.group_size, max_new_tokens=batch.longest)
    limits = Limits(device=MEMORY[GPU], host=0, shm=0, volume=0)
    flat = work_of(
        settings, model.shape, memory=MEMORY[GPU], nodes=nodes, ranks_per_node=gpus, compute_bytes=WEIGHT_BYTES
    )
    return choose(settings, model.shape, flat, limits)


def fits(model: Model, batch: Batch, nodes: int, gpus: int) -> bool:
    """Return whether the trainer's state and its largest micro-batch fit in the memory of the GPUs."""
    return needed(model.shape, work(model, batch, nodes, gpus)).total("device") <= MEMORY[GPU] * USABLE


def cheapest(model: Model, batch: Batch, measured: Rates, step_seconds: float) -> Prediction:
    """Return the layout of the fewest GPUs whose step takes at most ``step_seconds``, and the fastest of equal ones.

    Raises:
        ValueError: there is no such layout.
    """
    predictions = [predict(model, batch, layout, measured) for layout in layouts(model, batch)]
    quick = [one for one in predictions if one.seconds.total <= step_seconds]
    if not quick:
        best = min(one.seconds.total for one in predictions)
        raise ValueError(f"{model.label}: the fastest step takes {best:.0f} s; --step-seconds {step_seconds:g} is less")
    return min(quick, key=lambda one: (one.layout.gpus, one.seconds.total))


GIGA = 1e9


def check_text(rates: Rates, unseen: Mapping[str, Sequence[Measured]]) -> str:
    """Return the fitted rates, and predictions and measurements of runs that the rates were not fitted to."""
    lines = ["fitted milliseconds"]
    lines += [f"  {f.name.replace('_', ' '):<17} {getattr(rates, f.name) * 1e3:9.3f}" for f in fields(rates)]
    for name, steps in unseen.items():
        predicted = mean([rates.seconds(step.work) for step in steps])
        measured = mean([step.seconds for step in steps])
        rows = []
        for phase in (*PHASES, "total"):
            one, other = getattr(predicted, phase), getattr(measured, phase)
            error = f"{one / other - 1:+.0%}" if other > 0.05 else "-"
            rows.append([f"  {phase}", f"{one:.2f}", f"{other:.2f}", error])
        lines += ["", f"not seen: {name}, {len(steps)} steps"]
        lines += table(["  mean seconds", "predicted", "measured", "error"], rows)
    return "\n".join(lines)


def plan_text(predictions: Sequence[tuple[Model, Prediction]], batch: Batch, step_seconds: float) -> str:
    """Return the assumptions, nodes and seconds of each model, and the changes to jobgroup.yaml."""
    lines = [
        f"a step: {batch.prompts} prompts of {batch.prompt_tokens} tokens, {batch.group_size} completions each of "
        f"{batch.completion_tokens} tokens on average and {batch.longest} at most,",
        f"{TRAINED_SHARE:.0%} of the groups with a gradient; the fewest {GPU} with which it takes at most "
        f"{step_seconds:g} s",
        "assumed",
    ]
    for field in fields(Assumptions):
        value = getattr(ASSUMED, field.name)
        lines.append(f"  {field.name.replace('_', ' ')} {f'{value / GIGA:g} GB' if value >= GIGA else f'{value:g}'}")
    rows = []
    for model, one in predictions:
        layout, seconds = one.layout, one.seconds
        nodes = (f"{layout.rollout_nodes} x {layout.rollout_gpus}", f"{layout.trainer_nodes} x {layout.trainer_gpus}")
        phases = [f"{getattr(seconds, phase):.1f}" for phase in (*PHASES, "total")]
        last = (f"{one.asynchronous_seconds:.1f}", f"{busy(seconds):.0%}")
        rows.append([model.label, *nodes, str(layout.gpus), *phases, *last])
    header = ["model", "rollout", "trainer", "GPUs", *PHASES, "step", "MODE=async", "less busy tier"]
    lines += ["", *table(header, rows)]
    for model, one in predictions:
        lines += ["", f"{model.label}, in jobgroup.yaml"]
        chosen = work(model, batch, one.layout.trainer_nodes, one.layout.trainer_gpus)
        need = needed(model.shape, replace(chosen, published_copies=1 + (one.transport == Transport.BROADCAST)))
        lines += [f"  {task}.{key}: {value}" for (task, key), value in changes(model, one.layout, need).items()]
        lines += ["in jobgroups/volume.yaml", f"  size: {volume_gibibytes(need)}Gi", "and at launch"]
        lines.append("  " + " ".join(f"--env {name}={value}" for name, value in variables(model, one, batch).items()))
    return "\n".join(lines)


@dataclass(frozen=True)
class Launch:
    """A launch of a model; without options, with the model and the rollout nodes that jobgroup.yaml has."""

    label: str
    options: str
    layout: Layout
    settings: TrainerSettings

    @classmethod
    def all(cls) -> list[Launch]:
        """Return the launches with the preset of `grpo launch` and without."""
        preset = TrainerSettings.load(**{name.lower(): value for name, value in env_file(PRESET).items()})
        return [
            cls("0.5B", "", Layout(2, 1, 1, 1), preset),
            cls("0.5B", "--rollout-nodes 1", Layout(1, 1, 1, 1), preset),
            cls("0.5B", "--stock", Layout(2, 1, 2, 1), TrainerSettings.load()),
            cls("8B", "--gpus H100:4 --rollout-gpus H100:1", Layout(2, 1, 1, 4), preset),
            cls("8B", "--gpus H100:4 --rollout-gpus H100:1 --rollout-nodes 3", Layout(3, 1, 1, 4), preset),
        ]

    def seconds(self, measured: Rates) -> Seconds:
        """Predict the seconds of a step; a completion has half of its most tokens on average."""
        most = self.settings.max_new_tokens
        batch = Batch(self.settings.batch_size, self.settings.group_size, PROMPT_TOKENS, most // 2, most)
        predicted = predict(MODELS[self.label], batch, self.layout, measured).seconds
        publish = publish_seconds(MODELS[self.label], self.layout)[self.settings.publish_transport]
        return replace(predicted, publish=publish)


def busy(seconds: Seconds) -> float:
    """Return the work of the tier whose GPUs have less to do, as a share of the other's."""
    return min(seconds.generate, seconds.train) / max(seconds.generate, seconds.train)


def launches_text(measured: Rates) -> str:
    """Return how busy launches keep their GPUs."""
    rows = []
    for launch in Launch.all():
        layout, seconds = launch.layout, launch.seconds(measured)
        nodes = [f"{layout.rollout_nodes} x {layout.rollout_gpus}", f"{layout.trainer_nodes} x {layout.trainer_gpus}"]
        completions = launch.settings.batch_size * launch.settings.group_size
        phases = [f"{getattr(seconds, phase):.1f}" for phase in (*PHASES, "total")]
        rows.append(
            [launch.options or "no options", launch.label, *nodes, str(completions), *phases, f"{busy(seconds):.0%}"]
        )
    header = ["grpo launch, on H100", "model", "rollout", "trainer", "completions", *PHASES, "step", "less busy tier"]
    return "\n".join(table(header, rows))


def variables(model: Model, one: Prediction, batch: Batch) -> dict[str, str]:
    """Return the settings of the launch."""
    settings = {
        "MODEL_NAME": model.name,
        "BATCH_SIZE": str(batch.prompts),
        "GROUP_SIZE": str(batch.group_size),
        "MAX_NEW_TOKENS": str(batch.longest),
        "MIN_WORKERS": str(min_workers(one.layout.rollout_nodes)),
    }
    return settings if one.transport == "disk" else settings | {"PUBLISH_TRANSPORT": one.transport}
