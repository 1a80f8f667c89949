"""Make the runs of an experiment, and add a row of each to docs/results/NAME.jsonl.

    python -m benchmarks.results NAME [--seed N] [--variant TEXT] [--rows FILE]

A run that has a row is not made again; ``--rows`` names another file, to repeat runs. ``benchmarks.results.figures``
makes tables and pictures of rows. GSM8K_DIR names a directory with train.jsonl and test.jsonl of GSM8K in place of the
hub, and TRL_PYTHON an interpreter that has TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from benchmarks import job
from benchmarks.job import ROOT, RUN_SECONDS, Job, running, say
from benchmarks.results.experiments import EXPERIMENTS, TRL, Run, Settings
from services.core.files import read_records
from services.core.machine import cores
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.protocol.prompts import Cursor, Split
from trainer.config import TrainerSettings
from trainer.model.optimizer import ADAM_BETA1

KEPT = ROOT / "docs/results"
FIGURES = re.compile(r"reward_part_|(eval_)?environment_|tool_calls_(mean|parsed)|truncation_rate|teacher_k1$")
"""Columns of metrics.jsonl that a row has of the first and of the last step."""
PHASES = ("seconds_generate", "seconds_train", "seconds_publish", "pause_seconds")
"""Columns of metrics.jsonl that a row has the median of, without the first step, which warms up."""
PARITY = f"{ROOT / 'benchmarks/results/parity.py'}:parity"


def train(run: Run) -> dict[str, Any]:
    """Make a run with `grpo run`, or with TRL, and return its row.

    Raises:
        SystemExit: the run failed.
    """
    row = {"task": run.task, "variant": run.variant, "seed": run.seed, "settings": dict(run.settings)}
    before = processor_seconds()
    with TemporaryDirectory() as name, prepared(run, Path(name)) as settings:
        if run.variant == TRL:
            steps = train_by_trl(settings, threads=int(settings.get("OMP_NUM_THREADS") or cores()))
            measured: dict[str, Any] = {key: [step[key] for step in steps] for key in ("rewards", "tokens", "seconds")}
        else:
            directory = Path(name) / "run"
            directory.mkdir()
            with running(directory, settings, run.way.job_group, run.way.nodes) as job:
                if run.way.killed_after:
                    job.wait(lambda: len(job.steps()) >= run.way.killed_after)
                    job.kill_trainer()
                job.wait()
                measured = measurements(job, run.settings)
    row |= {"accuracy": None, "accuracy_error": None, "prompts": 0, "samples": 0, "figures": {}} | measured
    return row | {"processor_seconds": processor_seconds() - before, "processor": processor()}


@contextmanager
def prepared(run: Run, directory: Path) -> Iterator[Settings]:
    """Give a run's settings with paths of what it needs: its model, files of GSM8K."""
    settings = {"PYTHONPATH": str(ROOT)} | run.settings
    if not settings.get("MODEL_NAME"):
        from toys import arithmetic

        settings["MODEL_NAME"] = str(directory / "tiny")
        arithmetic.build_model().save_pretrained(settings["MODEL_NAME"])
        arithmetic.build_tokenizer().save_pretrained(settings["MODEL_NAME"])
    if settings.get("DATASET") == "gsm8k" and (files := os.environ.get("GSM8K_DIR")):
        settings |= {"DATASET": f"{files}/train.jsonl", "DATASET_TEST": f"{files}/test.jsonl"}
    if run.way.begins_with is None:
        yield settings
        return
    job_group, own, variable = run.way.begins_with
    seeds = {name: run.settings[name] for name in ("SEED", "DATA_SEED") if name not in own}
    first = {"PYTHONPATH": str(ROOT), "MODEL_NAME": settings["MODEL_NAME"], **seeds, **own}
    (directory / "first").mkdir()
    with running(directory / "first", first, job_group) as job:
        job.wait()
        yield settings | {variable: str(job.run_dir / "model")}


def measurements(job: Job, settings: Settings) -> dict[str, Any]:
    """Return the columns of a row that metrics.jsonl and summary.json have."""
    records = job.steps()
    # An evaluation before the first step has a record, too. Distillation without a reward has no rewards.
    steps = [step for step in records if "completion_tokens" in step]
    row: dict[str, Any] = {
        "rewards": [step["reward_mean"] for step in steps if "reward_mean" in step],
        "tokens": [int(step["completion_tokens"]) for step in steps],
        "seconds": [step["seconds_step"] - step.get("seconds_evaluate", 0.0) for step in steps],
    }
    samples = int(settings.get("EVAL_SAMPLES", "0"))
    accuracy = f"avg_at_{samples}" if samples else "accuracy"
    if accuracy in steps[-1]:
        row |= {"accuracy": steps[-1][accuracy], "accuracy_error": steps[-1][f"{accuracy}_stderr"]}
        row |= {"prompts": int(steps[-1]["eval_prompts"] - steps[-1]["eval_left_out"]), "samples": samples}
    figures = {"staleness": statistics.fmean(step["staleness_mean"] for step in steps)}
    figures |= {"replayed": sum(step.get("replay_groups", 0) for step in steps)}
    figures |= {"left_out": sum(step.get("replay_groups_left_out", 0) for step in steps)}
    figures |= {name: statistics.median(step.get(name, 0.0) for step in steps[1:] or steps) for name in PHASES}
    figures |= {"kl_behaviour_max": max(step.get("kl_behaviour", 0.0) for step in steps)}
    figures |= {f"accuracy_{step['step']}": step[accuracy] for step in records if accuracy in step}
    for name in {name for step in steps for name in step if FIGURES.match(name)}:
        values = [step[name] for step in steps if step.get(name) is not None]
        figures |= {f"{name}_before": values[0], f"{name}_after": values[-1]}
    summary = orjson.loads((job.run_dir / "summary.json").read_bytes())
    if summary.get("accuracy_before") is not None:
        figures["accuracy_before"] = summary["accuracy_before"]
    return row | {"figures": figures}


