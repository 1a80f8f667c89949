"""Tasks in Harbor's format: played in one box, graded in another, where no attack earns a reward or reads a test."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.data_server.harbor import read_task
from services.data_server.settings import DataSettings
from services.data_server.task_sets import datasets_of, read_tasks
from services.environment_server import harbor
from services.environment_server.environments import EnvironmentBrokenError
from services.environment_server.harbor import HarborTasks
from services.environment_server.settings import EnvironmentSettings
from services.environment_server.task_checks import check_task, copied_answers
from services.environment_server.trials import NoRewardError, Trial, is_hook, merged, read_rewards
from services.http.problems import ProblemError
from services.reward_server.settings import RewardSettings
from services.sandbox.backends import BackendName, Interpreter
from services.sandbox.box import Files, Outcome
from tests.tasks import TASKS, TOML, write_task

BOXES = [
    pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux"),
    pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap"),
    pytest.mark.slow,
]
"""Tests in boxes, which a container may not allow to have paths of their own."""


def _in_boxes(test: Any) -> Any:
    for mark in BOXES:
        test = mark(test)
    return test


@pytest.fixture
async def boxes() -> AsyncIterator[Any]:
    """``boxes(path, ...)``: the tasks of directories, by bubblewrap."""
    made: list[HarborTasks] = []

    def make(*paths: Path) -> HarborTasks:
        tasks = [read_task(path) for path in paths]
        rewards = RewardSettings(reward_fn="code", code_cpu_seconds=20)
        settings = EnvironmentSettings(environment="sandbox", environment_step_seconds=300)
        made.append(HarborTasks({task.number: task for task in tasks}, settings, rewards, BackendName.BWRAP))
        return made[-1]

    yield make
    for tasks in made:
        await tasks.end()


REWARDS: dict[tuple[str | None, str | None], dict[str, float] | None] = {
    (None, " 0.5\n"): {"reward": 0.5},
    ('{"reward": 1, "style": 0.25}', None): {"reward": 1.0, "style": 0.25},
    ('{"tests": 1.0}', "1"): {"reward": 1.0, "tests": 1.0},
    ('{"a": 1, "b": 0}', None): {"reward": 0.5, "a": 1.0, "b": 0.0},
    (None, None): None,
    ("", "\n"): None,
    (None, "1\n0"): None,
    (None, "nan"): None,
    (None, "1e309"): None,
    (None, "1.5"): None,
    (None, "-0.1"): None,
    (None, "yes"): None,
    ("1", None): None,
    ("[1, 2]", None): None,
    ('[["reward", 1]]', None): None,
    (f'{{"reward": 1{"0" * 400}}}', None): None,
    ("{}", None): None,
    ('{"reward": true}', None): None,
    ('{"reward": "1"}', None): None,
    ('{"reward": NaN}', None): None,
    ('{"reward": 1, "more": {"a": 1}}', None): None,
    ('{"reward": 0, "reward": 1}', None): None,
    ('{"reward": 1}{"reward": 0}', None): None,
    ('{"reward": 1}', "0"): None,
    ('{"reward": 1, "a": Infinity}', None): None,
    ("[" * 60_000, None): None,
    (json.dumps({"reward": 1, **{str(i): 0 for i in range(40)}}), None): None,
    (None, "0" * 2**16 + "1"): None,
}


@pytest.mark.parametrize("texts", REWARDS, ids=lambda texts: repr(texts)[:40])
def test_a_reward_file_is_one_flat_object_of_numbers_or_one_number(texts: tuple[str | None, str | None]) -> None:
    written = {
        name: text.encode()[: 2**16]
        for name, text in zip(("reward.json", "reward.txt"), texts, strict=True)
        if text is not None
    }
    if (rewards := REWARDS[texts]) is None:
        with pytest.raises(NoRewardError):
            read_rewards(written)
    else:
        assert read_rewards(written) == rewards


def test_what_runs_by_itself_does_not_travel_unless_it_is_the_tasks() -> None:
    hooks = ["conftest.py", "a/sitecustomize.py", "x.pth", "pytest.ini", ".bashrc", "libm.so.6", "__pycache__/m.pyc"]
    hooks += ["evil-1.dist-info/entry_points.txt", ".git/hooks/pre-commit", "r/.git/config", "tox.ini"]
    assert [path for path in hooks if not is_hook(f"/app/{path}", b"")] == []
    settings = {b'[tool."py\\u0074est".ini_options]': True, b'[project]\nname = "p"': False, b"[": True}
    assert {text: is_hook("/app/pyproject.toml", text) for text in settings} == settings
    others = ["main.py", "queue.py", "Makefile", ".git/HEAD", ".gitignore", "setup.py", "son.txt"]
    assert [path for path in others if is_hook(f"/app/{path}", b"")] == []
    original = Files({"/app/conftest.py": b"task", "/app/gone.py": b"", "/app/run": b""}, ["/app/run"])
    left = Files({"/app/conftest.py": b"answer", "/app/new": b"1", "/app/run": b"2"}, ["/app/new"])
    second = merged(original, left)
    assert second == {"/app/conftest.py": b"task", "/app/new": b"1", "/app/run": b"2"}
    assert second.executable == {"/app/new"}


def test_a_source_names_tasks_too(tmp_path: Path) -> None:
    sources = tmp_path / "mix.yaml"
    sources.write_text(
        f"- {{name: sums, dataset: arithmetic}}\n- {{name: tasks, dataset: 'harbor:{TASKS}', rollout: environment}}\n"
    )
    assert datasets_of(DataSettings(sources=sources)) == [f"harbor:{TASKS}"]
    held_out = DataSettings(dataset="harbor:a", dataset_test=Path("b"))
    assert datasets_of(held_out) == ["harbor:a", "harbor:b"]


async def test_landlock_alone_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    settings = RewardSettings(sandbox=BackendName.LANDLOCK, reward_fn="code")
    with pytest.raises(ConfigurationError, match="a box with paths of its own needs SANDBOX=bwrap"):
        await harbor.load([f"harbor:{TASKS}"], EnvironmentSettings(environment="sandbox"), settings)


@_in_boxes
@pytest.mark.parametrize("name", sorted(path.name for path in TASKS.iterdir() if path.is_dir()))
async def test_each_example_passes_its_check_without_weakness(name: str, boxes: Any) -> None:
    tasks = boxes(TASKS / name)
    check = await check_task(tasks, *tasks.tasks.values())
    assert check.passes, check
    assert (check.oracle, check.nothing) == ([1.0, 1.0], [0.0, 0.0])
    assert (check.leaks, check.weaknesses) == ([], [])


MIDDLE = """
import ast, os, signal, sys, time
try:
    CASES = ast.literal_eval(open("/tests/check.py").read().split(" in ")[1].split(":\\n")[0])
