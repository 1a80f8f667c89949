"""Servers on clusters: a Slurm that starts processes of this machine, and a local Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr

from evaluation import clusters, servers
from evaluation.metrics import Results
from evaluation.plan import Backend, Plan, ServerOptions
from evaluation.settings import EvaluationSettings
from services.core.endpoints import ENGINE_PORT, Task, bind_address, endpoint
from services.http.server import listen
from services.rollout_server.__main__ import choose_addresses
from tests.evaluation.conftest import ARITHMETIC, Here
from tests.waiting import IDLE_SECONDS, wait_until


def test_vllm_serves_the_model_by_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DATASET", "arithmetic")
    options = ServerOptions(backend=Backend.VLLM, num_servers=2)
    variables = {"VLLM_FLAGS": "--max-model-len 2048"}
    settings = EvaluationSettings(jobgroup_token=SecretStr("secret"))
    plan = Plan(settings, model="some/model", servers=options, variables=variables)
    task, address = servers._engines(plan, tmp_path)
    assert address is not None
    assert task.run.split() == [
        *("exec", "vllm", "serve", "some/model", "--served-model-name", "some/model", "--host", "127.0.0.1"),
        *("--port", str(address.port), "--tensor-parallel-size", "1", "--data-parallel-size", "2"),
        *("--max-model-len", "2048"),
    ]
    assert (task.num_nodes, task.environment["VLLM_API_KEY"]) == (1, "secret")
    assert address.url == f"http://127.0.0.1:{address.port}/v1"


# As many processes as srun is asked for, with the rank of each; they end with it.
SRUN = """
import os, signal, subprocess, sys
tasks = int(next(word for word in sys.argv if word.startswith("--ntasks=")).partition("=")[2])
program = sys.argv[sys.argv.index("--kill-on-bad-exit=0") + 1:]
running = [subprocess.Popen(program, env={**os.environ, "SLURM_PROCID": str(rank)}) for rank in range(tasks)]
signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in running])
sys.exit(max(process.wait() for process in running))
"""


@pytest.fixture
def slurm_path(tmp_path: Path) -> str:
    """A PATH that has srun."""
    (tmp_path / "slurm").mkdir()
    path = tmp_path / "slurm" / "srun"
    # An interpreter whose path has a space cannot stand in the first line.
    path.with_suffix(".py").write_text(SRUN)
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$0.py" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{path.parent}:{os.environ['PATH']}"


def test_srun_and_ray_get_the_numbers_and_the_names_of_variables() -> None:
    directory = Path("/data/my runs")
    node = f"{shlex.quote(sys.executable)} -m evaluation.clusters node '/data/my runs'"
    given = "srun --job-name=evaluate --ntasks=3"
    assert clusters.slurm_command(3, 8, directory) == f"{given} --gpus-per-task=8 --kill-on-bad-exit=0 {node}"
    assert clusters.slurm_command(3, 0, directory) == f"{given} --kill-on-bad-exit=0 {node}"
    command = clusters.ray_command(2, 1, directory, ["HF_TOKEN", "MODEL_NAME"])
    assert command.endswith(" -m evaluation.clusters ray '/data/my runs' 2 1 HF_TOKEN,MODEL_NAME")


def test_a_node_of_a_cluster_becomes_a_rollout_node_behind_the_first_ones_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(environment))
    for rank in "01":
        clusters.become_node(tmp_path, {"MODEL_NAME": "m", "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SLURM_PROCID": rank})
    router = (tmp_path / clusters.ADDRESS).read_text()
    for number, environment in enumerate(started):
        addresses = json.loads(environment["JOBGROUP_ENDPOINTS"])
        assert addresses["rollout-server-0:30000"] == router
        assert (environment["MODEL_NAME"], environment["SKYPILOT_NODE_RANK"]) == ("m", str(number))
        assert "SKYPILOT_NUM_GPUS_PER_NODE" not in environment, "it is that of the machine that asks"


def evaluated_on(scheduler: str, evaluate: Any, model: Path, **variables: str) -> Path:
    """Evaluate on two servers of a cluster, check the results, and return the output's directory."""
    own = {"ROLLOUT_ENGINE": "embedded", **ARITHMETIC}
    options = [option for name, value in own.items() for option in ("--env", f"{name}={value}")]
    given = ("--model", model, "--scheduler", scheduler, "--num-servers", "2", "--samples", "4", "--split", "all")
    command = evaluate(*given, *options, **variables)
    assert Results.model_validate(command.succeed()).left_out == {}
    assert len(command.samples()) == 500
    output: Path = command.output
    return output


@pytest.mark.slow
def test_an_evaluation_runs_on_slurm_and_leaves_nothing(evaluate: Any, tiny_model: Path, slurm_path: str) -> None:
    output = evaluated_on("slurm", evaluate, tiny_model, PATH=slurm_path)

    def is_over() -> bool:
        return not [p for p in psutil.process_iter() if str(output) in " ".join(_command_line(p))]

    wait_until(is_over, "the end of Slurm's job", idle_seconds=IDLE_SECONDS)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return [*process.cmdline(), process.environ().get("SHARED_DIR", "")]
    except psutil.Error:
        return []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_says_how_to_install_it(here: Here, tiny_model: Path, rewards: str) -> None:
    given = ("--model", tiny_model, "--scheduler", "ray", "--dataset", "arithmetic", "--reward-url", rewards)
    command = here(*given, PROMPT_STYLE="plain")
    assert (command.code, "pip install ray" in command.text) == (78, True), command.text


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_placed_node_has_free_ports_of_its_host(monkeypatch: pytest.MonkeyPatch, host: str, shown: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6; enable it in the kernel")
    variables, router = clusters.placed(host, 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert f"http://{router}" == endpoint(Task.ROLLOUT_SERVER).url == bind_address(Task.ROLLOUT_SERVER).url
    assert router.startswith(f"{shown}:")
    with listen(host, endpoint(Task.ROLLOUT_SERVER).port) as listener:
        assert listener.getsockname()[0] == host
    for name, value in clusters.placed(host, 2, router)[0].items():
        monkeypatch.setenv(name, value)
    addresses = choose_addresses(has_token=True)
    assert addresses.public_router.url == f"http://{router}"
    assert addresses.own_workers[0].url == bind_address(Task.ROLLOUT_SERVER, ENGINE_PORT).url


@pytest.mark.oracles
def test_an_evaluation_runs_on_a_local_ray_cluster(evaluate: Any, tiny_model: Path) -> None:
    evaluated_on("ray", evaluate, tiny_model)
