from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.core import machine
from services.core.errors import ConfigurationError
from services.protocol.accuracy import is_correct
from services.protocol.rewards import RewardItem, RewardStatus
from services.reward_server import pool, worker
from tests.waiting import IDLE_SECONDS, eventually


def item(response: str, truth: str = "5", **more: Any) -> RewardItem:
    return RewardItem(prompt="q", response=response, ground_truth=truth, **more)


HOSTILE = ["9^{9^{9}}", "10^{10^{10}}", "99999999!", r"\sum_{i=1}^{10^9} i^i", "2^{10^{11}}"]


async def test_hostile_answers_are_unscorable_with_a_reason_and_hold_nobody_up(scoring: Any) -> None:
    async with scoring(reward_fn="math", reward_workers=2, reward_timeout_seconds=120) as scorer:
        hostile = [item(rf"\boxed{{{answer}}}") for answer in HOSTILE]
        others = [item("#### 5"), item(r"\boxed{\sqrt{25}}"), item("#### 6"), item(r"\boxed{\sqrt{26}}")]
        results = await scorer.score([*hostile, *others])
        for result in results[: len(HOSTILE)]:
            assert (result.reward, result.status) == (None, RewardStatus.OVER_LIMIT)
            assert "0.25 s of processor time" in (result.reason or "")
        assert [result.reward for result in results[len(HOSTILE) :]] == [1.0, 1.0, 0.0, 0.0]
        # The workers that took their place answer.
        assert (await scorer.score([item(r"\boxed{\sqrt{36}}", "6")]))[0].reward == 1.0


MISBEHAVED = {
    "raise": (RewardStatus.ERROR, "ValueError: not today"),
    "nan": (RewardStatus.ERROR, "finite"),
    "none": (RewardStatus.ERROR, "None"),
    "text": (RewardStatus.ERROR, "'good'"),
    "digits": (RewardStatus.ERROR, "'1.0'"),
    "patch": (RewardStatus.ERROR, "finite"),
    "torch": (RewardStatus.ERROR, "REWARD_MEMORY_MB"),
    "burn": (RewardStatus.OVER_LIMIT, "processor time"),
    "swallow": (RewardStatus.OVER_LIMIT, "processor time"),
    "hog": (RewardStatus.OVER_LIMIT, "64 MB"),
    "grab": (RewardStatus.OVER_LIMIT, "64 MB"),
    "exit": (RewardStatus.ERROR, "exited with code 3"),
    "crash": (RewardStatus.ERROR, "SIGSEGV"),
    "killed": (RewardStatus.ERROR, "SIGKILL"),
}


async def test_a_function_of_ones_own_that_misbehaves_costs_its_own_answer_only(scoring: Any, plugin: str) -> None:
    limits = {"reward_timeout_seconds": IDLE_SECONDS, "reward_memory_mb": 64}
    async with scoring(reward_fn=f"{plugin}:moody", **limits) as scorer:
        for response, (status, reason) in MISBEHAVED.items():
            before, bad, after = await scorer.score([item("fine"), item(response), item("fine")])
            assert (bad.reward, bad.status) == (None, status), response
            assert reason in (bad.reason or "")
            assert (before.reward, after.reward) == (1.0, 1.0)


