"""Servers on clusters: a Slurm whose commands start processes of this machine, and a local Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from evaluation import clusters
from evaluation.launchers import servers_for
from evaluation.node import SUFFIX, Allocation
from evaluation.plan import Plan, ServerOptions
from evaluation.report import Results
from evaluation.settings import EvaluationSettings, SchedulerName
from services.core.endpoints import proxy_of
from services.core.errors import ConfigurationError, DependencyLostError
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
running = [subprocess.Popen(sys.argv[2:]) for _ in range(tasks)]
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
    text = clusters.slurm_script("evaluate", Allocation(3, 2, 4), variables, tmp_path)
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
        f"exec srun --kill-on-bad-exit=0 {sys.executable} -m evaluation.node {tmp_path}",
    ]


def test_a_directory_with_unusual_characters_is_quoted_as_sbatch_reads_it() -> None:
    text = clusters.slurm_script("evaluate", Allocation(), {}, Path("/data/my 100% runs"))
    assert "#SBATCH --output='/data/my 100%% runs/slurm.log'\n" in text
    assert text.endswith(" -m evaluation.node '/data/my 100% runs'\n")


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


async def test_a_given_reward_server_takes_the_place_of_our_own_and_started_nodes_are_asked_without_a_proxy(
    slurm_path: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", slurm_path)
    for name, value in {
        "DATASET": "arithmetic",
        "HTTP_PROXY": "http://proxy:3128",
        "NO_PROXY": "",
        "no_proxy": "",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "slurm" / "srun").write_text("#!/bin/sh\nexec sleep 60\n")
    options = ServerOptions(scheduler=SchedulerName.SLURM, reward_url="http://127.0.0.1:2")
    plan = Plan(
        EvaluationSettings(), models=[str(tiny_model)], run_dir=None, servers=options, output=None, variables={}
    )
    said: list[str] = []
    async with servers_for(plan, str(tiny_model), tmp_path, said.append) as servers:
        assert servers.reward.url == "http://127.0.0.1:2"
        [directory] = (tmp_path / "servers").glob("slurm-*")
        (directory / f"node{SUFFIX}").write_text("http://slurm-7:31000")
        assert proxy_of("http://slurm-7:31000") == "http://proxy:3128"
        assert servers.discover is not None
        assert proxy_of(*await servers.discover()) is None
    assert not any("reward-server" in line for line in said)


def test_a_dry_run_shows_it_and_starts_nothing(here: Here, tiny_model: Path) -> None:
    options = ("--scheduler", "slurm", "--allocation", "d4t2", "--dry-run", "--dataset", "arithmetic")
    exported = {"JOBGROUP_TOKEN": "secret", "SGLANG_EXTRA_FLAGS": "--mem-fraction-static 0.8"}
    command = here("--model", tiny_model, *options, **exported)
    assert command.code == 0, command.text
    assert "#SBATCH --ntasks=4" in command.text
    assert "export SGLANG_TP_SIZE=2" in command.text
    assert "export SGLANG_EXTRA_FLAGS='--mem-fraction-static 0.8 --pp-size 1'" in command.text
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


async def test_a_job_that_ends_is_an_error_with_the_end_of_its_log(
    slurm_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", slurm_path)
    monkeypatch.setattr(clusters, "POLL_SECONDS", 0.05)
    text = f"#SBATCH --output={tmp_path / clusters.LOG}\necho no such model >&2; exit 78\n"
    async with clusters.on_slurm(text, tmp_path) as (_, watch):
        with pytest.raises(DependencyLostError, match="has ended: no such model; see"):
            await watch()


def fail(program: Path, times: int | None = None) -> None:
    """Let one of Slurm's commands fail, at its first ``times`` calls or at all."""
    works = program.with_suffix(".works")
    program.rename(works)
    calls = program.with_suffix(".calls")
    limit = "" if times is None else f'[ "$(wc -l < {calls})" -gt {times} ] && exec {works} "$@"'
    program.write_text(f"#!/bin/sh\necho >> {calls}\n{limit}\necho 'Socket timed out' >&2\nexit 1\n")
    program.chmod(0o755)


