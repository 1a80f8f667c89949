"""Supervised fine-tuning before reinforcement learning, on a form of answers that the model never samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import ROOT
from benchmarks.job import running
from benchmarks.results import job_runs
from benchmarks.results.runs import Result, Run, Settings, Train
from benchmarks.results.tasks import DEMO_TASK
from local_runner.spec import env_file

_MODEL = {"MODEL_NAME": DEMO_TASK["MODEL_NAME"]}
RL_SETTINGS: Settings = DEMO_TASK | env_file(ROOT / "examples/demo-sft-rl.env") | _MODEL
"""The settings of the run after `make demo-sft`, but from the demo's model as it is."""
SFT_SETTINGS: Settings = env_file(ROOT / "examples/demo-sft.env") | {"COMPUTE_TYPE": "float32"}


def variants() -> dict[str, tuple[Settings, Train]]:
    """Return reinforcement learning from the model as it is, and from the model that learned from examples."""
    return {"RL alone": ({}, job_runs.train), "SFT, then RL": ({}, train)}


def train(run: Run) -> Result:
    """Make a supervised run with the settings of `make demo-sft`, and from its model the run; return the second's."""
    before = job_runs.processor_seconds()
    seeds = {name: run.settings[name] for name in ("SEED", "DATA_SEED")}
    variables = SFT_SETTINGS | seeds | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with TemporaryDirectory() as directory:
        with running(Path(directory), ROOT / "jobgroups/sft.yaml", variables, {"ppo-trainer": 1}) as job:
            job.wait(lambda: False)
            model = job.run_dir / "model"
        result = job_runs.train(replace(run, settings=run.settings | {"MODEL_NAME": str(model)}))
    result.settings = dict(run.settings)
    result.processor_seconds = job_runs.processor_seconds() - before
    return result
