"""Programs as agents in the boxes of Harbor tasks: they reach the model and nothing else, and the tests grade them."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from evaluation.servers import parse_url
from evaluation.store import Kind, Sample
from services import harnesses
from services.agents import AgentFailedError
from services.clients.environment import EnvironmentClient
from services.clients.games import BoxedProgram, ToolAgent
from services.data_server.harbor import read_task
from services.environment_server import harbor
from services.environment_server.app import create_app
from services.environment_server.settings import EnvironmentSettings
from services.harnesses import PRESETS, Harness
from services.http.server import serving
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardStatus
from tests.evaluation.agent_play import SETTINGS, Ground, ground_on
from tests.services.test_harnesses import REAL, last_turn, roomy_model, scripted, shell
from tests.tasks import TASKS, write_task
from tests.waiting import IDLE_SECONDS, stats_show, wait_ready

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux"),
    pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap"),
    pytest.mark.slow,
]

LIMITS = SETTINGS.model_copy(update={"agent_max_turns": 4, "agent_seconds": 120.0, "max_new_tokens": 400})

ASKS = """
import json, os, subprocess, sys, urllib.request
task = json.load(sys.stdin)
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
def post(path, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + KEY}
    return json.load(urllib.request.urlopen(urllib.request.Request(URL + path, json.dumps(body).encode(), headers)))
def ask(text=task["prompt"]):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", {"model": task["model"], "messages": messages})["choices"][0]["message"]["content"]
"""
VALUE, AGENT = Path("tasks/value"), "python agent.py"
RUNS = f"{ASKS}\nsubprocess.run(['sh', '-c', ask()])\n"
"""An agent that runs what the model says, once."""


def write_agent(code: str) -> None:
    Path("agent.py").write_text(code)


@dataclass
class Play:
    """Tasks on an environment-server, and a gateway."""

    ground: Ground
    environments: EnvironmentClient

    async def __call__(
        self, task: Path, command: str, says: list[str], *, settings: Any = LIMITS, agent: Any = None
    ) -> Sample:
        """Play a task by a command, with a model that says some texts."""
        found = read_task(task)
        prompt = Prompt(id="harbor/test/0", prompt=found.steps[0].instruction, ground_truth=str(found.number))
        prompt = prompt.model_copy(update={"is_task": True})
        self.ground.engine.says = list(says)
        agent = agent or BoxedProgram(
            *(command, settings, settings.max_new_tokens, self.environments), patience=IDLE_SECONDS
        )
        [sample] = await self.ground.workflow(agent, settings).sample(prompt, Kind.GREEDY, [0])
        return sample


@pytest.fixture
async def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    """``play(task, command, says)``, in a working directory with ``agent.py``."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write_agent(RUNS)
    shutil.copytree(TASKS, "tasks")
    write_task(VALUE)
    write_task(Path("tasks/seen"), {"tests/test.sh": SEEN, "instruction.md": "Look around.\n"})
    for name, value in {"DATASET": "harbor:tasks", "SANDBOX": "bwrap", "CODE_CPU_SECONDS": "20"}.items():
        monkeypatch.setenv(name, value)
    async with AsyncExitStack() as stack:
        ground = await stack.enter_async_context(
            ground_on(roomy_model(tmp_path / "model"), tmp_path / "gateway", monkeypatch)
        )
        settings = EnvironmentSettings(environment="sandbox", environment_step_seconds=300)
        app = create_app(settings)
        await stack.enter_async_context(app.router.lifespan_context(app))
        await wait_ready(app)
        address = await stack.enter_async_context(serving(app))
        environments = EnvironmentClient([parse_url(address)], deadline=IDLE_SECONDS)
        yield Play(ground, await stack.enter_async_context(environments))


async def test_a_program_works_in_its_tasks_box_and_the_tests_grade_what_it_leaves(play: Play) -> None:
    right = await play(VALUE, AGENT, ["echo 7 > value.txt"])
    assert (right.result.reward, right.is_correct, right.turns) == (1.0, True, 1)
    wrong = await play(VALUE, AGENT, ["echo 8 > value.txt"])
    assert (wrong.result.reward, wrong.is_correct) == (0.0, False)
    # Whatever its exit code is.
    assert (await play(VALUE, f"{AGENT}; exit 3", ["echo 7 > value.txt"])).result.reward == 1.0
    steps = ["seq 10 | awk '{print $1 * $1}' > squares.txt", "echo 400 > total.txt"]
    assert (await play(Path("tasks/two-steps"), AGENT, steps)).result.reward == 1.0
    assert play.ground.engine.asked[-1].count("`/app/more.txt` has") == 1
    half = "cat > tidy.py <<'END'\ndef tidy(text): return ' '.join(text.split()).lower()\nEND"
    assert (await play(Path("tasks/part-marks"), AGENT, [half])).result.reward == 0.75