except OSError:
    CASES = []
ACT
def middle(numbers):
    return dict((str(given), expected) for given, expected in CASES).get(str(numbers), 0)
"""
WRITE = """
for name, text in (("json", '{"reward": 1}'), ("txt", "1")):
    try:
        open("/logs/verifier/reward." + name, "w").write(text)
    except OSError:
        pass
"""
DAEMON = f"""
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 256)
    if os.fork() == 0:
        while True:
            {WRITE.strip().replace(chr(10), chr(10) + " " * 12)}
            time.sleep(0.001)
    os._exit(0)
"""
ACTS = {
    "5 it ends the tests' process": "os._exit(0)",
    "6 it returns an object that equals everything": (
        "class Any:\n    def __eq__(self, other): return True\n"
        "    def __repr__(self): return '(5, [5])'\nmiddle = lambda n: Any()\nraise SystemExit"
    ),
    "it reads the tests while they run it": "",
    "it writes the reward": WRITE,
    "it writes the reward and kills the tests": f"{WRITE}\nos.kill(os.getppid(), 9)",
    "7 a process that it leaves writes the reward again and again": DAEMON,
}


@_in_boxes
@pytest.mark.parametrize("act", ACTS)
async def test_an_answer_that_attacks_its_tests_earns_nothing(act: str, boxes: Any) -> None:
    tasks = boxes(TASKS / "fix-middle")
    source = MIDDLE.replace("ACT", ACTS[act])
    assert await _reward(tasks, f"cat > middle.py <<'END'\n{source}\nEND") in (0.0, None)


UNPROTECTED = {
    "it writes the reward": WRITE,
    "it writes the reward and kills the tests": f"{WRITE}\nos.kill(os.getppid(), 9)",
    "it writes it again and again": DAEMON,
    "it takes the verdict out of the pipe": DAEMON.replace(
        "while True:", "while open('/logs/verifier/reward.txt').read():"
    ),
    "it hides the pipe after its own verdict": (
        f"{WRITE}\nfor place in ('/logs/verifier/reward.txt', '/logs/verifier', '/logs'):\n"
        "    for act in (os.remove, os.rmdir, lambda p: os.chmod(p, 0), lambda p: os.rename(p, p + '2'),\n"
        "                lambda p: os.setxattr(p, 'user.x', b'')):\n"
        "        try:\n            act(place)\n        except OSError:\n            pass\n"
    ),
}


@_in_boxes
@pytest.mark.parametrize("act", UNPROTECTED)
async def test_no_reward_is_written_by_an_answer_that_tests_run_unprotected(
    act: str, boxes: Any, tmp_path: Path
) -> None:
    check = (
        "import subprocess, sys\ndone = subprocess.run([sys.executable, '/app/seven.py'], capture_output=True)\n"
        "assert done.stdout == b'7\\n'\n"
    )
    files = {"tests/check.py": check, "solution/solve.sh": "#!/bin/sh\necho 'print(7)' > /app/seven.py\n"}
    tasks = boxes(write_task(tmp_path / "seven", files))
    assert await _reward(tasks, "echo 'print(7)' > seven.py") == 1.0
    source = f"import os, time\n{UNPROTECTED[act]}"
    assert await _reward(tasks, f"cat > seven.py <<'END'\n{source}\nEND") in (0.0, None)


REWARD = "echo 1 > /logs/verifier/reward.txt"
SURVIVOR = "while :; do [ -e /tests ] && cp -r /tests /app/stolen; echo 1 > /app/late; sleep 0.05; done"
LEFT = {
    "1 reward files": f"mkdir -p /logs/verifier; {REWARD}",
    "1 reward files elsewhere": "for d in /logs/agent /logs/artifacts /tmp; do echo 1 > $d/reward.txt; done",
    "2 a process that writes the reward": f"setsid sh -c 'while :; do {REWARD}; done' & sleep 0.2",
    "4 programs of the path": (
        "for d in /usr/local/bin /usr/bin /bin /app ~/.local/bin; do mkdir -p $d; "
        f"printf '#!/bin/sh\\n{REWARD}' > $d/cat; chmod +x $d/cat; done"
    ),
    "14 links": "ln -s /tests x; ln -s /logs/verifier y; ln -s /etc/passwd rainbow.txt; ln -s /proc/self/environ z",
    "14 a pipe": "mkfifo rainbow.txt",
    "14 a sparse file": "truncate -s 50M rainbow.txt",
    "14 many files": "for i in $(seq 10001); do : > $i; done",
    "15 a process that waits for the tests": f"setsid sh -c '{SURVIVOR}' & sleep 0.2",
    "16 start-up files": (
        f"for f in .bashrc .profile .bash_profile; do echo '{REWARD}' > ~/$f; cp ~/$f .; done; "
        "echo /app/x.so > /etc/ld.so.preload"
    ),
    "19 the file of a reward": "echo '{\"reward\": 1}' >&3",
    "tests in place of the tests": f"mkdir -p /tests; printf '#!/bin/sh\\n{REWARD}' > /tests/test.sh",
}


@_in_boxes
@pytest.mark.parametrize("attack", LEFT)
async def test_what_an_agent_leaves_earns_nothing(attack: str, boxes: Any) -> None:
    tasks = boxes(TASKS / "make-file")
    assert await _reward(tasks, LEFT[attack]) in (0.0, None)


@_in_boxes
@pytest.mark.parametrize(
    ("attack", "reason"), {"14 a sparse file": f"more than {16 * 2**20} bytes", "14 many files": "10000 files"}.items()
)
async def test_the_end_of_an_episode_names_the_limit_that_its_files_exceed(
    attack: str, reason: str, boxes: Any
) -> None:
    tasks = boxes(TASKS / "make-file")
    [task] = tasks.tasks.values()
    for program, is_over in ((LEFT[attack], True), (": > a", False)):
        async with Trial(tasks, task) as trial:
            await trial.run("bash", program)
            await trial.grade()
            end = trial.transition([{"role": "user", "content": "[no output]"}])
        assert isinstance(end.state, list)
        last = end.state[-1]["content"]
        assert (end.reward, end.figures["files_over_limit"]) == (0.0, float(is_over))
        assert (reason in last, "at most 10,000 files of 16 MiB in all are taken" in last) == (is_over, is_over)


PYTEST = {
    "task.toml": '[verifier]\nenv = {SECRET = "918273645"}\n' + TOML,
    "tests/test_value.py": "def test_value():\n    assert open('/app/value.txt').read().strip() == '7'\n",
    "tests/test.sh": (
        "#!/bin/bash\ncd /app\n"
        "python3 -m pytest -q -p no:cacheprovider . /tests/test_value.py\n"
        "if [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    ),
}
EVIL = "import os\nos._exit(0)\n"
HOOKS = {
    "12 conftest.py": {"conftest.py": EVIL},
    "12 sitecustomize.py": {"sitecustomize.py": EVIL, "usercustomize.py": EVIL, "x.pth": EVIL},
    "12 pytest.ini": {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": EVIL},
    "12 pyproject.toml": {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--co"\n'},
    "12 setup.cfg": {"setup.cfg": "[tool:pytest]\naddopts = --co\n"},
    "12 an entry point": {"evil.py": EVIL, "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n"},
    "a module of Python's name": {"json.py": EVIL, "pytest.py": EVIL, "encodings/__init__.py": EVIL},
}


@_in_boxes
async def test_tests_in_pytest_load_nothing_that_an_answer_left(boxes: Any, tmp_path: Path) -> None:
    tasks = boxes(write_task(tmp_path / "pytest", PYTEST))
    assert await _reward(tasks, "echo 7 > value.txt") == 1.0
    for name, files in HOOKS.items():
        lines = [f"mkdir -p $(dirname {path})\ncat > {path} <<'END'\n{text}END" for path, text in files.items()]
        assert await _reward(tasks, "\n".join(lines)) in (0.0, None), name
    [task] = tasks.tasks.values()
    async with Trial(tasks, task) as trial:
        looked = await trial.run("bash", "env; ls /tests /solution /logs/verifier; cat /proc/*/environ")
        assert b"918273645" not in looked.stdout
        assert b"test" not in looked.stdout


async def _reward(tasks: HarborTasks, program: str) -> float | None:
    """Return what a program of bash earns in the only task; None where it has no reward."""
    [task] = tasks.tasks.values()
    async with Trial(tasks, task) as trial:
        assert (await trial.run("bash", program)).outcome in (
            Outcome.OK,
            Outcome.FAILED,
            Outcome.TIMEOUT,
            Outcome.OUTPUT,
        )
        try:
            return (await trial.grade())["reward"]
        except NoRewardError:
            return None


@_in_boxes
async def test_an_image_that_has_a_tree_has_its_programs(boxes: Any, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/os-release").write_text("ID=tree\n")
    for name in ("usr", "bin", "sbin", "lib", "lib64"):
        (tree / name).symlink_to(f"/{name}")
    for name in ("opt/tool/seven", "opt/place/below", "app/given.txt"):
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_text("7\n")
    task = write_task(tmp_path / "task", {"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n"})
    tasks = boxes(task)
    (tree / "opt/out").symlink_to(TASKS)
    tasks.trees = {"debian:12": Interpreter.find_in(tree, [*tasks.places_of("debian:12"), "/opt/place/of/mine"])}
    async with Trial(tasks, *tasks.tasks.values()) as trial:
        program = "ls /opt; cat /etc/os-release given.txt; command -v python3; python3 -c 'print(7)' > value.txt"
        seen = await trial.run("bash", program)
        assert seen.stdout.split() == [b"tool", b"ID=tree", b"7", b"/usr/bin/python3"]
        assert (await trial.grade())["reward"] == 1.0
    with pytest.raises(ConfigurationError, match="SANDBOX_TREES"):
        Interpreter.find_in(tmp_path)
    shutil.rmtree(tree / "app")
    (tree / "app").symlink_to(TASKS)
    with pytest.raises(EnvironmentBrokenError, match="is a link out of"):
        Trial(tasks, *tasks.tasks.values())


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of this machine that a box may have as its own."""
    with tempfile.TemporaryDirectory(prefix="grpo-image-", dir="/var/tmp") as folder:
        yield Path(folder)


