"""A broadcast between GPUs that does not end costs its group, and nobody waits for it longer than its deadline."""

from __future__ import annotations

import os
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from services.weights import broadcast_group
from services.weights.broadcast_group import (
    BLOCKING_WAIT,
    join_weights_group,
    leave_weights_group,
    receive_weights,
)
from tests.ports import free_port
from tests.waiting import IDLE_SECONDS


class Work:
    """A broadcast that is over when it was asked ``polls`` times."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def is_completed(self) -> bool:
        self.polls -= 1
        return self.polls < 0


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    groups: list[Any] = []
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", groups.append)
    return groups


def wait(polls: int, timeout: float) -> None:
    broadcast_group._wait_for_device(cast("dist.Work", Work(polls)), cast("dist.ProcessGroup", "group"), timeout)


def test_a_broadcast_that_ends_in_time_keeps_its_group(given_up: list[Any]) -> None:
    wait(polls=3, timeout=IDLE_SECONDS)
    assert given_up == []


def test_a_broadcast_that_does_not_end_costs_its_group(given_up: list[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"within 0\.05 s; its group is aborted"):
        wait(polls=1_000_000_000, timeout=0.05)
    assert time.monotonic() - started < IDLE_SECONDS
    assert given_up == ["group"]


@pytest.mark.parametrize("before", [None, "0"])
def test_the_group_is_made_without_the_watchdog_that_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    else:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    make, seen = distributed_c10d._new_process_group_helper, []

    def remember(*arguments: Any, **options: Any) -> Any:
        seen.append(os.environ.get(BLOCKING_WAIT))
        return make(*arguments, **options)

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", remember)
    group = join_weights_group("127.0.0.1", free_port(), 0, 1, "alone", "gloo", 60)
    receive_weights(torch.ones(2), group, 60)
    leave_weights_group(group)
    leave_weights_group(group)  # as after one that was given up
    assert seen == ["1"]
    assert os.environ.get(BLOCKING_WAIT) == before


def test_an_address_at_which_nobody_listens_is_given_up_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"nobody listens at 127\.0\.0\.1:\d+ after 0\.3 s"):
        join_weights_group("127.0.0.1", free_port(), 1, 2, "dead", "gloo", 0.3)
    assert time.monotonic() - started < 30
