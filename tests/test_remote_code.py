"""Code that comes with a model or dataset is not executed unless a setting says so, not even if a terminal says yes."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from services.chat.tokenizers import load_tokenizer
from services.core.errors import ConfigurationError
from services.data_server import dataset_rows
from services.data_server.settings import DataSettings
from services.embedded_engine.loading import load
from services.engines.settings import RolloutSettings
from services.reward_server.reward_model import RewardModel
from trainer.config import TrainerSettings
from trainer.model.policy import load_policy
from trainer.model.ranks import join_ranks


def load_in_trainer(directory: str, *, trust: bool = False) -> None:
    with join_ranks() as ranks:
        load_policy(TrainerSettings(model_name=directory, trust_remote_code=trust), ranks)


# How each component loads what lies in a directory.
LOADERS: dict[str, Callable[[str], object]] = {
    "data-server": load_tokenizer,
    "embedded engine": lambda directory: load(RolloutSettings(model_name=directory)),
    "reward model": RewardModel,
    "trainer": load_in_trainer,
}

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM
class Config(PretrainedConfig):
    model_type = "of-our-own"
class Model(Qwen2ForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.marker), "w")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once foreign code was executed; a terminal answers yes to everything."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    return tmp_path / "executed"


@pytest.fixture
def with_code(tiny_model: Path, tmp_path: Path, marker: Path) -> Path:
    """A model directory whose configuration and tokenizer say that they need the code beside them."""
    directory = shutil.copytree(tiny_model, tmp_path / "given")
    (directory / "code.py").write_text(CODE.format(marker=str(marker)))
    names = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model", "AutoModelForSequenceClassification": "Model"}
    change(directory / "config.json", model_type="of-our-own", auto_map={k: f"code.{v}" for k, v in names.items()})
    own = {"AutoTokenizer": [None, "code.Tokenizer"]}
    change(directory / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=own)
    return directory


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("component", LOADERS)
def test_a_models_code_is_not_executed(component: str, with_code: Path, marker: Path) -> None:
    with pytest.raises(ConfigurationError, match="code"):
        LOADERS[component](str(with_code))
    assert not marker.exists()


def test_a_models_code_is_executed_where_a_setting_says_so(
    with_code: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with suppress(Exception):  # the model has no weights of its own kind
        load_in_trainer(str(with_code), trust=True)
    assert marker.exists()


@pytest.mark.parametrize("component", ["embedded engine", "reward model", "trainer"])
def test_pickled_weights_are_not_executed(component: str, tiny_model: Path, tmp_path: Path, marker: Path) -> None:
    without_weights = shutil.ignore_patterns("*.safetensors*")
    directory = shutil.copytree(tiny_model, tmp_path / "given", ignore=without_weights)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever says that there are no weights)
        LOADERS[component](str(directory))
    assert not marker.exists()


def test_a_datasets_script_is_not_executed(tmp_path: Path, marker: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/dataset.py").write_text(CODE.format(marker=str(marker)))
    with pytest.raises(ConfigurationError):
        dataset_rows.load(DataSettings(dataset=str(tmp_path / "given")))
    assert not marker.exists()