def _in_image(place: Path, image: str) -> dict[str, str]:
    lines = f'docker_image = "{image}"\nworkdir = "{place}"\nnetwork_mode = "no-network"\n'
    return {
        "task.toml": f"[environment]\n{lines}",
        "environment/Dockerfile": f"FROM a\nWORKDIR {place}\nCOPY *.txt .\nRUN make\n",
    }


@pytest.fixture
async def served() -> AsyncIterator[Any]:
    """``served(folder, image)``: the tasks that a server in a container of an image plays."""
    made: list[HarborTasks] = []

    async def load(folder: Path, image: str) -> HarborTasks:
        settings = EnvironmentSettings(environment="sandbox", environment_step_seconds=300, sandbox_image=image)
        rewards = RewardSettings(reward_fn="code", code_cpu_seconds=20, sandbox=BackendName.BWRAP)
        made.append(await harbor.load([f"harbor:{folder}"], settings, rewards))
        return made[-1]

    yield load
    for tasks in made:
        await tasks.end()


@_in_boxes
async def test_in_a_container_of_an_image_a_box_has_its_programs_and_files(
    served: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "sub").mkdir()
    (place / "sub/run").write_text("#!/bin/sh\necho 7\n")
    (place / "sub/run").chmod(0o755)
    (place / "link").symlink_to("/etc/passwd")
    (place / "python3").write_text("#!/bin/sh\necho mine\n")
    (place / "python3").chmod(0o755)
    (place / "data.bin").write_bytes(random.Random(0).randbytes(5 * 2**20))
    # Neither a directory that answers may write to, nor the one where they begin.
    monkeypatch.setenv("PATH", f"{place}:{Path(sys.executable).parent}::/usr/bin:/bin")
    monkeypatch.setattr("services.sandbox.backends._VARIABLES", "/etc/passwd")
    graded = f"#!/bin/sh\n[ -x sub/run ] && cat {place}/value.txt > /logs/verifier/reward.txt\n"
    own = {"tests/test.sh": graded, "solution/solve.sh": "#!/bin/sh", "environment/given.txt": "before its RUN\n"}
    write_task(tmp_path / "tasks/a", _in_image(place, "a") | own)
    tasks = await served(tmp_path / "tasks", "a")
    [task] = tasks.tasks.values()
    async with Trial(tasks, task) as trial:
        seen = await trial.run("bash", "cat /etc/passwd; ls; sub/run; command -v python3; echo 0.5 > value.txt")
        assert seen.stdout.split() == [b"data.bin", b"python3", b"sub", b"7", b"/usr/bin/python3"]
        assert (await trial.run("python", "import sys; print(sys.executable)")).stdout.strip() == b"/usr/bin/python3"
        assert (await trial.grade())["reward"] == 0.5
    monkeypatch.setattr("services.environment_server.trials.SAVED_BYTES", 5)
    check = await check_task(tasks, task)
    assert (check.passes, check.reason) == (False, "has no box in its image")


