"""The engines that a node runs: their number, GPUs and sizes, the command lines of engine and router, and addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from local_runner.nodes import LocalRun, allocate, node_environment
from local_runner.spec import JobGroup, TaskSpec
from services.core import machine
from services.core.child import API_KEY_FROM_TOKEN
from services.core.endpoints import ENGINE_PORTS, NO_PROXY_VARIABLES, Endpoint
from services.core.errors import ConfigurationError
from services.core.machine import ComputeType
from services.core.processes import Command
from services.engines.engine import Embedded, Engine
from services.engines.placement import EnginePlace, SizeFacts, place_engines, size_facts, weight_bytes
from services.engines.router import RouterAdmin, router_command
from services.engines.settings import RolloutSettings
from services.rollout_server.__main__ import _client, choose_addresses
from tests.fake_service import fake_service
from tests.services.rollout_server.fake_nodes import FAKE_ENGINE
from tests.services.rollout_server.nodes import SGLANG_PYTHON

BIND, ROUTER, METRICS = (Endpoint("0.0.0.0", port) for port in (30001, 30000, 29000))


@pytest.fixture(autouse=True)
def no_job_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = (
        "CUDA_VISIBLE_DEVICES",
        "BATCH_SIZE",
        "GROUP_SIZE",
        "TORCH_NCCL",
        "SKYPILOT_",
        "JOBGROUP_",
        "SGLANG_",
        "ENGINE_",
        "ROLLOUT_",
        "ROUTER_",
    )
    for name in [name for name in os.environ if name.startswith(ours)]:
        monkeypatch.delenv(name, raising=False)


def settings(**fields: object) -> RolloutSettings:
    return RolloutSettings.load(model_name="a-model", **fields)


def value_of(command: Command, flag: str) -> str:
    """What follows the flag the last time that it is given."""
    last = len(command.arguments) - 1 - command.arguments[::-1].index(flag)
    return command.arguments[last + 1]


def sglang(**fields: object) -> Command:
    return Engine.command(settings(**fields), BIND, EnginePlace(3, 2, ("6", "7")))


@pytest.fixture
def interpreter_with_sglang(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexport PYTHONPATH="{FAKE_ENGINE}"\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_sglang_that_is_not_installed_is_an_error_and_no_other_engine(interpreter_with_sglang: str) -> None:
    with pytest.raises(ConfigurationError, match="install the extra 'sglang'"):
        Engine.check_installed(settings(), 0)
    with pytest.raises(ConfigurationError, match="cannot be run"):
        Engine.check_installed(settings(sglang_python="/no/such/python"), 0)
    Engine.check_installed(settings(sglang_python=interpreter_with_sglang), 0)


@pytest.fixture
def interpreter_with_nccl(interpreter_with_sglang: str, tmp_path: Path) -> str:
    wrapper = Path(interpreter_with_sglang)
    wrapper.write_text(wrapper.read_text("utf-8").replace(str(FAKE_ENGINE), f"{FAKE_ENGINE}:{tmp_path}"), "utf-8")
    metadata = tmp_path / "nvidia_nccl_cu13-2.28.3.post1.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.28.3.post1\n", "utf-8")
    return interpreter_with_sglang


async def test_the_router_gets_the_nccl_of_the_engines_own_interpreter(interpreter_with_nccl: str) -> None:
    own = settings(sglang_python=interpreter_with_nccl)
    with fake_service({"POST /workers": lambda _: {}}) as service:
        async with RouterAdmin(service.endpoint) as router:
            for place in EnginePlace(), EnginePlace(3, 2, ("2", "3")):
                async with _client(own, Engine, place, Endpoint("worker", 1)) as worker:
                    await router.add(worker)
        without, labelled = [request["labels"] for request in service.asked("POST /workers")]
    assert without == {"engine": "sglang"}
    assert labelled == {"engine": "sglang", "gpus": "2,3", "nccl": "2.28.3"}
    assert Embedded.python(own) is None


def test_sglang_gets_its_flags_from_the_settings() -> None:
    command = sglang(
        engine_dtype="bfloat16",
        engine_context_length=4096,
        engine_deterministic=True,
        engine_max_running_requests=128,
        engine_max_total_tokens=100_000,
    )
    expected = {
        "--model-path": "a-model",
        "--host": "0.0.0.0",
        "--port": "30001",
        "--tp-size": "2",
        "--weight-version": "0",
        "--dtype": "bfloat16",
        "--context-length": "4096",
        "--max-running-requests": "128",
        "--max-total-tokens": "100000",
        "--max-queued-requests": "4096",
    }
    assert {flag: value_of(command, flag) for flag in expected} == expected
    switches = {"--enable-metrics", "--enable-deterministic-inference", "--enable-fp32-lm-head", API_KEY_FROM_TOKEN}
    assert switches <= set(command.arguments)
    # Otherwise every look at its health is a token generated.
    assert (
        command.environment.items()
        >= {
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "CUDA_VISIBLE_DEVICES": "6,7",
        }.items()
    )
    assert command.name == "engine-3"


@pytest.mark.parametrize(
    ("fields", "gigabytes", "nodes", "engines", "expected"),
    [
        ({"batch_size": 64, "group_size": 16}, 80, 1, 1, "1024"),
        ({"batch_size": 64, "group_size": 16}, 80, 1, 2, "512"),
        ({"batch_size": 100, "group_size": 16}, 80, 3, 1, "534"),
        ({"batch_size": 128, "group_size": 16}, 80, 1, 1, "1024"),
        ({"batch_size": 128, "group_size": 16, "engine_max_running_requests": 300}, 80, 1, 1, "300"),
        ({"batch_size": 64, "group_size": 16}, 80, 2, 2, None),
        # Smaller cards have fewer graphs of their own: 32, 48 and 8.
        ({"batch_size": 64, "group_size": 16}, 45, 2, 2, "256"),
        ({"batch_size": 4, "group_size": 8}, 45, 1, 1, None),
        ({"batch_size": 8, "group_size": 8, "engine_max_running_requests": 64}, 24, 1, 1, "64"),
        ({"batch_size": 8, "group_size": 8, "engine_max_running_requests": 64}, 16, 1, 1, "64"),
        ({"batch_size": 4, "group_size": 8}, 16, 1, 1, "32"),
        ({"batch_size": 4, "group_size": 8}, None, 1, 1, "32"),
        ({}, 16, 1, 1, None),
    ],
)
def test_cuda_graphs_cover_the_sequences_of_a_step_on_every_card(
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, int],
    gigabytes: int | None,
    nodes: int,
    engines: int,
    expected: str | None,
) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_NODES", str(nodes))
    monkeypatch.setattr("services.core.machine.gpu_memory", lambda: gigabytes and gigabytes * 2**30)
    command = Engine.command(settings(**fields), BIND, EnginePlace(devices=("0",), engines=engines))
    flag = "--cuda-graph-max-bs-decode"
    assert (value_of(command, flag) if flag in command.arguments else None) == expected
    assert flag not in Engine.command(settings(**fields), BIND, EnginePlace()).arguments


def test_what_is_not_set_is_left_to_sglang_and_extra_flags_win_split_as_a_shell_does() -> None:
    left = {"--context-length", "--max-running-requests", "--max-total-tokens", "--enable-lora"}
    assert value_of(sglang(), "--dtype") == "bfloat16"
    assert not set(sglang().arguments) & (left | {"--enable-deterministic-inference"})
    command = sglang(sglang_extra_flags="--tp-size 8 --chat-template 'a b.jinja'")
    assert value_of(command, "--tp-size") == "8"
    assert command.arguments[-2:] == ["--chat-template", "a b.jinja"]
    for extra in ("--quantization=fp8", "--quantization fp8", "--no-enable-fp32-lm-head"):
        assert "--enable-fp32-lm-head" not in sglang(sglang_extra_flags=extra).arguments


def test_a_proxy_of_the_environment_is_not_asked_for_the_nodes_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NO_PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8, intranet")
    engine, router = sglang(), router_command(settings(), ROUTER, METRICS)
    assert engine.variables()["HTTP_PROXY"] == "http://proxy:3128", "for models of the hub"
    exempt = {"10.0.0.0/8", "intranet", "localhost", "127.0.0.1", "::1", "0.0.0.0"}
    assert all(exempt <= {*engine.variables()[name].split(",")} for name in NO_PROXY_VARIABLES)
    assert "HTTP_PROXY" not in router.variables()
    monkeypatch.setenv("no_proxy", "*")
    assert sglang().variables()["NO_PROXY"] == "*"


def test_with_a_token_the_router_listens_to_its_own_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "0")
    plain = choose_addresses(has_token=False)
    assert (plain.router.host, plain.router_metrics.host, plain.auth_proxy) == ("0.0.0.0", "0.0.0.0", None)
    guarded = choose_addresses(has_token=True)
    assert guarded.auth_proxy == plain.router
    assert (guarded.router.host, guarded.router_metrics.host) == ("127.0.0.1", "127.0.0.1")


def test_outside_skypilot_a_node_listens_to_its_own_machine_only() -> None:
    default = choose_addresses(has_token=False)
    assert {address.host for address in (*default.engines, default.router, default.router_metrics)} == {"127.0.0.1"}
    given = choose_addresses(has_token=False, host="0.0.0.0")
    assert {address.host for address in (*given.engines, given.router, given.router_metrics)} == {"0.0.0.0"}


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize(
    ("host", "rank", "router", "worker"),
    [
        ("127.0.0.9", 0, "http://127.0.0.9:31000", "http://127.0.0.9:30001"),
        ("::1", 0, "http://[::1]:31000", "http://[::1]:30001"),
        ("0.0.0.0", 0, "http://rollout-server-0.group:31000", "http://rollout-server-0.group:30001"),
        (None, 0, "http://rollout-server-0.group:31000", "http://rollout-server-0.group:30001"),
        ("10.0.0.5", 1, "http://rollout-server-0.group:31000", "http://10.0.0.5:30001"),
    ],
)
def test_a_node_looks_for_its_router_and_engine_where_they_listen(
    monkeypatch: pytest.MonkeyPatch, host: str | None, rank: int, has_token: bool, router: str, worker: str
) -> None:
    monkeypatch.setenv("SKYPILOT_JOBGROUP_NAME", "group")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", str(rank))
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    addresses = choose_addresses(has_token=has_token, host=host, port=31000)
    assert (addresses.public_router.url, addresses.own_workers[0].url) == (router, worker)
    assert addresses.first_workers[rank] == addresses.own_workers[0]
    other = 1 - rank
    assert addresses.first_workers[other].url == f"http://rollout-server-{other}.group:30001"


def test_sglang_serves_adapters_of_the_rank_that_is_trained() -> None:
    command = sglang(lora_rank=16)
    assert "--enable-lora" in command.arguments
    assert value_of(command, "--max-lora-rank") == "16"
    assert value_of(command, "--lora-target-modules") == "q_proj"
    assert value_of(
        sglang(lora_rank=16, sglang_extra_flags="--lora-target-modules qkv_proj"), "--lora-target-modules"
    ) == ("qkv_proj")


def test_an_engine_that_sleeps_has_a_memory_saver_on_a_gpu_only() -> None:
    # Prefill graphs would stay on the GPU while the engine sleeps.
    flags = {"--enable-memory-saver", "--enable-weights-cpu-backup", "--disable-prefill-cuda-graph"}
    assert flags <= set(sglang(engine_sleeps=True).arguments)
    assert not flags & set(sglang().arguments)
    on_cpu = Engine.command(settings(engine_sleeps=True), BIND, EnginePlace())
    assert not flags & set(on_cpu.arguments)


def test_an_engine_starts_on_gpus_that_ranks_fill_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    assert sglang(engine_sleeps=True).environment[name] == "0"
    assert name not in sglang().environment, "an engine that has its GPUs alone keeps the check"
    monkeypatch.setenv(name, "1")
    assert sglang(engine_sleeps=True).variables()[name] == "1"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_engine_that_sleeps_is_refused_memory_that_its_saver_cannot_give_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(ConfigurationError, match=f"{name} has expandable_segments:True"):
        sglang(engine_sleeps=True)
    sglang()
    monkeypatch.setenv(name, "expandable_segments:False")
    sglang(engine_sleeps=True)


# --- the number of engines of a node ---------------------------------------------------------------------------------


# Heads, key-value heads, width of the MLP, and bytes of the weights in bfloat16.
MODELS = {
    "Qwen2.5-0.5B": (14, 2, 4864, 988_065_536),
    "Qwen3-8B": (32, 8, 12288, 16_381_470_720),
    "Qwen3-32B": (64, 8, 25600, 65_524_246_528),
    "Llama-3.3-70B": (64, 8, 28672, 141_107_412_992),
}


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
