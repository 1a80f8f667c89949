"""Nodes: allocations in shorthand and what they mean to engines, addresses, and the programs that nodes become."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation import node
from evaluation.node import Allocation, parse_allocation
from services.core.endpoints import Task, bind_address, endpoint
from services.core.errors import ConfigurationError
from services.http.server import listen
from tests.evaluation.conftest import ROOT


def test_letters_in_any_order_and_nothing_else() -> None:
    for text, allocation in [
        ("d12p1t1", Allocation(12, 1, 1)),
        ("t4d2", Allocation(2, 1, 4)),
        ("p2", Allocation(1, 2, 1)),
    ]:
        assert parse_allocation(text) == allocation
        assert parse_allocation(str(allocation)) == allocation
    for text in ("", "12", "d0", "d2d2", "d2x1", "d-1", "d2 t1", "D2"):
        with pytest.raises(ConfigurationError, match="such as d12p1t2"):
            parse_allocation(text)


def test_a_machine_holds_no_more_engines_than_it_has_gpus_for() -> None:
    for text, gpus in [("d3", 0), ("d2t2", 4), ("d2", 2)]:
        parse_allocation(text).check_machine(gpus)
    for text, gpus in [("t2", 0), ("d3t2", 4), ("d3", 2)]:
        with pytest.raises(ConfigurationError, match=f"this machine has {gpus}"):
            parse_allocation(text).check_machine(gpus)


def test_engines_get_their_sizes() -> None:
    allocation = parse_allocation("d2p2t4")
    assert allocation.engine_variables({"SGLANG_EXTRA_FLAGS": "--mem-fraction-static 0.8"}) == {
        "SGLANG_TP_SIZE": "4",
        "SGLANG_EXTRA_FLAGS": "--mem-fraction-static 0.8 --pp-size 2",
    }
    assert Allocation(data=3).engine_variables({}) == {}


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_placed_node_has_free_ports_of_its_host(monkeypatch: pytest.MonkeyPatch, host: str, shown: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6; enable it in the kernel")
    variables, url = node.placed(host)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert url == endpoint(Task.ROLLOUT_SERVER).url == bind_address(Task.ROLLOUT_SERVER).url
    assert url.startswith(f"http://{shown}:")
    with listen(host, endpoint(Task.ROLLOUT_SERVER).port) as listener:
        assert listener.getsockname()[0] == host


def test_vllm_is_started_at_its_nodes_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\necho "$@ $VLLM_API_KEY" > {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("JOBGROUP_TOKEN", "secret")
    own = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "MODEL_NAME": "some/model",
        "SKYPILOT_NODE_RANK": "1",
        "JOBGROUP_ENDPOINTS": '{"rollout-server-1:30001": "127.0.0.3:4711"}',
        **parse_allocation("t2").vllm_variables({"VLLM_FLAGS": "--max-model-len 2048"}),
    }
    subprocess.run([sys.executable, "-m", node.MODULE, node.VLLM], cwd=ROOT, env=own, check=True)
    assert told.read_text().split() == [
        *("serve", "some/model", "--served-model-name", "some/model", "--host", "127.0.0.3", "--port", "4711"),
        *("--tensor-parallel-size", "2", "--pipeline-parallel-size", "1", "--max-model-len", "2048", "secret"),
    ]


def test_nodes_are_found_by_the_files_that_they_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.update(environment))
    node.main(tmp_path, {"MODEL_NAME": "m"})
    [url] = node.registered(tmp_path)
    assert url.removeprefix("http://") in started["JOBGROUP_ENDPOINTS"]
    assert (started["MODEL_NAME"], started["SKYPILOT_NODE_RANK"]) == ("m", "0")
