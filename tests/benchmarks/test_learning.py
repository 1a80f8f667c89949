"""Learning curves: a run in one process, and the table of its seeds."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from benchmarks import learning
from benchmarks.common.learning_run import Curve


def test_a_variants_own_settings_come_last_and_the_seed_is_that_of_the_run() -> None:
    settings = learning.settings_of("tiny", "replay:REPLAY_MAX_KL=0.5,REPLAY_GROUPS=3", 7, 4)
    named = {name: settings[name] for name in ("REPLAY_MAX_KL", "REPLAY_GROUPS", "REPLAY_EVERY", "MAX_STEPS", "SEED")}
    assert named == {
        "REPLAY_MAX_KL": "0.5",
        "REPLAY_GROUPS": "3",
        "REPLAY_EVERY": "1",
        "MAX_STEPS": "4",
        "SEED": "7",
    }
    with pytest.raises(SystemExit, match="replays"):
        learning.settings_of("tiny", "replays", 0, None)


def test_differences_are_taken_seed_by_seed() -> None:
    def curve(variant: str, seed: int, reward: float) -> Curve:
        return Curve("tiny", variant, seed, [reward] * 4, [2] * 4, [1, 0, 1, 0])

    curves = [curve("grpo", seed, reward) for seed, reward in enumerate([0.1, 0.5, 0.9])]
    curves += [curve("replay", seed, reward) for seed, reward in enumerate([0.2, 0.6, 1.0])]
    table = learning.show("tiny", curves)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[0][2:6] == ("0.500±0.231", "", "0.500±0.231", "")
    assert rows[1][2:7] == ("0.600±0.231", "0.100±0.000", "0.600±0.231", "0.100±0.000", "20%")


def test_a_run_replays_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The level of the log would stay for the tests that come after.
    monkeypatch.setattr("benchmarks.learning.logs.configure", lambda *_: None)
    runs = tmp_path / "runs.jsonl"
    command = ["--quick", "--variants", "grpo", "replay", "--runs", str(runs), "--plots", str(tmp_path / "learning")]
    learning.main(command)
    first = runs.read_bytes()
    grpo, replay = (Curve(**orjson.loads(line)) for line in first.splitlines())
    assert grpo.rewards[:2] == replay.rewards[:2], "the first step has nothing to replay"
    assert (grpo.replayed, grpo.left_out) == ([0, 0, 0], [0, 0, 0])
    assert [a + b for a, b in zip(replay.replayed, replay.left_out, strict=True)] == [0, 2, 2]
    assert "<svg" in (tmp_path / "learning-tiny.svg").read_text()

    learning.main(command)
    assert runs.read_bytes() == first
    assert "replay" in capsys.readouterr().out
