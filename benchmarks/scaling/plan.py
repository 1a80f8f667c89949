"""Predict how many nodes a model needs, from a GPU's data sheet and assumed utilisations.

``Assumptions`` (``scripts/launch/sizes.py``) holds the values that are assumed and not
measured; ``python -m benchmarks.scaling plan`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from benchmarks.scaling.step import PHASES, Measured, Rates, Seconds, mean
from local_runner.spec import env_file
from scripts.launch.models import CONFIGS, MEMORY, Model
from scripts.launch.prediction import (
    MOST_NODES,
    TRAINED_SHARE,
    Batch,
    busy,
    choose_rollout_nodes,
    generate_seconds,
    train_seconds,
    trainer_shares,
    trainer_work,
)
from scripts.launch.sizes import (
    ASSUMED,
    GPU,
    LEAST_SEQUENCES,
    NODE_GPUS,
    PRESET,
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
from trainer.preflight.sizes import USABLE, needed

MODELS = {label: Model(label, CONFIGS[label][0], ModelShape.of(CONFIGS[label][1])) for label in ("0.5B", "8B", "70B")}


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


def fits(model: Model, batch: Batch, nodes: int, gpus: int) -> bool:
    """Return whether the trainer's state and its largest micro-batch fit in the memory of the GPUs."""
    return needed(model.shape, trainer_work(model, batch, nodes, gpus)).total("device") <= MEMORY[GPU] * USABLE


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
        last = (f"{one.asynchronous_seconds:.1f}", f"{busy(seconds.train / seconds.generate):.0%}")
        rows.append([model.label, *nodes, str(layout.gpus), *phases, *last])
    header = ["model", "rollout", "trainer", "GPUs", *PHASES, "step", "MODE=async", "less busy tier"]
    lines += ["", *table(header, rows)]
    for model, one in predictions:
        lines += ["", f"{model.label}, in jobgroup.yaml"]
        chosen = trainer_work(model, batch, one.layout.trainer_nodes, one.layout.trainer_gpus)
        need = needed(model.shape, replace(chosen, published_copies=1 + (one.transport == Transport.BROADCAST)))
        lines += [f"  {task}.{key}: {value}" for (task, key), value in changes(model, one.layout, need).items()]
        lines += ["in jobgroups/volume.yaml", f"  size: {volume_gibibytes(need)}Gi", "and at launch"]
        lines.append("  " + " ".join(f"--env {name}={value}" for name, value in variables(model, one, batch).items()))
    return "\n".join(lines)


@dataclass(frozen=True)
class Launch:
    """A launch of a model."""

    label: str
    options: str
    layout: Layout
    settings: TrainerSettings

    @classmethod
    def all(cls) -> list[Launch]:
        """Return launches with the preset of `grpo launch`, with the nodes that it chooses, and without."""
        preset = TrainerSettings.load(**{name.lower(): value for name, value in env_file(PRESET).items()})
        gpus = "--gpus H100:4 --rollout-gpus H100:1"

        def chosen(label: str, file: Layout) -> Layout:
            shares = trainer_shares(MODELS[label], Batch.of(preset), file, engines=1)
            return replace(file, rollout_nodes=choose_rollout_nodes(shares, file.rollout_nodes)[0])

        return [
            cls("0.5B", "", chosen("0.5B", Layout(2, 1, 1, 1)), preset),
            cls("0.5B", "--rollout-nodes 1", Layout(1, 1, 1, 1), preset),
            cls("0.5B", "--stock", Layout(2, 1, 2, 1), TrainerSettings.load()),
            cls("8B", gpus, chosen("8B", Layout(2, 1, 1, 4)), preset),
            cls("8B", f"{gpus} --rollout-nodes 2", Layout(2, 1, 1, 4), preset),
        ]

    def seconds(self, measured: Rates) -> Seconds:
        """Predict the seconds of a step."""
        predicted = predict(MODELS[self.label], Batch.of(self.settings), self.layout, measured).seconds
        publish = publish_seconds(MODELS[self.label], self.layout)[self.settings.publish_transport]
        return replace(predicted, publish=publish)


def launches_text(measured: Rates) -> str:
    """Return how busy launches keep their GPUs."""
    rows = []
    for launch in Launch.all():
        layout, seconds = launch.layout, launch.seconds(measured)
        nodes = [f"{layout.rollout_nodes} x {layout.rollout_gpus}", f"{layout.trainer_nodes} x {layout.trainer_gpus}"]
        completions = launch.settings.batch_size * launch.settings.group_size
        phases = [f"{getattr(seconds, phase):.1f}" for phase in (*PHASES, "total")]
        share = f"{busy(seconds.train / seconds.generate):.0%}"
        rows.append([launch.options or "no options", launch.label, *nodes, str(completions), *phases, share])
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
