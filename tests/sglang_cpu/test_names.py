"""SGLang's own ``load_weights`` takes every tensor of a published version, for every family of docs/models.md."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from services.engines.proof import fused
from tests.families import IMAGES, KINDS, TINY, save_image_model
from tests.services.rollout_server.conftest import check_installed
from tests.services.rollout_server.nodes import SGLANG_PYTHON
from tests.trainer.tiny import SHAPE, save_model
from tests.waiting import LIMIT_SECONDS
from trainer.config import TrainerSettings
from trainer.model import families
from trainer.model.gathering import whole_parameters
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding
from trainer.model.saving import keep_untrained, save_pretrained

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

AS_RELEASED: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "exaone4": {"head_dim": 8, "sliding_window_pattern": "LG"},
}
"""The options that SGLang expects of a family's checkpoints, and the tiny configurations lack."""
# SGLang opens Gemma 4 as an image checkpoint only.
CASES = sorted({*KINDS, *IMAGES} - {"gemma4_text"})


def checkpoint(directory: Path, case: str) -> Path:
    """Write a tiny checkpoint of a family."""
    if case in IMAGES:
        return save_image_model(directory, case)
    return save_model(directory, AutoConfig.for_model(case, **SHAPE | TINY[case] | AS_RELEASED.get(case, {})))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The outcomes of loading each family's published version, and one by the names that transformers keeps."""
    check_installed("sglang")
    trained: dict[str, list[str]] = {}
    directory = tmp_path_factory.mktemp("published")
    with join_ranks() as ranks:
        for case in CASES:
            model = checkpoint(directory / f"{case}-model", case)
            settings = TrainerSettings.load(model_name=str(model), shared_dir=directory, run_id=case)
            policy = load_policy(settings, ranks)
            trained[case] = [name for name, _ in policy.full_parameters(Rounding(torch.float32))]
            keep_untrained(policy, settings)
            save_pretrained(policy, ranks, directory / case, Rounding(torch.float32))
            if case == "qwen3_moe":
                save_pretrained(policy, ranks, directory / "kept", Rounding(torch.float32))
                kept = whole_parameters(policy.model, Rounding(torch.float32))
                save_file({name: x.clone() for name, x in kept}, directory / "kept" / "model.safetensors")
    script = Path(__file__).with_name("load_published.py")
    command = [SGLANG_PYTHON, script, *(directory / case for case in (*CASES, "kept"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    outcomes = dict(zip((*CASES, "kept"), found, strict=True))
    for case, names in trained.items():
        outcomes[case]["trained"] = names
    return outcomes


@pytest.mark.parametrize("case", CASES)
def test_every_published_tensor_is_loaded(outcomes: dict[str, dict[str, Any]], case: str) -> None:
    found = outcomes[case]
    assert (found.get("error"), found.get("unfilled"), found.get("skipped")) == (None, [], [])
    own = {family.sglang for family in families.FAMILIES if family.kind == case}
    assert (found["class"] == "TransformersForCausalLM") == (own == {families.BY_TRANSFORMERS})


@pytest.mark.parametrize("case", CASES)
def test_the_proof_of_a_version_finds_each_trained_tensor_where_sglang_keeps_it(
    outcomes: dict[str, dict[str, Any]], case: str
) -> None:
    found = outcomes[case]
    lost = [name for name in found["trained"] if fused(name, found["names"]) not in found["places"][name]]
    assert lost == [name for name in found["trained"] if name.endswith(".mamba.A_log")]


def test_names_of_transformers_are_skipped_without_an_error(outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes["kept"]
    fused = {f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in (0, 1) for part in ("down", "gate_up")}
    assert {*found["skipped"]} == fused
    assert found["unfilled"]