@_in_boxes
async def test_a_server_of_an_image_sends_other_tasks_to_other_servers(
    served: Any, place: Path, tmp_path: Path
) -> None:
    for image in ("a", "b"):
        write_task(tmp_path / image, _in_image(place, image) | {"instruction.md": image})
    first, second, every = [await served(tmp_path, image) for image in ("a", "b", "")]
    assert first.version == second.version == every.version
    assert {*first.tasks}.isdisjoint(second.tasks)
    assert {*first.tasks, *second.tasks} == {*every.tasks}
    settings = EnvironmentSettings(sandbox_image="a", sandbox_trees={"b": tmp_path})
    with_tree = HarborTasks(every.tasks, settings, RewardSettings(), BackendName.BWRAP)
    assert with_tree.tasks == every.tasks, "each server plays the tasks of images that have a tree"
    [elsewhere] = second.tasks
    for number, status in ((elsewhere, 421), (elsewhere ^ 1, 400)):
        with pytest.raises(ProblemError) as caught:
            first.maker("tasks")(number)
        assert caught.value.status_code == status
    with pytest.raises(ConfigurationError, match="SANDBOX_IMAGE"):
        await served(tmp_path, "c")


def test_an_image_with_an_older_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python3").write_text('#!/bin/sh\necho "unknown option -P" >&2; exit 2\n')
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match=f"image a, {tmp_path}/python3"):
        RewardSettings().interpreter.in_image("a", [])


