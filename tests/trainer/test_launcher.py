"""The launcher of a node's ranks: the variables that the ranks get, the node's exit code, and signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from local_runner.supervisor import PRIMARY_STOP_SECONDS
from services.core.errors import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_PEER_LOST, EXIT_RECOVERABLE
from tests.waiting import LIMIT_SECONDS
from trainer import __main__ as program

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
