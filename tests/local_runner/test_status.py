"""The status of a run tells a component that is busy from one that cannot be reached."""

import asyncio
import io
import os
import re
import socket
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from local_runner import status
from services.core.files import write_json
from services.run_page import components
from services.run_page.directory import FIRST_FAILURE, Run
from tests.fake_service import fake_service
from tests.ports import free_port


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that this process runs."""
    monkeypatch.setattr(components, "QUESTION_SECONDS", 3.0)
    for task in ("ppo-trainer", "reward-server"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / f"logs/{task}-0.log").write_text("")
    return tmp_path


def shown(run_dir: Path, trainer: int, reward: int, **states: str) -> dict[str, list[str]]:
    """Return the words after the name of each component, with the components at ports of this machine.

    ``states`` are what the runner recorded, by task.
    """
    nodes = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "machine": socket.gethostname(),
        "endpoints": {"ppo-trainer-0:8004": f"127.0.0.1:{trainer}", "reward-server-0:8002": f"127.0.0.1:{reward}"},
        "states": {f"{task.replace('_', '-')}-0": state for task, state in states.items()},
    }
    write_json(run_dir / "nodes.json", nodes)
    console = Console(file=io.StringIO(), width=200)
    asyncio.run(status.print_status(console, Run(run_dir), None))
    return {words[0]: words[1:] for line in console.file.getvalue().splitlines() if (words := line.split())}


def test_a_trainer_that_listens_and_does_not_answer_is_busy_and_one_that_is_gone_is_silent(running):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port = one.getsockname()[1]
        told = shown(running, port, other.getsockname()[1])
        assert (told["ppo-trainer-0"][:-1], told["reward-server-0"][:-1]) == (["busy"], ["busy"])
        told = shown(running, port, free_port())
        assert (told["ppo-trainer-0"][:-1], told["reward-server-0"][:-1]) == (["busy"], ["silent"])


def test_a_component_that_was_never_up_is_starting_and_one_that_ended_says_so(running):
    gone = free_port(), free_port()
    told = shown(running, *gone, ppo_trainer="running", reward_server="up")
    assert (told["ppo-trainer-0"][0], told["reward-server-0"][0]) == ("starting", "silent")
    told = shown(running, *gone, ppo_trainer="restarting", reward_server="failed")
    assert (told["ppo-trainer-0"][0], told["reward-server-0"][0]) == ("restarting", "failed")


def test_a_run_says_what_it_waits_for(running):
    activity = {"what": "waiting for 2 rollout workers", "done": "1 there", "since": time.time() - 12, "until": 1e9}
    stats = {"phase": "publish", "total_steps": 10, "activity": activity}
    with fake_service({"GET /stats": lambda _: stats, "GET /health": lambda _: 200}) as trainer:
        told = shown(running, trainer.endpoint.port, free_port())
    until = time.strftime("%H:%M:%S", time.localtime(1e9))
    assert re.fullmatch(rf"waiting for 2 rollout workers, 1 there, for 1\d s, until {until}", " ".join(told["now"]))


def test_a_run_that_is_over_says_what_came_of_it_and_which_component_named_an_error(running):
    (running / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.25}\n{"step": 2, "reward_mean": 0.75}\n')
    nodes = {"pid": 1, "started": 0.0, "machine": socket.gethostname(), "endpoints": {}}
    write_json(running / "nodes.json", nodes)
    write_json(running / "runner.json", {"exit_code": 0, "reason": "done", "seconds": 65, "failed": None})
    after = {"accuracy_after": 0.9, "accuracy_after_low": 0.7, "accuracy_after_high": 1.0, "accuracy_after_prompts": 20}
    summary = {"status": "succeeded", "steps": 2} | after
    write_json(running / "summary.json", summary)
    (running / FIRST_FAILURE).write_text("reward_error: mine:score: KeyError (mine.py, line 3, in score)\n")
    said = printed(running)
    assert "first failed answer reward_error: mine:score: KeyError (mine.py, line 3, in score)" in said
    for words in ("succeeded", "steps 2", "0.250 → 0.750", "outcome done", "accuracy after, 20 held-out prompts 0.900"):
        assert words in said
    assert "component" not in said
    (running / "logs/reward-server-0.log").write_text("=== start ===\nerror: no such verifier\n")
    assert "component error reward-server-0 error: no such verifier run page" in printed(running)


def printed(run_dir: Path) -> str:
    """Return what is printed on a run, with single spaces."""
    console = Console(file=io.StringIO(), width=200)
    asyncio.run(status.print_status(console, Run(run_dir), None))
    return " ".join(console.file.getvalue().split())


def test_what_users_wrote_is_shown_as_it_is(running):
    running.joinpath(FIRST_FAILURE).write_text("no [/INST] in [b]answer[/b] :x:")
    told = shown(running, free_port(), free_port())
    assert told["first"] == ["failed", "answer", "no", "[/INST]", "in", "[b]answer[/b]", ":x:"]
