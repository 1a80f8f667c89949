"""The text of an image model is trained alone, and what is saved opens as the image model that it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from services.core.errors import ConfigurationError
from toys import arithmetic
from trainer.config import TrainerSettings
from trainer.model.policy import Policy, load_policy
from trainer.model.ranks import Ranks
from trainer.model.rounding import Rounding
from trainer.model.saving import UNTRAINED, keep_untrained, save_pretrained

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture
def image_model(tmp_path: Path) -> Path:
    tokenizer = arithmetic.build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=TEXT | {"vocab_size": len(tokenizer)}, vision_config=VISION)
    model = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loaded(directory: Path, volume: Path, alone: Ranks) -> tuple[TrainerSettings, Policy]:
    settings = TrainerSettings.load(model_name=str(directory), shared_dir=volume, publish_type="float32")
    policy = load_policy(settings, alone)
    return settings, policy


def test_a_saved_model_has_the_new_text_and_the_old_vision_tower(
    image_model: Path, tmp_path: Path, alone: Ranks
) -> None:
    settings, policy = loaded(image_model, tmp_path, alone)
    assert not [name for name, _ in policy.named_parameters() if "visual" in name]
    keep_untrained(policy, settings)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    # The second time as well: a version links to the same file as the one before.
    for name in ("first", "second"):
        save_pretrained(policy, alone, tmp_path / name, Rounding(torch.float32))
    before = AutoModelForImageTextToText.from_pretrained(image_model).state_dict()
    after, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert (type(after), report["missing_keys"]) == (Qwen3_5ForConditionalGeneration, set())
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "visual" not in name}
    assert (tmp_path / "second" / UNTRAINED).samefile(settings.run_dir / UNTRAINED)
    for name, value in policy.full_parameters(Rounding(torch.float32)):
        assert torch.equal(after.state_dict()[name], value), name
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert report["missing_keys"] == set()


def test_an_image_model_without_safetensors_is_refused(image_model: Path, tmp_path: Path, alone: Ranks) -> None:
    weights = Qwen3_5ForConditionalGeneration.from_pretrained(image_model).state_dict()
    (image_model / "model.safetensors").unlink()
    torch.save(weights, image_model / "pytorch_model.bin")
    settings, policy = loaded(image_model, tmp_path, alone)
    with pytest.raises(ConfigurationError, match="safetensors"):
        keep_untrained(policy, settings)
