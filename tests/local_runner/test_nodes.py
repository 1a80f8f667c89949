"""Addresses of nodes on one machine."""

import json
import socket
import sys
import time

import pytest

from local_runner import nodes
from local_runner.spec import JobGroup, TaskSpec
from services.core import endpoints
from services.core.endpoints import Task
from tests.waiting import IDLE_SECONDS

GROUP = JobGroup(
    "group",
    (TaskSpec(Task.ROLLOUT_SERVER, "", num_nodes=2), TaskSpec(Task.TRAINER, "", num_nodes=2), TaskSpec("other", "")),
)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")


def listen(address: str) -> socket.socket:
    host, port = address.split(":")
    server = socket.socket()
    server.bind((host, int(port)))
    server.listen()
    return server


@pytest.mark.parametrize("own_hosts", [pytest.param(True, marks=needs_linux), False])
def test_every_port_of_every_node_can_be_listened_on_at_once(own_hosts):
    with nodes.allocate(GROUP, own_hosts=own_hosts) as addresses:
        assert len(addresses.endpoints) == sum(2 * len(endpoints.PORTS[task.name]) for task in GROUP.tasks[:2])
        servers = [listen(address) for address in addresses.endpoints.values()]
        for server in servers:
            server.close()


@needs_linux
def test_a_node_has_a_host_of_its_own_and_its_usual_ports():
    with nodes.allocate(GROUP) as addresses:
        hosts = [host for task in addresses.hosts.values() for host in task]
        assert len(set(hosts)) == 5
        assert all(host.startswith("127.") and host != "127.0.0.1" for host in hosts)
        assert addresses.find("rollout-server", 1, 30001) == f"{addresses.hosts['rollout-server'][1]}:30001"


@needs_linux
def test_two_runs_at_once_share_no_address():
    with nodes.allocate(GROUP) as one, nodes.allocate(GROUP) as other:
        assert not set(one.endpoints.values()) & set(other.endpoints.values())


def _bind_when_free(listener: socket.socket, port: int) -> None:
    """Bind the port on all addresses, once programs that have it on one address, such as other tests, release it."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        try:
            listener.bind(("0.0.0.0", port))
            listener.listen()
            return
        except OSError:
            if time.monotonic() > deadline:
                pytest.skip(f"another program of this machine has port {port}")
            time.sleep(0.1)


@needs_linux
def test_a_port_that_is_taken_on_all_addresses_is_replaced():
    with socket.socket() as taken:
        _bind_when_free(taken, endpoints.STATUS_PORT)
        with nodes.allocate(GROUP) as addresses:
            server = listen(addresses.find("ppo-trainer", 0, endpoints.STATUS_PORT))
            assert server.getsockname()[1] != endpoints.STATUS_PORT
            server.close()


def test_components_find_each_other_by_it(monkeypatch):
    with nodes.allocate(GROUP, own_hosts=False) as addresses:
        monkeypatch.setenv("JOBGROUP_ENDPOINTS", addresses.variable)
        monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
        assert json.loads(addresses.variable) == addresses.endpoints
        assert (
            endpoints.endpoint(endpoints.Task.ROLLOUT_SERVER).url
            == f"http://{addresses.find('rollout-server', 0, 30000)}"
        )
        bound = endpoints.bind_address(Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT)
        assert f"{bound.host}:{bound.port}" == addresses.find("rollout-server", 1, 30001)