async def test_squeue_may_fail_for_a_while(slurm_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", slurm_path)
    monkeypatch.setattr(clusters, "POLL_SECONDS", 0.05)
    squeue = tmp_path / "slurm" / "squeue"
    text = f"#SBATCH --output={tmp_path / clusters.LOG}\necho all done; exit 0\n"
    fail(squeue, times=3)
    async with clusters.on_slurm(text, tmp_path) as (_, watch):
        with pytest.raises(DependencyLostError, match="has ended: all done"):
            await watch()
        monkeypatch.setattr(clusters, "UNKNOWN_SECONDS", 0.0)
        squeue.with_suffix(".calls").unlink()
        with pytest.raises(ConfigurationError, match=r"squeue .* failed: Socket timed out"):
            await watch()


async def test_a_failing_scancel_does_not_take_the_place_of_the_error(
    slurm_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", slurm_path)
    fail(tmp_path / "slurm" / "scancel")
    text = f"#SBATCH --output={tmp_path / clusters.LOG}\nexit 0\n"
    with pytest.raises(DependencyLostError, match="the servers are gone"):
        async with clusters.on_slurm(text, tmp_path):
            raise DependencyLostError("the servers are gone")


@pytest.mark.slow
def test_an_evaluation_runs_on_slurm_and_leaves_nothing(evaluate: Any, tiny_model: Path, slurm_path: str) -> None:
    own = {"ROLLOUT_ENGINE": "embedded", **ARITHMETIC}
    options = [option for name, value in own.items() for option in ("--env", f"{name}={value}")]
    given = ("--model", tiny_model, "--scheduler", "slurm", "--num-servers", "2", "--samples", "4", "--split", "all")
    command = evaluate(*given, *options, PATH=slurm_path, FAKE_TASKS="2")
    results = Results.model_validate(command.succeed())
    assert results.left_out == {}
    assert len(results.servers["urls"]) == 2
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


class Reference(asyncio.Future[Any]):
    """Ray's reference to a result, which is not there while the actor waits for room."""


class FakeRay(ModuleType):
    """As much of Ray as the scheduler uses. A node's placement is its URL, None for one that waits, or an error."""

    def __init__(self, placements: list[str | Exception | None]) -> None:
        super().__init__("ray")
        self.placements, self.stopped, self.is_up = iter(placements), 0, False

    def init(self, **_: Any) -> None:
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def wait(self, references: list[Reference], **_: Any) -> tuple[list[Reference], list[Reference]]:
        return [one for one in references if one.done()], [one for one in references if not one.done()]

    def remote(self, **_: Any) -> Callable[[type], SimpleNamespace]:
        return lambda _: SimpleNamespace(remote=lambda _: self.actor(next(self.placements)))

    def actor(self, placement: str | Exception | None) -> SimpleNamespace:
        def method(result: Callable[[], Any]) -> SimpleNamespace:
            def call() -> Reference:
                reference = Reference()
                if isinstance(placement, Exception):
                    reference.set_exception(placement)
                elif placement is not None:
                    reference.set_result(result())
                return reference

            return SimpleNamespace(remote=call)

        def stop() -> None:
            self.stopped += 1

        return SimpleNamespace(url=method(lambda: placement), exit_code=method(lambda: 3), stop=method(stop))


async def test_nodes_are_found_as_ray_starts_them_and_all_that_started_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(["http://a:1", RuntimeError("the machine was lost"), None])
    monkeypatch.setitem(sys.modules, "ray", ray)
    async with asyncio.timeout(IDLE_SECONDS):
        async with clusters.on_ray(Allocation(data=3), {}) as (discover, _):
            assert await discover() == ["http://a:1"]
    assert (ray.stopped, ray.is_up) == (1, False)


async def test_a_lost_machine_ends_only_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(["http://a:1", RuntimeError("the machine was lost")])
    monkeypatch.setitem(sys.modules, "ray", ray)
    async with clusters.on_ray(Allocation(data=2), {}) as (_, watch):
        with pytest.raises(DependencyLostError, match="have ended, with 3, the machine was lost; see"):
            await watch()


@pytest.mark.oracles
def test_an_evaluation_runs_on_a_local_ray_cluster(evaluate: Any, tiny_model: Path) -> None:
    own = {"ROLLOUT_ENGINE": "embedded", **ARITHMETIC}
    options = [option for name, value in own.items() for option in ("--env", f"{name}={value}")]
    given = ("--model", tiny_model, "--scheduler", "ray", "--num-servers", "2", "--samples", "4", "--split", "all")
    command = evaluate(*given, *options)
    results = Results.model_validate(command.succeed())
    assert results.left_out == {}
    assert len(results.servers["urls"]) == 2
    assert len(command.samples()) == 500
