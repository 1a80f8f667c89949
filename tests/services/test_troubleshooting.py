"""The symptoms in docs/guides/operating.md are true: the code has each message and exports each number, and mistakes
end with the messages that the page gives."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE, PORTS, STATUS_PORT, Task
from tests.ports import free_port
from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/operating.md").read_text()
ANYTHING = "..."


def rows(heading: str) -> list[str]:
    """Return the entries in backticks of the first column of the tables below a heading."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(heading)]
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


def strings() -> list[str]:
    """Return every string of the code, with ``...`` for the values in f-strings."""
    found = []
    for folder in ("services", "trainer", "scripts", "local_runner", "evaluation"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else ANYTHING for v in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def pattern(message: str) -> str:
    return ".*".join(map(re.escape, message.split(ANYTHING)))


MESSAGES = rows("By message")


def test_every_message_is_one_of_the_code() -> None:
    assert len(MESSAGES) > 20
    code = "\n".join(strings())
    assert [message for message in MESSAGES if not re.search(pattern(message), code)] == []


def test_every_number_is_exported() -> None:
    named = {name for cell in rows("By numbers") for name in re.findall(r"\w+", cell)}
    known = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    assert len(named) > 8
    assert named <= known


def run(module: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "SHARED_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def local_endpoints() -> str:
    """Return a JOBGROUP_ENDPOINTS with every port on this machine, and a free port for the status page."""
    ports = {f"{task}-0:{port}": port for task, numbers in PORTS.items() for port in numbers}
    ports[f"{Task.TRAINER}-0:{STATUS_PORT}"] = free_port()
    return json.dumps({name: f"127.0.0.1:{port}" for name, port in ports.items()})


@pytest.fixture
def plain_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model without a chat template."""
    directory = tmp_path / "plain-model"
    shutil.copytree(tiny_model, directory)
    (directory / "chat_template.jinja").unlink()
    return directory


DATA, REWARD, ROLLOUT, TRAINER = (
    *("services.data_server", "services.reward_server", "services.rollout_server"),
    "trainer",
)
MISTAKES = [
    (DATA, {"DATASET": "no-such-file.jsonl"}, "... is not a file, seen from ..."),
    (DATA, {"DATASET": "rows.jsonl", "PROMPT_COLUMN": "ask"}, "... is ..., which ... lacks; it has ..."),
    (REWARD, {"REWARD_FN": "no_such_module:reward"}, "REWARD_FN ... cannot be loaded"),
    (REWARD, {"REWARD_FN": "maths"}, "... is not a reward; allowed are ..."),
    (ROLLOUT, {"ROLLOUT_ENGINE": "sglang"}, "this node needs ..., which ... does not have"),
    pytest.param(
        *(TRAINER, {"MODEL_NAME": "no-such-model"}, "MODEL_NAME: the model ... cannot be loaded"),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("module", "variables", "message"), MISTAKES)
def test_a_mistake_ends_with_its_message(tmp_path: Path, module: str, variables: dict[str, str], message: str) -> None:
    assert message in MESSAGES
    (tmp_path / "rows.jsonl").write_text('{"question": "3+4=", "answer": "7"}\n' * 20)
    port = () if module in (ROLLOUT, TRAINER) else ("--port", "0")
    own = {ENDPOINTS_VARIABLE: local_endpoints()} if module == TRAINER else {}
    ended = run(module, tmp_path, *port, **own, **variables)
    assert ended.returncode == 78, ended.stdout
    assert re.search(pattern(message), ended.stdout), ended.stdout


@pytest.mark.slow
def test_a_model_without_turns_is_refused_and_few_shot_is_the_remedy(
    tmp_path: Path, plain_model: Path, start_service
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"question": "{a}+{a}=", "answer": "{2 * a}"}}\n' for a in range(40))
    )
    settings = {"DATASET": str(tmp_path / "rows.jsonl"), "MODEL_NAME": str(plain_model)}
    ended = run(DATA, tmp_path, "--port", "0", **settings)
    assert ended.returncode == 78, ended.stdout
    assert re.search(pattern("has no chat template; set PROMPT_STYLE=plain or few_shot"), ended.stdout), ended.stdout
    start_service(DATA, **settings, PROMPT_STYLE="few_shot")


def test_a_taken_port_is_named(tmp_path: Path, start_service) -> None:
    first = start_service(REWARD)
    ended = run(REWARD, tmp_path, "--host", "127.0.0.1", "--port", str(first.port))
    assert ended.returncode == 78, ended.stdout
    assert f"cannot listen on 127.0.0.1:{first.port}" in ended.stdout
