"""The launcher of a node's ranks: the variables that the ranks get, the node's exit code, and signals."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import trainer.run
from local_runner import spec
from local_runner.nodes import allocate
from local_runner.spec import JOB_GROUPS
from local_runner.supervisor import PRIMARY_STOP_SECONDS
from services.core import machine
from services.core.errors import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_PEER_LOST, EXIT_RECOVERABLE, DependencyLostError
from tests.skypilot_facts import skypilot_facts
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until
from trainer import __main__ as program
from trainer.model.ranks import PeerLostError

ROOT = Path(__file__).parents[2]
NODE = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "PYTHONUNBUFFERED": "1",
}
LAUNCH = """
import sys
from trainer.__main__ import launch_ranks
code = launch_ranks(2, [sys.executable, "-c", sys.argv[1]])
assert "torch" not in sys.modules
sys.exit(code)
"""


def launch(rank_program: str) -> subprocess.Popen[str]:
    """Start the second of two nodes with two ranks each, whose program is given."""
    command = [sys.executable, "-c", LAUNCH, rank_program]
    return subprocess.Popen(command, cwd=ROOT, env=NODE, stdout=subprocess.PIPE, text=True)


def test_ranks_get_torchruns_variables() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    node = launch(f"import os; os.write(1, (' '.join(os.environ[name] for name in {names}) + '\\n').encode())")
    lines = node.communicate(timeout=LIMIT_SECONDS)[0].splitlines()
    assert node.returncode == 0
    assert sorted(line.rsplit(" ", 1)[0] for line in lines) == ["2 0 4 2 10.0.0.1", "3 1 4 2 10.0.0.1"]
    assert len({line.rsplit(" ", 1)[1] for line in lines}) == 1


BESIDE = """
import sys
from services.core.processes import Command
from trainer.__main__ import launch_ranks
sys.exit(launch_ranks(1, [sys.executable, "-c", sys.argv[1]], [Command("engines", sys.executable, sys.argv[2], [])]))
"""


@pytest.mark.parametrize(
    ("rank", "engines", "code"),
    [
        ("pass", "import time; time.sleep(999)", 0),
        ("import time; time.sleep(999)", f"raise SystemExit({EXIT_CONFIGURATION})", EXIT_CONFIGURATION),
        ("import time; time.sleep(999)", "pass", EXIT_RECOVERABLE),
        ("import time; time.sleep(999)", "import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
    ids=["ranks end", "engines refuse", "engines end", "engines are killed"],
)
def test_ranks_and_the_engines_beside_them_end_together(tmp_path: Path, rank: str, engines: str, code: int) -> None:
    (tmp_path / "beside.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w')\n{engines}\n")
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'started')!r}): time.sleep(0.01)\n"
    environment = NODE | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", BESIDE, waits + rank, "beside"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=LIMIT_SECONDS).returncode == code
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and "beside" in p.info["cmdline"]]


def test_the_first_rank_that_fails_ends_the_others_and_gives_the_nodes_code() -> None:
    node = launch(
        f"""
import os, signal, sys, time
if os.environ["LOCAL_RANK"] == "0":
    sys.exit({EXIT_FAILED})
signal.signal(signal.SIGTERM, lambda *_: sys.exit({EXIT_PEER_LOST}))
time.sleep({LIMIT_SECONDS})
"""
    )
    assert node.wait(LIMIT_SECONDS) == EXIT_FAILED


def test_ranks_have_as_long_for_a_checkpoint_as_whoever_asks_for_it() -> None:
    tasks = yaml.safe_load_all((ROOT / "jobgroup.yaml").read_text())
    [hook] = [hook for task in tasks if task["name"] == "ppo-trainer" for hook in task["config"]["hooks"]]
    assert max(hook["timeout"], PRIMARY_STOP_SECONDS) <= program.STOP_SECONDS


def test_a_signal_reaches_the_ranks_which_may_still_write() -> None:
    node = launch(
        f"""
