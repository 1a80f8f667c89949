"""What the commands print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from benchmarks.scaling.plan import H100, Assumptions, Batch, Layout, Model, Prediction, predict
from benchmarks.scaling.simulate import SIMULATED
from benchmarks.scaling.step import PHASES, Rates, Run, mean

GIGA = 1e9
DISK_SECONDS = 1.0
"""Publishing through the volume that takes no longer is left as it is, for a restarted worker needs it anyway."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, the first to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]


def check(rates: Rates, fitted: Sequence[Run], unseen: Sequence[Run]) -> str:
    """The rates, and predictions beside measurements."""
    lines = ["fitted to"]
    lines += [f"  {run.name}: {run.about}; {len(run.steps)} steps" for run in fitted]
    lines += [
        "milliseconds",
        *(f"  {f.name.replace('_', ' '):<17} {getattr(rates, f.name) * 1e3:9.3f}" for f in fields(rates)),
    ]
    for run in unseen:
        lines += ["", f"not seen: {run.name}: {run.about}; {len(run.steps)} steps", *_comparison(rates, run)]
    return "\n".join(lines)


def _comparison(rates: Rates, run: Run) -> list[str]:
    predicted = mean([rates.seconds(step.work) for step in run.steps])
    measured = mean([step.seconds for step in run.steps])
    pairs = [(phase, getattr(predicted, phase), getattr(measured, phase)) for phase in PHASES]
    pairs.append(("step", predicted.total, measured.total))
    rows = [
        [name, f"{one:.2f}", f"{other:.2f}", f"{one / other - 1:+.0%}" if other > 0.05 else "-"]
        for name, one, other in pairs
    ]
    return table(["  mean seconds", "predicted", "measured", "error"], [[f"  {row[0]}", *row[1:]] for row in rows])


def plan(found: Sequence[tuple[Model, Prediction]], batch: Batch, step_seconds: float, measured: Rates) -> str:
    """The assumptions, nodes and seconds of each model, and what to change for it."""
    lines = [
        f"a step: {batch.prompts} prompts of {batch.prompt_tokens} tokens, {batch.group_size} completions each of "
        f"{batch.completion_tokens} tokens on average and {batch.longest} at most,",
        f"{batch.trained_share:.0%} of the groups with a gradient; the fewest {H100.name} with which it takes at most "
        f"{step_seconds:g} s",
        "assumed",
        *(f"  {_assumption(f.name, getattr(Assumptions(), f.name))}" for f in fields(Assumptions)),
        "",
    ]
    header = ["model", "rollout", "trainer", "GPUs", *PHASES, "step", "steps/h"]
    lines += table(header, [_row(model, one) for model, one in found])
    lines += ["", "share of the step"]
    lines += table(["model", *PHASES], [[model.label, *_shares(one)] for model, one in found])
    lines += ["", f"with MODE=async, by simulation of {SIMULATED} steps"]
    header = ["model", "step", "steps/h", "staleness", "stalest", "dropped", "trainer waits"]
    lines += table(header, [_asynchronous_row(model, one) for model, one in found])
    lines += ["", "seconds of a step if the cluster is half as fast as assumed"]
    for model, one in found:
        slow = predict(model, batch, one.layout, measured, assumed=Assumptions().halved)
        lines.append(f"  {model.label}: {slow.seconds.total:.0f}, with MODE=async {slow.asynchronous.step_seconds:.0f}")
    for model, one in found:
        lines += ["", f"{model.label}, in jobgroup.yaml"]
        lines += [f"  {task}.{key}: {value}" for (task, key), value in changes(model, one.layout).items()]
        lines += ["in volume.yaml", f"  size: {volume_gibibytes(model)}Gi"]
        lines += [
            "and at launch",
            f"  {' '.join(f'--env {name}={value}' for name, value in variables(model, one, batch).items())}",
        ]
    return "\n".join(lines)


def _assumption(name: str, value: float) -> str:
    shown = f"{value / GIGA:g} GB" if value >= GIGA else f"{value:g}"
    return f"{name.replace('_', ' ')} {shown}"


def _row(model: Model, one: Prediction) -> list[str]:
    seconds = one.seconds
    return [
        model.label,
        f"{one.layout.rollout_nodes} x {one.layout.rollout_gpus}",
        f"{one.layout.trainer_nodes} x {one.layout.trainer_gpus}",
        str(one.layout.gpus),
        *(f"{getattr(seconds, phase):.1f}" for phase in PHASES),
        f"{seconds.total:.1f}",
        f"{3600 / seconds.total:.0f}",
    ]


def _asynchronous_row(model: Model, one: Prediction) -> list[str]:
    found = one.asynchronous
    return [
        model.label,
        f"{found.step_seconds:.1f}",
        f"{3600 / found.step_seconds:.0f}",
        f"{found.staleness:.1f}",
        str(found.stalest),
        str(found.dropped),
        f"{found.idle:.0%}",
    ]


def _shares(one: Prediction) -> list[str]:
    return [f"{getattr(one.seconds, phase) / one.seconds.total:.0%}" for phase in PHASES]


def changes(model: Model, layout: Layout) -> dict[tuple[str, str], str]:
    """What to write into jobgroup.yaml: value by task and key."""
    weights = model.parameters * 4 / GIGA
    return {
        ("rollout-server", "num_nodes"): str(layout.rollout_nodes),
        ("rollout-server", "resources.accelerators"): f"{H100.name}:{layout.rollout_gpus}",
        ("rollout-server", "resources.memory"): f"{_rounded(32, weights / 2)}+",
        ("ppo-trainer", "num_nodes"): str(layout.trainer_nodes),
        ("ppo-trainer", "resources.accelerators"): f"{H100.name}:{layout.trainer_gpus}",
        ("ppo-trainer", "resources.memory"): f"{_rounded(64, trainer_host_gigabytes(model, layout))}+",
    }


def trainer_host_gigabytes(model: Model, layout: Layout) -> float:
    """What the first trainer node's host holds: the whole model in float32 while it is read; later the version that is
    published, in bfloat16, and a copy of the node's share of weights and moments while a checkpoint is written."""
    return model.parameters * max(4, 2 + 12 / layout.trainer_nodes) / GIGA


def volume_gibibytes(model: Model) -> int:
    """What the shared volume holds at once, in hundreds: checkpoints of weights and moments, and published versions.

    Two newest checkpoints and the best one are kept while the next is written; as many versions while one is published.
    """
    size = model.parameters * (4 * 12 + 3 * 2)
    return max(200, math.ceil(size / 2**30 / 100) * 100)


def _rounded(least: float, needed: float) -> int:
    """Gigabytes of a node: what is there already, or what is needed and a quarter more."""
    return max(int(least), math.ceil(needed * 1.25 / 32) * 32)


def variables(model: Model, one: Prediction, batch: Batch) -> dict[str, str]:
    """The settings that go with it."""
    disk = one.transport == "disk" or model.parameters * 2 * (1 + one.layout.rollout_nodes) / 2e9 <= DISK_SECONDS
    given = {
        "MODEL_NAME": model.name,
        "BATCH_SIZE": str(batch.prompts),
        "GROUP_SIZE": str(batch.group_size),
        "MAX_NEW_TOKENS": str(batch.longest),
        # All of a step's prompts at once; the default leaves engines idle.
        "GENERATION_CONCURRENCY": str(batch.prompts),
        "MIN_WORKERS": str(max(1, one.layout.rollout_nodes // 2)),
    }
    return given if disk else given | {"PUBLISH_TRANSPORT": "broadcast"}