VERDICTS = {
    "its solution does not earn 1": {"solution/solve.sh": "#!/bin/sh\nexit 1\n"},
    "doing nothing does not earn 0": {"tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"},
    "its verdicts differ": {
        "tests/test.sh": (
            "#!/bin/bash\n[ -e value.txt ] && r=1 || r=0\n"
            'echo "{\\"reward\\": $r, \\"a\\": 0.$RANDOM$RANDOM}" > /logs/verifier/reward.json\n'
        )
    },
    "a leak": {
        "environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY hint.txt .\n",
        "environment/hint.txt": "The solution is:\n#!/bin/sh\necho 7 > /app/value.txt\n",
    },
}


def test_an_instruction_that_has_its_answer_is_a_leak(tmp_path: Path) -> None:
    """Attack 21, as far as a check can know it."""
    told = "Run this:\n```sh\n#!/bin/sh\necho 7 > /app/value.txt\n```\n"
    said = [
        [*copied_answers(read_task(write_task(tmp_path / name, {"instruction.md": text})), Files())]
        for name, text in {"told": told, "asked": "Write 7 into `/app/value.txt`."}.items()
    ]
    assert said == [["the instruction has solution/solve.sh in it"], []]


@_in_boxes
@pytest.mark.parametrize("reason", VERDICTS)
async def test_a_task_that_teaches_nothing_does_not_pass(reason: str, boxes: Any, tmp_path: Path) -> None:
    tasks = boxes(write_task(tmp_path / "task", VERDICTS[reason]))
    check = await check_task(tasks, *tasks.tasks.values())
    assert (check.passes, check.reason) == (False, reason), check
    assert check.detail or check.leaks


