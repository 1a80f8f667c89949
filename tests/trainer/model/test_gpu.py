"""On GPUs the trainer computes what it computes on a CPU. Run by ``pytest -m gpu``; these have not been run yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer import rank_jobs
from tests.trainer.model.test_learner import CUT, assert_same_gradients
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import make_learner
from tests.trainer.tiny import plain_logprobs, plain_model, random_groups
from trainer.model.ranks import Ranks

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_log_probabilities_are_the_models_on_a_cpu(alone: Ranks, model: Path) -> None:
    learner = make_learner(alone, model)
    assert alone.device.type == "cuda"
    plain, groups = plain_model(model), random_groups(1)
    for group, of_group in zip(groups, learner.logprobs(groups), strict=True):
        for given, wanted in zip(of_group, plain_logprobs(plain, group), strict=True):
            assert given == pytest.approx(wanted.tolist(), abs=1e-3)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_two_gpus_make_the_gradient_of_one(model: Path) -> None:
    settings = {"micro_batch_tokens": 60}
    (alone,) = run_on_ranks(1, rank_jobs.update, model, settings, CUT)
    for trained in run_on_ranks(2, rank_jobs.update, model, settings, CUT):
        assert_same_gradients(trained.gradients, alone.gradients, 1e-3)
