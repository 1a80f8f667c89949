"""grpo evaluate-policy: results by seed, deaths of workers, head and command, resuming, and refusals."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from evaluation.policy import worker as worker_module
from evaluation.policy.run import EPISODES, RESULTS, Options, evaluate
from evaluation.policy.worker import Costs, HeadActor, Work, WorkerPlay
from evaluation.policy.workers import LINE_BYTES, Coordinator, Worker
from evaluation.trajectories.arenas import open_arena
from services.clients.play import Decision, NoActionError
from services.core.errors import ConfigurationError, DependencyLostError
from services.evaluation_head.app import create_app
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import EpisodePosition
from tests.evaluation import trajectory_policies
from tests.evaluation.deadly_environment import HANGS_ONCE, KILLS_ALWAYS, KILLS_ONCE, MARKS
from tests.local_runner.runner import is_running
from tests.ports import free_port
from tests.services.evaluation_head import policies
from tests.services.run_page.serving import served, served_ready
from tests.waiting import LIMIT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
MINE = "tests.evaluation.trajectory_policies"
DEADLY = "tests.evaluation.deadly_environment:Deadly-v0"
ODD = "tests.services.environment_server.odd_environments:Odd/"
POLICIES = f"left={MINE}:left lean={MINE}:lean wrong={MINE}:wrong fails={MINE}:optimal"


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    with served_ready(create_app(HeadSettings(head_policies=POLICIES))) as url:
        yield url


class WorkerHere:
    """A worker process, as its coordinator sees it, that plays in this process and is killed by some seeds."""

    def __init__(self, work: Work, log: Path, marks: set[int]) -> None:
        log.touch()
        self.stdin = self
        self.stdout = asyncio.StreamReader(limit=LINE_BYTES)
        self._marks = marks
        self._given: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._play(work))

    def write(self, line: bytes) -> None:
        self._given.put_nowait(json.loads(line))

    def close(self) -> None:
        self._given.put_nowait(None)

    async def wait(self) -> int:
        return await self.task

    def _say(self, content: object) -> None:
        self.stdout.feed_data(json.dumps(content).encode() + b"\n")

    def _dies_of(self, seeds: list[int]) -> bool:
        for seed in {KILLS_ONCE, HANGS_ONCE}.intersection(seeds) - self._marks:
            self._marks.add(seed)
            return True
        return KILLS_ALWAYS in seeds

    async def _play(self, work: Work) -> int:
        async with open_arena(work.environment, None, None) as (_, arena):
            self._say({})
            while (seeds := await self._given.get()) is not None:
                if self._dies_of(seeds):
                    self.stdout.feed_data(b'{"half a line')
                    self.stdout.feed_eof()
                    return -signal.SIGKILL
                await WorkerPlay(HeadActor(work), seeds, lambda episode: self._say(asdict(episode))).run(arena)
        self._say(asdict(Costs(0.0, 0.0)))
        return 0


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Let workers play in this process; those seeds that are not in the returned set kill theirs."""
    marks = {KILLS_ONCE, HANGS_ONCE}

    @asynccontextmanager
    async def start(self: Coordinator, worker: Worker, log: Path | None) -> AsyncIterator[WorkerHere]:
        assert log is not None
        started = WorkerHere(replace(self._crew.work, name=f"{worker.name}.{worker.restarts}"), log, marks)
        yield started
        started.task.cancel()

    monkeypatch.setattr(Coordinator, "_process", start)
    return marks


def run(save_to: Path, head: str, **options: Any) -> dict[str, Any]:
    given = {"environment": "CartPole-v1", "episodes": 4, "workers": 2, "seed": 7, "url": head, **options}
    return asyncio.run(evaluate(Options(save_to=save_to, **given), lambda _: None))


def returns_of(results: dict[str, Any]) -> dict[int, float]:
    return {one["seed"]: one["episode_return"] for one in results["episodes"]}


def return_of(seed: int, policy: str = "left", environment_id: str = "CartPole-v1") -> float:
    environment = gymnasium.make(environment_id)
    state, _ = environment.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        [action] = getattr(trajectory_policies, policy)([state.tolist()])
        state, reward, terminated, truncated, _ = environment.step(action)
        total, is_over = total + float(reward), terminated or truncated
    return total