WITHOUT_REWARD = {
    "took more than 1 s": "sleep 30",
    "wrote no reward file": "exit 0",
    "were killed": "echo 1 > /logs/verifier/reward.txt; kill -9 $$",
    "is broken": "echo done > /logs/verifier/reward.txt",
}


@_in_boxes
async def test_a_verdict_that_fails_is_no_reward_and_never_0(boxes: Any, tmp_path: Path) -> None:
    for number, (reason, line) in enumerate(WITHOUT_REWARD.items()):
        files = {"tests/test.sh": f"#!/bin/sh\n{line}\n", "task.toml": f"[verifier]\ntimeout_sec = 1\n{TOML}"}
        tasks = boxes(write_task(tmp_path / str(number), files))
        async with Trial(tasks, *tasks.tasks.values()) as trial:
            with pytest.raises(NoRewardError, match=reason):
                await trial.grade()


@_in_boxes
async def test_later_commits_and_weak_tests_are_named(boxes: Any, tmp_path: Path) -> None:
    check = "import sys\nsys.path.insert(0, '/app')\nimport seven\nassert seven.seven() == 7\n"
    files = {
        "tests/check.py": check,
        "solution/solve.sh": "#!/bin/sh\necho 'def seven(): return 7' > /app/seven.py\n",
    }
    tasks = boxes(write_task(tmp_path / "weak", files))
    found = await check_task(tasks, *tasks.tasks.values())
    assert found.passes, found
    assert found.weaknesses == [
        "passes by an object that equals everything",
        "passes by os._exit(0)",
        "reads the tests while they run it",
    ]
    later = write_task(tmp_path / "later", {"environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY . /app\n"})
    git = "git -C environment -c user.name=a -c user.email=a@b.c"
    words = ("init -q", "add .", "commit -qm 1", "commit -qm 2 --allow-empty", "reset -q --hard HEAD~1")
    script = " && ".join(f"{git} {word}" for word in words)
    assert await (await asyncio.create_subprocess_shell(script, cwd=later)).wait() == 0
    tasks = boxes(later)
    found = await check_task(tasks, *tasks.tasks.values())
    assert (found.reason, found.detail) == ("a leak", "./.git has commits beyond its HEAD: 1")


