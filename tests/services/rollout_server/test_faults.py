"""What goes wrong around the rollout workers: every group is complete and true, or the node ends and says why.

The launchers run in processes of their own, with the real router behind a proxy variable that leads nowhere.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.core.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE
from tests.services.rollout_server.fake_nodes import REGISTERED, FakeNodes, Traffic, fake_nodes
from tests.services.rollout_server.nodes import TOKEN
from tests.waiting import LIMIT_SECONDS, wait_until

NOBODY = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"), NOBODY)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNodes]:
    """Two nodes that the tests below share, since each leaves them well again."""
    directory = tmp_path_factory.mktemp("nodes")
    nodes = fake_nodes(directory, 2, SERVICE_DEADLINE_SECONDS="60", ROLLOUT_MAX_RESTARTS="50", NO_PROXY="", **PROXIES)
    try:
        yield nodes.start_all()
        processes = nodes.all_processes()
        assert nodes.stop() == [0, 0], "SIGTERM ends a node in order"
        assert not [process for process in processes if process.is_running()], "and its children"
    finally:
        nodes.stop()


@pytest.fixture
def two(shared: FakeNodes) -> Iterator[FakeNodes]:
    shared.wait_registered([0, 1])
    yield shared
    shared.wait_registered([0, 1])
    assert [shared.version(rank) for rank in (0, 1)] == [str(newest(shared))] * 2


def newest(nodes: FakeNodes) -> int:
    published = nodes.store.newest()
    return published.version if published else 0


def test_workers_are_registered_although_the_environment_has_a_proxy(two: FakeNodes) -> None:
    router, engine = two.nodes[0].router.environ(), two.nodes[1].engine.environ()
    assert not PROXIES.keys() & router.keys()
    assert engine["HTTP_PROXY"] == NOBODY, "an engine may fetch its model through it"
    assert "127.0.0.1" in engine["NO_PROXY"].split(","), "but asks itself directly"
    with Traffic(two) as traffic:
        traffic.wait_for_groups(6)


def test_the_token_is_in_no_command_line(two: FakeNodes) -> None:
    lines = [" ".join(process.cmdline()) for process in two.all_processes()]
    assert len(lines) == 6  # launchers, engines, router and proxy
    assert not [line for line in lines if TOKEN in line]
    assert TOKEN not in two.logs()
    assert os.environ.get("JOBGROUP_TOKEN") != TOKEN


def test_what_a_worker_does_not_answer_costs_no_group(two: FakeNodes) -> None:
    payload = {"input_ids": [5000], "sampling_params": {"max_new_tokens": 1}}
    with Traffic(two) as traffic:
        two.fault(1, generate_status=500)
        traffic.wait_for_groups(20)
        two.fault(1)
        statuses = {two.post(two.router, "/generate", payload).status_code for _ in range(20)}
        traffic.wait_for_groups(6)
    # The router's circuit breaker takes refusals for failures of the worker; it closes again within a second.
    assert statuses <= {400, 503}
    assert 400 in statuses


def test_a_worker_whose_update_failed_half_way_serves_nothing_until_it_has_caught_up(two: FakeNodes) -> None:
    version = newest(two) + 1
    with Traffic(two) as traffic:
        # Its weights are those of the new version then, and it says that it serves the one before.
        two.fault(1, half_way=True)
        with two.registered_anew(1):
            two.publish(version)
        two.wait_registered([0, 1])
        traffic.wait_for_groups(12)
    assert version in traffic.versions()


def test_what_a_trainer_that_died_left_paused_and_open_is_taken_up_again(two: FakeNodes) -> None:
    version = newest(two) + 1

    async def leave_in_mid_update() -> None:
        async with two.admin(1) as worker:
            await worker.pause("retract")
            await worker.begin_update()

    with Traffic(two) as traffic:
        asyncio.run(leave_in_mid_update())
        with two.registered_anew(1):
            two.publish(version)
        two.wait_registered([0, 1])
        before = len(traffic.groups)
        traffic.wait_for_groups(12)
    assert traffic.versions(since=before) <= {version - 1, version}


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


@pytest.mark.slow
def test_a_killed_router_comes_back_with_all_its_workers(two: FakeNodes) -> None:
    with Traffic(two) as traffic:
        router = two.nodes[0].router
        router.kill()
        wait_until(lambda: not router.is_running(), "the router is dead")
        two.wait_registered([0, 1])
        traffic.wait_for_groups(6)


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher_whose_node_is_registered_once_after_its_return(two: FakeNodes) -> None:
    with Traffic(two) as traffic:
        launcher = two.nodes[1].process
        children = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not [p for p in children if p.is_running() and p.status() != "zombie"], "their ends")
        returned = two.start(1)
        # The router routes to the killed worker until a check of its health fails.
        two.wait_until(lambda: REGISTERED in returned.log.read_text(), "the worker is registered anew")
        two.wait_registered([0, 1])
        traffic.wait_for_groups(6)
    urls = [worker["url"] for worker in two.get(two.router, "/workers").json()["workers"]]
    assert sorted(urls) == sorted({two.worker(0).url, two.worker(1).url})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "variables", "code", "reason"),
    [
        (0, {"FAKE_ENGINE_EXIT": "78"}, EXIT_CONFIGURATION, "the engine-0 cannot run with these settings"),
        (0, {"FAKE_ENGINE_EXIT": "1"}, EXIT_CONFIGURATION, "error: the engine-0 (sglang.launch_server) never answered"),
        (1, {"SERVICE_DEADLINE_SECONDS": "0.5"}, EXIT_RECOVERABLE, "the router does not answer"),
    ],
    ids=["refused settings", "engine never up", "no router"],
)
def test_a_node_that_cannot_work_ends_with_the_reason(
    tmp_path: Path, rank: int, variables: dict[str, str], code: int, reason: str
) -> None:
    nodes = fake_nodes(tmp_path, 2, ROLLOUT_MAX_RESTARTS="1", **variables)
    try:
        assert nodes.start(rank).process.wait(LIMIT_SECONDS) == code
    finally:
        nodes.stop()
    lines = nodes.log(rank).splitlines()
    assert reason in lines[-1]
    # The line that runner, status and page show is the engine's own if it has one.
    refused = variables.get("FAKE_ENGINE_EXIT") == "78"
    [shown] = [line for line in lines if line.startswith("error: ")] if refused else ["error: the fake engine"]
    assert shown.startswith("error: the fake engine")


@pytest.mark.slow
def test_a_router_that_keeps_dying_ends_the_node_with_the_reason(tmp_path: Path) -> None:
    nodes = fake_nodes(tmp_path, ROLLOUT_MAX_RESTARTS="1")
    try:
        node = nodes.start(0)
        for _ in range(2):
            nodes.wait_registered([0])
            router = node.router
            router.kill()
            wait_until(lambda: not router.is_running(), "the router is dead")  # noqa: B023  # called at once
        assert node.process.wait(LIMIT_SECONDS) == EXIT_RECOVERABLE
    finally:
        nodes.stop()
    last = nodes.log(0).splitlines()[-1]
    assert "error: the router" in last
    assert "was ended by SIGKILL after 1 restart" in last