async def test_a_process_that_a_function_forks_answers_nothing(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:moody", reward_timeout_seconds=60) as scorer:
        # The child returns while the worker is at the next answer.
        results = await scorer.score([item(response) for _ in range(3) for response in ("fork", "slow", "fine")])
        assert [result.reward for result in results] == [1.0] * 9


def test_a_number_of_any_library_is_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned = {"f": "np.float32(0.5)", "g": "np.int64(2)", "h": "True"}
    code = "".join(f"def {name}(response):\n    return {value}\n" for name, value in returned.items())
    (tmp_path / "numeric.py").write_text(f"import numpy as np\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    assert [worker.load(f"numeric:{name}")({"response": "?"})["value"] for name in returned] == [0.5, 2.0, 1.0]


async def test_a_function_of_trls_form_gets_lists(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:distinct") as scorer:
        results = await scorer.score([item("aab"), item("abc", "7")])
        assert [result.reward for result in results] == [7.0, 10.0]


async def test_a_reward_whose_square_overflows_is_none(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:length=1{'0' * 299}") as scorer:
        [huge] = await scorer.score([item("5", completion_tokens=10)])
        assert (huge.reward, huge.status) == (None, RewardStatus.ERROR)


async def test_workers_share_the_nodes_cores(scoring: Any, plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(machine, "cores", lambda: 6)
    async with scoring(reward_fn=f"{plugin}:moody", reward_workers=2) as scorer:
        [scored] = await scorer.score([item("threads")])
        assert scored.reward == 3.0


async def test_several_rewards_are_weighted_and_each_is_told_by_name(scoring: Any, plugin: str) -> None:
    functions = f"math=2,format=0.5,exact_match,{plugin}:half=-1,{plugin}:length=0.1"
    async with scoring(reward_fn=functions) as scorer:
        marked, plain = await scorer.score([item("#### 5", completion_tokens=15), item("5", completion_tokens=2)])
        assert marked.components == {
            "math": 1.0,
            "format": 1.0,
            "exact_match": 0.0,
            f"{plugin}:half": 0.5,
            f"{plugin}:length": 15.0,
        }
        assert marked.reward == pytest.approx(2 + 0.5 - 0.5 + 1.5)
        assert marked.extracted == "5"
        assert plain.components["format"] == 0.0
        assert plain.components["exact_match"] == 1.0


ROW = '{"tests": [1, 2], "difficulty": 3, "level": 4, "when": "2024-01-02", "big": 9007199254740993, "row": "mine"}'


async def test_a_function_gets_the_columns_that_its_signature_names(scoring: Any, plugin: str) -> None:
    names = ("check", "by_column", "whole")
    async with scoring(reward_fn=",".join(f"{plugin}:{name}" for name in names)) as scorer:
        exact = "row['big'] - 2**53 if row['when'] == '2024-01-02' and row['row'] == 'mine' else 0"
        # A function that changes a list changes that of its own answer only.
        results = await scorer.score([item(exact, row=ROW), item(exact, row=ROW)])
        assert [list(result.components.values()) for result in results] == [[9.0, 4.0, 1.0]] * 2


async def test_a_row_that_lacks_a_column_without_a_default_has_no_reward(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:check") as scorer:
        for row in ('{"difficulty": 2}', None):
            [result] = await scorer.score([item("x", row=row)])
            assert (result.reward, result.status) == (None, RewardStatus.ERROR)
            assert "check needs tests" in (result.reason or "")


async def test_a_function_that_does_not_apply_is_another_thing_than_one_that_failed(scoring: Any, plugin: str) -> None:
    tested, moody = f"{plugin}:where_tested", f"{plugin}:moody"
    async with scoring(reward_fn=f"{tested}=2,{moody}") as scorer:
        rows = ['{"tests": [1]}', '{"other": 1}', '{"tests": [1]}', '{"other": 1}']
        answers = ("fine", "fine", "none", "raise")
        results = await scorer.score([item(answer, row=row) for answer, row in zip(answers, rows, strict=True)])
        assert [result.reward for result in results] == [3.0, 1.0, 2.0, None]
        assert [result.components for result in results] == [
            {tested: 1.0, moody: 1.0},
            {tested: None, moody: 1.0},
            {tested: 1.0, moody: None},
            {tested: None, moody: None},
        ]
        assert [result.failed for result in results] == [{}, {}, {}, {moody: RewardStatus.ERROR}]
        assert [result.decided_by for result in results[:3]] == [tested, moody, tested]
        [own] = await scorer.score([item("fine")], is_group=True, own_rewards=[0.5])
        assert (own.decided_by, is_correct(own)) == ("agent", False)


async def test_an_answer_is_right_by_one_part_before_its_weight(scoring: Any, plugin: str) -> None:
    for functions, named, right, wrong in (
        ("math=0.1,format=2", None, True, False),
        (f"{plugin}:half=-3,math", None, True, False),
        ("math,format", "format", True, True),
        (f"{plugin}:length,math", f"{plugin}:length", True, True),
    ):
        async with scoring(reward_fn=functions, accuracy_fn=named) as scorer:
            results = await scorer.score([item("#### 5", completion_tokens=9), item("#### 6", completion_tokens=9)])
            assert [is_correct(result) for result in results] == [right, wrong], functions


async def test_without_one_part_there_is_no_reward_but_the_other_parts_are_told(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"math,{plugin}:moody") as scorer:
        result = (await scorer.score([item("raise", "raise")]))[0]
        assert (result.reward, result.status) == (None, RewardStatus.ERROR)
        assert result.components == {"math": 1.0, f"{plugin}:moody": None}
        assert (result.reason or "").startswith(f"{plugin}:moody: ValueError")
        assert re.search(rf"\(.*/{plugin}\.py, line \d+, in moody\)$", result.reason or ""), result.reason


async def test_too_many_waiting_answers_come_back_overloaded(
    scoring: Any, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_PENDING", 2)
    limits = {"reward_timeout_seconds": 3, "service_deadline_seconds": 7.5}
    async with scoring(reward_fn=f"{plugin}:moody", **limits) as scorer:
        results = await scorer.score([item("sleep")] + [item("fine")] * 4)
        assert [result.status for result in results] == [RewardStatus.TIMEOUT] + [RewardStatus.OVERLOADED] * 4
        assert sum("SERVICE_DEADLINE_SECONDS" in str(result.reason) for result in results) == 2, "two may wait"

        async def scores_again() -> bool:
            return (await scorer.score([item("fine")]))[0].reward == 1.0

        await eventually(scores_again, "a worker took the place of the one that slept")


async def test_the_event_loop_turns_while_answers_are_scored(scoring: Any) -> None:
    """Processor time of this thread between two turns: unlike time by the clock, no other process adds to it."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async with scoring(reward_fn="math", reward_timeout_seconds=120) as scorer:
        watcher = asyncio.create_task(watch())
        plain = [item("She has 3, 4 and 5 apples. " * 50 + f"The answer is {i}.", str(i)) for i in range(5000)]
        hostile = [item(rf"\boxed{{{answer}}}") for answer in HOSTILE[:2]]
        before = time.thread_time()
        await scorer.score([*hostile, *plain])
        whole = time.thread_time() - before
        watcher.cancel()
    assert longest < 0.2 * whole


async def test_each_death_has_its_own_reason_however_many_there_are_at_once(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:moody", reward_workers=4, reward_timeout_seconds=60) as scorer:
        results = await scorer.score([item("exit") for _ in range(60)])
    reasons = {result.reason for result in results}
    assert len(reasons) == 1
    assert "exited with code 3" in str(reasons)


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_no_process_is_left(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:moody", reward_workers=2) as scorer:
        results = await scorer.score([item("pid") for _ in range(20)])
        pids = {int(result.reward or 0) for result in results}
        assert all(psutil.pid_exists(pid) for pid in pids)
    await eventually(lambda: not any(map(is_running, pids)), "the workers have ended")


async def test_a_function_that_cannot_be_loaded_or_has_a_parameter_that_nobody_gives_stops_the_start(
    scoring: Any, plugin: str
) -> None:
    for name, said in (
        (f"{plugin}:by_conversation", "by_conversation needs messages"),
        (f"{plugin}:by_place", "by_place needs response"),
        ("no_such_module:f", "'no_such_module:f' cannot be loaded"),
        ("json:no_such_function", "'json:no_such_function' cannot be loaded"),
        ("json:__doc__", "'json:__doc__' cannot be loaded"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            async with scoring(reward_fn=name):
                pass


async def test_a_module_that_takes_too_long_to_import_stops_the_start(
    scoring: Any, plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text("import time\n\ntime.sleep(3600)\n")
    monkeypatch.setattr(pool, "START_SECONDS", 0.5)
    with pytest.raises(ConfigurationError, match="'endless:f' cannot be loaded"):
        async with scoring(reward_fn="endless:f"):
            pass


@pytest.mark.slow
async def test_the_server_that_starts_workers_may_be_killed(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:moody") as scorer:
        worker = (await scorer.score([item("pid")]))[0].reward
        psutil.Process(int(worker)).parent().kill()
        results = await scorer.score([item("crash"), item("ok")])
    assert [result.status for result in results] == [RewardStatus.ERROR, RewardStatus.SCORED]


async def test_a_worker_that_died_while_it_was_free_costs_no_answer(scoring: Any, plugin: str) -> None:
    async with scoring(reward_fn=f"{plugin}:moody") as scorer:
        free = psutil.Process(int((await scorer.score([item("pid")]))[0].reward))
        free.kill()
        # Gone, not just a zombie: another thread of a dying process may still hold its end of the connection.
        await eventually(lambda: not psutil.pid_exists(free.pid))
        [result] = await scorer.score([item("pid")])
    assert result.status is RewardStatus.SCORED, result.reason
    assert int(result.reward) != free.pid
