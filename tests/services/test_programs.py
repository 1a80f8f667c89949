"""Programs as agents: the task that they read, the reward that they give, and how each of them ends."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services import agents
from services.agents import (
    EPISODES_AT_ONCE,
    AgentFailedError,
    Example,
    Program,
    play,
    programs_at_once,
)
from services.core import machine
from services.core.endpoints import PROXY_VARIABLES
from services.core.machine import CORES_VARIABLE
from services.protocol.rewards import RewardResult, RewardStatus
from tests.fake_service import fake_service
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until

ENDPOINT: dict[str, Any] = {"base_url": "http://gateway/sessions/s/v1", "api_key": "s", "http_client": None}


def example(truth: str = "42") -> Example:
    async def score(response: str) -> RewardResult:
        return RewardResult(reward=float(response == truth))

    return Example(id="p/1", prompt="6*7=", ground_truth=truth, category="products", model="m", scorer=score)


async def answer(command: str, task: Example | None = None, seconds: float = IDLE_SECONDS) -> float | None:
    return await play(Program(command), task or example(), seconds, **ENDPOINT)


async def answer_late(command: str, is_ready: Callable[[], bool]) -> None:
    """Play a program whose time begins to pass once it ``is_ready``."""
    started, stood = time.monotonic(), 0.0

    async def waited() -> float:
        nonlocal stood
        if not is_ready():
            stood = time.monotonic() - started
        return stood

    await play(Program(command), example(), 0.3, waited=waited, **ENDPOINT)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() not in ("", "Z", "Z+", "Zs")


SECRETS = (
    "JOBGROUP_TOKEN",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "MY_PASSWORD",
)


async def test_a_program_has_the_task_and_its_endpoint_and_no_secret_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OWN_FILE", "own")
    variables = tmp_path / "variables"
    assert await answer(f"env > {variables}; cat > {tmp_path}/task; HF_TOKEN=own; echo 42") == 1.0
    task = json.loads((tmp_path / "task").read_text())
    assert (task["prompt"], task["ground_truth"], task["category"], task["model"]) == ("6*7=", "42", "products", "m")
    seen = dict(line.split("=", 1) for line in variables.read_text().splitlines() if "=" in line)
    assert (seen["OPENAI_BASE_URL"], seen["OPENAI_API_KEY"]) == ("http://gateway/sessions/s/v1", "s")
    assert (seen["ANTHROPIC_BASE_URL"], seen["ANTHROPIC_API_KEY"]) == ("http://gateway/sessions/s", "s")
    assert seen["OWN_FILE"] == "own"
    assert not seen.keys() & {*SECRETS}


PYTHON = shlex.quote(sys.executable)
URL = 'os.environ["OPENAI_BASE_URL"] + "/answer"'
ASKS = {
    "curl": "curl -s $OPENAI_BASE_URL/answer",
    "urllib": f"{PYTHON} -S -c 'import os, urllib.request as r; print(r.urlopen({URL}).read().decode())'",
    "httpx": f"{PYTHON} -c 'import os, httpx; print(httpx.get({URL}).text)'",
}


@pytest.mark.parametrize("client", ASKS)
async def test_a_program_reaches_its_endpoint_without_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    if client == "curl" and shutil.which(client) is None:
        pytest.skip("there is no curl; install it with your system's packages")
    for name in PROXY_VARIABLES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.delenv("no_proxy", raising=False)
    with fake_service({"GET /v1/answer": lambda _: (200, "42")}) as service:
        endpoint = ENDPOINT | {"base_url": f"{service.endpoint.url}/v1"}
        assert await play(Program(ASKS[client]), example(), IDLE_SECONDS, **endpoint) == 1.0


SAID = {
    'echo thinking; echo \'{"reward": 0.25, "reason": "half"}\' >&3': RewardResult(reward=0.25, reason="half"),
    "(echo '{\"reward\": 0}'; echo '{\"reward\": true}'; echo) >&$GRPO_REWARD_FD; echo 4": RewardResult(reward=1.0),
    "printf '{\"reward\": 0.5}' >&$GRPO_REWARD_FD": RewardResult(reward=0.5),
    'echo \'{"reward": null, "reason": "no network"}\' >/dev/fd/$GRPO_REWARD_FD': RewardResult(
        reward=None, status=RewardStatus.ERROR, reason="no network"
    ),
    "echo 42": RewardResult(reward=1.0),
    "printf '4\\n2'": RewardResult(reward=0.0),
    "echo '{\"answer\": 42}'": RewardResult(reward=0.0),
    "true": RewardResult(reward=0.0),
}


async def test_a_reward_comes_from_its_own_file_or_else_the_output_is_scored() -> None:
    for said, reward in SAID.items():
        task = example()
        given = await answer(said, task)
        assert given == reward.reward, said
        assert task.result_of(given) == reward


async def test_the_output_is_an_answer_even_if_it_looks_like_a_reward() -> None:
    agents._warn_of_reward_in_output.cache_clear()
    text = '{"reward": 1000}'
    with capture_logs() as logs:
        assert await answer(f"echo hm; echo '{text}'") == 0.0
        assert await answer(f"echo '{text}'", example(text)) == 1.0
    # Once a process, with the line of code that gives a reward.
    [warning] = [line["event"] for line in logs if line["log_level"] == "warning" and "reward" in line["event"]]
    assert "GRPO_REWARD_FD" in warning


async def test_a_reward_that_is_no_finite_number_is_a_failure() -> None:
    for line in (*(f'{{"reward": {given}}}' for given in ('"high"', "NaN", "[1]", 10**400)), "1", "{}"):
        with pytest.raises(AgentFailedError) as failed:
            await answer(f"echo '{line}' >&3; echo 42")
        assert failed.value.reason == "reward", line


async def test_an_exit_code_is_a_failure_with_the_end_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentFailedError, match=r"exited with code 3; its output ends with '.*no such tool'"):
        await answer("echo '{\"reward\": 1}' >&3; echo no such tool >&2; exit 3")
    with pytest.raises(AgentFailedError, match=r"exited with code 127.*not found"):
        await answer("no-such-program-anywhere")
    monkeypatch.setattr(agents, "OUTPUT_BYTES", 5000)
    with pytest.raises(AgentFailedError) as failed:
        await answer("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; exit 1")
    assert str(failed.value).endswith(r"\nline 19999'")
    assert len(str(failed.value)) < 2 * agents.SHOWN_CHARACTERS


async def test_a_long_output_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "OUTPUT_BYTES", 5000)
    task = example()
    many = "head -c 1000000 /dev/zero"
    assert await answer(f"{many}; ({many}; echo; echo '{{\"reward\": 0.5}}') >&3; exit 0", task) == 0.5
    with pytest.raises(AgentFailedError, match=r"GRPO_REWARD_FD is '\d+'; write one"):
        await answer("(echo '{\"reward\": 1}'; seq -s '' 20000) >&3")


async def test_the_deadline_ends_every_process_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agents, "TERM_SECONDS", 0.3)
    pids = tmp_path / "pids"
    command = f"""
        echo $$ >> {pids}
        (trap '' TERM; sh -c 'echo $$ >> {pids}; sleep 600; sleep 600') &
        echo so far
        echo done >> {pids}
        sleep 600
    """
    with pytest.raises(AgentFailedError, match=r"took more than 0.3 s; its output ends with 'so far") as failed:
        await answer_late(command, lambda: pids.exists() and len(pids.read_text().split()) == 3)
    assert failed.value.reason == "timeout"
    found = [int(word) for word in pids.read_text().split() if word != "done"]
    assert len(found) == 2
    wait_until(lambda: not any(map(is_running, found)), "the end of the program's processes")


async def test_a_program_may_clean_up_when_its_deadline_comes(tmp_path: Path) -> None:
    begun, done = tmp_path / "begun", tmp_path / "done"
    code = f"import signal, time, sys; signal.signal(15, lambda *_: sys.exit(open({str(done)!r}, 'w').close())); "
    code += f"open({str(begun)!r}, 'w').close(); time.sleep(600)"
    with pytest.raises(AgentFailedError):
        await answer_late(f'{shlex.quote(sys.executable)} -S -c "{code}"', begun.exists)
    assert done.exists()


async def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert await asyncio.wait_for(answer(f"sleep 600 & echo $! > {pid}; echo 42"), IDLE_SECONDS) == 1.0
    wait_until(lambda: not is_running(int(pid.read_text())), "the end of the sleeper")


async def test_a_task_that_is_not_read_holds_nothing_up() -> None:
    task = example()
    task.prompt = "x" * 10**6
    assert await answer("echo 42", task) == 1.0


PRYING = """
import asyncio, os, sys
import encodings.idna
from services.relay import Relay
from tests.services.test_programs import Program, answer, example

