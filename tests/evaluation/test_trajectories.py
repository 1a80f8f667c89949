"""grpo trajectories: content of the files, resuming after a kill, refusals, games, servers, ratings."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluation.trajectories import METHOD, Options, bradley_terry, generate, lineups_of
from services.core.errors import ConfigurationError, DependencyLostError
from services.evaluation_head.policies import PolicyFailedError
from tests.pages import grpo_command
from tests.services.evaluation_head import policies

ROOT = Path(__file__).parents[2]
MINE = "tests.evaluation.trajectory_policies"
ODD = "tests.services.environment_server.odd_environments:Odd/"


def run(save_to: Path, policies: str, environment: str | None = "CartPole-v1", **options: Any) -> dict[str, Any]:
    given = {"episodes": 5, "seed": 7, "shard_episodes": 2, "at_once": 2, **options}
    return asyncio.run(generate(Options(environment, policies=policies, save_to=save_to, **given), lambda _: None))


def rows_of(directory: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path) for path in sorted(directory.glob("shard-*.parquet"))]
    return pa.concat_tables(tables).to_pylist()


@pytest.fixture(scope="module")
def wobbles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wobbles")
    policies.publish_wobbles(directory, 3)
    return directory


def test_each_row_is_a_step_of_the_environment_with_that_seed(tmp_path: Path, wobbles: Path) -> None:
    results = run(tmp_path, f"wobbles={wobbles},left={MINE}:left", at_once=3)
    rows = rows_of(tmp_path)
    assert [row["episode"] for row in rows] == sorted(row["episode"] for row in rows)
    assert {row["episode"] for row in rows} == set(range(10))
    returns: dict[str, list[float]] = {"wobbles": [], "left": []}
    for episode in range(10):
        of_episode = [row for row in rows if row["episode"] == episode]
        returns[of_episode[0]["policy"]].append(sum(row["reward"] for row in of_episode))
        environment = gymnasium.make("CartPole-v1")
        state, _ = environment.reset(seed=7 + episode % 5)
        for step, row in enumerate(of_episode):
            assert (row["step"], row["seed"], row["state"]) == (step, 7 + episode % 5, state.tolist())
            state, reward, terminated, truncated, _ = environment.step(row["action"])
            assert (row["reward"], row["terminated"], row["truncated"]) == (reward, terminated, truncated)
            assert row["final_state"] == (state.tolist() if terminated or truncated else None)
        assert of_episode[-1]["terminated"] or of_episode[-1]["truncated"]
    for row in rows:
        angle = row["state"][2]
        logprob = -math.log(1 + math.exp(-2 * abs(angle))) if row["policy"] == "wobbles" else None
        assert row["version"] == (3 if row["policy"] == "wobbles" else None)
        assert row["logprob"] == (None if logprob is None else pytest.approx(logprob, rel=1e-5))
    for row in results["policies"]:
        values = returns[row["policy"]]
        assert row["mean_return"] == pytest.approx(np.mean(values))
        assert row["standard_error"] == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))
    assert results == json.loads((tmp_path / "results.json").read_text())


def call(*words: str) -> None:
    """Run the command in this process."""
    with patch("services.core.logs.configure"):
        grpo_command("trajectories").main([*words], standalone_mode=False)


def test_other_settings_are_refused_with_the_difference(tmp_path: Path) -> None:
    given = {"policies": f"a={MINE}:left"}
    run(tmp_path, **given)
    before = rows_of(tmp_path)
    for options, says in [
        ({"episodes": 6}, "episodes was 5 and is 6"),
        ({"seed": 8}, "seed was 7 and is 8"),
        ({"environment": "Acrobot-v1"}, "environment.action was"),
        ({"policies": f"a={MINE}:lean"}, f"policies.a was '{MINE}:left' and is '{MINE}:lean'"),
        ({"policies": f"a={MINE}:left,b={MINE}:left"}, r"policies was \['a'\] and is \['a', 'b'\]"),
    ]:
        with pytest.raises(ConfigurationError, match=says):
            run(tmp_path, **{**given, **options})
    assert rows_of(tmp_path) == before
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ConfigurationError, match="manifest"):
        run(tmp_path, **given)


def test_a_new_version_of_a_policy_is_refused_in_a_run_that_has_begun(tmp_path: Path) -> None:
    policies.publish_wobbles(tmp_path / "policy", 1)
    run(tmp_path / "out", f"a={tmp_path / 'policy'}")
    policies.publish_lean(tmp_path / "policy", 2)
    with pytest.raises(ConfigurationError, match=r"policies.a.sha256|policies.a.version was 1 and is 2"):
        run(tmp_path / "out", f"a={tmp_path / 'policy'}")


def test_the_command_tells_a_wrong_setting_from_a_run_that_may_continue(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        call("--save-to", str(tmp_path), "--policies", "a=nowhere")
    with pytest.raises(DependencyLostError, match="the same command continues"):
        call("--save-to", str(tmp_path), "--policies", f"a={MINE}:heaps")


def test_policies_of_a_game_play_each_other_from_both_seats(tmp_path: Path) -> None:
    results = run(tmp_path, f"optimal={MINE}:optimal,greedy={MINE}:greedy", "nim", episodes=12, shard_episodes=5)
    rows = rows_of(tmp_path)
    assert {tuple(row["policies"]) for row in rows} == {("optimal", "greedy"), ("greedy", "optimal")}
    seeds = [{row["seed"] for row in rows if row["policies"][0] == name} for name in ("optimal", "greedy")]
    assert seeds == [set(range(7, 19))] * 2
    for row in rows:
        assert row["policy"] == row["policies"][row["seat"]]
        assert row["reward"] == row["rewards"][row["seat"]]
        assert "Nim" in row["state"][0]["content"]
        assert (row["final_state"] is not None) == row["terminated"]
    first, second = results["policies"]
    assert (results["method"], first["policy"], second["policy"]) == (METHOD, "optimal", "greedy")
    won = sum(row["rewards"][row["policies"].index("optimal")] == 1 for row in rows if row["terminated"])
    assert (first["wins"], first["games"], second["losses"]) == (won, 24, won)
    assert first["rating"] + second["rating"] == pytest.approx(3000)
    share = (won + 0.5) / 25
    assert first["rating"] - second["rating"] == pytest.approx(400 * math.log10(share / (1 - share)), rel=1e-6)


def test_every_order_of_seats_is_played() -> None:
    assert lineups_of(["a", "b"], 1) == [("a",), ("b",)]
    assert lineups_of(["a", "b", "c"], 2) == [*(("a", x) for x in "bc"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")]
    assert lineups_of(["a"], 2) == [("a", "a")]


def test_ratings_of_three_players_are_the_maximum_of_the_likelihood() -> None:
    strength = np.array([1.0, 2.0, 8.0])
    wins = 1e6 * strength[:, None] / (strength[:, None] + strength[None, :])
    np.fill_diagonal(wins, 0)
    elo, errors = bradley_terry(wins)
    assert np.diff(elo) == pytest.approx(400 * np.log10([2, 4]), abs=0.01)
    assert elo.mean() == pytest.approx(1500)
    # Two equal players: the variance of the log-odds is 4 / games, and half of it is each one's share.
    _, errors = bradley_terry(np.array([[0.0, 199.5], [199.5, 0.0]]))
    assert errors == pytest.approx([400 / math.log(10) * math.sqrt(4 / 400) / 2] * 2)
    # Three equal players: the information of a pair is games / 4, and 2 / 9 of its inverse is each one's variance.
    _, errors = bradley_terry(199.5 * (1 - np.eye(3)))
    assert errors == pytest.approx([400 / math.log(10) * math.sqrt(2 / 9 * 4 / 400)] * 3)


def test_mistakes_are_reported_in_terms_of_the_options(tmp_path: Path, wobbles: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for policies_, options, says in [
        (f"doors={tmp_path}/model", {}, "^policy 'doors': .*/model is a language model"),
        (f"doors={tmp_path}", {}, "^policy 'doors': .* has no versions"),
        ("doors=nowhere:left", {}, "^policy 'doors' is 'nowhere:left'"),
        (f"a={wobbles}", {"environment": "Acrobot-v1"}, "policy 'a' takes numbers of shape"),
        (f"a={MINE}:left", {"environment": "nothing"}, "^--environment is 'nothing'"),
        (f"a={MINE}:wrong", {}, "no episode .* comes to its end: the action is 99"),
    ]:
        with pytest.raises((ConfigurationError, DependencyLostError), match=says):
            run(tmp_path / "out", policies_, **options)


def test_a_policy_that_fails_ends_the_run_which_continues_without_a_double_or_a_gap(tmp_path: Path) -> None:
    run(tmp_path, f"a={MINE}:left")
    rows, kept = rows_of(tmp_path), (tmp_path / "shard-000000.parquet").stat().st_mtime_ns
    (tmp_path / "shard-000001.parquet").unlink()
    (tmp_path / "manifest.json").write_text(
        (tmp_path / "manifest.json").read_text().replace(f"{MINE}:left", f"{MINE}:heaps")
    )
    with pytest.raises(PolicyFailedError, match="heaps raised"):
        run(tmp_path, f"a={MINE}:heaps")
    assert len(list(tmp_path.glob("shard-*.parquet"))) == 2
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f"{MINE}:heaps", f"{MINE}:left"))
    # What a kill in the midst of writing leaves behind.
    (tmp_path / ".shard-000001.parquet.partial").write_bytes(b"PAR1")
    assert run(tmp_path, f"a={MINE}:left")["episodes"] == 5
    assert rows_of(tmp_path) == rows
    assert (tmp_path / "shard-000000.parquet").stat().st_mtime_ns == kept
