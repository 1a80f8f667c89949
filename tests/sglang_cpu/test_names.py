"""SGLang's own ``load_weights`` takes every tensor of a published version, for every family of docs/models.md."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.services.rollout_server.conftest import check_installed
from tests.services.rollout_server.nodes import SGLANG_PYTHON
from tests.trainer.model import test_image_checkpoints, test_recurrent, test_rows, test_tree_families
from tests.trainer.tiny import SHAPE, save_model
from tests.waiting import LIMIT_SECONDS
from toys.arithmetic import build_tokenizer
from trainer.config import TrainerSettings
from trainer.model import families
from trainer.model.gathering import whole_parameters
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.model.rounding import Rounding
from trainer.model.saving import keep_untrained, save_pretrained

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

KINDS = {family.kind for family in families.FAMILIES}
TINY = test_rows.OTHERS | dict(test_tree_families.FAMILIES.values()) | test_recurrent.FAMILIES
AS_RELEASED: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "exaone4": {"head_dim": 8, "sliding_window_pattern": "LG"},
}
"""What SGLang expects of a family's checkpoints, and the tiny configurations lack."""
IMAGES = {
    "qwen3_5": (test_image_checkpoints.TEXT, test_image_checkpoints.VISION | {"deepstack_visual_indexes": []}),
    "gemma4": (
        TINY["gemma4_text"] | {"vocab_size_per_layer_input": SHAPE["vocab_size"], "hidden_size_per_layer_input": 8},
        {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
    ),
}
"""Text and vision tower of image checkpoints. SGLang opens Gemma 4 as one only."""
CASES = sorted(KINDS - {"gemma4_text"} | IMAGES.keys())


def checkpoint(directory: Path, case: str) -> Path:
    """Write a tiny checkpoint of a family."""
    if case not in IMAGES:
        return save_model(directory, AutoConfig.for_model(case, **SHAPE | TINY[case] | AS_RELEASED.get(case, {})))
    text, vision = IMAGES[case]
    config = AutoConfig.for_model(case, text_config=SHAPE | text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What SGLang makes of a published version of each family, and of one by the names that transformers keeps."""
    check_installed("sglang")
    directory = tmp_path_factory.mktemp("published")
    with join_ranks() as ranks:
        for case in CASES:
            model = checkpoint(directory / f"{case}-model", case)
            settings = TrainerSettings.load(model_name=str(model), shared_dir=directory, run_id=case)
            policy = load_policy(settings, ranks)
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
    return dict(zip((*CASES, "kept"), found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_published_tensor_is_loaded(outcomes: dict[str, dict[str, Any]], case: str) -> None:
    found = outcomes[case]
    assert (found.get("error"), found.get("unfilled"), found.get("skipped")) == (None, [], [])
    own = {family.sglang for family in families.FAMILIES if family.kind == case}
    assert (found["class"] == "TransformersForCausalLM") == (own == {families.BY_TRANSFORMERS})


def test_names_of_transformers_are_skipped_without_an_error(outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes["kept"]
    fused = {f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in (0, 1) for part in ("down", "gate_up")}
    assert {*found["skipped"]} == fused
    assert found["unfilled"]
