"""``grpo run``: whole runs, most of them with nodes without processes, and what only real processes show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.run_page.directory import Run
from tests.local_runner.machine import Command, Node, exits, stays
from tests.local_runner.runner import HEADER, Runner, is_running, task
from tests.waiting import LIMIT_SECONDS, eventually, wait_until

TRAINER = "ppo-trainer"
RUN_DIR = Path("runs/test")


def serving(task: str, port: int, reply: str) -> Command:
    """Return a command that answers each request at a port of the first node of ``task``, and stays."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(reply)}\r\nConnection: close\r\n\r\n{reply}".encode())
        await writer.drain()
        writer.close()

    async def command(node: Node) -> None:
        host, number = json.loads(node.environment["JOBGROUP_ENDPOINTS"])[f"{task}-0:{port}"].split(":")
        async with await asyncio.start_server(answer, host, int(number)):
            await stays(node)

    return command


@pytest.mark.parametrize("hosts", ["--own-hosts", "--shared-host"])
def test_the_runner_prints_and_records_which_components_are_up(here, monkeypatch, hosts):
    """``grpo status`` tells a component that starts from one that fell silent by this record."""
    # Nobody answers there, and the nodes of this machine need no proxy.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    states = {"ppo-trainer-0": "running", "reward-server-0": "up", "data-server-0": "running"}

    async def trainer(node: Node) -> None:
        await eventually(lambda: getattr(Run(RUN_DIR).nodes, "states", None) == states, told=here.printed)

    commands = {TRAINER: trainer, "reward-server": serving("reward-server", 8002, "{}"), "data-server": stays}
    assert here.run(commands, hosts) == 0
    assert "reward-server-0 up" in here.output


def test_steps_are_printed_as_they_end(here):
    activity = {"what": "training step 1", "done": "", "since": 1, "until": None}
    stats = {"phase": "train", "step": 0, "total_steps": 3, "activity": activity}
    summary = {"status": "succeeded", "steps": 3, "reward_first": 0.1, "reward_last": 0.3}

    async def trainer(node: Node) -> None:
        server = asyncio.create_task(serving(TRAINER, 8004, json.dumps(stats))(node))
        # Of an earlier attempt; then the total number of steps is known.
        await eventually(lambda: "training step 1" in here.printed())
        for step in (1, 2, 3):
            record = {
                "step": step,
                "reward_mean": step / 10,
                "loss": 0.01,
                "seconds_generate": 1.5,
                "seconds_step": 2.0,
            }
            with (RUN_DIR / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            await eventually(lambda step=step: f"step {step}/3" in here.printed())
        server.cancel()
        (RUN_DIR / "summary.json").write_text(json.dumps(summary))

    RUN_DIR.mkdir(parents=True)
    (RUN_DIR / "metrics.jsonl").write_text('{"step": 7, "reward_mean": 0.7}\n')
    volume = {"envs": {"SHARED_DIR": "/shared"}, "volumes": {"/shared": "volume"}}
    assert here.run({TRAINER: trainer}, ppo_trainer=volume) == 0
    printed = here.output
    assert "step 2/3  reward 0.200  loss +0.0100  generate 1.5s" in printed
    assert "step 7" not in printed
    assert "left" in printed
    assert "0.100 → 0.300" in printed


@pytest.mark.parametrize(
    ("lines", "shown", "count", "hidden"),
    [
        (["the reason"], "the reason", 2, "error: "),
        (["chatter", "error: DATASET x", "more"], "error: DATASET x", 1, "chatter"),
    ],
)
def test_a_failed_runs_outcome_is_recorded_and_its_error_or_the_end_of_its_log_shown(here, lines, shown, count, hidden):
    async def command(node: Node) -> int:
        for line in lines:
            node.say(line)
        return 3

    assert here.run({TRAINER: command}, "--num-nodes", "ppo-trainer=2") == 3
    assert here.output.count(f"  {shown}") == count
    assert hidden not in here.output
    record = Run(RUN_DIR).outcome
    assert (record["exit_code"], record["failed"]) == (3, "ppo-trainer-0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run(here, number):
    async def command(node: Node) -> None:
        os.kill(os.getpid(), number)
        await stays(node)

    assert here.run({TRAINER: command}) == 128 + number
    assert json.loads((RUN_DIR / "runner.json").read_text())["failed"] is None


async def trains(node: Node) -> None:
    """Write what a trainer leaves behind."""
    steps = int(node.environment["MAX_STEPS"])
    summary = {"status": "succeeded", "steps": steps, "reward_first": 0.1, "reward_last": 0.3}
    settings = {"max_steps": steps, "num_epochs": 3, "batch_size": 4, "target_accuracy": None}
    (RUN_DIR / "model").mkdir(exist_ok=True)
    (RUN_DIR / "summary.json").write_text(json.dumps(summary))
    (RUN_DIR / "config.json").write_text(json.dumps({"components": {TRAINER: {"settings": settings}}}))


def test_a_run_that_has_ended_starts_nothing_until_it_has_further_steps(here):
    given = ("--env", "MAX_STEPS=2")
    assert here.run({TRAINER: trains}, *given) == 0
    for more, starts in ((), 0), (("--env", "NUM_EPOCHS=6"), 1), (("--env", "MAX_STEPS=9"), 1):
        assert here.run({TRAINER: trains}, *given, *more) == 0
        assert sum(map(len, here.machine.times.values())) == starts
        assert ("nothing is left to do: run test has ended after step 2" in here.output) == (starts == 0)
        assert "0.100 → 0.300" in here.output


@pytest.mark.parametrize("code", [0, 7])
def test_a_run_whose_record_cannot_be_written_ends_as_it_would(here, code):
    (RUN_DIR / "runner.json").mkdir(parents=True)
    assert here.run({TRAINER: exits(code)}) == code
    assert "the run's record cannot be written" in here.output


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nodes.json", "cannot be written"),
        ("runner.lock", "cannot be locked"),
        ("", "cannot be made"),
        (None, "running"),
    ],
)
def test_a_run_does_not_start_where_its_directory_cannot_be_written_or_another_runs(here, name, told):
    with contextlib.ExitStack() as stack:
        if name == "":
            Path("runs").touch()
        elif name is None:
            RUN_DIR.mkdir(parents=True)
            stack.enter_context(Run(RUN_DIR).locked())
        else:
            (RUN_DIR / name).mkdir(parents=True)
        assert here.run({TRAINER: stays}) == 78
    assert told in here.output
    assert not here.machine.nodes


