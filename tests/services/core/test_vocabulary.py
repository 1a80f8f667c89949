import json

import pytest
from transformers import AutoConfig

from services.core.errors import ConfigurationError
from services.core.vocabulary import vocabulary_size


def test_a_models_vocabulary_is_what_transformers_says(tiny_model):
    assert vocabulary_size(str(tiny_model), "MODEL_NAME") == AutoConfig.from_pretrained(tiny_model).vocab_size == 17


def test_a_model_of_several_modalities_says_it_for_its_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5}, "vision_config": {}}))
    assert vocabulary_size(str(tmp_path), "MODEL_NAME") == 5
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 6, "text_config": None}))
    assert vocabulary_size(str(tmp_path), "MODEL_NAME") == 6


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{", "Expecting"), ("{}", "has no vocab_size"), ("[]", "list")]
)
def test_what_does_not_say_it_is_named(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=f"MODEL_NAME .*configuration cannot be loaded: .*{said}"):
        vocabulary_size(str(tmp_path), "MODEL_NAME")


def test_a_name_that_no_hub_has_is_named():
    with pytest.raises(ConfigurationError, match="--model 'no/such-model': its configuration cannot be loaded"):
        vocabulary_size("no/such-model", "--model")
