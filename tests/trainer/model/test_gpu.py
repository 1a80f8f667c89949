"""On a GPU the trainer computes what it computes on a processor. Run by ``pytest -m gpu``, in three minutes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import rank_jobs
from tests.trainer.model.test_learner import CUT, assert_same_gradients
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import Trained
from tests.trainer.tiny import FAMILIES, save_model, with_heads_of

pytestmark = pytest.mark.gpu

GPUS = torch.cuda.device_count()
# Experts are products by group, which CUDA has in bfloat16 only.
ROUNDED: dict[str, Any] = {"compute_type": "bfloat16"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, ROUNDED if "moe" in family else {}) for family in FAMILIES},
    "bfloat16": ("qwen3", ROUNDED),
    "all activations again": ("qwen3", {"activation_checkpointing": True}),
    "some activations again": ("qwen3", {"activation_checkpointing": "selective"}),
    "adapters and reference": ("qwen3", {"lora_rank": 4, "kl_coef": 0.1}),
    "whole reference": ("qwen2", {"kl_coef": 0.1}),
    "on the host": ("qwen2", {"cpu_offload": True}),
    "critic": ("llama", {"advantage": "gae", "critic": "shared"}),
    "sharded": ("qwen3", {"shard_parameters": True}),
}


def close(settings: Mapping[str, Any]) -> float:
    """Return how near the gradients of two machines are, as a share of each parameter's norm."""
    return 0.2 if settings.get("compute_type") == "bfloat16" else 1e-4


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family."""
    return {name: save_model(tmp_path_factory.mktemp(name), with_heads_of(16, name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def on_gpu(directories: dict[str, Path]) -> dict[str, Trained | str]:
    """An update of each case on one GPU, or its error, in one process, because they share compiled kernels."""
    (trained,) = run_on_ranks(1, rank_jobs.updates_of_models, _cases(directories), CUT)
    return dict(trained)


@pytest.fixture(scope="module")
def on_processor(directories: dict[str, Path]) -> dict[str, Trained | str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        (trained,) = run_on_ranks(1, rank_jobs.updates_of_models, _cases(directories), CUT)
    return dict(trained)


def _cases(directories: dict[str, Path]) -> dict[str, tuple[Path, dict[str, Any]]]:
    return {
        name: (directories[family], {"micro_batch_tokens": 400, **settings})
        for name, (family, settings) in CASES.items()
    }


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_an_update_on_a_gpu_is_that_on_a_processor(
    case: str, on_gpu: dict[str, Trained | str], on_processor: dict[str, Trained | str]
) -> None:
    here, there = on_gpu[case], on_processor[case]
    assert isinstance(here, Trained), here
    assert isinstance(there, Trained), there
    within = close(CASES[case][1])
    assert_same_gradients(here.gradients, there.gradients, within)
    assert here.result.metrics["loss"] == pytest.approx(there.result.metrics["loss"], abs=within)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_two_gpus_make_the_gradient_of_one(directories: dict[str, Path]) -> None:
    settings = {"micro_batch_tokens": 60}
    (alone,) = run_on_ranks(1, rank_jobs.update, directories["qwen2"], settings, CUT)
    for trained in run_on_ranks(2, rank_jobs.update, directories["qwen2"], settings, CUT):
        assert_same_gradients(trained.gradients, alone.gradients, 1e-3)