import os, signal, sys, time
def leave(*_):
    os.write(1, b"written\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
os.write(1, b"started\\n")
time.sleep({LIMIT_SECONDS})
"""
    )
    assert node.stdout is not None
    assert [node.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    node.send_signal(signal.SIGTERM)
    assert node.stdout.read() == "written\n" * 2
    assert node.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM


# --- exit codes ------------------------------------------------------------------------------------------------------


@contextmanager
def start_trainer(
    directory: Path, num_nodes: int, settings: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a trainer whose services are nowhere on every node, and kill what still runs at the end."""
    group = spec.load(ROOT / "jobgroup.yaml", spec.Overrides(num_nodes={"ppo-trainer": num_nodes}))
    with allocate(group) as addresses:
        environment = os.environ | {
            "SHARED_DIR": str(directory),
            "RUN_ID": "test",
            "SERVICE_DEADLINE_SECONDS": "1",
            "ENGINE_START_SECONDS": "1",
            "JOBGROUP_ENDPOINTS": addresses.variable,
            "SKYPILOT_NODE_IPS": "\n".join(addresses.hosts["ppo-trainer"]),
            "SKYPILOT_NUM_NODES": str(num_nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_POD_CPU_CORE_LIMIT": "1",
            **settings,
        }
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "trainer"],
                cwd=ROOT,
                env=environment | {"SKYPILOT_NODE_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_nodes)
        ]
        try:
            yield nodes
        finally:
            for node in nodes:
                node.kill()


@pytest.mark.slow
def test_a_service_that_never_comes_up_uses_up_restarts(tiny_model, tmp_path):
    with start_trainer(tmp_path, 1, {"MODEL_NAME": str(tiny_model)}) as [node]:
        output, _ = node.communicate(timeout=LIMIT_SECONDS)
    assert node.returncode == EXIT_FAILED, output
    assert any(line.startswith("error: ") and "after 2 s" in line for line in output.splitlines()), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "variables", [{"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NUM_NODES": "2"}, {"RANK": "0"}], ids=str
)
def test_a_wrong_setting_ends_launcher_and_rank_with_a_line(monkeypatch, capfd, variables):
    for name, value in ({"LEARNING_RATE": "-1", "SKYPILOT_NODE_RANK": "0"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(program, "kill_stale_processes", lambda: None)
    monkeypatch.setattr(program, "launch_ranks", lambda *_, **__: pytest.fail("launched"))
    assert program.main() == EXIT_CONFIGURATION
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: LEARNING_RATE")


@pytest.mark.parametrize(
    ("ranks", "node"),
    [
        ({EXIT_PEER_LOST}, EXIT_PEER_LOST),
        ({EXIT_RECOVERABLE}, EXIT_RECOVERABLE),
        ({EXIT_RECOVERABLE, EXIT_PEER_LOST}, EXIT_RECOVERABLE),
        # What one rank met by itself may come back after every restart, whatever its end did to the others.
        ({EXIT_FAILED, EXIT_PEER_LOST}, EXIT_FAILED),
        ({EXIT_FAILED, EXIT_RECOVERABLE}, EXIT_FAILED),
        ({-9, EXIT_PEER_LOST}, 137),
        ({-9, EXIT_FAILED}, 137),
        ({EXIT_CONFIGURATION, EXIT_FAILED, EXIT_PEER_LOST, 137}, EXIT_CONFIGURATION),
    ],
)
def test_a_nodes_code_is_that_of_the_rank_that_failed_by_itself(ranks, node):
    assert program.node_code(ranks) == node


def test_the_ranks_of_a_node_share_its_cores(monkeypatch):
    numbers: list[int] = []

    def lose(*_: Any) -> None:
        raise DependencyLostError("gone")

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(machine, "cores", lambda: 12)
    monkeypatch.setattr(trainer.run, "join_ranks", lose)
    monkeypatch.setattr(trainer.run.torch, "set_num_threads", numbers.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert program.main() == EXIT_RECOVERABLE
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert program.main() == EXIT_RECOVERABLE
    assert numbers == [3, 12]


def test_a_rank_that_lost_its_peers_lets_them_end_first(monkeypatch):
    pauses: list[float] = []

    def lose(*_: Any) -> None:
        raise PeerLostError("rank 1 of 2 lost the others")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(trainer.run, "join_ranks", lose)
    monkeypatch.setattr(program.time, "sleep", pauses.append)
    assert program.main() == EXIT_PEER_LOST
    assert pauses == [program.PEER_LOST_SECONDS]


@pytest.mark.slow
def test_the_other_node_of_a_killed_rank_is_not_recoverable_for_free(tiny_model, tmp_path):
    settings = {"MODEL_NAME": str(tiny_model), "ENGINE_START_SECONDS": "600"}
    with start_trainer(tmp_path, 2, settings) as (first, second):
        assert first.stdout is not None
        assert any("policy loaded" in line for line in first.stdout)
        [rank] = psutil.Process(first.pid).children()
        rank.kill()
        killed = time.monotonic()
        assert first.wait(LIMIT_SECONDS) == 137
        assert second.wait(LIMIT_SECONDS) == EXIT_PEER_LOST
        assert time.monotonic() - killed >= program.PEER_LOST_SECONDS
        assert second.stdout is not None
        assert "error: rank 1 of 2 lost the others" in second.stdout.read()


class FullLog(io.TextIOBase):
    """A log on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_does_not_change_the_exit_code(monkeypatch):
    def lose(*_: Any) -> None:
        raise DependencyLostError("replay-buffer did not answer")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "stderr", FullLog())
    monkeypatch.setattr(trainer.run, "join_ranks", lose)
    assert program.main() == EXIT_RECOVERABLE


# --- the hook that lets a cancelled trainer leave a checkpoint -------------------------------------------------------


TRAINER = """
import os, pathlib, signal, sys, time
def end(*_):
    time.sleep(0.3)
    pathlib.Path("checkpoint-" + os.environ.get("RANK", "launcher")).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready-" + os.environ.get("RANK", "launcher")).touch()
time.sleep(600)
"""


def stop(*arguments: str) -> str:
    """Run the hook's program as SkyPilot does: elsewhere, with nothing of the task's environment."""
    command = ["/usr/bin/env", "-i", sys.executable, str(ROOT / "trainer/stop.py"), *arguments]
    return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True, timeout=IDLE_SECONDS).stdout


@pytest.fixture
def start(tmp_path):
    """Start what looks like a trainer of a task, and wait until it handles signals."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/__main__.py").write_text(TRAINER)
    started = []

    def process(task_id: str, rank: str | None = None) -> subprocess.Popen[bytes]:
        variables = {"SKYPILOT_TASK_ID": task_id} | ({} if rank is None else {"RANK": rank})
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "PYTHONPATH")}
        started.append(subprocess.Popen([sys.executable, "-m", "trainer"], cwd=tmp_path, env=kept | variables))
        ready = tmp_path / f"ready-{rank or 'launcher'}"
        wait_until(ready.exists, "the trainer handles signals")
        ready.unlink()
        return started[-1]

    yield process
    for one in started:
        one.kill()
        one.wait(IDLE_SECONDS)