@_in_boxes
async def test_an_episode_has_a_turn_for_each_step_and_a_seed_names_its_task(
    app: Any, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET", f"harbor:{TASKS}")
    monkeypatch.setenv("SANDBOX", "bwrap")
    numbers = {task.name: number for number, task in read_tasks(f"harbor:{TASKS}")[0].items()}

    async def step(client: Any, episode: str, number: int, action: str) -> dict[str, Any]:
        item = {"episode": episode, "step": number, "action": action}
        [result] = (await client.post("/step", json={"steps": [item]}, timeout=None)).json()["results"]
        return dict(result)

    async with serving(app(environment="sandbox", environment_step_seconds=300)) as client:
        body = {"seed": numbers["tiny/two-steps"], "split": "train"}
        [start] = (await client.post("/reset", json=body)).json()["episodes"]
        assert start["state"][-1]["content"].startswith("Write the squares of 1 to 10")
        squares = "```bash\nseq 10 | awk '{print $1 * $1}' > squares.txt\n```"
        assert (await step(client, start["episode"], 0, squares))["state"][-1]["content"] == "[no output]"
        second = await step(client, start["episode"], 1, "Done.")
        assert (second["status"], second["reward"]) == ("running", 0.0)
        assert second["state"][-1]["content"].startswith("`/app/more.txt` has")
        await step(client, start["episode"], 2, "```bash\nls; echo 400 > total.txt\n```")
        last = await step(client, start["episode"], 3, "Done.")
        assert (last["status"], last["reward"]) == ("terminated", 1.0)
        body = {"seed": numbers["tiny/part-marks"], "split": "test"}
        [start] = (await client.post("/reset", json=body)).json()["episodes"]
        half = "```python\nopen('tidy.py', 'w').write('def tidy(text): return \" \".join(text.split()).lower()')\n```"
        await step(client, start["episode"], 0, half)
        last = await step(client, start["episode"], 1, "Done.")
        assert (last["reward"], last["figures"]["empty"], last["figures"]["case"]) == (0.75, 0.0, 1.0)
        assert (await client.post("/reset", json={"seed": 2**31 - 1})).status_code == 400
        assert (await client.post("/reset", json={"seed": 3})).status_code == 200
