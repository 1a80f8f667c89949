"""Code that comes with a model or dataset is not executed unless a setting says so, not even if a terminal says yes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[1]

# How each component loads what lies in ``directory``.
LOADERS = {
    "data-server": "from services.chat.tokenizers import load_tokenizer; load_tokenizer(directory)",
    "embedded engine": """
from services.embedded_engine.compute.loading import load
from services.engines.settings import RolloutSettings
load(RolloutSettings(model_name=directory))
""",
    "reward model": """
from services.reward_server.reward_model import RewardModel
RewardModel(directory, max_tokens=16)
""",
    "trainer": """
from trainer.config import TrainerSettings
from trainer.model.ranks import join_ranks
from trainer.model.policy import load_policy
with join_ranks() as ranks:
    load_policy(TrainerSettings(model_name=directory), ranks)
""",
    "dataset": """
from services.data_server import dataset_rows
from services.data_server.settings import DataSettings
dataset_rows.load(DataSettings(dataset=directory))
""",
}
WITH_CODE = ["data-server", "embedded engine", "reward model", "trainer"]
WITH_WEIGHTS = ["embedded engine", "reward model", "trainer"]

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


# Runs loaders one after the other, and says by what error each was ended.
RUN = """
import json, os, sys
errors = []
for loader, directory, marker in json.loads(sys.argv[1]):
    os.environ["MARKER"] = marker
    try:
        exec(loader, {"directory": directory})
        errors.append(None)
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}")
print(json.dumps(errors))
"""


@dataclass
class Attempt:
    """A component's attempt to load a directory."""

    loader: str
    directory: Path
    error: str | None = None

    @property
    def marker(self) -> Path:
        """Is there when foreign code was executed."""
        return self.directory / "executed"


def run(attempts: Sequence[Attempt], **settings: str) -> None:
    """Makes the attempts in a process whose terminal answers yes to everything."""
    given = json.dumps([(attempt.loader, str(attempt.directory), str(attempt.marker)) for attempt in attempts])
    ended = subprocess.run(
        [sys.executable, "-c", RUN, given],
        input="y\n" * 10 * len(attempts),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_SECONDS,
        check=False,
        env=os.environ | {"HF_MODULES_CACHE": str(attempts[0].directory / "modules")} | settings,
    )
    assert ended.returncode == 0, ended.stderr
    for attempt, error in zip(attempts, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        attempt.error = error


@pytest.fixture(scope="module")
def attempts(tiny_model, tmp_path_factory) -> dict[tuple[str, str], Attempt]:
    """Every component's attempt at every kind of directory, made in one process since its imports take seconds."""
    makers = {"code": (with_code, WITH_CODE), "pickle": (with_pickle, WITH_WEIGHTS), "dataset": (dataset, ["dataset"])}
    made = {
        (kind, component): Attempt(LOADERS[component], make(tiny_model, tmp_path_factory.mktemp(kind) / "given"))
        for kind, (make, components) in makers.items()
        for component in components
    }
    run(list(made.values()))
    return made


def with_code(model: Path, directory: Path) -> Path:
    """A model directory whose configuration and tokenizer say that they need the code beside them."""
    shutil.copytree(model, directory)
    (directory / "code.py").write_text(CODE)
    names = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model", "AutoModelForSequenceClassification": "Model"}
    change(directory / "config.json", model_type="of-our-own", auto_map={k: f"code.{v}" for k, v in names.items()})
    own = {"AutoTokenizer": [None, "code.Tokenizer"]}
    change(directory / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=own)
    return directory


def with_pickle(model: Path, directory: Path) -> Path:
    """A model directory with pickled weights that create a file when they are read."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(directory / "executed")))
    return directory


def dataset(model: Path, directory: Path) -> Path:
    """A dataset directory that is a script."""
    directory.mkdir()
    (directory / "dataset.py").write_text(CODE)
    return directory


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("component", WITH_CODE)
def test_a_models_code_is_not_executed(attempts, component):
    attempt = attempts["code", component]
    assert not attempt.marker.exists()
    assert attempt.error is not None
    assert attempt.error.startswith("ConfigurationError")
    assert "code" in attempt.error


@pytest.mark.slow
def test_a_models_code_is_executed_where_a_setting_says_so(tiny_model, tmp_path):
    attempt = Attempt(LOADERS["trainer"], with_code(tiny_model, tmp_path / "given"))
    run([attempt], TRUST_REMOTE_CODE="true")
    assert attempt.marker.exists()


@pytest.mark.parametrize("component", WITH_WEIGHTS)
def test_pickled_weights_are_not_executed(attempts, component):
    attempt = attempts["pickle", component]
    assert attempt.error is not None
    assert not attempt.marker.exists()


def test_a_datasets_script_is_not_executed(attempts):
    attempt = attempts["dataset", "dataset"]
    assert attempt.error is not None
    assert attempt.error.startswith("ConfigurationError")
    assert not attempt.marker.exists()
