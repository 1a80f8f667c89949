"""scripts.evaluate_policy: results by seed, deaths of workers, head and command, resuming, and refusals."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from evaluation.policy.run import EPISODES, RESULTS, Options, evaluate
from evaluation.policy.worker import HeadActor, Work
from services.clients.play import Decision, NoActionError
from services.core.errors import ConfigurationError, DependencyLostError
from services.evaluation_head.app import create_app
from services.evaluation_head.settings import HeadSettings
from services.protocol.evaluation import EpisodePosition
from tests.evaluation import trajectory_policies
from tests.evaluation.deadly_environment import MARKS
from tests.local_runner.runner import is_running
from tests.ports import free_port
from tests.services.run_page.serving import served, served_ready
from tests.waiting import LIMIT_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
MINE = "tests.evaluation.trajectory_policies"
DEADLY = "tests.evaluation.deadly_environment:Deadly-v0"
ODD = "tests.services.environment_server.odd_environments:Odd/"
POLICIES = f"lean={MINE}:lean left={MINE}:left wrong={MINE}:wrong fails={MINE}:optimal"


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    with served_ready(create_app(HeadSettings(head_policies=POLICIES))) as url:
        yield url


def run(save_to: Path, head: str, **options: Any) -> dict[str, Any]:
    given = {"environment": "CartPole-v1", "episodes": 4, "workers": 2, "seed": 7, "url": head, **options}
    return asyncio.run(evaluate(Options(save_to=save_to, **given), lambda _: None))


def returns_of(results: dict[str, Any]) -> dict[int, float]:
    return {one["seed"]: one["episode_return"] for one in results["episodes"]}


def return_of(seed: int, environment_id: str = "CartPole-v1") -> float:
    environment = gymnasium.make(environment_id)
    state, _ = environment.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        [action] = trajectory_policies.lean([state.tolist()])
        state, reward, terminated, truncated, _ = environment.step(action)
        total, is_over = total + float(reward), terminated or truncated
    return total


def test_results_are_those_of_the_environment_and_a_longer_run_continues(tmp_path: Path, head: str) -> None:
    run(tmp_path, head, episodes=2)
    with pytest.raises(ConfigurationError, match="policy was 'lean' and is 'left'"):
        run(tmp_path, head, policy="left")
    kept = (tmp_path / EPISODES).read_bytes()
    # What a kill in the midst of a line leaves behind is not counted.
    (tmp_path / EPISODES).write_bytes(kept + b'{"seed": 9, "episode_return": 1e9, "steps"')
    results = run(tmp_path, head, episodes=5)
    assert (tmp_path / EPISODES).read_bytes().startswith(kept)
    returns = [return_of(seed) for seed in range(7, 12)]
    assert returns_of(results) == dict(enumerate(returns, start=7))
    assert results["mean_return"]["value"] == pytest.approx(np.mean(returns))
    assert results["mean_return"]["low"] <= np.mean(returns) <= results["mean_return"]["high"]
    assert (results["steps"], results["policy"], results["policy_versions"]) == (sum(returns), "lean", [None])
    assert [worker["name"] for worker in results["workers"]] == ["worker-0", "worker-1"]
    assert sum(worker["episodes"] for worker in results["workers"]) == 3
    assert json.loads((tmp_path / RESULTS).read_text()) == results


@pytest.mark.parametrize(("episodes_at_once", "n_deaths"), [(1, 5), (2, 5)])
def test_deaths_cost_only_their_open_episodes(
    tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch, episodes_at_once: int, n_deaths: int
) -> None:
    expected = {seed: return_of(seed, DEADLY) for seed in (0, 1, 3, 4, 5)}
    monkeypatch.setenv(MARKS, str(tmp_path))
    monkeypatch.setenv("ENVIRONMENT_STEP_SECONDS", "4")
    results = run(tmp_path / "out", head, environment=DEADLY, episodes=6, seed=0, episodes_at_once=episodes_at_once)
    # Seed 1 kills its worker once, seed 2 always, and seed 3 hangs once.
    assert returns_of(results) == expected
    assert list(results["left_out"]) == ["2"]
    assert "was ended by SIGKILL" in results["left_out"]["2"]
    deaths = [death for worker in results["workers"] for death in worker["deaths"]]
    assert len(deaths) <= n_deaths
    assert sum("SIGALRM" in death for death in deaths) == 1
    assert sum(worker["restarts"] for worker in results["workers"]) <= 5


def test_episodes_played_together_are_those_played_one_by_one(tmp_path: Path, head: str) -> None:
    alone, together = (
        run(tmp_path / str(n), head, policy="left", episodes=6, episodes_at_once=n)["episodes"] for n in (1, 3)
    )
    assert len({episode["steps"] for episode in alone}) > 1, "they end at different steps"
    measured = {"seconds"}
    assert [{k: v for k, v in one.items() if k not in measured} for one in together] == [
        {k: v for k, v in one.items() if k not in measured} for one in alone
    ]


def command(save_to: Path, *options: str) -> list[str]:
    given = ["--save-to", str(save_to), "--episodes", "8", "--workers", "2", *options]
    return [sys.executable, "-m", "scripts.grpo", "evaluate-policy", *given]


def start(save_to: Path, *options: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start the command with a head of its own; return it with its children once some episodes are played."""
    process = subprocess.Popen(
        command(save_to, "--policies", f"lean={MINE}:slow_lean", *options), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
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
def test_the_head_and_a_worker_may_be_killed_and_a_signal_ends_all(tmp_path: Path) -> None:
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
    done = subprocess.run(
        command(tmp_path / "out", "--policies", f"lean={MINE}:slow_lean"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "of 8 episodes already" in done.stderr
    results = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert returns_of(results) == {seed: return_of(seed) for seed in range(8)}


def test_nothing_survives_a_command_that_is_killed(tmp_path: Path) -> None:
    process, children = start(tmp_path)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(child.is_running() for child in children), "the end of all processes")


def test_a_refusal_is_one_line_and_78(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        command(tmp_path, "--eval-head-url", url), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: evaluation-head at {url} did not answer /health")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("start a head there, or give another --eval-head-url\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "other"}, "--policy is 'other'; the head at http.* has lean, left, wrong, fails"),
        ({"policy": "wrong"}, "policy 'wrong' does not fit CartPole-v1: the action is 99"),
        ({"policy": "fails"}, "the policy gives no action for CartPole-v1: .*raised"),
        ({"environment": "NoSuchGame-v0"}, "NoSuchGame"),
        ({"environment": "nim"}, "nim has 2 seats"),
        ({"environment": f"{ODD}Unborn-v0"}, "cannot be reset: .*no world today"),
        ({"url": "localhost:8080"}, "--eval-head-url is 'localhost:8080'; needed is a URL"),
        ({"url": None}, "give either --eval-head-url"),
        ({"policies": "a=b:c"}, "give either --eval-head-url"),
    ],
)
def test_what_does_not_fit_is_refused_before_workers_start(
    tmp_path: Path, head: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        run(tmp_path, head, **options)
    assert not list(tmp_path.glob("worker-*"))


def test_a_torch_policy_of_other_states_is_refused(tmp_path: Path) -> None:
    from tests.services.evaluation_head import policies

    policies.publish_times(tmp_path / "times", 1)
    app = create_app(HeadSettings(head_policies=f"times={tmp_path / 'times'}"))
    with (
        served_ready(app) as url,
        pytest.raises(ConfigurationError, match=r"policy 'times' takes numbers of shape \[2\]"),
    ):
        run(tmp_path / "out", url)


@pytest.mark.slow
def test_episodes_of_another_content_of_the_policys_file_are_not_continued(tmp_path: Path) -> None:
    from tests.services.evaluation_head import policies

    policy = tmp_path / "policy.pt2"
    own: dict[str, Any] = {"url": None, "policies": f"mine={policy}", "episodes": 1, "workers": 1}
    policies.publish_wobbles(tmp_path / "wobbles").rename(policy)
    returns = returns_of(run(tmp_path / "out", "", **own))
    assert returns_of(run(tmp_path / "out", "", **own)) == returns
    policies.publish_lean(tmp_path / "lean").rename(policy)
    with pytest.raises(ConfigurationError, match=r"policy\.sha256 was .*; give another --save-to"):
        run(tmp_path / "out", "", **own)


def test_a_server_that_is_not_a_head_and_a_head_with_a_token_are_refused(tmp_path: Path) -> None:
    other = FastAPI()
    other.get("/stats")(lambda: {"service": "data-server"})
    with served(other) as url, pytest.raises(ConfigurationError, match="is not an evaluation head: /stats answers"):
        run(tmp_path, url)
    app = create_app(HeadSettings(head_policies=POLICIES, jobgroup_token="secret"))
    with served_ready(app) as url, pytest.raises(ConfigurationError, match="/stats answers 401"):
        run(tmp_path, url)


def test_a_port_that_is_taken_and_a_head_that_cannot_start_are_refused(tmp_path: Path, head: str) -> None:
    port = int(head.rsplit(":", 1)[1])
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
        run(tmp_path, head, url=None, policies=f"lean={MINE}:lean", port=port)
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
def test_an_actor_asks_again_where_that_may_help(answers: list[int], error: type[Exception] | None, says: str) -> None:
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


def test_an_actor_waits_for_a_head_that_is_away_no_longer_than_its_patience() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(DependencyLostError, match=r"gave no action within 0\.6 s: ConnectionRefusedError"):
        HeadActor(Work("w", "CartPole-v1", url, patience_seconds=0.6)).act([EpisodePosition(episode="a")], [[0.0]])
    assert time.monotonic() - started >= 0.4
