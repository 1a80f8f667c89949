"""Servers on clusters: a Slurm whose commands start processes of this machine, and a local Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from evaluation import clusters
from evaluation.report import Results
from services.core.endpoints import ENGINE_PORT, Task, bind_address, endpoint
from services.core.errors import ConfigurationError, DependencyLostError
from services.http.server import listen
from services.rollout_server.node_addresses import choose_addresses
from tests.evaluation.conftest import ARITHMETIC, Here
from tests.waiting import IDLE_SECONDS, eventually, wait_until

COMMANDS = {
    # Starts the batch file in a process group of its own, with the log that it asks for; its number is the job's.
    "sbatch": """
import re, shlex, subprocess, sys
text = open(sys.argv[-1]).read()
log = open(shlex.split(re.search("--output=(.*)", text)[1])[0], "w")
print(subprocess.Popen(["bash", sys.argv[-1]], stdout=log, stderr=log, start_new_session=True).pid)
""",
    # As many processes as the batch file has tasks.
    "srun": """
import os, re, subprocess, sys
tasks = int(os.environ["FAKE_TASKS"])
running = [subprocess.Popen(sys.argv[2:], env={**os.environ, "SLURM_PROCID": str(rank)}) for rank in range(tasks)]
sys.exit(max(process.wait() for process in running))
""",
    "squeue": """
import psutil, sys
job = int(sys.argv[-1].partition("=")[2])
print("RUNNING" if psutil.pid_exists(job) and psutil.Process(job).status() != "zombie" else "")
""",
    "scancel": """
import os, signal, sys
try: os.killpg(int(sys.argv[1]), signal.SIGTERM)
except ProcessLookupError: pass
""",
}


@pytest.fixture
def slurm_path(tmp_path: Path) -> str:
    """A PATH that has Slurm's commands."""
    directory = tmp_path / "slurm"
    directory.mkdir()
    for name, code in COMMANDS.items():
        path = directory / name
        path.write_text(f"#!{sys.executable}{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{directory}:{os.environ['PATH']}"


def test_the_batch_file_can_be_read(tmp_path: Path) -> None:
    variables = {"MODEL_NAME": "some/model", "SGLANG_EXTRA_FLAGS": "--pp-size 2"}
    text = clusters.slurm_script(3, 8, variables, tmp_path)
    assert text.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=evaluate",
        "#SBATCH --ntasks=3",
        "#SBATCH --gpus-per-task=8",
        f"#SBATCH --output={tmp_path}/slurm.log",
        "set -euo pipefail",
        f"cd {clusters.ROOT}",
        "export MODEL_NAME=some/model",
        "export SGLANG_EXTRA_FLAGS='--pp-size 2'",
        f"exec srun --kill-on-bad-exit=0 {sys.executable} -m evaluation.clusters {tmp_path}",
    ]


def test_a_directory_with_unusual_characters_is_quoted_as_sbatch_reads_it() -> None:
    text = clusters.slurm_script(1, 1, {}, Path("/data/my 100% runs"))
    assert "#SBATCH --output='/data/my 100%% runs/slurm.log'\n" in text
    assert text.endswith(" -m evaluation.clusters '/data/my 100% runs'\n")


