"""The number of engines of a node, their GPUs and parallel sizes, chosen from heads, weights and memory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from local_runner.nodes import LocalRun, allocate, node_environment
from local_runner.spec import JobGroup, TaskSpec
from services.core import machine
from services.core.child import API_KEY_FROM_TOKEN
from services.core.endpoints import ENGINE_PORTS, Endpoint
from services.core.errors import ConfigurationError
from services.core.machine import ComputeType
from services.engines.engine import Embedded, Engine
from services.engines.placement import EnginePlace, SizeFacts, place_engines, size_facts, weight_bytes
from services.engines.settings import RolloutSettings
from services.rollout_server.__main__ import choose_addresses
from tests.services.rollout_server.nodes import SGLANG_PYTHON

# Heads, key-value heads, width of the MLP, and bytes of the weights in bfloat16.
MODELS = {
    "Qwen2.5-0.5B": (14, 2, 4864, 988_065_536),
    "Qwen3-8B": (32, 8, 12288, 16_381_470_720),
    "Qwen3-32B": (64, 8, 25600, 65_524_246_528),
    "Llama-3.3-70B": (64, 8, 28672, 141_107_412_992),
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SGLANG_TP_SIZE", "SGLANG_EXTRA_FLAGS", "JOBGROUP_ENDPOINTS", "ENGINE_DTYPE"):
        monkeypatch.delenv(name, raising=False)


def model(directory: Path, name: str, **more: Any) -> str:
    heads, key_values, width, size = MODELS[name]
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        "intermediate_size": width,
        "torch_dtype": "bfloat16",
        **more,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}}))
    return str(directory)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, directory: Path, *gibibytes: int) -> None:
    """An nvidia-smi that says that this machine has such GPUs."""
    lines = "\\n".join(str(1024 * number) for number in gibibytes)
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def places(model_name: str, gpus: int = 8, **fields: Any) -> list[EnginePlace]:
    settings = RolloutSettings.load(model_name=model_name, **fields)
    return place_engines(Engine.split(settings, gpus, lambda: size_facts(settings)), gpus)


@pytest.mark.parametrize(
    ("name", "gibibytes", "gpus", "engines", "size"),
    [
        ("Qwen2.5-0.5B", 80, 8, 8, 1),
        ("Qwen3-8B", 80, 8, 8, 1),
        ("Qwen3-8B", 24, 8, 4, 2),
        ("Qwen3-8B", 80, 1, 1, 1),
        ("Qwen3-32B", 80, 8, 4, 2),
        ("Qwen3-32B", 141, 8, 8, 1),
        ("Llama-3.3-70B", 80, 8, 2, 4),
        ("Llama-3.3-70B", 80, 4, 1, 4),
        # Its 14 heads cannot be split in 4 or 8, so no memory makes it more than 2.
        ("Qwen2.5-0.5B", 1, 8, 4, 2),
    ],
)
def test_a_node_has_as_many_engines_as_its_memory_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, gibibytes: int, gpus: int, engines: int, size: int
) -> None:
    pretend_gpus(monkeypatch, tmp_path, *[gibibytes] * gpus)
    found = places(model(tmp_path, name), gpus)
    assert (len(found), {place.tensor_parallel for place in found}) == (engines, {size})
    assert [device for place in found for device in place.devices] == [str(index) for index in range(engines * size)]


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({"sglang_tp_size": 4}, ["0,1,2,3", "4,5,6,7"]),
        ({"sglang_extra_flags": "--tp-size 8", "sglang_tp_size": 2}, ["0,1,2,3,4,5,6,7"]),
        # An allocation p2t2 of an evaluation.
        ({"sglang_tp_size": 2, "sglang_extra_flags": "--pp-size 2"}, ["0,1,2,3", "4,5,6,7"]),
        ({"sglang_tp_size": 8, "sglang_extra_flags": "--dp-size 8 --enable-dp-attention"}, ["0,1,2,3,4,5,6,7"]),
    ],
)
def test_sizes_that_the_user_gives_win(fields: dict[str, Any], devices: list[str]) -> None:
    assert [",".join(place.devices) for place in places("no/model", **fields)] == devices


REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    ("Llama-3.3-70B", 2, {}, "MODEL_NAME"),
    ("Qwen3-8B", 2, {"sglang_tp_size": 4}, "SGLANG_TP_SIZE"),
    ("Qwen3-8B", 8, {"sglang_tp_size": 3}, "SGLANG_TP_SIZE"),
    ("Qwen2.5-0.5B", 8, {"sglang_tp_size": 4}, "SGLANG_TP_SIZE"),
    ("Qwen3-8B", 2, {"sglang_extra_flags": "--pp-size 4"}, "SGLANG_EXTRA_FLAGS"),
    ("Qwen3-8B", 2, {"sglang_extra_flags": "--tp-size many"}, "SGLANG_EXTRA_FLAGS"),
]


def test_engines_that_a_node_cannot_have_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpus(monkeypatch, tmp_path, 24, 24)
    for name, gpus, fields, variable in REFUSED:
        with pytest.raises(ConfigurationError, match=variable):
            places(model(tmp_path, name), gpus, **fields)


def test_engines_share_the_gpus_that_the_node_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,GPU-5f,7")
    assert [place.devices for place in places("no/model", 4, sglang_tp_size=2)] == [("2", "3"), ("GPU-5f", "7")]


def test_the_embedded_engine_and_nodes_without_gpus_have_one_engine() -> None:
    settings = RolloutSettings.load(model_name="no/model")
    assert place_engines(Embedded.split(settings, 8, never), 8) == [EnginePlace()]
    assert place_engines(Engine.split(settings, 0, never), 0) == [EnginePlace()]


def never() -> SizeFacts:
    raise AssertionError("nobody needs the size of model and GPUs")


@pytest.mark.parametrize(
    ("stored", "dtype", "factor"),
    [("bfloat16", "auto", 1), ("bfloat16", "float32", 2), ("float32", "auto", 0.5), ("float32", "float32", 1)],
)
def test_weights_count_in_the_type_that_the_engine_computes_in(
    tmp_path: Path, stored: str, dtype: str, factor: float
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4000))
    assert weight_bytes(str(tmp_path), {"torch_dtype": stored}, ComputeType(dtype)) == 4000 * factor
    assert weight_bytes(str(tmp_path), {"torch_dtype": stored, "quantization_config": {}}, ComputeType(dtype)) == 4000


def test_a_node_of_the_local_runner_places_its_engines_on_its_share_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpus(monkeypatch, tmp_path, *range(8))
    # A nvidia-smi that prints 0, 1024, ... lists eight GPUs by these names.
    names = machine.visible_gpus()
    task = TaskSpec("rollout-server", "", num_nodes=2, gpus_per_node=4, environment={"SGLANG_TP_SIZE": "2"})
    group = JobGroup("group", (task,))
    with allocate(group) as local:
        own = node_environment(LocalRun(group, "run", tmp_path, local, names), task, 1)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    found = places("no/model", machine.promised_gpus() or 0)
    assert [place.devices for place in found] == [names[4:6], names[6:8]]
    addresses = choose_addresses(has_token=True, n_engines=len(found))
    assert [own.url for own in addresses.own_workers] == [
        "http://" + local.find("rollout-server", 1, port) for port in ENGINE_PORTS[:2]
    ]
    assert addresses.first_workers[1] == addresses.own_workers[0] != addresses.first_workers[0]


@pytest.mark.sglang
def test_sglang_takes_the_flags_of_every_place(tmp_path: Path) -> None:
    """SGLang's own parser reads them, and says what it read."""
    place = EnginePlace(3, 2, ("6", "7"))
    address = Endpoint("127.0.0.1", ENGINE_PORTS[3])
    settings = RolloutSettings.load(model_name="a-model", engine_dtype="bfloat16", lora_rank=8)
    command = Engine.command(settings, address, place)
    check = tmp_path / "check.py"
    check.write_text(PARSE)
    flags = [flag for flag in command.arguments if flag != API_KEY_FROM_TOKEN]
    told = subprocess.run([SGLANG_PYTHON, str(check), *flags], capture_output=True, text=True, check=False)
    assert told.stdout.splitlines()[-1:] == [f"2 {ENGINE_PORTS[3]} bfloat16 8"], told.stderr[-2000:]


PARSE = """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
read = parser.parse_args()
print(read.tp_size, read.port, read.dtype, read.max_lora_rank)
"""
