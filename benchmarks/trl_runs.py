"""Runs of TRL's GRPOTrainer on this project's tasks: the same model, prompts in the same order, and hyperparameters.

The module isn't called ``trl``, because the folder of trl_grpo.py is searched first when that file imports TRL.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from benchmarks.job import ROOT, RUN_SECONDS
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.protocol.prompts import Cursor, Split
from trainer.config import TrainerSettings
from trainer.model.optimizer import ADAM_BETA1

PARITY = f"{ROOT / 'benchmarks/results/parity.py'}:parity"


def python() -> str:
    """Return the interpreter that has TRL: TRL_PYTHON, or the one of `make bench` or of `make test-oracles`.

    Raises:
        SystemExit: there is none.
    """
    here = [str(path) for name in ("trl", "oracles") if (path := ROOT / f".venv-{name}/bin/python").exists()]
    if found := os.environ.get("TRL_PYTHON") or next(iter(here), None):
        return found
    raise SystemExit("error: no interpreter has TRL; `make .venv-trl/.trl` makes one, or name yours by TRL_PYTHON")


def train(variables: Mapping[str, str], threads: int) -> list[dict[str, Any]]:
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
            "options": options(settings),
        }
        command = [python(), str(ROOT / "benchmarks/trl_grpo.py"), json.dumps(work)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        raise SystemExit(f"error: TRL ended with {done.returncode}; its messages are above")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rewards"')]


def options(settings: TrainerSettings) -> dict[str, object]:
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