# Real processes.


def test_nodes_have_skypilots_variables_the_given_ones_and_logs_of_their_own(tmp_path):
    envs = {"MODEL_NAME": None, "NEW": ""}
    options = ("--env", "MODEL_NAME=m", "--env", "NEW=n", "--secret", "KEY=k", "--num-nodes", "ppo-trainer=2")
    tasks = task(TRAINER, "env; echo err >&2", envs=envs, secrets={"KEY": ""}), task("reward-server", "exec sleep 60")
    ended = Runner(tmp_path, *tasks, arguments=options).end()
    assert ended.exit_code == 0, ended.output
    for rank in (0, 1):
        lines = ended.log(TRAINER, rank).splitlines()
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        expected = {"JOBGROUP_NAME": "group", "NODE_RANK": str(rank), "NUM_NODES": "2", "NUM_GPUS_PER_NODE": "0"}
        assert {name: variables[f"SKYPILOT_{name}"] for name in expected} == expected
        assert [variables[name] for name in ("RUN_ID", "MODEL_NAME", "NEW", "KEY")] == ["test", "m", "n", "k"]
        assert lines[-1] == "err"
        endpoints = json.loads(variables["JOBGROUP_ENDPOINTS"])
        assert {"reward-server-0:8002", "ppo-trainer-0:8004", "ppo-trainer-1:29500"} <= endpoints.keys()
        assert endpoints["ppo-trainer-1:8004"].startswith(endpoints["ppo-trainer-1:29500"].rpartition(":")[0])


def test_a_node_that_was_killed_is_replaced_and_none_of_its_processes_stays(tmp_path):
    command = "echo x >> starts; if [ $(wc -l < starts) = 1 ]; then setsid sleep 300 & echo $! > pid; kill -9 $$; fi"
    fields = {"job_recovery": {"recover_on_exit_codes": [33]}}
    ended = Runner(tmp_path, task(TRAINER, command, resources=fields)).end()
    assert ended.exit_code == 0
    assert ended.record["restarts"] == {TRAINER: 1}
    assert Run(ended.run_dir).state == "succeeded"
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_ctrl_c_ends_every_process_however_stubborn(tmp_path):
    (tmp_path / "stubborn.sh").write_text(
        "for i in 1 2; do (trap '' TERM; sleep 3600 & echo $! >> pids; wait) & done\n"
        "trap '' TERM; echo $$ >> pids; touch started; while :; do sleep 1; done\n"
    )
    tasks = task(TRAINER, "exec bash stubborn.sh"), task("reward-server", "exec sleep 300")
    runner = Runner(tmp_path, *tasks, stop_seconds=1)
    runner.wait_for("started")
    runner.send(signal.SIGINT)
    ended = runner.end()
    assert ended.exit_code == 130
    assert Run(ended.run_dir).state == "interrupted"
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if is_running(int(pid))]


def test_a_killed_runner_leaves_no_process_behind_and_no_run_under_way(tmp_path):
    runner = Runner(tmp_path, task(TRAINER, "echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 300"))
    pid = int(runner.wait_for("pid").read_text())
    assert Run(runner.run_dir).state == "running"
    runner.send(signal.SIGKILL)
    runner.process.wait()
    assert Run(runner.run_dir).state == "ended without a summary"
    wait_until(lambda: not is_running(pid), "the end of the trainer")


def test_a_run_whose_own_output_cannot_be_written_goes_on_and_ends_as_it_would(tmp_path):
    (tmp_path / "group.yaml").write_text(HEADER + task(TRAINER, "touch ran; exit 7"))
    command = [sys.executable, "-m", "scripts.grpo", "run", "group.yaml", "--run-id", "test"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, timeout=LIMIT_SECONDS, check=False)
    assert ended.returncode == 7
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("is_ignored", "code"), [(False, 129), (True, 0)])
def test_a_hang_up_ends_a_run_except_under_nohup(tmp_path, is_ignored, code):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    runner = Runner(tmp_path, task(TRAINER, "touch started; until [ -e go ]; do sleep 0.1; done"))
    signal.signal(signal.SIGHUP, before)
    runner.wait_for("started")
    runner.send(signal.SIGHUP)
    if is_ignored:
        (tmp_path / "go").touch()
    assert runner.end().exit_code == code
