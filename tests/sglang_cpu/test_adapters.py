"""SGLang computes with every adapter of the families that the table of docs/models.md says, and of no others."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from services.engines.sglang_command import LORA_TARGETS
from tests.families import TINY, save_image_model
from tests.services.rollout_server.conftest import check_installed
from tests.services.rollout_server.nodes import SGLANG_PYTHON
from tests.sglang_cpu.test_names import AS_RELEASED
from tests.trainer.tiny import SHAPE, save_model
from tests.waiting import LIMIT_SECONDS
from trainer.config import TrainerSettings
from trainer.model.families import FAMILIES
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks
from trainer.model.saving import write_adapter

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

RANK = 4
LOADED = {family.kind: family.sglang_lora for family in FAMILIES if family.has_adapters}
ALIGNED = {"intermediate_size": 64, "head_dim": 8}
"""SGLang pads odd widths on a CPU, but not those of adapters, and takes Command R's size of a head from the others."""


def model_of(directory: Path, kind: str) -> Path:
    """Write a tiny checkpoint of a family, of which SGLang opens Gemma 4 as an image checkpoint only."""
    if kind == "gemma4_text":
        return save_image_model(directory, "gemma4")
    options = SHAPE | TINY[kind] | AS_RELEASED.get(kind, {}) | ALIGNED
    return save_model(directory, AutoConfig.for_model(kind, **options))


def test_the_table_says_whose_adapters_sglang_loads_whole(tmp_path: Path) -> None:
    check_installed("sglang")
    pairs: list[Path] = []
    with join_ranks() as ranks:
        for kind in LOADED:
            model = model_of(tmp_path / f"{kind}-model", kind)
            settings = {"model_name": str(model), "shared_dir": tmp_path, "run_id": kind, "lora_rank": RANK}
            policy = load_policy(TrainerSettings.load(**settings), ranks)
            write_adapter(policy, dict(policy.adapter_parameters(torch.float32)), tmp_path / kind)
            pairs += [model, tmp_path / kind]
    script = Path(__file__).with_name("load_adapters.py")
    command = [SGLANG_PYTHON, script, str(RANK), ",".join(LORA_TARGETS), *pairs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    outcomes = dict(zip(LOADED, lines, strict=True))
    assert {kind: found.get("left_out") == [] for kind, found in outcomes.items()} == LOADED, outcomes
