from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.reward_server.pool import WorkerPool
from services.reward_server.scoring import Scorer
from services.reward_server.settings import RewardSettings

PLUGIN = '''
import ctypes, math, os, signal, time

def half(response):
    return 0.5

def length(response, completion_tokens=None, **rest):
    assert set(rest) == {"prompt", "ground_truth", "finish_reason"}, rest
    return float(completion_tokens or len(response))

def distinct(completions, ground_truth, **rest):
    """As TRL's documentation has it."""
    assert set(rest) == {"prompts", "completion_tokens", "finish_reason"}, rest
    return [len(set(text)) + float(truth) for text, truth in zip(completions, ground_truth, strict=True)]

def by_column(completions, level, **rest):
    """Takes a column of the dataset, as TRL passes it."""
    return [float(number) for number in level]

def check(response, tests, difficulty=1):
    """Takes columns of the dataset, and changes them."""
    tests.append(response)
    return len(tests) * difficulty

def whole(response, row):
    return eval(response, {"row": row})

def where_tested(response, tests=None):
    return None if tests is None else float(len(tests))

def by_conversation(messages):
    """Takes a name that no column has."""

def by_place(response, /):
    """Cannot be called by keyword."""

def moody(prompt, response):
    """Does what the response says."""
    match response:
        case "raise":
            raise ValueError("not today")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "good"
        case "digits":
            return "1.0"
        case "patch":
            math.isfinite = lambda _: True
            return float("nan")
        case "torch":
            # The loader's words when memory lacks; torch itself may be loaded already, by tests before.
            raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
        case "fork":
            if os.fork() == 0:
                time.sleep(0.3)
                return -1.0
        case "slow":
            time.sleep(1)
        case "burn":
            while True:
                pass
        case "sleep":
            time.sleep(600)
        case "hog":
            hoard = []
            while True:
                hoard.append(bytearray(2**22))
        case "grab":
            return len(bytearray(2**40))
        case "swallow":
            try:
                while True:
                    pass
            except BaseException:
                return 1.0
        case "exit":
            os._exit(3)
        case "crash":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pid":
            return os.getpid()
        case "threads":
            return float(os.environ["OMP_NUM_THREADS"])
    return 1.0
'''

Scoring = Callable[..., AbstractAsyncContextManager[Scorer]]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with reward functions of a user's own."""
    (tmp_path / "rewards_of_mine.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    return "rewards_of_mine"


@pytest.fixture
def scoring(plugin: str) -> Scoring:
    """``async with scoring(reward_fn=...) as scorer``: a scorer with its worker processes."""

    @asynccontextmanager
    async def score(**options: Any) -> AsyncIterator[Scorer]:
        settings = RewardSettings(**{"reward_workers": 1, **options})
        pool = WorkerPool(settings)
        await pool.start()
        try:
            yield Scorer(settings, pool)
        finally:
            await pool.stop()

    return score
