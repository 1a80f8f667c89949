"""Ranks leave their process group where that ends, and not where it would wait for peers that never come."""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ports import free_port
from tests.waiting import IDLE_SECONDS
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address, and ports for each run")
def test_two_job_groups_of_a_machine_meet_each_for_itself_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port, stores = free_port(), {}
    for rank in (0, 1):
        for group, address in (("first", "127.77.0.1"), ("second", "127.77.0.2")):
            monkeypatch.setenv("MASTER_ADDR", address)
            monkeypatch.setenv("MASTER_PORT", str(port))
            monkeypatch.setenv("JOBGROUP_ENDPOINTS", json.dumps({f"ppo-trainer-0:{port}": f"{address}:{port}"}))
            stores[group, rank] = ranks._store(rank, 2, timedelta(seconds=IDLE_SECONDS))
    for group in ("first", "second"):
        stores[group, 0].set("group", group)
    assert [stores[group, 1].get("group").decode() for group in ("first", "second")] == ["first", "second"]