@pytest.mark.usefixtures("workers_here")
def test_results_are_those_of_the_environment_and_a_longer_run_continues(tmp_path: Path, head: str) -> None:
    run(tmp_path, head, episodes=2)
    with pytest.raises(ConfigurationError, match="policy was 'left' and is 'lean'"):
        run(tmp_path, head, policy="lean")
    kept = (tmp_path / EPISODES).read_bytes()
    # What a kill in the midst of a line leaves behind is not counted.
    (tmp_path / EPISODES).write_bytes(kept + b'{"seed": 9, "episode_return": 1e9, "steps"')
    results = run(tmp_path, head, episodes=5)
    assert (tmp_path / EPISODES).read_bytes().startswith(kept)
    returns = [return_of(seed) for seed in range(7, 12)]
    assert returns_of(results) == dict(enumerate(returns, start=7))
    assert results["mean_return"]["value"] == pytest.approx(np.mean(returns))
    assert results["mean_return"]["low"] <= np.mean(returns) <= results["mean_return"]["high"]
    assert (results["steps"], results["policy"], results["policy_versions"]) == (sum(returns), "left", [None])
    assert [worker["name"] for worker in results["workers"]] == ["worker-0", "worker-1"]
    assert sum(worker["episodes"] for worker in results["workers"]) == 3
    assert json.loads((tmp_path / RESULTS).read_text()) == results


@pytest.mark.parametrize("episodes_at_once", [1, 2])
def test_deaths_cost_only_their_open_episodes(
    tmp_path: Path, head: str, workers_here: set[int], episodes_at_once: int
) -> None:
    workers_here.clear()
    results = run(tmp_path, head, episodes=6, seed=0, episodes_at_once=episodes_at_once)
    assert returns_of(results) == {seed: return_of(seed) for seed in (0, 1, 3, 4, 5)}
    assert list(results["left_out"]) == [str(KILLS_ALWAYS)]
    assert "was ended by SIGKILL" in results["left_out"][str(KILLS_ALWAYS)]
    # The seed that kills always has three tries, the two others one that fails.
    assert 3 + 1 <= sum(len(worker["deaths"]) for worker in results["workers"]) <= 3 + 2
    assert sum(worker["restarts"] for worker in results["workers"]) <= 5


@pytest.mark.slow
def test_processes_that_an_environment_kills_or_hangs_are_restarted(
    tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARKS, str(tmp_path))
    monkeypatch.setenv("ENVIRONMENT_STEP_SECONDS", "4")
    given = {"environment": DEADLY, "policy": "lean", "episodes_at_once": 2}
    results = run(tmp_path / "out", head, episodes=6, seed=0, **given)
    assert returns_of(results) == {seed: return_of(seed, "lean", DEADLY) for seed in (0, 1, 3, 4, 5)}
    assert list(results["left_out"]) == ["2"]
    assert "was ended by SIGKILL" in results["left_out"]["2"]
    deaths = [death for worker in results["workers"] for death in worker["deaths"]]
    assert len(deaths) <= 5
    assert sum("SIGALRM" in death for death in deaths) == 1


@pytest.mark.usefixtures("workers_here")
def test_episodes_played_together_are_those_played_one_by_one(tmp_path: Path, head: str) -> None:
    alone, together = (run(tmp_path / str(n), head, episodes=6, episodes_at_once=n)["episodes"] for n in (1, 3))
    assert len({episode["steps"] for episode in alone}) > 1, "they end at different steps"
    for episode in (*alone, *together):
        del episode["seconds"]
    assert together == alone


def command(save_to: Path, *options: str) -> list[str]:
    given = ["--save-to", str(save_to), "--episodes", "8", "--workers", "2", *options]
    return [sys.executable, "-m", "scripts.grpo", "evaluate-policy", "--policies", f"lean={MINE}:slow_lean", *given]


