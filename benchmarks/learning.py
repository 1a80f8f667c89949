"""Compare settings of the trainer by their learning curves, with the same seeds for each.

    python -m benchmarks.learning [--task tiny demo] [--variants grpo replay:REPLAY_MAX_KL=0.5] [--seeds N] [--steps N]

A variant is a name of VARIANTS, with settings of its own after a colon, divided by commas. All variants generate the
same number of completions a step. A seed decides the order of the prompts, the samples and the draws, so that the
difference between two variants is taken seed by seed. Every run starts from the same model, in this process, without
services. With ``--runs FILE``, runs are added to the file as they end, and those that it has are not repeated.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import orjson
import torch
from rich.table import Table

from benchmarks.common import harness
from benchmarks.common.job import DEMO
from benchmarks.common.learning_run import Curve, LearningRun, Reward
from scripts import tiny_model
from services.core import logs
from trainer.model.ranks import join_ranks

Settings = dict[str, str]

PARITY_TOKENS = 8


def parity(prompt: str, _truth: str, text: str) -> float:
    """Return the share of PARITY_TOKENS that are even digits after a sum, or odd ones after a difference."""
    wanted = "02468" if "+" in prompt else "13579"
    return sum(character in wanted for character in text) / PARITY_TOKENS


def exact_match(_prompt: str, truth: str, text: str) -> float:
    """Return 1 if the text is the ground truth, else 0."""
    return float(text.strip() == truth.strip())


PARITY = {"ARITHMETIC_OPERATIONS": "+-", "ARITHMETIC_TEMPLATE": "{a}{op}{b}=", "LEARNING_RATE": "5e-4"}
TASKS: dict[str, tuple[Settings, Reward]] = {
    "tiny": (DEMO | PARITY | {"MAX_NEW_TOKENS": str(PARITY_TOKENS), "MAX_STEPS": "50"}, parity),
    "demo": (DEMO, exact_match),
}
"""``tiny`` is the model of scripts.tiny_model with random weights, ``demo`` the run of demo.env."""

OFF = {"REPLAY_GROUPS": "0"}
VARIANTS: dict[str, Settings] = {
    "grpo": OFF,
    "replay": {"REPLAY_GROUPS": "2", "REPLAY_EVERY": "1"},
    "rloo": OFF | {"ADVANTAGE": "rloo"},
    "dr_grpo": OFF | {"ADVANTAGE": "dr_grpo", "AGGREGATION": "constant_length"},
    "gae": OFF | {"ADVANTAGE": "gae", "CRITIC_LEARNING_RATE": "1e-3"},
    "lora": OFF | {"LORA_RANK": "8"},
}
LORA_RATE_FACTOR = 10.0
"""Learning rate of adapters, as a multiple of the whole model's."""
BASE = "grpo"
"""The variant that others are compared with."""
LAST_STEPS = 3
"""The final reward is the mean of these."""


def settings_of(task: str, variant: str, seed: int, steps: int | None) -> Settings:
    """Return the environment variables of a run, without the model's directory.

    Raises:
        SystemExit: there is no such variant.
    """
    name, _, more = variant.partition(":")
    if name not in VARIANTS:
        raise SystemExit(f"error: --variants has {name!r}; allowed is {', '.join(VARIANTS)}")
    settings = TASKS[task][0] | VARIANTS[name]
    if name == "lora":
        settings["LEARNING_RATE"] = str(LORA_RATE_FACTOR * float(settings["LEARNING_RATE"]))
    settings |= dict(pair.split("=", 1) for pair in more.split(",") if pair)
    return settings | {"SEED": str(seed), "DATA_SEED": str(seed)} | ({"MAX_STEPS": str(steps)} if steps else {})