async def test_the_models_own_tools_are_graded_by_the_same_tests(play: Play) -> None:
    says = ["```bash\necho 7 > value.txt\n```", "Done."]
    sample = await play(VALUE, "", says, agent=ToolAgent(play.environments))
    assert (sample.result.reward, sample.turns) == (1.0, 2)


ESCAPES = """
import socket, pathlib, urllib.error
def http(path, method="POST"):
    with socket.create_connection(("127.0.0.1", 8005)) as there:
        body = b'{"reward": 1}'
        head = f"{method} {path} HTTP/1.1\\r\\nHost: h\\r\\nAuthorization: Bearer {KEY}\\r\\nConnection: close\\r\\n"
        head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
        there.sendall(head.encode() + body)
        return int(there.makefile("rb").readline().split()[1])
def reaches(*address):
    try:
        return bool(socket.create_connection(address, 2))
    except OSError:
        return False
def reads(path):
    try:
        return [*pathlib.Path(path).iterdir()] if pathlib.Path(path).is_dir() else pathlib.Path(path).read_bytes()
    except OSError:
        return None
def opens(path):
    try:
        return os.open(path, os.O_RDWR) >= 0
    except OSError:
        return False
def writes(fd):
    try:
        return os.write(fd, b'{"reward": 1}')
    except OSError:
        return None
ask()
seen = {
    "host": reaches("127.0.0.1", PORT),
    "elsewhere": reaches("1.1.1.1", 53),
    "downloads": subprocess.run(
        [sys.executable, "-m", "pip", "download", "--retries", "0", "--timeout", "2", "six"], capture_output=True
    ).returncode == 0,
    "routes": [
        http(f"/{KEY}{path}", method)
        for path in ("/finish", "/reward", "/v1/../finish", "/v1/%2e%2e/reward", "/v1/x/..%2f..%2ffinish")
        for method in ("POST", "GET")
    ],
    "other": http(f"/{'0' * 32}/v1/chat/completions"),
    "files": [path for path in ("/tests", "/solution", "/logs/verifier", TASKS) if reads(path)],
    "processes": [
        path
        for pid in (1, 2)
        for path in (f"/proc/{pid}/environ", f"/proc/{pid}/fd", f"/proc/{pid}/mem", f"/proc/{pid}/root")
        if os.access(f"/proc/{pid}", os.F_OK) is False or reads(path) is not None or opens(path)
    ],
    "others": [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 100],
    "reward": [writes(fd) for fd in (3, 4, 5)],
    "secrets": [name for name in os.environ if "TOKEN" in name],
}
pathlib.Path("seen.json").write_text(json.dumps(seen))
"""
SEEN = """#!/bin/sh
python3 -c "
import json
seen = json.load(open('/app/seen.json'))
held = not (seen['host'] or seen['elsewhere'] or seen['downloads'])
held &= set(seen['routes']) == {404} and seen['other'] == 404 and not seen['files'] + seen['secrets']
held &= not seen['processes'] + seen['others']
held &= seen['reward'] == [None] * 3
json.dump({'reward': 0.25 if held else 0}, open('/logs/verifier/reward.json', 'w'))"
"""


