"""The text that the commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from benchmarks.scaling.plan import TRAINED_SHARE, Batch, Prediction, work
from benchmarks.scaling.step import PHASES, Measured, Rates, mean
from scripts.launch.models import Model
from scripts.launch.sizes import ASSUMED, GPU, Assumptions, changes, min_workers, volume_gibibytes
from scripts.launch.tables import table
from trainer.preflight.sizes import needed

GIGA = 1e9


def check(rates: Rates, unseen: Mapping[str, Sequence[Measured]]) -> str:
    """Return the fitted rates, and predictions beside measurements of runs that the rates were not fitted to."""
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


def plan(found: Sequence[tuple[Model, Prediction]], batch: Batch, step_seconds: float) -> str:
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
    for model, one in found:
        layout, seconds = one.layout, one.seconds
        nodes = (f"{layout.rollout_nodes} x {layout.rollout_gpus}", f"{layout.trainer_nodes} x {layout.trainer_gpus}")
        phases = [f"{getattr(seconds, phase):.1f}" for phase in (*PHASES, "total")]
        rows.append([model.label, *nodes, str(layout.gpus), *phases, f"{one.asynchronous_seconds:.1f}"])
    lines += ["", *table(["model", "rollout", "trainer", "GPUs", *PHASES, "step", "MODE=async"], rows)]
    for model, one in found:
        lines += ["", f"{model.label}, in jobgroup.yaml"]
        need = needed(model.shape, work(model, batch, one.layout.trainer_nodes, one.layout.trainer_gpus))
        lines += [f"  {task}.{key}: {value}" for (task, key), value in changes(model, one.layout, need).items()]
        lines += ["in jobgroups/volume.yaml", f"  size: {volume_gibibytes(need)}Gi", "and at launch"]
        lines.append("  " + " ".join(f"--env {name}={value}" for name, value in variables(model, one, batch).items()))
    return "\n".join(lines)


def variables(model: Model, one: Prediction, batch: Batch) -> dict[str, str]:
    """Return the settings of the launch."""
    given = {
        "MODEL_NAME": model.name,
        "BATCH_SIZE": str(batch.prompts),
        "GROUP_SIZE": str(batch.group_size),
        "MAX_NEW_TOKENS": str(batch.longest),
        "MIN_WORKERS": str(min_workers(one.layout.rollout_nodes)),
    }
    return given if one.transport == "disk" else given | {"PUBLISH_TRANSPORT": one.transport}
