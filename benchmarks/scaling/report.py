"""The text that the commands print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

from benchmarks.scaling.plan import (
    ASSUMED,
    GPU,
    TRAINED_SHARE,
    WEIGHT_BYTES,
    Assumptions,
    Batch,
    Layout,
    Model,
    Prediction,
    work,
)
from benchmarks.scaling.step import PHASES, Measured, Rates, mean
from trainer.preflight.sizes import GIB, PROCESS_BYTES, Need, needed

GIGA = 1e9


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with its first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in (header, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


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
        lines += ["in volume.yaml", f"  size: {volume_gibibytes(need)}Gi", "and at launch"]
        lines.append("  " + " ".join(f"--env {name}={value}" for name, value in variables(model, one, batch).items()))
    return "\n".join(lines)


def changes(model: Model, layout: Layout, need: Need, engines: int = 1) -> dict[tuple[str, str], str]:
    """Return the values to write into jobgroup.yaml, by task and key.

    Args:
        model: the model.
        layout: the nodes and their GPUs.
        need: the trainer's bytes.
        engines: engines of a rollout node, which share its GPUs. Each may hold a copy of the weights while it loads
            a version, and has a process for each of its GPUs.
    """
    rollout = engines * model.parameters * WEIGHT_BYTES + layout.rollout_gpus * PROCESS_BYTES
    return {
        ("rollout-server", "num_nodes"): str(layout.rollout_nodes),
        ("rollout-server", "resources.accelerators"): f"{GPU}:{layout.rollout_gpus}",
        ("rollout-server", "resources.cpus"): f"{_rollout_cpus(layout.rollout_gpus, engines)}+",
        ("rollout-server", "resources.memory"): f"{_rounded(32, rollout / GIB)}+",
        ("ppo-trainer", "num_nodes"): str(layout.trainer_nodes),
        ("ppo-trainer", "resources.accelerators"): f"{GPU}:{layout.trainer_gpus}",
        ("ppo-trainer", "resources.memory"): f"{_rounded(64, (need.total('host') + need.total('shm')) / GIB)}+",
    }


def volume_gibibytes(need: Need) -> int:
    """Return the size of the shared volume for one run, in hundreds, with a fifth for what else is on it."""
    return max(200, math.ceil(need.total("volume") * 1.2 / GIB / 100) * 100)


def min_workers(rollout_nodes: int, engines: int = 1) -> int:
    """Return MIN_WORKERS: a run goes on with half of its workers, of which a rollout node has ``engines``."""
    return max(1, rollout_nodes * engines // 2)


def _rollout_cpus(gpus: int, engines: int) -> int:
    """Return the CPUs of a rollout node, in eights: one for each busy process.

    SGLang has a scheduler for each GPU, and for each engine an HTTP server with the tokenizer, and a detokenizer. The
    launcher and the router take one each.
    """
    return math.ceil((gpus + 2 * engines + 2) / 8) * 8


def _rounded(least: int, needed: float) -> int:
    """Return the gigabytes of a node: the present value, or a quarter more than needed."""
    return max(least, math.ceil(needed * 1.25 / 32) * 32)


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
