"""Supervised fine-tuning: before reinforcement learning, on a form that the model never samples, and on own answers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import ROOT
from benchmarks.job import running
from benchmarks.results import in_process, job_runs
from benchmarks.results.in_process import InProcess
from benchmarks.results.runs import Result, Run, Settings, Train, result_of
from benchmarks.results.tasks import DEMO_TASK, REWARDS
from local_runner.spec import env_file
from services.core.settings import Method
from services.protocol.groups import Group
from services.protocol.rewards import is_correct
from trainer.algorithm.packing import TrainingGroup
from trainer.model.learner import Learner
from trainer.model.ranks import join_ranks

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


# --- expert iteration -------------------------------------------------------------------------------------------------

KEPT = 4
"""Most answers that expert iteration learns of a prompt, so that easy ones do not have a share of all."""
ROUNDS: Settings = {"MAX_STEPS": "5", "BATCH_SIZE": "16", "UPDATES_PER_BATCH": "4", "EPOCHS_PER_BATCH": "2"}
"""As many completions as in the demo's ten steps, in rounds of two epochs of four updates."""
RATES = ("2e-5", "5e-5", "1e-4")


def by_rounds() -> dict[str, tuple[Settings, Train]]:
    """Return GRPO, and expert iteration at three learning rates."""
    rounds = {f"expert iteration at {rate}": (ROUNDS | {"LEARNING_RATE": rate}, iterate) for rate in RATES}
    return {"GRPO": ({}, in_process.train), **rounds}


class ExpertIteration(InProcess):
    """Rounds of sampling, each followed by supervised epochs on the right answers (arXiv:2312.06585)."""

    def _step(self, step: int, result: Result) -> None:
        """Sample BATCH_SIZE groups, and learn at most KEPT different right answers of each."""
        started = time.perf_counter()
        groups = self.sampled(self.settings.batch_size)
        self.learner.update([chosen for group in groups if (chosen := right_answers(group)).sequences], step)
        self.end_step(step, groups, started, result)


def right_answers(group: Group) -> TrainingGroup:
    """Return the first KEPT different right answers of a group."""
    right = {tuple(s.completion_ids.tolist()): s for s in group.sequences if is_correct(s.scoring)}
    return TrainingGroup(group.prompt_ids, list(right.values())[:KEPT], group.group_id)


def iterate(run: Run) -> Result:
    """Make a run of expert iteration in this process."""
    started = time.process_time()
    result = result_of(run)
    with join_ranks() as ranks:
        iteration = ExpertIteration(run.settings, REWARDS[run.settings["REWARD_FN"]], ranks)
        supervised = iteration.settings.model_copy(update={"method": Method.SFT})
        iteration.learner = Learner(supervised, iteration.policy, ranks, None, supervised.max_steps)
        iteration.train(result)
    result.processor_seconds = time.process_time() - started
    return result
