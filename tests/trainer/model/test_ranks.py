"""Ranks leave their process group where that ends, and not where it would wait for peers that never come."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.ports import free_port
from tests.waiting import LIMIT_SECONDS
from trainer.model import ranks
from trainer.model.ranks import join_ranks


def fail_in_group(fails: bool) -> None:
    with contextlib.suppress(torch.OutOfMemoryError), join_ranks():
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fails", [False, True])
def test_a_gloo_group_is_left_after_success_and_after_an_error(fails: bool) -> None:
    fail_in_group(fails)
    assert not dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
def test_an_nccl_group_is_left_after_success_only(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    left: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks, "log_device", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append("left"))
    monkeypatch.setattr(ranks, "init_device_mesh", lambda *_: None)
    fail_in_group(fails)
    assert left == ([] if fails else ["left"])


MEETING = """
import sys
from trainer.model.ranks import join_ranks
with join_ranks() as ranks:
    print(ranks.broadcast_json(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address, and ports for each run")
def test_two_job_groups_of_a_machine_meet_each_for_itself_on_one_port() -> None:
    port = str(free_port())
    started = {
        (group, rank): subprocess.Popen(
            [sys.executable, "-c", MEETING, group],
            env=os.environ
            | {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
            | {"JOBGROUP_ENDPOINTS": json.dumps({f"ppo-trainer-0:{port}": f"{address}:{port}"})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for group, address in (("first", "127.77.0.1"), ("second", "127.77.0.2"))
        for rank in "10"
    }
    for (group, _), process in started.items():
        assert process.communicate(timeout=LIMIT_SECONDS)[0].splitlines()[-1] == group
