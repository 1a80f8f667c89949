"""ENVIRONMENT=sandbox: programs in a box an episode, graded in a second box; hostile ones cost their episode only."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.environment_server import sandbox_environment as sandbox_module
from services.environment_server.sandbox_environment import SHOWN_CHARACTERS, program_of
from services.sandbox.box import Box
from tests.rows import write_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux")

SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin")
SECRET = "918273645"
"""An expected value, which no box may have."""
DOUBLE = {"fn_name": "double", "inputs": [[2], [-3], ["a"]], "outputs": [4, -6, "aa"]}
ROWS = [
    {
        "question": "Write double(x) into solution.py; helper.py has the factor.",
        "files": '{"helper.py": "FACTOR = 2\\n"}',
        "file": "solution.py",
        "tests": json.dumps(DOUBLE),
    },
    {
        "question": "Write main.py, which prints the number.",
        "files": "{}",
        "file": "main.py",
        "tests": json.dumps({"inputs": ["7"], "outputs": [SECRET]}),
    },
    {
        "question": "Write area(x) into shapes/square.py.",
        "files": '{"hashlib.py": "import os; os._exit(0)"}',
        "file": "shapes/square.py",
        "tests": json.dumps(
            ["import hashlib\nfrom shapes.square import area\nassert area(3) == 9", "assert area(2) == 4"]
        ),
    },
]
RIGHT = (
    "```python\nopen('solution.py', 'w').write('from helper import FACTOR\\ndef double(x): return FACTOR * x\\n')\n```"
)
DONE = "It is done."


@pytest.fixture
def sandbox(app: Any, serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``async with sandbox(...) as client``: an environment-server for the rows, in the backend that holds here."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    others = write_rows(tmp_path / "others.jsonl", [row | {"files": '{"other.py": ""}'} for row in ROWS])
    # Programs run by a Python that every user may read.
    own = {"SANDBOX_PYTHON": SYSTEM_PYTHON} if SYSTEM_PYTHON else {}
    own |= {"DATASET": str(others), "DATASET_TEST": str(rows), "GROUND_TRUTH_COLUMN": "tests", "REWARD_WORKERS": "2"}

    def make(cpu_seconds: float = 5.0, **options: Any) -> Any:
        for name, value in (own | {"CODE_CPU_SECONDS": str(cpu_seconds)}).items():
            monkeypatch.setenv(name, value)
        return serving(app(environment="sandbox", **{"environment_step_seconds": 90.0, **options}))

    return make


async def begin(client: Any, question: str) -> str:
    """Begin an episode of the row whose question begins so; return its id."""
    for seed in range(50):
        [start] = (await client.post("/reset", json={"seed": seed})).json()["episodes"]
        if start["state"][-1]["content"].startswith(question):
            return str(start["episode"])
    raise AssertionError(f"no seed draws {question}")


async def step(client: Any, episode: str, number: int, action: str) -> dict[str, Any]:
    item = {"episode": episode, "step": number, "action": action}
    result: dict[str, Any] = (await client.post("/step", json={"steps": [item]}, timeout=None)).json()["results"][0]
    return result


def said(result: dict[str, Any]) -> str:
    return str(result["state"][-1]["content"])


def python(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


async def test_files_are_kept_and_graded_in_a_second_box(sandbox: Any) -> None:
    async with sandbox() as client:
        episode = await begin(client, "Write double")
        listed = await step(client, episode, 0, "Let me look.\n```bash\nls; cat helper.py; exit 3\n```")
        assert said(listed) == "helper.py\nFACTOR = 2\n\n[exit code 3]"
        assert (listed["status"], listed["reward"]) == ("running", 0.0)
        assert said(await step(client, episode, 1, RIGHT)) == "[no output]"
        checked = await step(client, episode, 2, python("import solution; print(solution.double(4))"))
        assert said(checked) == "8\n"
        done = await step(client, episode, 3, DONE)
        assert (done["status"], done["reward"]) == ("terminated", 1.0)
        assert await step(client, episode, 3, DONE) == done
        lazy = await begin(client, "Write double")
        assert (await step(client, lazy, 0, "double(x) is 2 * x."))["reward"] == 0.0


async def test_asserts_import_the_file_and_no_other_one(sandbox: Any) -> None:
    async with sandbox() as client:
        for area, reward in (("x * x", 1.0), ("9", 0.0)):
            episode = await begin(client, "Write area")
            write = f"mkdir shapes; echo 'def area(x): return {area}' > shapes/square.py"
            assert said(await step(client, episode, 0, f"```bash\n{write}\n```")) == "[no output]"
            assert (await step(client, episode, 1, DONE))["reward"] == reward


async def test_a_program_may_be_longer_than_an_argument(sandbox: Any) -> None:
    async with sandbox() as client:
        episode = await begin(client, "Write double")
        padding = "#" * 99 + "\n"
        for number, (fence, program) in enumerate(
            (("python", "import sys\nprint(sys.stdin.read(), __name__)"), ("bash", "cat; echo $((6 * 7)); exit 3"))
        ):
            long = await step(client, episode, 2 * number, f"```{fence}\n{padding * 2000}{program}\n```")
            short = await step(client, episode, 2 * number + 1, f"```{fence}\n{program}\n```")
            assert said(long) == said(short) != "[no output]", fence


PROGRAMS = {
    "```Python\na\n```": ("python", "a\n"),
    "1. So:\n   ```python3.11 title='x'\n   a\n     b\n   ```": ("python", "a\n  b\n"),
    "```{.bash}\na\n```\r\n": ("bash", "a\n"),
    "```py\na\n```\nand\n```SH\nb\n```\n```\nc\n```": ("bash", "b\n"),
    "```\na\n```": None,
    "```text\na\n```": None,
    "<tool_call>\n": None,
    "</tool_call><tool_call>\n```sh\na\n```": ("bash", "a\n"),
    f"```sh\na\n```\n{python('b')} so": ("python", "b"),
}


@pytest.mark.parametrize("text", PROGRAMS)
def test_the_program_of_an_answer_is_found(text: str) -> None:
    assert program_of(text) == PROGRAMS[text]


async def test_a_step_that_is_repeated_runs_once_and_a_bad_call_is_read_by_the_model(sandbox: Any) -> None:
    async with sandbox() as client:
        episode = await begin(client, "Write double")
        append = "```bash\necho x >> log; wc -l < log\n```"
        results = await asyncio.gather(*(step(client, episode, 0, append) for _ in range(3)))
        assert [said(result) for result in results] == ["1\n"] * 3
        calls = ('{"name": "rm", "arguments": {}}', '{"name": "bash", "arguments": "x"}', "{")
        for number, call in enumerate(calls, 1):
            assert said(await step(client, episode, number, f"<tool_call>{call}</tool_call>")).startswith("[")
        assert said(await step(client, episode, 4, append)) == "2\n"
        long = said(await step(client, episode, 5, python("print('x' * 20_000)")))
        assert f"[{20_001 - SHOWN_CHARACTERS} more characters]" in long
        # A box without a task shows outputs alone and has no limit of turns.
        [start] = (await client.post("/reset", json={"split": "box"})).json()["episodes"]
        assert start["state"] == []
        for number in range(12):
            result = await step(client, start["episode"], number, append)
            assert result["state"] == [{"role": "user", "content": f"{number + 1}\n"}]


async def test_the_second_box_gets_files_alone(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for the tests, a link, a pipe and a module of Python's own name change no grade."""
    seen: list[tuple[int, str, bytes]] = []
    exchange = Box._exchange

    async def watched(box: Box, message: Any) -> Any:
        seen.append((box.pid, str(message.get("deed")), json.dumps(message).encode()))
        return await exchange(box, message)

    monkeypatch.setattr(Box, "_exchange", watched)
    async with sandbox() as client:
        episode = await begin(client, "Write main.py")
        seen.clear()
        lurks = (
            "(while :; do echo 'print(1)' > main.py; grep -r 9182 . ; sleep 0.05; done) > /dev/null 2>&1 & "
            "ln -s /etc/passwd link; mkfifo pipe; ls"
        )
        assert "pipe" in said(await step(client, episode, 0, f"```bash\n{lurks}\n```"))
        written = await step(client, episode, 1, "```bash\necho 'print(0)' > main.py; sleep 0.3; cat main.py\n```")
        assert said(written) == "print(0)\n"
        done = await step(client, episode, 2, DONE)
        assert (done["status"], done["reward"]) == ("terminated", 0.0)
        first, second = list(dict.fromkeys(pid for pid, _, _ in seen))
        assert [deed for pid, deed, _ in seen if pid == second] == ["None", "load", "script"]
        [loaded] = [body for pid, deed, body in seen if pid == second and deed == "load"]
        assert set(json.loads(json.loads(loaded)["stdin"])) == {"main.py"}
        # The expected value is in no message to either box.
        assert not any(SECRET.encode() in body for _, _, body in seen)
        assert first != second


