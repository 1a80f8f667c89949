"""The rules by which the local runner starts, restarts and ends the tasks of a job group, without processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from local_runner.nodes import Addresses, LocalRun, node_environment
from local_runner.spec import JobGroup, TaskSpec
from local_runner.supervisor import LOST_NODES, PRIMARY_STOP_SECONDS, Outcome, Supervisor
from tests.local_runner.machine import Command, Machine, exits, in_no_time, stays, traps

TRAINER, REWARD, REPLAY = "ppo-trainer", "reward-server", "replay-buffer"
RECOVERS = {"recover_on_exit_codes": frozenset({33})}


class Supervised:
    """A run that has ended."""

    def __init__(
        self,
        directory: Path,
        commands: dict[str, Command],
        meanwhile: Callable[[Supervisor], Awaitable[None]] | None = None,
        primaries: tuple[str, ...] = (TRAINER,),
        **fields: dict[str, Any],
    ) -> None:
        """Run tasks of these commands; ``fields`` are those of their TaskSpec by task, with _ for -."""
        tasks = tuple(
            TaskSpec(name, "", is_primary=name in primaries, **fields.get(name.replace("-", "_"), {}))
            for name in commands
        )
        hosts = {task.name: ["127.0.0.1"] * task.num_nodes for task in tasks}
        run = LocalRun(JobGroup("group", tasks), "test", directory, Addresses(hosts, {}), mark="mark")
        self.machine = Machine(commands)
        self.said: list[str] = []
        """The state of a node or task, and why, as they were reported."""
        self.times: dict[str, float] = {}
        """When it was reported last, by state."""

        def report(task: TaskSpec, rank: int | None, state: str, why: str) -> None:
            node = task.name if rank is None else f"{task.name}-{rank}"
            self.said.append(f"{node} {state}, {why}")
            self.times[f"{node} {state}"] = asyncio.get_running_loop().time()

        async def start(task: TaskSpec, rank: int, log: Any) -> Any:
            return await self.machine.start(task, rank, log, node_environment(run, task, rank))

        async def whole() -> Outcome:
            supervisor = Supervisor(run, report, start, self.machine.end)
            other = asyncio.ensure_future(meanwhile(supervisor)) if meanwhile else None
            outcome = await supervisor.run()
            if other is not None:
                await other
            return outcome

        self.outcome = in_no_time(whole())
        assert not [node for node in self.machine.nodes if node.is_running]

    @property
    def code(self) -> int:
        return self.outcome.exit_code

    def starts(self, node: str) -> int:
        return len(self.machine.times[node])


@pytest.mark.parametrize(
    ("fields", "codes", "code", "restarts"),
    [
        ({}, [0], 0, 0),
        ({}, [7], 7, 0),
        ({}, [33, 0], 33, 0),
        ({}, [-9, 0], 137, 0),
        ({"max_restarts_on_errors": 1}, [5, 0], 0, 1),
        ({"max_restarts_on_errors": 1}, [5, 5, 0], 5, 1),
        ({"max_restarts_on_errors": 1}, [-9, -9, 0], 137, 1),
        ({"max_restarts_on_errors": 5} | RECOVERS, [78, 0], 78, 0),
        (RECOVERS, [33, 33, 0], 0, 2),
        # Lost, failed, lost, failed: the second error is one too many, and the losses between are not counted.
        ({"max_restarts_on_errors": 1} | RECOVERS, [33, 5, 33, 5, 0], 5, 3),
        # The node itself was killed, and a command on it was.
        (RECOVERS, [-9, 0], 0, 1),
        (RECOVERS, [137, 0], 137, 0),
        (RECOVERS, [-9] * LOST_NODES + [0], 0, LOST_NODES),
        (RECOVERS, [-9] * (LOST_NODES + 1) + [0], 137, LOST_NODES),
        (RECOVERS, [-9, 5, 0], 5, 1),
    ],
)
def test_a_task_restarts_on_listed_codes_and_for_lost_nodes_else_while_its_budget_lasts(
    tmp_path, fields, codes, code, restarts
):
    ended = Supervised(tmp_path, {TRAINER: exits(*codes)}, ppo_trainer=fields)
    assert ended.code == code
    assert ended.starts("ppo-trainer-0") == restarts + 1
    assert ended.outcome.restarts == ({TRAINER: restarts} if restarts else {})
    assert ended.outcome.failed == ("ppo-trainer-0" if code else None)
    log = (tmp_path / "runs/test/logs/ppo-trainer-0.log").read_text().splitlines()
    assert [line.split(" ", 3)[3] for line in log] == ["start ===", *(f"restart {n + 1} ===" for n in range(restarts))]


def test_the_pauses_before_restarts_double_up_to_half_a_minute(tmp_path):
    ended = Supervised(tmp_path, {TRAINER: exits(*[33] * 7, 0)}, ppo_trainer=RECOVERS)
    assert ended.machine.times["ppo-trainer-0"] == pytest.approx([0, 1, 3, 7, 15, 31, 61, 91])


def test_a_task_succeeds_when_all_its_nodes_have(tmp_path):
    async def command(node):
        await asyncio.sleep(100 * node.rank)

    ended = Supervised(tmp_path, {TRAINER: command}, ppo_trainer={"num_nodes": 2})
    assert ended.code == 0
    assert ended.times["ppo-trainer-1 ended"] == pytest.approx(100)


def test_one_failing_node_ends_and_restarts_all_nodes_and_its_exit_code_is_the_tasks(tmp_path):
    async def command(node):
        if node.rank == 0:
            return await stays(node)
        await asyncio.sleep(10)
        return (33, 7)[node.attempt]

    ended = Supervised(tmp_path, {TRAINER: command}, ppo_trainer={"num_nodes": 2} | RECOVERS)
    assert ended.code == 7
    assert ended.outcome.failed == "ppo-trainer-1"
    assert (
        ended.machine.times["ppo-trainer-0"] == ended.machine.times["ppo-trainer-1"] == pytest.approx([0, 11], abs=0.1)
    )
    assert ended.said.count("ppo-trainer-0 stopped, exit code 137") == 2
    assert "ppo-trainer-1 failed, exit code 7" in ended.said


@pytest.mark.parametrize(("other", "code", "seconds"), [(exits(0, after=5), 0, 5), (exits(9, after=2), 9, 2)])
def test_a_run_ends_when_all_primary_tasks_have_succeeded_or_one_has_failed(tmp_path, other, code, seconds):
    first = exits(0) if code == 0 else stays
    commands = {TRAINER: first, "collector": other, REWARD: stays}
    ended = Supervised(tmp_path, commands, primaries=(TRAINER, "collector"))
    assert ended.code == code
    assert ended.times["reward-server-0 " + ("stopped" if code else "ended")] == pytest.approx(seconds, abs=0.2)
    assert ended.outcome.failed == ("collector-0" if code else None)


@pytest.mark.parametrize(
    ("fields", "command", "starts", "last"),
    [
        ({}, exits(1), 1, "reward-server failed, exit code 1 after 0 of 0 restarts on errors"),
        ({"max_restarts_on_errors": 3}, exits(0), 1, "reward-server-0 ended, exit code 0"),
        ({"max_restarts_on_errors": 1}, exits(1, 0), 2, "reward-server-0 ended, exit code 0"),
    ],
)
def test_a_run_goes_on_without_an_auxiliary_that_has_failed_or_succeeded(tmp_path, fields, command, starts, last):
    ended = Supervised(tmp_path, {TRAINER: exits(0, after=60), REWARD: command}, reward_server=fields)
    assert ended.code == 0
    assert (ended.starts("reward-server-0"), ended.starts("ppo-trainer-0")) == (starts, 1)
    assert [line for line in ended.said if line.startswith("reward-server")][-1] == last


def test_auxiliaries_stay_while_the_trainer_is_restarted(tmp_path):
    ended = Supervised(tmp_path, {TRAINER: exits(33, 0, after=5), REWARD: stays}, ppo_trainer=RECOVERS)
    assert ended.code == 0
    assert (ended.starts("reward-server-0"), ended.starts("ppo-trainer-0")) == (1, 2)


def test_an_auxiliary_with_a_wrong_setting_ends_the_run(tmp_path):
    fields = {"max_restarts_on_errors": 5} | RECOVERS
    ended = Supervised(tmp_path, {TRAINER: stays, "data-server": exits(78, after=3)}, data_server=fields)
    assert ended.code == 78
    assert ended.outcome.failed == "data-server-0"
    assert ended.starts("data-server-0") == 1


def test_a_trainer_is_not_restarted_for_ever_when_a_service_is_gone_for_good(tmp_path):
    commands = {TRAINER: exits(33, after=5), REWARD: exits(1, after=7)}
    ended = Supervised(tmp_path, commands, ppo_trainer=RECOVERS)
    assert ended.code == 33
    assert ended.starts("ppo-trainer-0") == 2
    assert "reward-server failed for good" in ended.said[-1] + ended.said[-2]


@pytest.mark.parametrize(("code", "seconds"), [(0, 60), (1, 0)])
def test_auxiliaries_outlive_a_trainer_that_has_succeeded_by_their_delay(tmp_path, code, seconds):
    commands = {TRAINER: exits(code, after=10), REPLAY: stays, REWARD: stays}
    ended = Supervised(tmp_path, commands, replay_buffer={"termination_delay": 60})
    state = "stopped" if code else "ended"
    assert ended.code == code
    assert ended.times[f"replay-buffer-0 {state}"] == pytest.approx(10 + seconds, abs=0.2)
    assert ended.times[f"reward-server-0 {state}"] == pytest.approx(10, abs=0.2)


@pytest.mark.parametrize(
    ("trainer", "auxiliary", "said"),
    [
        (exits(0, after=1), stays, "ended, with the run"),
        (exits(1, after=1), stays, "stopped, exit code 143"),
        (exits(0, after=1), traps(4.5), "ended, with the run"),
        (exits(0, after=1), traps(4.5, 3), "stopped, exit code 3"),
        (exits(0, after=1), traps(600), "stopped, exit code 137"),
    ],
)
def test_an_auxiliary_that_the_end_of_the_run_ends_has_not_failed(tmp_path, trainer, auxiliary, said):
    assert f"replay-buffer-0 {said}" in Supervised(tmp_path, {TRAINER: trainer, REPLAY: auxiliary}).said


def asks(*times: float, number: int = signal.SIGINT) -> Callable[[Supervisor], Awaitable[None]]:
    """Return what asks a supervisor to stop at each of the times."""

    async def meanwhile(supervisor: Supervisor) -> None:
        for time in times:
            await asyncio.sleep(time - asyncio.get_running_loop().time())
            supervisor.stop(number)

    return meanwhile


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_lets_the_trainer_save_while_the_services_still_serve(tmp_path, number):
    ended = Supervised(tmp_path, {TRAINER: traps(50), REWARD: stays}, asks(5, number=number))
    assert ended.code == 128 + number
    assert ended.outcome.reason == f"stopped by {signal.Signals(number).name}"
    assert ended.outcome.failed is None
    assert "ppo-trainer running, asked to stop; Ctrl-C again ends it at once" in ended.said
    assert ended.times["ppo-trainer-0 stopped"] == pytest.approx(55, abs=0.2)
    assert ended.times["reward-server-0 stopped"] == pytest.approx(55, abs=0.4)


@pytest.mark.parametrize(("times", "seconds"), [([5], 5 + PRIMARY_STOP_SECONDS), ([5, 7], 7)])
def test_a_stubborn_trainer_is_killed_after_a_time_and_by_a_second_request_at_once(tmp_path, times, seconds):
    ended = Supervised(tmp_path, {TRAINER: traps(3600)}, asks(*times))
    assert ended.code == 130
    assert ended.said[-1] == "ppo-trainer-0 stopped, exit code 137"
    assert ended.times["ppo-trainer-0 stopped"] == pytest.approx(seconds, abs=0.2)


def test_a_request_to_stop_before_the_start_or_in_a_pause_starts_nothing_more(tmp_path):
    async def at_once(supervisor: Supervisor) -> None:
        supervisor.stop(signal.SIGTERM)

    ended = Supervised(tmp_path, {TRAINER: exits(33)}, asks(0.5), ppo_trainer=RECOVERS)
    assert (ended.code, ended.starts("ppo-trainer-0")) == (130, 1)
    assert Supervised(tmp_path, {TRAINER: stays}, at_once).code == 143


def test_a_request_to_stop_cuts_the_delay_of_auxiliaries_short_and_the_run_has_succeeded(tmp_path):
    fields = {"termination_delay": 3600}
    ended = Supervised(tmp_path, {TRAINER: exits(0), REPLAY: stays}, asks(9), replay_buffer=fields)
    assert ended.code == 0
    assert ended.times["replay-buffer-0 ended"] == pytest.approx(9, abs=0.2)


def test_a_run_whose_logs_cannot_be_written_goes_on_and_says_so_once(tmp_path):
    logs = tmp_path / "runs/test/logs"
    logs.parent.mkdir(parents=True)
    logs.touch()
    ended = Supervised(tmp_path, {TRAINER: exits(7, after=1), REWARD: stays})
    assert ended.code == 7
    logs.unlink()
    logs.mkdir()
    (logs / "ppo-trainer-0.log").symlink_to("/dev/full")
    full = Supervised(tmp_path, {TRAINER: exits(0), REWARD: stays})
    assert full.code == 0
    for run, reason in (ended, "File exists"), (full, "No space left on device"):
        [said] = [line for line in run.said if "its logs cannot be written" in line]
        assert said.endswith(reason)