async def test_a_program_reaches_the_model_and_nothing_else(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks 9, 18 and 19: published fixes, the gateway's other routes, and a reward of its own."""
    monkeypatch.setenv("JOBGROUP_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = f"PORT, TASKS = {server.getsockname()[1]}, {os.getcwd() + '/tasks'!r}\n"
        write_agent(ASKS + places + ESCAPES)
        assert (await play(Path("tasks/seen"), AGENT, ["?"])).result.reward == 0.25


async def test_calls_of_a_program_count_as_turns_until_a_limit_refuses_them(play: Play) -> None:
    """Attack 18: a program, or what the model has it run, cannot sample more than an episode may."""
    write_agent(f"{ASKS}\ntry:\n    while ask(): pass\nexcept OSError: pass\n")
    sample = await play(VALUE, AGENT, ["x"] * 9)
    assert (sample.turns, sample.result.reward) == (4, 0.0)


async def test_a_preset_runs_in_the_box_and_is_wrong_over_a_limit(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harnesses, "HARNESSES", tmp_path / "harnesses")
    monkeypatch.setattr(harbor, "HARNESSES", tmp_path / "harnesses")
    (tmp_path / "harnesses").mkdir()
    code = "import subprocess\nsaid = ask()\nif said == 'more': ask(), ask(), ask(), ask()\n"
    code += "config = open(os.path.expanduser('~/.own/config')).read()\n"
    code += "assert config == os.path.expanduser('~') + ' 3', config\nsubprocess.run(['sh', '-c', said])\n"
    harness = scripted(tmp_path / "harnesses", code, files={".own/config": "$home $turns"})
    monkeypatch.setitem(PRESETS, "scripted", harness)
    monkeypatch.setattr(Harness, "is_installed", True)
    right = await play(VALUE, "preset:scripted", ["ls -a ~ / > seen.txt; echo 7 > value.txt"])
    assert (right.result.reward, right.turns) == (1.0, 1)
    over = await play(VALUE, "preset:scripted", ["more"])
    assert (over.result.status, over.turns, over.is_correct) == (RewardStatus.OVER_LIMIT, 4, False)


@pytest.mark.parametrize("harness", REAL)
async def test_a_real_program_solves_a_task_in_its_box_with_the_default_limits(play: Play, harness: Harness) -> None:
    settings = LIMITS.model_copy(update={"max_new_tokens": 600})
    says = [shell(harness, "printf 'red\\ngreen\\nblue\\n' > rainbow.txt"), last_turn(harness, "Done.")]
    sample = await play(Path("tasks/make-file"), f"preset:{harness.name}", says, settings=settings)
    assert (sample.result.reward, sample.turns) == (1.0, 2)
    print(f"{harness.name} {harness.version}: {sample.seconds:.1f} s in a box")


TAKES = "import time\nmemory = b'x' * 2**30\ntime.sleep(3600)\n"
"""A program of 1 GB, which CODE_MEMORY_MB does not allow."""


async def test_too_much_memory_ends_a_command_of_the_program_and_the_program_itself_has_no_reward(play: Play) -> None:
    assert (await play(VALUE, AGENT, [f'python3 -c "{TAKES}"; echo 7 > value.txt'])).result.reward == 1.0
    write_agent(f"{ASKS}\nask()\n{TAKES}")
    with pytest.raises(AgentFailedError, match="CODE_MEMORY_MB, which is 512"):
        await play(VALUE, AGENT, ["?"])


@pytest.fixture
def refuses_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap refuses a /proc, as in a container whose own one is covered in part."""
    program = tmp_path / "bin/bwrap"
    program.parent.mkdir()
    refuse = "*' --proc '*) echo \"bwrap: Can't mount proc on /newroot/proc\" >&2; exit 1 ;;"
    program.write_text(f'#!/bin/sh\ncase " $* " in {refuse} esac\nexec {shutil.which("bwrap")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


async def test_without_a_proc_programs_play_and_one_that_gets_no_answer_is_told_of_it(
    refuses_proc: None, play: Play
) -> None:
    assert (await play(VALUE, AGENT, ["test -e /proc/self || echo 7 > value.txt"])).result.reward == 1.0
    with pytest.raises(AgentFailedError, match=r"has no /proc \(.*mount proc"):
        await play(VALUE, "cat /proc/self/environ", [])


FAILS = {
    "got no answer of the model: .*no-such-program: not found": "no-such-program",
    "in which the tests of a task are": "ls tasks/value",
}


async def test_a_program_that_cannot_play_has_no_reward(play: Play) -> None:
    for reason, command in FAILS.items():
        with pytest.raises(AgentFailedError, match=reason):
            await play(VALUE, command, [])
    with pytest.raises(AgentFailedError, match="is not here"):
        await play(write_task(Path("other"), {"instruction.md": "Write 8."}), AGENT, [])


async def test_a_program_over_its_time_is_wrong_and_ends_with_its_box(play: Play) -> None:
    write_agent(f"{ASKS}\nask()\nimport time\ntime.sleep(600)\n")
    settings = LIMITS.model_copy(update={"agent_seconds": 6.0})
    sample = await play(VALUE, AGENT, ["?"], settings=settings)
    assert sample.result.status is RewardStatus.OVER_LIMIT
    [server] = await play.environments.servers()

    async with httpx.AsyncClient(base_url=server.url) as client:
        await stats_show(client, lambda seen: seen["active"] == 0)