HOSTILE = {
    "spins": ("while True: pass", "[ended: timeout]"),
    "forks": ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", "[ended: timeout]"),
    "prints": ("while True: print('x' * 10000)", "[ended: output]"),
    "takes memory": ("x = [bytes(10**8) for _ in range(100)]", "MemoryError"),
    "kills": ("import os\nos.kill(-1, 9)", "["),
    "reads the tests": ("print(open('/proc/1/environ').read())", "[exit code"),
    "connects": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "[exit code"),
}


@pytest.mark.slow
async def test_hostile_programs_cost_their_episode_only(sandbox: Any) -> None:
    async with sandbox(cpu_seconds=1.0) as client:

        async def attack(name: str) -> None:
            program, says = HOSTILE[name]
            episode = await begin(client, "Write double")
            result = await step(client, episode, 0, python(program))
            assert says in said(result), (name, result)
            # The box is as it was.
            assert said(await step(client, episode, 1, "```bash\ncat helper.py\n```")) == "FACTOR = 2\n", name

        async def work() -> float:
            episode = await begin(client, "Write double")
            await step(client, episode, 0, RIGHT)
            return float((await step(client, episode, 1, DONE))["reward"])

        *_, first, second = await asyncio.gather(*map(attack, HOSTILE), work(), work())
        assert (first, second) == (1.0, 1.0)
        assert (await client.get("/health")).json()["status"] == "healthy"


