"""Code that comes with a model or dataset is not executed unless a setting says so, not even if a terminal says yes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# How each component loads what it is given. Each prints what it cannot load for lack of trust.
LOADERS = {
    "data-server": "from services.data_server.prompts import load_tokenizer; load_tokenizer(sys.argv[1])",
    "embedded engine": """
from services.rollout_server.embedded.loading import load
from services.rollout_server.settings import RolloutSettings
load(RolloutSettings(model_name=sys.argv[1]))
""",
    "reward model": """
from services.reward_server.reward_model import RewardModel
RewardModel(sys.argv[1], batch_size=1, max_tokens=16)
""",
    "trainer": """
from trainer.config import TrainerSettings
from trainer.distributed import join_ranks
from trainer.policy import load_policy
with join_ranks() as ranks:
    load_policy(TrainerSettings(model_name=sys.argv[1]), ranks)
""",
}

CODE = """
import os, pathlib
pathlib.Path(os.environ["MARKER"]).touch()
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
def marker(tmp_path) -> Path:
    """Is there when foreign code was executed."""
    return tmp_path / "executed"


@pytest.fixture
def with_code(tiny_model, tmp_path) -> Path:
    """A model directory whose configuration and tokenizer say that they need the code beside them."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    (directory / "code.py").write_text(CODE)
    names = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model", "AutoModelForSequenceClassification": "Model"}
    change(directory / "config.json", model_type="of-our-own", auto_map={k: f"code.{v}" for k, v in names.items()})
    own = {"AutoTokenizer": [None, "code.Tokenizer"]}
    change(directory / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=own)
    return directory


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def load(code: str, argument: Path, marker: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a loader whose terminal answers yes to everything."""
    return subprocess.run(
        [sys.executable, "-c", "import sys\n" + code, str(argument)],
        input="y\n" * 10,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
        env=os.environ | {"MARKER": str(marker), "HF_MODULES_CACHE": str(marker.parent / "modules"), **settings},
    )


@pytest.mark.parametrize("component", LOADERS)
def test_a_models_code_is_not_executed(with_code, marker, component):
    ended = load(LOADERS[component], with_code, marker)
    assert not marker.exists()
    assert "ConfigurationError" in ended.stderr, ended.stderr
    assert "code" in ended.stderr.splitlines()[-1]


def test_a_models_code_is_executed_where_a_setting_says_so(with_code, marker):
    load(LOADERS["trainer"], with_code, marker, TRUST_REMOTE_CODE="true")
    assert marker.exists()


@pytest.mark.parametrize("component", ["embedded engine", "reward model", "trainer"])
def test_pickled_weights_are_not_executed(tiny_model, tmp_path, marker, component):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    ended = load(LOADERS[component], directory, marker)
    assert ended.returncode != 0
    assert not marker.exists()


def test_a_datasets_script_is_not_executed(tmp_path, marker):
    directory = tmp_path / "dataset"
    directory.mkdir()
    (directory / "dataset.py").write_text(CODE)
    code = """
from services.data_server import sources
from services.data_server.settings import DataSettings
sources.load(DataSettings(dataset=sys.argv[1]))
"""
    ended = load(code, directory, marker)
    assert "ConfigurationError" in ended.stderr, ended.stderr
    assert not marker.exists()
