"""The text that the commands print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from benchmarks.scaling.plan import ASSUMED, GPU, Assumptions, Batch, Layout, Model, Prediction, predict
from benchmarks.scaling.simulate import SIMULATED
from benchmarks.scaling.step import PHASES, Rates, Run, mean

GIGA = 1e9
DISK_SECONDS = 1.0
"""Publishing through the volume stays if it takes no longer, because a restarted worker needs the volume anyway."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with its first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def check(rates: Rates, fitted: Sequence[Run], unseen: Sequence[Run]) -> str:
    """Return the rates, and predictions beside measurements."""
    lines = ["fitted to", *(f"  {run.name}: {run.about}; {len(run.steps)} steps" for run in fitted), "milliseconds"]
    lines += [f"  {f.name.replace('_', ' '):<17} {getattr(rates, f.name) * 1e3:9.3f}" for f in fields(rates)]
    for run in unseen:
        predicted = mean([rates.seconds(step.work) for step in run.steps])
        measured = mean([step.seconds for step in run.steps])
        rows = []
        for name in (*PHASES, "total"):
            one, other = getattr(predicted, name), getattr(measured, name)
            error = f"{one / other - 1:+.0%}" if other > 0.05 else "-"
            rows.append([f"  {'step' if name == 'total' else name}", f"{one:.2f}", f"{other:.2f}", error])
        lines += ["", f"not seen: {run.name}: {run.about}; {len(run.steps)} steps"]
        lines += table(["  mean seconds", "predicted", "measured", "error"], rows)
    return "\n".join(lines)


def plan(found: Sequence[tuple[Model, Prediction]], batch: Batch, step_seconds: float, measured: Rates) -> str:
    """Return the assumptions, nodes and seconds of each model, and the changes to jobgroup.yaml."""
    lines = [
        f"a step: {batch.prompts} prompts of {batch.prompt_tokens} tokens, {batch.group_size} completions each of "
        f"{batch.completion_tokens} tokens on average and {batch.longest} at most,",
        f"{batch.trained_share:.0%} of the groups with a gradient; the fewest {GPU} with which it takes at most "
        f"{step_seconds:g} s",
        "assumed",
    ]
    for field in fields(Assumptions):
        value = getattr(ASSUMED, field.name)
        lines.append(f"  {field.name.replace('_', ' ')} {f'{value / GIGA:g} GB' if value >= GIGA else f'{value:g}'}")
    lines += ["", *_seconds(found), "", "share of the step"]
    shares = [[m.label, *(f"{getattr(p.seconds, n) / p.seconds.total:.0%}" for n in PHASES)] for m, p in found]
    lines += table(["model", *PHASES], shares)
    lines += ["", f"with MODE=async, by simulation of {SIMULATED} steps", *_asynchronous(found)]
    lines += ["", "seconds of a step if the cluster is half as fast as assumed"]
    for model, one in found:
        slow = predict(model, batch, one.layout, measured, assumed=ASSUMED.halved)
        lines.append(f"  {model.label}: {slow.seconds.total:.0f}, with MODE=async {slow.asynchronous.step_seconds:.0f}")
    for model, one in found:
        lines += ["", f"{model.label}, in jobgroup.yaml"]
        lines += [f"  {task}.{key}: {value}" for (task, key), value in changes(model, one.layout).items()]
        lines += ["in volume.yaml", f"  size: {volume_gibibytes(model)}Gi", "and at launch"]
        lines.append("  " + " ".join(f"--env {name}={value}" for name, value in variables(model, one, batch).items()))
    return "\n".join(lines)


def _seconds(found: Sequence[tuple[Model, Prediction]]) -> list[str]:
    rows = []
    for model, one in found:
        layout, seconds = one.layout, one.seconds
        nodes = (f"{layout.rollout_nodes} x {layout.rollout_gpus}", f"{layout.trainer_nodes} x {layout.trainer_gpus}")
        phases = [f"{getattr(seconds, phase):.1f}" for phase in (*PHASES, "total")]
        rows.append([model.label, *nodes, str(layout.gpus), *phases, f"{3600 / seconds.total:.0f}"])
    return table(["model", "rollout", "trainer", "GPUs", *PHASES, "step", "steps/h"], rows)


def _asynchronous(found: Sequence[tuple[Model, Prediction]]) -> list[str]:
    rows = []
    for model, one in found:
        flow = one.asynchronous
        speed = (f"{flow.step_seconds:.1f}", f"{3600 / flow.step_seconds:.0f}", f"{flow.staleness:.1f}")
        rows.append([model.label, *speed, str(flow.stalest), str(flow.dropped), f"{flow.idle:.0%}"])
    return table(["model", "step", "steps/h", "staleness", "stalest", "dropped", "trainer waits"], rows)


def changes(model: Model, layout: Layout) -> dict[tuple[str, str], str]:
    """Return the values to write into jobgroup.yaml, by task and key."""
    weights = model.parameters * 4 / GIGA
    # A trainer node's host holds the whole model in float32 while the first rank reads it; later the published version
    # in bfloat16, and a copy of the node's share of weights and moments while a checkpoint is written.
    state = model.parameters * max(4, 2 + 12 / layout.trainer_nodes) / GIGA
    return {
        ("rollout-server", "num_nodes"): str(layout.rollout_nodes),
        ("rollout-server", "resources.accelerators"): f"{GPU}:{layout.rollout_gpus}",
        ("rollout-server", "resources.memory"): f"{_rounded(32, weights / 2)}+",
        ("ppo-trainer", "num_nodes"): str(layout.trainer_nodes),
        ("ppo-trainer", "resources.accelerators"): f"{GPU}:{layout.trainer_gpus}",
        ("ppo-trainer", "resources.memory"): f"{_rounded(64, state)}+",
    }


def volume_gibibytes(model: Model) -> int:
    """Return the size of the shared volume, in hundreds: checkpoints of weights and moments, and published versions.

    The volume keeps the two newest checkpoints and the best one while the next is written, and two published versions
    while the next is written.
    """
    size = model.parameters * (4 * 12 + 3 * 2)
    return max(200, math.ceil(size / 2**30 / 100) * 100)


def _rounded(least: int, needed: float) -> int:
    """Return the gigabytes of a node: the present value, or a quarter more than needed."""
    return max(least, math.ceil(needed * 1.25 / 32) * 32)


def variables(model: Model, one: Prediction, batch: Batch) -> dict[str, str]:
    """Return the settings of the launch."""
    disk = one.transport == "disk" or model.parameters * 2 * (1 + one.layout.rollout_nodes) / 2e9 <= DISK_SECONDS
    given = {
        "MODEL_NAME": model.name,
        "BATCH_SIZE": str(batch.prompts),
        "GROUP_SIZE": str(batch.group_size),
        "MAX_NEW_TOKENS": str(batch.longest),
        "MIN_WORKERS": str(max(1, one.layout.rollout_nodes // 2)),
    }
    return given if disk else given | {"PUBLISH_TRANSPORT": "broadcast"}