async def test_a_program_that_hides_in_the_files_is_a_wrong_answer(sandbox: Any) -> None:
    """The grade of a program that sleeps, or of files that are too large, is 0 and not missing."""
    async with sandbox(environment_step_seconds=12.0, cpu_seconds=1.0) as client:
        for number, line in enumerate(("import time; time.sleep(3600)", "import os; os._exit(0)")):
            episode = await begin(client, "Write double")
            await step(client, episode, 0, python(f"open('solution.py', 'w').write({line!r})"))
            done = await step(client, episode, 1, DONE)
            assert (done["status"], done["reward"]) == ("terminated", 0.0), (number, done)
        episode = await begin(client, "Write double")
        await step(client, episode, 0, python("open('solution.py', 'w').write('#' * 10**7)"))
        done = await step(client, episode, 1, DONE)
        assert done["reward"] == 0.0
        assert "at most 8 MiB" in said(done)


async def test_a_session_has_turns_and_processor_time(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandbox(environment_max_steps=2) as client:
        episode = await begin(client, "Write double")
        await step(client, episode, 0, RIGHT)
        last = await step(client, episode, 1, "```bash\nls\n```")
        assert (last["status"], last["reward"]) == ("truncated", 1.0)
    monkeypatch.setattr(sandbox_module, "SESSION_SECONDS", 0.4)
    async with sandbox() as client:
        episode = await begin(client, "Write double")
        await step(client, episode, 0, RIGHT)
        spent = await step(client, episode, 1, python("while True: pass"))
        assert "the processor time of this session is over" in said(spent)
        assert (spent["status"], spent["reward"]) == ("truncated", 1.0)


async def test_a_box_that_is_lost_loses_the_episode_and_is_no_answer(sandbox: Any) -> None:
    async with sandbox() as client:
        episode = await begin(client, "Write double")
        await step(client, episode, 0, RIGHT)
        children = psutil.Process().children(recursive=True)
        zygotes = [child for child in children if "zygote" in " ".join(child.cmdline())]
        for zygote in zygotes:
            # A zygote within another one's box ends with it.
            with suppress(psutil.NoSuchProcess):
                zygote.kill()
        result = await step(client, episode, 1, "```bash\nls\n```")
        assert (result["status"], result.get("environment_failed", False)) == ("lost", False)
        assert "the box was lost" in result["detail"]
