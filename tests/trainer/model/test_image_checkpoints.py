"""The text of an image model is trained alone, and what is saved opens as the image model that it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from services.core.errors import ConfigurationError
from tests.families import IMAGES, save_image_model
from trainer.config import TrainerSettings
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding
from trainer.model.saving import UNTRAINED, keep_untrained, save_pretrained

TOWER = re.compile("visual|vision|multi_modal|layer_scalar")
"""Names of what is not trained."""


@pytest.fixture(params=IMAGES)
def image_model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save_image_model(tmp_path / "model", request.param)


def loaded(directory: Path, volume: Path, alone: Ranks, rank: int = 0) -> tuple[TrainerSettings, Policy]:
    settings = TrainerSettings.load(
        model_name=str(directory), shared_dir=volume, publish_type="float32", lora_rank=rank
    )
    policy = load_policy(settings, alone)
    return settings, policy


def test_a_saved_model_has_the_new_text_and_the_old_vision_tower(
    image_model: Path, tmp_path: Path, alone: Ranks
) -> None:
    settings, policy = loaded(image_model, tmp_path, alone)
    assert not [name for name, _ in policy.named_parameters() if TOWER.search(name)]
    keep_untrained(policy, settings)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    # The second time as well: a version links to the same file as the one before.
    for name in ("first", "second"):
        save_pretrained(policy, alone, tmp_path / name, Rounding(torch.float32))
    before = AutoModelForImageTextToText.from_pretrained(image_model).state_dict()
    after, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert report["missing_keys"] == set()
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not TOWER.search(name)}
    assert (tmp_path / "second" / UNTRAINED).samefile(settings.run_dir / UNTRAINED)
    saved = load_file(tmp_path / "second" / "trained.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in policy.full_parameters(Rounding(torch.float32)))
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert report["missing_keys"] == set()


def test_a_model_of_merged_adapters_opens_as_the_image_model(image_model: Path, tmp_path: Path, alone: Ranks) -> None:
    settings, policy = loaded(image_model, tmp_path, alone, rank=2)
    keep_untrained(policy, settings)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.add_("lora_B" in name)
    save_pretrained(policy, alone, tmp_path / "merged", Rounding(torch.float32))
    before = AutoModelForImageTextToText.from_pretrained(image_model).state_dict()
    after, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert (report["missing_keys"], report["unexpected_keys"]) == (set(), set())
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before[name])}
    adapted = {
        f"{name.removesuffix('.lora_A.weight').rpartition('.model.')[2]}.weight"
        for name, _ in policy.adapter_parameters(torch.float32)
        if "lora_A" in name
    }
    assert {name.rpartition("language_model.")[2].removeprefix("model.") for name in changed} == adapted


def test_an_image_model_without_safetensors_is_refused(image_model: Path, tmp_path: Path, alone: Ranks) -> None:
    weights = AutoModelForImageTextToText.from_pretrained(image_model).state_dict()
    (image_model / "model.safetensors").unlink()
    torch.save(weights, image_model / "pytorch_model.bin")
    settings, policy = loaded(image_model, tmp_path, alone)
    with pytest.raises(ConfigurationError, match="safetensors"):
        keep_untrained(policy, settings)