async def main():
    async with Relay(Program("true")):
        print("starting", flush=True)
    for _ in range(2):
        task = example()
        await answer("cat /proc/[0-9]*/environ 2>&1 | tr '\\\\0' '\\\\n' | grep ^JOBGROUP_TOKEN= | sort -u", task)
        print("read", task.output)

if {user}:
    os.setgroups([])
    os.setgid({user})
    os.setuid({user})
asyncio.run(main())
"""


def pry(user: int, token: str) -> str:
    """Let programs print each JOBGROUP_TOKEN in /proc, and return what their owner and its shell print."""
    shell = ["/bin/sh", "-c", 'echo shell; "$@"; exit $?', "sh", sys.executable, "-c", PRYING.format(user=user)]
    environment = {**os.environ, "JOBGROUP_TOKEN": token}
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs root on Linux")
def test_a_program_of_root_finds_no_token_in_any_process() -> None:
    token = secrets.token_hex(8)
    # A process whose start has the token, as the launcher and its shell have.
    printed = pry(0, token)
    assert token not in printed
    assert printed.count("read") == 2
    assert "programs can read" not in printed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_start_says_once_that_a_program_of_another_user_can_read_what_its_user_can() -> None:
    printed = pry(65534 if os.geteuid() == 0 else 0, secrets.token_hex(8))
    said, read = printed.split("starting")
    assert "programs can read what this user can" in said
    assert "JOBGROUP_TOKEN" in said
    assert "programs can read" not in read


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs root on Linux")
def test_a_program_that_runs_as_another_user_gives_a_reward_and_ends(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    pid.touch()
    pid.chmod(0o666)
    tmp_path.chmod(0o755)
    command = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    inner = "sleep 600 & id -u >&2; echo $! > pid; echo '{\"reward\": 0.5}' >&$GRPO_REWARD_FD"
    task = example()
    assert asyncio.run(answer(f"cd {tmp_path}; {command} sh -c {shlex.quote(inner)}", task)) == 0.5
    assert "65534" in task.output
    wait_until(lambda: not is_running(int(pid.read_text())), "the end of the other user's process")


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


def test_the_cores_and_the_memory_of_the_pod_bound_the_programs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for cores, gibibytes, at_once in (("2", 64, 16), ("16", 4, 4), ("16", 0.5, 1), ("64", 1024, EPISODES_AT_ONCE)):
        monkeypatch.setenv(CORES_VARIABLE, cores)
        monkeypatch.setattr(machine, "host_memory", lambda size=gibibytes: int(size * 2**30))
        assert programs_at_once() == at_once
