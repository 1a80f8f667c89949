"""Tasks compared with TRL's GRPOTrainer: the same model, prompts in the same order, rewards and hyperparameters."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import psutil

from benchmarks import harness
from benchmarks.harness import ROOT
from benchmarks.job import RUN_SECONDS
from benchmarks.results import in_process
from benchmarks.results.comparisons import REWARD, compare, comparison, paragraph, table
from benchmarks.results.plots import curves
from benchmarks.results.runs import Part, Result, Results, Run, Settings, by_variant, result_of
from benchmarks.results.tasks import DEMO_TASK, TINY, seeded, with_model
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.protocol.prompts import Cursor, Split
from trainer.config import TrainerSettings

OURS, TRL = "this project", "TRL"
NO_EVALUATION: Settings = {"EVAL_PROMPTS": "0", "EVAL_SAMPLES": "0"}
TASKS: dict[str, tuple[Settings, range]] = {
    "tiny": (TINY | NO_EVALUATION, range(5)),
    "demo": (DEMO_TASK | NO_EVALUATION, range(5)),
}
"""Settings and seeds of the tasks."""
STAGE = 10
"""Steps whose mean rewards are compared, too."""
PARITY = f"{ROOT / 'benchmarks/results/parity.py'}:parity"
INTERPRETERS = (".venv-trl/bin/python", ".venv-oracles/bin/python")


def train_trl(run: Run) -> Result:
    """Train by TRL with the run's settings as far as TRL has them.

    Raises:
        SystemExit: there is no interpreter with TRL, or the run failed.
    """
    result = result_of(run)
    with with_model(run.settings) as given, TemporaryDirectory() as name:
        settings = TrainerSettings.load(**{key.lower(): value for key, value in given.items()})
        work = {
            "model": settings.model_name,
            "questions": str(write_questions(given, settings, Path(name))),
            "directory": name,
            "prompts": settings.batch_size,
            "group_size": settings.group_size,
            "completion_tokens": settings.max_new_tokens,
            "steps": settings.max_steps,
            "learning_rate": settings.learning_rate,
            "seed": settings.seed,
            "threads": 1,
            **({"reward": PARITY} if given["REWARD_FN"].endswith(":parity") else {}),
            "options": options(settings),
        }
        command = [interpreter(), str(ROOT / "benchmarks/trl_grpo.py"), json.dumps(work)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        started = time.process_time() + children_seconds()
        with harness.programs([command], [environment], RUN_SECONDS) as [process]:
            lines = harness.output_of(process, "TRL").splitlines()
        result.processor_seconds = time.process_time() + children_seconds() - started
    for step in (json.loads(line) for line in lines if line.startswith('{"step"')):
        result.rewards.append(step["reward"])
        result.tokens.append(round(step["tokens"]))
        result.seconds.append(step["seconds"])
    return result


def options(settings: TrainerSettings) -> dict[str, object]:
    """Return the settings of GRPOConfig that make TRL compute what this project computes."""
    return {
        "shuffle_dataset": False,
        "temperature": settings.temperature,
        "beta": settings.kl_coef,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2,
        "adam_epsilon": settings.adam_eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
    }


def write_questions(given: Settings, settings: TrainerSettings, directory: Path) -> Path:
    """Write the prompts of all steps in the order in which the data-server gives them."""
    data = Batches.load(DataSettings.load(**{key.lower(): value for key, value in given.items()}))
    cursor, rows = Cursor(), []
    for _ in range(settings.max_steps):
        prompts, cursor = data.batch(Split.TRAIN, cursor, settings.batch_size)
        rows += [{"prompt": prompt["prompt"], "answer": prompt["ground_truth"]} for prompt in prompts]
    file = directory / "questions.jsonl"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return file


def interpreter() -> str:
    """Return the Python that has TRL.

    Raises:
        SystemExit: there is none.
    """
    found = next((ROOT / path for path in INTERPRETERS if (ROOT / path).exists()), None)
    if found is None:
        raise SystemExit(f"error: no interpreter with TRL at {' or '.join(INTERPRETERS)}; `make results` installs one")
    return str(found)


def children_seconds() -> float:
    """Return the processor time of the ended processes that this one has started."""
    times = psutil.Process().cpu_times()
    return float(times.children_user + times.children_system)


RUNS = [
    Run(task, variant, seed, seeded(settings, seed), train)
    for task, (settings, seeds) in TASKS.items()
    for seed in seeds
    for variant, train in ((OURS, in_process.train), (TRL, train_trl))
]


def stages(results: Results, task: str) -> str:
    """Return a table of the differences of this project's mean reward from TRL's, by stages of a run."""
    variants = by_variant(results, task)
    ours, trl = variants.get(OURS, []), variants.get(TRL, [])
    rows = []
    for first in range(0, len(ours[0].rewards), STAGE):

        def mean(result: Result, first: int = first) -> float:
            return statistics.fmean(result.rewards[first : first + STAGE])

        compared = compare(ours, trl, replace(REWARD, of=mean))
        own, other = (statistics.fmean(map(mean, side)) for side in (ours, trl))
        rows.append(
            (
                f"{first + 1} to {first + STAGE}",
                f"{own:.3f}",
                f"{other:.3f}",
                compared or "",
                compared.verdict if compared else "",
            )
        )
    return table(("steps", OURS, TRL, f"difference from {TRL}", "verdict"), rows)


def show(results: Results) -> str:
    """Return the section: what is equal, and each task's tables and curves."""
    text = f"""
    This project's trainer and engine in one process, and GRPOTrainer of TRL 1.16, both in float32 on one thread. Both
    have the same weights, the same prompts at each step, group size, length, temperature, reward, advantages (group
    deviation with G - 1, plus 1e-4), loss (the mean over the tokens of a step, clip 0.2) and AdamW with the same betas,
    epsilon, clipping and constant rate. They sample completions by different random numbers, so the rewards of a step
    differ by chance. The second table has the mean rewards of {STAGE} steps each, by the same rule. CPU seconds are
    those of a run; TRL's include some ten seconds of imports, this project's none.
    [benchmarks.md](benchmarks.md#one-grpo-step-against-trl) says where the time of a step goes.
    """
    sections = [paragraph(text)]
    for task in dict.fromkeys(result.task for result in results):
        plot = curves(f"beside_trl-{task}", results, task, f"Beside TRL: {task}", timed=True)
        sections += [comparison(results, task, TRL), stages(results, task), plot]
    return "\n\n".join(sections)


def summary(results: Results) -> list[str]:
    """Return a sentence of the summary for each task."""
    sentences = []
    for task in dict.fromkeys(result.task for result in results):
        variants = by_variant(results, task)
        compared = compare(variants.get(OURS, []), variants.get(TRL, []), REWARD)
        if compared is not None:
            sentences.append(
                f"[Beside TRL](#beside-trl) on the task {task}, {compared.pairs} seeds: **{compared.verdict}**, this "
                f"project's mean reward minus TRL's is {compared}."
            )
    return sentences


PART = Part("beside_trl", "Beside TRL", RUNS, show, summary)