def with_error(values: Sequence[float]) -> str:
    """Return the mean and its standard error as text."""
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean}±{statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else mean


def area(curve: Curve) -> float:
    """Return the area under the curve, divided by its steps."""
    return statistics.fmean(curve.rewards)


def final(curve: Curve) -> float:
    """Return the mean reward of the last steps."""
    return statistics.fmean(curve.rewards[-LAST_STEPS:])


def show(task: str, curves: Sequence[Curve]) -> Table:
    """Return a task's variants as a table, each with its difference from BASE over the seeds that both have."""
    base = {curve.seed: curve for curve in curves if curve.variant == BASE}

    def difference(own: Sequence[Curve], number: Callable[[Curve], float]) -> str:
        values = [number(curve) - number(base[curve.seed]) for curve in own if curve.seed in base]
        return with_error(values) if values and own[0].variant != BASE else ""

    rows = []
    for variant in dict.fromkeys(curve.variant for curve in curves):
        own = [curve for curve in curves if curve.variant == variant]
        kept, dropped = sum(sum(curve.replayed) for curve in own), sum(sum(curve.left_out) for curve in own)
        rows.append(
            (
                variant,
                len(own),
                with_error([area(curve) for curve in own]),
                difference(own, area),
                with_error([final(curve) for curve in own]),
                difference(own, final),
                f"{dropped / (kept + dropped):.0%}" if kept + dropped else "",
                f"{statistics.fmean(curve.seconds for curve in own):.0f}",
            )
        )
    return harness.table(
        f"{task}, {len(curves[0].rewards)} steps: mean reward ± standard error over seeds; differences from {BASE}",
        ("", "seeds", "area", "difference", f"last {LAST_STEPS}", "difference", "left out", "CPU s"),
        rows,
    )


def plot(task: str, curves: Sequence[Curve], file: Path) -> None:
    """Draw each variant's mean reward by step, with a band of one standard error to both sides."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.hashsalt": task, "svg.fonttype": "none"}
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for variant in dict.fromkeys(curve.variant for curve in curves):
        rewards = np.array([curve.rewards for curve in curves if curve.variant == variant])
        steps, mean = np.arange(1, rewards.shape[1] + 1), rewards.mean(0)
        band = rewards.std(0, ddof=1 if len(rewards) > 1 else 0) / len(rewards) ** 0.5
        axes.plot(steps, mean, label=f"{variant} ({len(rewards)} seeds)")
        axes.fill_between(steps, mean - band, mean + band, alpha=0.2)
    axes.set(xlabel="step", ylabel="mean reward", title=task)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def measure(
    tasks: Sequence[str], variants: Sequence[str], seeds: int, steps: int | None, file: Path | None
) -> list[Curve]:
    """Return the curves of all runs; those that ``file`` lacks are made and added to it."""
    had = [Curve(**orjson.loads(line)) for line in file.read_bytes().splitlines()] if file and file.exists() else []
    found = {(curve.task, curve.variant, curve.seed): curve for curve in had}
    wanted = [(task, variant, seed) for task in tasks for seed in range(seeds) for variant in variants]
    with join_ranks() as ranks, tempfile.TemporaryDirectory() as directory:
        tiny_model.build_model().save_pretrained(directory)
        tiny_model.build_tokenizer().save_pretrained(directory)
        for task, variant, seed in (key for key in wanted if key not in found):
            settings = settings_of(task, variant, seed, steps) | ({"MODEL_NAME": directory} if task == "tiny" else {})
            curve = found[task, variant, seed] = Curve(task, variant, seed)
            LearningRun(settings, TASKS[task][1], ranks).train(curve)
            harness.say(f"{task}, {variant}, seed {seed}: area {area(curve):.3f}, final {final(curve):.3f}")
            if file:
                with file.open("ab") as lines:
                    lines.write(orjson.dumps(curve) + b"\n")
    return [found[key] for key in wanted]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, and draw."""
    parser = harness.CommandLine("learning", rounds=5, quick="one seed, three steps, of the task tiny")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS), help="what is learned")
    parser.add_argument("--variants", nargs="+", default=["grpo", "replay"], help="NAME or NAME:SETTING=VALUE,...")
    parser.add_argument("--seeds", type=int, dest="rounds", help="another name of --rounds")
    parser.add_argument("--steps", type=int, help="steps of a run; default: the task's MAX_STEPS")
    parser.add_argument("--runs", type=Path, help="a file of runs to go on with")
    parser.add_argument("--plots", help="the beginning of the paths of plots, which -TASK.svg ends")
    given = parser.parse(arguments)
    if given.quick:
        given.task, given.steps = ["tiny"], given.steps or 3
    logs.configure("learning", "warning")
    torch.set_num_threads(1)
    curves = measure(given.task, given.variants, given.rounds, given.steps, given.runs)
    by_task = {task: [curve for curve in curves if curve.task == task] for task in given.task}
    if given.plots:
        for task, own in by_task.items():
            plot(task, own, Path(f"{given.plots}-{task}.svg"))
    harness.finish(given, [show(task, own) for task, own in by_task.items()], curves)


if __name__ == "__main__":
    main()