def start(save_to: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start the command with a head of its own; return it with its children once some episodes are played."""
    process = subprocess.Popen(command(save_to), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    lines = save_to / EPISODES
    wait_until(
        lambda: (lines.exists() and lines.read_bytes().count(b"\n") >= 2) or process.poll() is not None,
        "two episodes",
        progress=lambda: lines.exists() and lines.stat().st_size,
    )
    assert process.poll() is None, process.communicate()
    return process, psutil.Process(process.pid).children(recursive=True)


def three_children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes below the command if they are three that live, else none."""
    below = psutil.Process(process.pid).children(recursive=True)
    return below if len(below) == 3 and all(is_running(child.pid) for child in below) else []


def named(children: list[psutil.Process], module: str) -> psutil.Process:
    return next(child for child in children if module in child.cmdline())


@pytest.mark.slow
def test_head_worker_and_command_may_be_killed_and_a_signal_ends_all(tmp_path: Path) -> None:
    process, children = start(tmp_path / "out")
    try:
        for child in (named(children, "services.evaluation_head"), named(children, "evaluation.policy.worker")):
            child.kill()
        count = (tmp_path / "out" / EPISODES).read_bytes().count(b"\n")
        wait_until(
            lambda: (tmp_path / "out" / EPISODES).read_bytes().count(b"\n") > count, "an episode after the kills"
        )
        # The episode may have been at its end when the others were killed.
        children = wait_until(lambda: three_children(process), "the head and two workers")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; the same command continues from" in said
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "out" / RESULTS).exists()
    done = subprocess.run(command(tmp_path / "out"), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "of 8 episodes already" in done.stderr
    results = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert returns_of(results) == {seed: return_of(seed, "lean") for seed in range(8)}

    process, children = start(tmp_path / "killed")
    process.kill()
    process.communicate()
    wait_until(lambda: not any(child.is_running() for child in children), "the end of all processes")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "other"}, "--policy is 'other'; the head at http.* has left, lean, wrong, fails"),
        ({"policy": "wrong"}, "policy 'wrong' does not fit CartPole-v1"),
        ({"policy": "fails"}, "the policy gives no action for CartPole-v1: .*raised"),
        ({"environment": "NoSuchGame-v0"}, "NoSuchGame"),
        ({"environment": "nim"}, "nim has 2 seats"),
        ({"environment": f"{ODD}Unborn-v0"}, "cannot be reset: .*no world today"),
        ({"url": "localhost:8080"}, "--eval-head-url is 'localhost:8080'"),
        ({"url": f"http://127.0.0.1:{free_port()}"}, "did not answer /health.*--eval-head-url"),
        ({"url": None}, "--eval-head-url"),
        ({"policies": "a=b:c"}, "--eval-head-url"),
    ],
)
def test_what_does_not_fit_is_refused_before_workers_start(
    tmp_path: Path, head: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        run(tmp_path, head, **options)
    assert not list(tmp_path.glob("worker-*"))


def test_a_torch_policy_of_other_states_is_refused(tmp_path: Path) -> None:
    policies.publish_times(tmp_path / "times", 1)
    app = create_app(HeadSettings(head_policies=f"times={tmp_path / 'times'}"))
    with served_ready(app) as url, pytest.raises(ConfigurationError, match=r"policy 'times' takes .* shape \[2\]"):
        run(tmp_path / "out", url)


def test_a_server_that_is_not_a_head_and_a_head_with_a_token_are_refused(tmp_path: Path) -> None:
    other = FastAPI()
    other.get("/stats")(lambda: {"service": "data-server"})
    with served(other) as url, pytest.raises(ConfigurationError, match="is not an evaluation head"):
        run(tmp_path, url)
    app = create_app(HeadSettings(head_policies=POLICIES, jobgroup_token="secret"))
    with served_ready(app) as url, pytest.raises(ConfigurationError, match="/stats answers 401"):
        run(tmp_path, url)


def test_a_port_that_is_taken_is_refused(tmp_path: Path, head: str) -> None:
    port = int(head.rsplit(":", 1)[1])
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
        run(tmp_path, head, url=None, policies=f"lean={MINE}:lean", port=port)


@pytest.mark.slow
def test_a_head_that_cannot_start_is_refused(tmp_path: Path, head: str) -> None:
    with pytest.raises(ConfigurationError, match="the evaluation-head cannot run with these settings"):
        run(tmp_path, head, url=None, policies="missing=no-such-directory")


@pytest.mark.parametrize(
    ("answers", "error", "says"),
    [
        ([429, 503, 200], None, ""),
        ([422], NoActionError, "422"),
        ([500], NoActionError, "500"),
        ([409], ConfigurationError, "409"),
        ([503] * 100, DependencyLostError, "gave no action within 0.2 s: 503"),
    ],
)
def test_an_actor_asks_again_where_that_may_help(
    answers: list[int], error: type[Exception] | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "PAUSE_SECONDS", 0.05)
    app = FastAPI()
    content = {"actions": [1], "policy_versions": [5]}

    @app.post("/evaluate")
    async def answer() -> JSONResponse:
        return JSONResponse(content, answers.pop(0), {"Retry-After": "0"})

    position = EpisodePosition(episode="a")
    with served(app) as url:
        actor = HeadActor(Work("w", "CartPole-v1", url, patience_seconds=LIMIT_SECONDS if error is None else 0.2))
        if error is None:
            assert actor.act([position], [[0.0]]) == [Decision(1, 5)]
            return
        with pytest.raises(error, match=says):
            actor.act([position], [[0.0]])


class Clock:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


def test_an_actor_waits_for_a_head_that_is_away_no_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(worker_module, "time", clock)
    actor = HeadActor(Work("w", "CartPole-v1", f"http://127.0.0.1:{free_port()}", patience_seconds=2))
    with pytest.raises(DependencyLostError, match="gave no action within 2 s: ConnectionRefusedError"):
        actor.act([EpisodePosition(episode="a")], [[0.0]])
    assert clock.pauses == [worker_module.PAUSE_SECONDS] * 4
