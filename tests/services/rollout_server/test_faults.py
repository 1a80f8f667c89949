"""What goes wrong around the rollout workers: every group is complete and true, or the node ends and says why."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.core import supervisor
from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE, ConfigurationError
from services.core.processes import Command
from tests.services.rollout_server.fake_nodes import REGISTERED, FakeNodes, Traffic, fake_nodes
from tests.services.rollout_server.nodes import authorization
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNodes]:
    """Two nodes that the tests below share, since each leaves them well again."""
    nodes = fake_nodes(
        tmp_path_factory.mktemp("nodes"),
        2,
        ENGINE_HANG_SECONDS="3",
        ENGINE_STALE_SECONDS="3",
        ROLLOUT_MAX_RESTARTS="50",
    )
    try:
        yield nodes.start_all()
    finally:
        nodes.stop()


@pytest.fixture
def two(shared: FakeNodes) -> FakeNodes:
    shared.wait_registered([0, 1])
    return shared


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[FakeNodes]:
    """Two nodes of which one is going to end."""
    nodes = fake_nodes(tmp_path, 2, ROLLOUT_MAX_RESTARTS="1")
    try:
        yield nodes
    finally:
        nodes.stop()


def newest(nodes: FakeNodes) -> int:
    published = nodes.store.newest()
    return published.version if published else 0


def test_a_worker_killed_in_mid_generation_costs_no_group_and_returns_with_the_newest_version(two: FakeNodes) -> None:
    version = newest(two) + 1
    with Traffic(two) as traffic:
        two.publish(version)
        traffic.wait_for_groups(12)  # those that were in flight meanwhile are over
        before = len(traffic.groups)
        with two.registered_anew(1):
            two.nodes[1].engine.kill()
        two.wait_registered([0, 1])
        traffic.wait_for_groups(12)
    # It started with version 0, and nobody got anything of it.
    assert traffic.versions(since=before) == {version}
    assert two.version(1) == str(version)


def test_a_worker_that_hangs_is_replaced(two: FakeNodes) -> None:
    with Traffic(two) as traffic:
        engine = two.nodes[1].engine
        with two.registered_anew(1):
            engine.send_signal(signal.SIGSTOP)
            wait_until(lambda: not engine.is_running(), "the engine was killed")
        two.wait_registered([0, 1])
        traffic.wait_for_groups(6)


def test_a_worker_whose_scheduler_hangs_is_replaced_although_its_health_answers(two: FakeNodes) -> None:
    with Traffic(two) as traffic:
        engine = two.nodes[1].engine
        with two.registered_anew(1):
            two.fault(1, wedged=True)
            assert two.get(two.worker(1), "/health").status_code == 200
            wait_until(lambda: not engine.is_running(), "the engine was killed")
        two.wait_registered([0, 1])
        traffic.wait_for_groups(6)
    assert "scheduler does not answer" in two.log(1)


def test_a_paused_worker_does_not_count_as_hanging(two: FakeNodes) -> None:
    engine = two.nodes[1].engine
    two.post(two.worker(1), "/pause_generation", {"mode": "retract"})
    # Two checks and as long as a silent engine may be.
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(asyncio.Event().wait(), 6))
    assert engine.is_running()
    two.post(two.worker(1), "/continue_generation", {})


def test_a_worker_that_answers_500_costs_no_group(two: FakeNodes) -> None:
    with Traffic(two) as traffic:
        two.fault(1, generate_status=500)
        traffic.wait_for_groups(20)
        two.fault(1)


def test_a_worker_whose_update_failed_half_way_serves_nothing_until_it_has_caught_up(two: FakeNodes) -> None:
    version = newest(two) + 1
    with Traffic(two) as traffic:
        # Its weights are those of the new version then, and it says that it serves the one before.
        two.fault(1, half_way=True)
        with two.registered_anew(1):
            two.publish(version)
        two.wait_registered([0, 1])
        assert two.version(1) == str(version)
        traffic.wait_for_groups(12)
    assert version in traffic.versions()


def test_what_a_trainer_that_died_left_paused_and_open_is_taken_up_again(two: FakeNodes) -> None:
    version = newest(two) + 1
    with Traffic(two) as traffic:
        asyncio.run(leave_in_mid_update(two))
        with two.registered_anew(1):
            two.publish(version)
        two.wait_registered([0, 1])
        before = len(traffic.groups)
        traffic.wait_for_groups(12)
    assert traffic.versions(since=before) <= {version - 1, version}
    assert [two.version(rank) for rank in (0, 1)] == [str(version)] * 2


async def leave_in_mid_update(nodes: FakeNodes) -> None:
    """What SIGKILL of a trainer leaves."""
    async with nodes.admin(1) as worker:
        await worker.pause("in_place")
        await worker.begin_update()


def test_a_registered_worker_that_nobody_updates_catches_up(two: FakeNodes) -> None:
    version = newest(two) + 1
    with Traffic(two) as traffic:
        two.write_version(version)
        for rank in (0, 1):
            two.wait_for_version(version, rank)
        two.wait_registered([0, 1])
        before = len(traffic.groups)
        traffic.wait_for_groups(6)
    assert traffic.versions(since=before) <= {version - 1, version}


def test_a_killed_router_comes_back_with_all_its_workers(two: FakeNodes) -> None:
    with Traffic(two) as traffic:
        router = two.nodes[0].router
        router.kill()
        wait_until(lambda: not router.is_running(), "the router is dead")
        two.wait_registered([0, 1])
        traffic.wait_for_groups(6)


def test_a_killed_node_is_registered_once_after_its_return(two: FakeNodes) -> None:
    with Traffic(two) as traffic:
        launcher = two.nodes[1].process
        launcher.kill()
        launcher.wait()
        returned = two.start(1)
        # The router routes to the killed worker until a check of its health fails.
        two.wait_until(lambda: REGISTERED in returned.log.read_text(), "the worker is registered anew")
        two.wait_registered([0, 1])
        traffic.wait_for_groups(6)
    urls = [worker["url"] for worker in two.get(two.router, "/workers").json()["workers"]]
    assert sorted(urls) == sorted({two.worker(0).url, two.worker(1).url})


def test_requests_that_are_refused_do_not_close_the_workers_to_others(two: FakeNodes) -> None:
    payload = {"input_ids": [5000], "sampling_params": {"max_new_tokens": 1}}
    with Traffic(two) as traffic:
        statuses = {two.post(two.router, "/generate", payload).status_code for _ in range(20)}
        traffic.wait_for_groups(6)
    # The router's circuit breaker takes refusals for failures of the worker; it closes again within a second.
    assert statuses <= {400, 503}
    assert 400 in statuses


@pytest.mark.slow
def test_a_node_that_loses_the_shared_volume_ends_and_the_others_go_on(lost: FakeNodes) -> None:
    lost.start(0)
    lost.wait_registered([0])
    lost.environment["ROLLOUT_LOST_SECONDS"] = "10"
    lost.start(1)
    lost.wait_registered([0, 1])
    lost.publish(4)
    with Traffic(lost) as traffic:
        runs = lost.directory / "runs"
        runs.rename(lost.directory / "gone")
        lost.nodes[1].engine.kill()
        assert lost.nodes[1].process.wait(LIMIT_SECONDS) == EXIT_RECOVERABLE
        runs.parent.joinpath("gone").rename(runs)
        traffic.wait_for_groups(6)
    assert traffic.versions() == {4}
    assert "is SHARED_DIR still mounted?" in lost.log(1).splitlines()[-1]


@pytest.mark.slow
def test_a_node_with_another_volume_than_the_trainers_ends(lost: FakeNodes, tmp_path: Path) -> None:
    lost.start(0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    lost.environment["SHARED_DIR"] = str(elsewhere)
    lost.start(1)
    lost.wait_registered([0, 1])
    node = lost.nodes[1].process

    def dropped() -> bool:
        """As a trainer drops it at each step."""
        for worker in lost.get(lost.router, "/workers").json()["workers"]:
            if worker["url"] == lost.worker(1).url:
                url = f"{lost.router.url}/workers/{worker['id']}"
                httpx.delete(url, headers=authorization(), timeout=IDLE_SECONDS, trust_env=False)
        return node.poll() is not None

    wait_until(dropped, "the end of the node")
    assert node.returncode == EXIT_CONFIGURATION
    assert "is SHARED_DIR the same volume" in lost.log(1).splitlines()[-1]


@pytest.mark.parametrize("child", ["engine", pytest.param("router", marks=pytest.mark.slow)])
def test_a_child_that_keeps_dying_ends_the_node_with_the_reason(lost: FakeNodes, child: str) -> None:
    lost.count = 1
    node = lost.start(0)
    lost.wait_registered([0])
    deaths = 0
    while node.process.poll() is None and deaths < 2:
        process = node.engine if child == "engine" else node.router
        process.kill()
        deaths += 1
        if deaths < 2:
            wait_until(lambda: not process.is_running(), "the child is dead")  # noqa: B023  # called at once
            lost.wait_registered([0])
    assert node.process.wait(LIMIT_SECONDS) == EXIT_RECOVERABLE
    assert f"error: the {child}" in lost.log(0).splitlines()[-1]
    assert "was ended by SIGKILL after 1 restart in 10 minutes" in lost.log(0).splitlines()[-1]


def test_an_engine_that_cannot_run_with_these_settings_ends_the_node_at_once(lost: FakeNodes) -> None:
    lost.environment["FAKE_ENGINE_EXIT"] = str(EXIT_CONFIGURATION)
    node = lost.start(0)
    assert node.process.wait(LIMIT_SECONDS) == EXIT_CONFIGURATION
    lines = lost.log(0).splitlines()
    assert "the engine-0 cannot run with these settings" in lines[-1]
    # The line that runner, status and page show is the engine's own.
    assert [line for line in lines if line.startswith("error: ")] == ["error: the fake engine refuses its model"]


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ({"FAKE_ENGINE_EXIT": "1"}, "exited with code 1"),
        ({"FAKE_ENGINE_HANGS": "1", "ENGINE_START_SECONDS": "1"}, "was ended by SIGKILL"),
    ],
    ids=["exits", "hangs"],
)
def test_an_engine_that_never_comes_up_is_not_recoverable(lost: FakeNodes, fault: dict[str, str], how: str) -> None:
    # A tensor parallel size that does not divide the model's heads ends so, and would after every restart of the node.
    lost.count = 1
    lost.environment |= fault
    node = lost.start(0)
    assert node.process.wait(LIMIT_SECONDS) == EXIT_CONFIGURATION
    last = lost.log(0).splitlines()[-1]
    assert last.startswith(f"error: the engine-0 (sglang.launch_server) never answered in 2 starts and {how}")


async def test_a_child_that_was_never_healthy_is_started_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An engine that hangs at its start takes longer to end than the window.
    monkeypatch.setattr(supervisor, "RESTART_WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.0)

    async def never_healthy() -> bool:
        return False

    child = supervisor.SupervisedProcess(
        Command("engine", sys.executable, "this", []),
        never_healthy,
        max_restarts=2,
        start_seconds=IDLE_SECONDS,
        hang_seconds=IDLE_SECONDS,
    )
    with pytest.raises(ConfigurationError, match="never answered in 3 starts and exited with code 0"):
        await child.run()


def test_a_node_without_a_router_ends(lost: FakeNodes) -> None:
    lost.environment["ROLLOUT_LOST_SECONDS"] = "1"
    node = lost.start(1)
    assert node.process.wait(LIMIT_SECONDS) == EXIT_RECOVERABLE
    assert "the router does not answer" in lost.log(1).splitlines()[-1]


def test_sigterm_ends_a_node_and_all_its_children(lost: FakeNodes) -> None:
    lost.start_all()
    processes = lost.all_processes()
    assert len(processes) == 6  # launchers, engines, router and proxy
    assert lost.stop() == [0, 0]
    assert not [process for process in processes if process.is_running()]


def test_nothing_outlives_a_killed_launcher(lost: FakeNodes) -> None:
    lost.start_all()
    processes = lost.all_processes()
    for node in lost.nodes.values():
        node.process.kill()
        node.process.wait()
    wait_until(lambda: not [p for p in processes if p.is_running() and p.status() != "zombie"], "their ends")


def test_the_token_is_in_no_command_line(lost: FakeNodes) -> None:
    lost.start_all()
    token = authorization()["Authorization"].split()[1]
    lines = [" ".join(process.cmdline()) for process in lost.all_processes()]
    assert len(lines) == 6
    assert not [line for line in lines if token in line]
    assert token not in lost.logs()
    assert os.environ.get("JOBGROUP_TOKEN") != token