def trl_python() -> str:
    """Return the interpreter that has TRL: TRL_PYTHON, or the one of `make bench` or of `make test-oracles`.

    Raises:
        SystemExit: there is none.
    """
    here = [str(path) for name in ("trl", "oracles") if (path := ROOT / f".venv-{name}/bin/python").exists()]
    if found := os.environ.get("TRL_PYTHON") or next(iter(here), None):
        return found
    raise SystemExit("error: no interpreter has TRL; `make .venv-trl/.trl` makes one, or name yours by TRL_PYTHON")


def train_by_trl(variables: Mapping[str, str], threads: int) -> list[dict[str, Any]]:
    """Train by the settings as far as TRL has them, and return each step's ``seconds``, ``rewards`` and ``tokens``.

    Raises:
        SystemExit: there is no interpreter with TRL, or TRL failed.
    """
    lowered = {name.lower(): value for name, value in variables.items() if value}
    settings = TrainerSettings.load(**lowered)
    # TRL would look for a relative path on the hub.
    model = ROOT / settings.model_name
    with TemporaryDirectory() as directory:
        questions = Path(directory) / "questions.jsonl"
        write_questions(DataSettings.load(**lowered), settings, questions)
        work = {
            "model": str(model) if model.is_dir() else settings.model_name,
            "questions": str(questions),
            "directory": directory,
            "prompts": settings.batch_size,
            "group_size": settings.group_size,
            "completion_tokens": settings.max_new_tokens,
            "steps": settings.max_steps,
            "learning_rate": settings.learning_rate,
            "dtype": variables["COMPUTE_TYPE"],
            "seed": settings.seed,
            "threads": threads,
            **({"reward": PARITY} if variables["REWARD_FN"].endswith(":parity") else {}),
            "options": trl_options(settings),
        }
        command = [trl_python(), str(ROOT / "benchmarks/trl_grpo.py"), json.dumps(work)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        raise SystemExit(f"error: TRL ended with {done.returncode}; its messages are above")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rewards"')]


def trl_options(settings: TrainerSettings) -> dict[str, object]:
    """Return the settings of GRPOConfig that make TRL compute what this project computes."""
    return {
        "shuffle_dataset": False,
        "temperature": settings.temperature,
        "beta": settings.kl_coef,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "adam_beta1": ADAM_BETA1,
        "adam_beta2": settings.adam_beta2,
        "adam_epsilon": settings.adam_eps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
    }


def write_questions(data_settings: DataSettings, settings: TrainerSettings, file: Path) -> None:
    """Write the prompts of all steps in the order in which the data-server gives them."""
    data = Batches.load(data_settings)
    cursor, rows = Cursor(), []
    for _ in range(settings.max_steps):
        prompts, cursor = data.batch(Split.TRAIN, cursor, settings.batch_size)
        rows += [{"prompt": prompt["prompt"], "answer": prompt["ground_truth"]} for prompt in prompts]
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def processor_seconds() -> float:
    """Return the processor time of all processes that this one has started and seen end, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processor() -> str:
    """Return the name of this machine's processor and the number of cores."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"(?m)^model name\s*:\s*(.+)$", file.read_text("utf-8")) if file.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores()} cores"


def main() -> None:
    """Read the command line, and make the runs that have no row."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.results", description=__doc__, formatter_class=form)
    parser.add_argument("name", choices=EXPERIMENTS, help="the experiment")
    parser.add_argument("--seed", type=int, help="the runs of this seed only")
    parser.add_argument("--variant", default="", help="the runs whose task and variant contain this text")
    parser.add_argument("--steps", help="MAX_STEPS of all runs, to try the command")
    parser.add_argument("--rows", type=Path, help="file of the rows; default docs/results/NAME.jsonl")
    args = parser.parse_args()
    job.end_in_order()
    file = args.rows or KEPT / f"{args.name}.jsonl"
    present = {(row["task"], row["variant"], row["seed"]) for row in read_records(file)}
    for run in EXPERIMENTS[args.name]:
        is_asked = args.variant in f"{run.task}, {run.variant}" and args.seed in (None, run.seed)
        if not is_asked or (run.task, run.variant, run.seed) in present:
            continue
        if args.steps:
            run = replace(run, settings={**run.settings, "MAX_STEPS": args.steps})
        row = train(run)
        with file.open("ab") as rows:
            rows.write(orjson.dumps(row) + b"\n")
        reached = f"mean reward {statistics.fmean(row['rewards']):.3f}" if row["rewards"] else "no rewards"
        say(f"{run.task}, {run.variant}, seed {run.seed}: {reached}, {row['processor_seconds']:.0f} CPU s")


if __name__ == "__main__":
    main()
