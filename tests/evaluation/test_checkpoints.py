"""Which model a command names, and which models are the same."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils.serialization import config as serialization

from evaluation.plan import Checkpoint, Plan, ServerOptions, resolve
from evaluation.settings import EvaluationSettings
from services.core.errors import ConfigurationError

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path):
    """A directory that looks like a model's."""

    def make(name, weights=b"w" * 1000, **others):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        save_file({f"layer.{i}": np.frombuffer(weights, np.uint8) for i in range(3)} | others, directory / WEIGHTS)
        return directory

    return make


@pytest.mark.parametrize(("name", "step"), [("v000012", 12), ("step-000100", 100), ("checkpoint-200", 200)])
def test_the_step_is_read_from_the_name(model, name, step):
    checkpoint = resolve(str(model(name)), None)
    assert (checkpoint.name, checkpoint.step) == (name, step)


def test_a_run_gives_its_final_model_or_the_last_that_it_published(tmp_path, model):
    for name in ("run/policy/v000002", "run/policy/v000010"):
        model(name)
    last = resolve(None, tmp_path / "run")
    assert (last.name, last.step) == ("v000010", 10)
    model("run/model")
    (tmp_path / "run/summary.json").write_text(json.dumps({"steps": 12}))
    final = resolve(None, tmp_path / "run")
    assert (final.name, final.step) == ("model", 12)


def test_a_name_on_the_hub_is_taken_as_it_is():
    checkpoint = resolve("Qwen/Qwen2.5-0.5B-Instruct", None)
    assert (checkpoint.model, checkpoint.step) == ("Qwen/Qwen2.5-0.5B-Instruct", None)
    assert checkpoint.fingerprint() == "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_copy_has_the_same_fingerprint_and_other_weights_another(tmp_path, model):
    first = model("first", b"w" * 200_000)
    shutil.copytree(first, tmp_path / "copy")
    second = model("second", b"w" * 199_999 + b"x")
    of = [Checkpoint("n", str(path)).fingerprint() for path in (first, tmp_path / "copy", second)]
    assert of[0] == of[1] != of[2]


def test_one_changed_tensor_in_the_middle_of_a_file_changes_the_fingerprint(model):
    large = np.zeros(200_000, np.float32)
    first, second = (model(name, a=large, m=large + i, z=large) for i, name in enumerate(("first", "second")))
    of = [Checkpoint("n", str(path)).fingerprint() for path in (first, second)]
    assert of[0] != of[1]


def test_weights_in_torchs_format_have_a_fingerprint_too(model):
    of = []
    for name, value in (("first", 1.0), ("second", 2.0)):
        directory = model(name)
        (directory / WEIGHTS).unlink()
        tensors = {f"layer.{i}": torch.zeros(100_000) for i in range(3)} | {"layer.1": torch.full((100_000,), value)}
        # Without torch's checksums, by which the two files would differ at their ends.
        with serialization.patch({"save.compute_crc32": False}):
            torch.save(tensors, directory / "pytorch_model.bin")
        of.append(Checkpoint("n", str(directory)).fingerprint())
    assert of[0] != of[1]


def test_a_directory_without_a_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        resolve(str(tmp_path / "empty"), None)
    for given in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(ConfigurationError, match="has neither"):
            resolve(None, given)


def test_evaluations_of_two_runs_models_have_outputs_of_their_own(tmp_path, model, monkeypatch):
    monkeypatch.setenv("DATASET", "arithmetic")

    def output(path):
        settings = EvaluationSettings(eval_output=tmp_path / "out")
        given = {"model": str(path), "run_dir": None, "servers": ServerOptions(url="http://h"), "output": None}
        return Plan(settings, variables={}, **given).output.relative_to(tmp_path / "out")

    paths = [model(f"{run}/{name}") for run in ("runs/a", "runs/b") for name in ("model", "policy/v000002")]
    outputs = [output(path) for path in paths]
    assert str(outputs[0]).endswith("runs-a-model-arithmetic-test")
    assert len(set(outputs)) == 4
    assert str(output(model("smollm2-135m"))) == "smollm2-135m-arithmetic-test"


def test_a_run_with_adapters_gives_its_merged_model(tmp_path, model):
    adapter = tmp_path / "run/policy/v000012"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    for names in ({"run_dir": tmp_path / "run", "model": None}, {"run_dir": None, "model": str(adapter)}):
        with pytest.raises(ConfigurationError, match=r"v000012 has LoRA adapters only; merge them"):
            resolve(**names)
    model("run/model")
    assert resolve(None, tmp_path / "run").name == "model"


def test_a_run_and_a_model_are_not_both_evaluated(tmp_path, model, monkeypatch):
    monkeypatch.setenv("DATASET", "arithmetic")
    with pytest.raises(ConfigurationError, match="--model"):
        Plan(EvaluationSettings(), model=str(model("m")), run_dir=tmp_path, servers=ServerOptions(url="http://h"))