async def test_ctrl_c_during_the_submission_leaves_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "go")
    for name, code in {
        "sbatch": f"touch {tmp_path}/asked; cat {tmp_path}/go",
        "scancel": f"echo $1 > {tmp_path}/ended",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    async def submit() -> None:
        async with clusters.on_slurm("", tmp_path):
            pass

    job = asyncio.create_task(submit())
    await eventually((tmp_path / "asked").exists, "sbatch was asked")
    job.cancel()
    await asyncio.sleep(0)
    await asyncio.to_thread((tmp_path / "go").write_text, "4711\n")
    with pytest.raises(asyncio.CancelledError):
        await job
    assert (tmp_path / "ended").read_text() == "4711\n"


def test_a_dry_run_shows_it_and_starts_nothing(here: Here, tiny_model: Path) -> None:
    options = ("--scheduler", "slurm", "--num-servers", "4", "--dry-run", "--dataset", "arithmetic")
    command = here("--model", tiny_model, *options, "--env", "SGLANG_TP_SIZE=2", JOBGROUP_TOKEN="secret")
    assert command.code == 0, command.text
    assert "#SBATCH --ntasks=4" in command.text
    assert "export SGLANG_TP_SIZE=2" in command.text
    assert "#SBATCH --gpus-per-task=2" in command.text
    assert "secret" not in command.text
    assert not command.output.exists()


async def test_an_answer_without_a_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for text in ("what?", ""):
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
        with pytest.raises(ConfigurationError, match="number"):
            async with clusters.on_slurm("", tmp_path):
                pass


@pytest.fixture
def submitted(slurm_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A batch file whose first node is up at once; set POLL_SECONDS and PATH for it."""
    monkeypatch.setenv("PATH", slurm_path)
    monkeypatch.setattr(clusters, "POLL_SECONDS", 0.05)
    return f"#SBATCH --output={tmp_path / clusters.LOG}\necho -n a:1 > {tmp_path / clusters.ADDRESS}\n"


async def test_a_job_that_ends_is_an_error_with_the_end_of_its_log(submitted: str, tmp_path: Path) -> None:
    async with clusters.on_slurm(f"{submitted}echo no such model >&2; exit 78\n", tmp_path) as (url, watch):
        assert url == "http://a:1"
        with pytest.raises(DependencyLostError, match="has ended: no such model; see"):
            await watch()
    (tmp_path / clusters.ADDRESS).unlink()
    with pytest.raises(DependencyLostError, match="has ended: too early; see"):
        async with clusters.on_slurm(f"{submitted.splitlines()[0]}\necho too early; exit 1\n", tmp_path):
            pass


def fail(program: Path, times: int | None = None) -> None:
    """Let one of Slurm's commands fail, at its first ``times`` calls or at all."""
    works = program.with_suffix(".works")
    program.rename(works)
    calls = program.with_suffix(".calls")
    limit = "" if times is None else f'[ "$(wc -l < {calls})" -gt {times} ] && exec {works} "$@"'
    program.write_text(f"#!/bin/sh\necho >> {calls}\n{limit}\necho 'Socket timed out' >&2\nexit 1\n")
    program.chmod(0o755)


async def test_squeue_may_fail_for_a_while(submitted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "slurm" / "squeue"
    fail(squeue, times=3)
    async with clusters.on_slurm(f"{submitted}echo all done; exit 0\n", tmp_path) as (_, watch):
        with pytest.raises(DependencyLostError, match="has ended: all done"):
            await watch()
        monkeypatch.setattr(clusters, "UNKNOWN_SECONDS", 0.0)
        squeue.with_suffix(".calls").unlink()
        with pytest.raises(ConfigurationError, match=r"squeue .* failed: Socket timed out"):
            await watch()


async def test_a_failing_scancel_does_not_take_the_place_of_the_error(submitted: str, tmp_path: Path) -> None:
    fail(tmp_path / "slurm" / "scancel")
    with pytest.raises(DependencyLostError, match="the servers are gone"):
        async with clusters.on_slurm(submitted, tmp_path):
            raise DependencyLostError("the servers are gone")


@pytest.mark.slow
def test_an_evaluation_runs_on_slurm_and_leaves_nothing(evaluate: Any, tiny_model: Path, slurm_path: str) -> None:
    own = {"ROLLOUT_ENGINE": "embedded", **ARITHMETIC}
    options = [option for name, value in own.items() for option in ("--env", f"{name}={value}")]
    given = ("--model", tiny_model, "--scheduler", "slurm", "--num-servers", "2", "--samples", "4", "--split", "all")
    command = evaluate(*given, *options, PATH=slurm_path, FAKE_TASKS="2")
    results = Results.model_validate(command.succeed())
    assert results.left_out == {}
    assert len(command.samples()) == 500

    def is_over() -> bool:
        marks = [p for p in psutil.process_iter() if str(command.output) in " ".join(_command_line(p))]
        return not marks

    wait_until(is_over, "the end of Slurm's job", idle_seconds=IDLE_SECONDS)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return [*process.cmdline(), process.environ().get("SHARED_DIR", "")]
    except psutil.Error:
        return []


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_says_how_to_install_it(here: Here, tiny_model: Path, rewards: str) -> None:
    given = ("--model", tiny_model, "--scheduler", "ray", "--dataset", "arithmetic", "--reward-url", rewards)
    command = here(*given, PROMPT_STYLE="plain")
    assert (command.code, "pip install ray" in command.text) == (78, True), command.text


class FakeRay(ModuleType):
    """As much of Ray as the scheduler uses, with actors that have their rank as host."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("ray")
        self.error, self.started, self.stopped, self.is_up = error, [], 0, False

    def init(self, **_: Any) -> None:
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def remote(self, **_: Any) -> Callable[[type], SimpleNamespace]:
        return lambda _: SimpleNamespace(remote=self.actor)

    def actor(self, _variables: Any, rank: int, router: str) -> SimpleNamespace:
        self.started.append((rank, router))

        async def get_router() -> str:
            if self.error:
                raise self.error
            return "a:1"

        async def exit_code() -> int:
            return 3

        async def stop() -> None:
            self.stopped += 1

        named = {"router": get_router, "exit_code": exit_code, "stop": stop}
        return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in named.items()})


async def test_nodes_on_ray_get_the_first_ones_router_and_all_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    async with clusters.on_ray(3, 1, {}) as (url, watch):
        assert (url, ray.started) == ("http://a:1", [(0, ""), (1, "a:1"), (2, "a:1")])
        with pytest.raises(DependencyLostError, match="has ended, with exit code 3; see"):
            await watch()
    assert (ray.stopped, ray.is_up) == (3, False)
    ray.error = RuntimeError("the machine was lost")
    with pytest.raises(DependencyLostError, match="could not start the first node: the machine was lost"):
        async with clusters.on_ray(1, 1, {}):
            pass


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
    own = {"ROLLOUT_ENGINE": "embedded", **ARITHMETIC}
    options = [option for name, value in own.items() for option in ("--env", f"{name}={value}")]
    given = ("--model", tiny_model, "--scheduler", "ray", "--num-servers", "2", "--samples", "4", "--split", "all")
    command = evaluate(*given, *options)
    results = Results.model_validate(command.succeed())
    assert results.left_out == {}
    assert len(command.samples()) == 500
