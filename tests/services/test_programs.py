"""Programs as agents: the task that they read, the reward that they give, and how each of them ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services import programs
from services.agents import EPISODES_AT_ONCE, AgentFailedError, Example, play
from services.core import memory
from services.core.processors import CORES_VARIABLE
from services.programs import Program, ProgramFailedError, programs_at_once
from services.protocol.groups import RewardResult, RewardStatus
from services.protocol.rewards import RewardItem
from tests.waiting import IDLE_SECONDS, wait_until

ENDPOINT: dict[str, Any] = {"base_url": "http://gateway/sessions/s/v1", "api_key": "s", "http_client": None}


async def score(items: Sequence[RewardItem]) -> list[RewardResult]:
    """Score an answer by whether it is the ground truth."""
    return [RewardResult(reward=float(item.response == item.ground_truth)) for item in items]


def example() -> Example:
    return Example(id="p/1", prompt="6*7=", ground_truth="42", category="products", model="m", scorer=score)


async def answer(command: str, task: Example | None = None, seconds: float = IDLE_SECONDS) -> float | None:
    return await play(Program(command), task or example(), seconds, **ENDPOINT)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() not in ("", "Z", "Z+", "Zs")


async def test_a_program_has_the_task_and_its_endpoint_and_no_secret_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in programs.WITHHELD:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OWN_KEY", "own")
    variables = tmp_path / "variables"
    assert await answer(f"env > {variables}; cat > {tmp_path}/task; HF_TOKEN=own; echo 42") == 1.0
    task = json.loads((tmp_path / "task").read_text())
    assert (task["prompt"], task["ground_truth"], task["category"], task["model"]) == ("6*7=", "42", "products", "m")
    seen = dict(line.split("=", 1) for line in variables.read_text().splitlines() if "=" in line)
    assert (seen["OPENAI_BASE_URL"], seen["OPENAI_API_KEY"]) == ("http://gateway/sessions/s/v1", "s")
    assert (seen["ANTHROPIC_BASE_URL"], seen["ANTHROPIC_API_KEY"]) == ("http://gateway/sessions/s", "s")
    assert seen["OWN_KEY"] == "own"
    assert not seen.keys() & set(programs.WITHHELD)


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ('echo thinking; echo \'{"reward": 0.25, "reason": "half"}\'', RewardResult(reward=0.25, reason="half")),
        ("echo '{\"reward\": true}'; echo", RewardResult(reward=1.0)),
        (
            'echo \'{"reward": null, "reason": "no network"}\'',
            RewardResult(reward=None, status=RewardStatus.ERROR, reason="no network"),
        ),
        ("echo 42", RewardResult(reward=1.0)),
        ("printf '4\\n2'", RewardResult(reward=0.0)),
        ("echo '{\"answer\": 42}'", RewardResult(reward=0.0)),
        ("true", RewardResult(reward=0.0)),
    ],
)
async def test_the_last_line_is_the_reward_or_else_the_output_is_scored(said: str, reward: RewardResult) -> None:
    task = example()
    given = await answer(said, task)
    assert given == reward.reward
    assert task.result_of(given) == reward


@pytest.mark.parametrize("reward", ['"high"', "NaN", "[1]", "1" + "0" * 400])
async def test_a_reward_that_is_no_finite_number_is_a_failure(reward: str) -> None:
    with pytest.raises(AgentFailedError, match="finite number, or null") as failed:
        await answer(f"echo '{{\"reward\": {reward}}}'")
    assert failed.value.reason == "reward"


async def test_an_exit_code_is_a_failure_with_the_end_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProgramFailedError, match=r"exit code 3; its output ends with '.*no such tool'"):
        await answer("echo '{\"reward\": 1}'; echo no such tool >&2; exit 3")
    with pytest.raises(ProgramFailedError, match=r"exit code 127.*not found"):
        await answer("no-such-program-anywhere")
    monkeypatch.setattr(programs, "OUTPUT_BYTES", 5000)
    with pytest.raises(ProgramFailedError) as failed:
        await answer("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; exit 1")
    assert str(failed.value).endswith(r"\nline 19999'")
    assert len(str(failed.value)) < 2 * programs.SAID_CHARACTERS


async def test_a_long_output_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "OUTPUT_BYTES", 5000)
    task = example()
    assert await answer("head -c 1000000 /dev/zero; echo; echo '{\"reward\": 1}'", task) == 1.0


async def test_the_deadline_ends_every_process_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(programs, "TERM_POLLS", 6)
    pids = tmp_path / "pids"
    command = f"""
        echo $$ >> {pids}
        (trap '' TERM; sh -c 'echo $$ >> {pids}; sleep 600; sleep 600') &
        echo so far
        sleep 600
    """
    with pytest.raises(AgentFailedError, match=r"took more than 2 s; its output ends with 'so far") as failed:
        await answer(command, seconds=2)
    assert failed.value.reason == "timeout"
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2
    wait_until(lambda: not any(map(is_running, found)), "the end of the program's processes")


async def test_a_program_may_clean_up_when_its_deadline_comes(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"import signal, time, sys; signal.signal(15, lambda *_: sys.exit(open({str(done)!r}, 'w').close())); "
    with pytest.raises(AgentFailedError):
        await answer(f'{sys.executable} -S -c "{code} print(1, flush=True); time.sleep(600)"', seconds=3)
    assert done.exists()


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert await asyncio.wait_for(answer(f"sleep 600 & echo $! > {pid}; echo 42"), IDLE_SECONDS) == 1.0
    wait_until(lambda: not is_running(int(pid.read_text())), "the end of the sleeper")


async def test_a_task_that_is_not_read_holds_nothing_up() -> None:
    task = example()
    task.prompt = "x" * 10**6
    assert await answer("echo 42", task) == 1.0


OWNER = """
    import asyncio
    from tests.services.test_programs import answer
    asyncio.run(answer("trap '' TERM; echo $$ > {pid}; sleep 600; sleep 600"))
"""


def test_no_program_outlives_a_killed_owner(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER.format(pid=pid))]) as owner:
        wait_until(lambda: pid.exists() and pid.read_text().strip() != "", "the program's start")
        program = int(pid.read_text())
        assert is_running(program)
        os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(program), "the end of the program")


@pytest.mark.parametrize(
    ("cores", "gibibytes", "at_once"), [("2", 64, 16), ("16", 4, 4), ("16", 0.5, 1), ("64", 1024, EPISODES_AT_ONCE)]
)
def test_the_cores_and_the_memory_of_the_pod_bound_the_programs_at_once(
    cores: str, gibibytes: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setenv(CORES_VARIABLE, cores)
    monkeypatch.setattr(memory, "host_memory", lambda: int(gibibytes * 2**30))
    assert programs_at_once() == at_once