@pytest.mark.parametrize("ranks", [[None], [None, "0", "1"]], ids=["one rank", "a launcher with ranks"])
def test_rank_0_is_asked_and_waited_for(start, tmp_path, ranks):
    task_id = f"test-{uuid.uuid4()}"
    other = start(f"test-{uuid.uuid4()}")
    processes = [start(task_id, rank) for rank in ranks]
    asked = processes[1] if len(ranks) > 1 else processes[0]
    # Reaped beside the hook, as bash does in a pod.
    hook = subprocess.Popen([sys.executable, str(ROOT / "trainer/stop.py"), task_id], stdout=subprocess.PIPE, text=True)
    assert asked.wait(IDLE_SECONDS) == 143
    said, _ = hook.communicate(timeout=IDLE_SECONDS)
    assert f"asked process {asked.pid} to stop" in said
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [
        f"checkpoint-{ranks[-2] if ranks[1:] else 'launcher'}"
    ]
    assert all(one.poll() is None for one in (other, *processes) if one is not asked)


def test_without_a_trainer_nothing_is_waited_for():
    assert stop(f"test-{uuid.uuid4()}").startswith("trainer: nothing runs")


@pytest.mark.parametrize("file", JOB_GROUPS)
def test_skypilot_runs_it_when_the_trainer_is_cancelled(file):
    hooks = {name: task["hooks"] for name, task in skypilot_facts()["files"][file]["tasks"].items() if task["hooks"]}
    command = "python3 ~/sky_workdir/trainer/stop.py"
    assert hooks == {"ppo-trainer": [{"run": command, "events": ["down"], "timeout": 600}]}
