"""Ranks leave their process group where that ends, and not where it would wait for peers that never come."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

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
