"""A step is computed again to the bit from its record and the checkpoint before it, and explained."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from services.protocol.groups import Group
from services.protocol.replay import SampledGroup
from tests.sequences import changed
from tests.trainer.processes import run_on_ranks
from tests.trainer.rank_jobs import make_learner
from tests.trainer.runs import STEPS, Outside, train, weights_after
from trainer.explain import Explanation, explain, verify
from trainer.model.ranks import Ranks, join_ranks

ALL: dict[str, Any] = {"record_groups": "all", "checkpoints_kept": 9}
PPO = ALL | {"advantage": "gae", "critic_warmup_steps": 1, "updates_per_batch": 2, "epochs_per_batch": 2}


class Episodes(Outside):
    """Hands out groups of episodes with a tool's result between two turns, and replays those of the step before."""

    def __init__(self, versions_behind: int = 0) -> None:
        super().__init__("")
        self.versions_behind = versions_behind
        self.made: list[Group] = []

    def generate_and_score(self, *arguments: Any) -> list[Group]:
        [made] = super().generate_and_score(*arguments)
        sequences = [
            changed(
                one,
                completion_ids=[*one.completion_ids, 7, 8, 9 + number],
                logprobs=[-2.0, -2.5, 0.0, 0.0, -3.0],
                policy_versions=[max(self.steps - 1 - self.versions_behind, 0)] * 5,
                loss_mask=[True, True, False, False, True],
            )
            for number, one in enumerate(made.sequences)
        ]
        self.made.append(made.model_copy(update={"sequences": sequences}))
        return self.made[-1:]

    def draw_replayed(self, batch: Any, step: int, *_: Any) -> None:
        if step:
            batch.replayed = [SampledGroup(group=self.made[step - 1], priority=1.0, probability=1.0, weight=0.75)]


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, which tests must not write to."""
    with join_ranks() as ranks:
        return train(ranks, model, tmp_path_factory.mktemp("recorded"), **ALL).directory


@pytest.fixture
def run_dir(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the run's directory."""
    return Path(shutil.copytree(recorded, tmp_path / "runs/r"))


def checked(run_dir: Path, ranks: Ranks, steps: Sequence[int] = range(1, STEPS + 1)) -> list[Explanation]:
    """Explains steps of a run; each must be equal to the bit, tensors included."""
    explained = [explain(run_dir, step, ranks) for step in steps]
    for one in explained:
        assert one.compared.step is None, one.compared
        assert one.compared.metrics >= 2
        assert (one.compared.tensors or 0) > 20
    return explained


SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 4, "learning_rate": 1e-2, "kl_coef": 0.1, "lr_schedule": "linear", "warmup_steps": 1},
    "reference": {"kl_coef": 0.1, "kl_in_reward": True, "advantage": "dr_grpo", "epochs_per_batch": 2},
    "rae": {"advantage": "rae", "kl_coef": 0.1, "loss": "gspo"},
    "own critic": {**PPO, "critic": "own"},
    "shared critic": {**PPO, "critic": "shared"},
}
SLOW = ("reference", "rae", "own critic", "shared critic")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SETTINGS]
)
def test_steps_are_computed_again_to_the_bit(
    alone: Ranks, model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(alone, model, tmp_path, prompts=3, **ALL | SETTINGS[name])
    monkeypatch.setenv("LEARNING_RATE", "5")  # of this process, and not of the run
    first, _ = checked(run.directory, alone, (1, 3))
    assert ("loss" in first.metrics) != ("critic" in name), "in the warm-up of a critic the policy stays"


def test_episodes_and_replayed_groups_are_computed_again_to_the_bit(alone: Ranks, model: Path, tmp_path: Path) -> None:
    run = train(alone, model, tmp_path, Episodes(versions_behind=1), **ALL, replay_groups=1, replay_max_kl=9.0)
    explained = checked(run.directory, alone)
    assert [one.versions for one in explained] == [{0: 6}, {0: 12}, {0: 6, 1: 6}, {1: 6, 2: 6}]
    assert sorted((g.group_id, g.is_replayed, g.weight) for g in explained[2].groups) == [
        ("g2", True, 0.75),
        ("g3", False, 1.0),
    ]


def train_and_explain(ranks: Ranks, model: Path, directory: Path, context: int) -> list[bytes]:
    weights_after(ranks.in_contexts(context), model, directory, PPO | {"context_parallel_size": context})
    return [
        orjson.dumps(one, lambda x: x.model_dump(), orjson.OPT_NON_STR_KEYS)
        for one in checked(directory / "runs" / "r", ranks)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_two_ranks_compute_their_steps_again_to_the_bit(model: Path, tmp_path: Path, context: int) -> None:
    first, second = run_on_ranks(2, train_and_explain, model, tmp_path, context)
    for mine, theirs in zip(first, second, strict=True):
        a, b = orjson.loads(mine), orjson.loads(theirs)
        assert [a[name] for name in ("silence", "versions", "metrics")] == [
            b[name] for name in ("silence", "versions", "metrics")
        ]
        tokens = 2 * sum(a["versions"].values()) * (a["step"] > 1)
        assert a["silence"].get("tokens", 0) == tokens, "both epochs of the batch"


def test_without_a_checkpoint_right_before_it_a_step_is_computed_from_an_earlier_one(
    alone: Ranks, run_dir: Path
) -> None:
    whole = explain(run_dir, 4, alone)
    for step in (2, 3):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:06d}")
    from_first = explain(run_dir, 4, alone)
    assert (from_first.compared.first, from_first.compared.last, from_first.compared.step) == (2, 4, None)
    assert from_first.groups == whole.groups
    assert [(one.first, one.last, one.step) for one in verify(run_dir, alone)] == [(1, 1, None), (2, 4, None)]
    (run_dir / "groups/step-000003").unlink()
    first, second = verify(run_dir, alone)
    assert first.reason is None
    assert "step 3 has no record" in (second.reason or "")
    with pytest.raises(Exception, match=r"step 3 has no record in .*: there are files of the steps 1 to 4"):
        explain(run_dir, 3, alone)


def test_the_first_difference_is_named(alone: Ranks, model: Path, run_dir: Path, tmp_path: Path) -> None:
    other = train(alone, model, tmp_path / "other", **ALL, adam_beta2=0.9).directory
    shutil.rmtree(run_dir / "checkpoints/step-000003")
    shutil.copytree(other / "checkpoints/step-000003", run_dir / "checkpoints/step-000003")
    found = explain(run_dir, 3, alone).compared
    assert (found.step, found.differences[0].elements is not None) == (3, True), "all metrics are equal"
    assert {one.name.split(".")[0] for one in found.differences} == {"model", "optimizer"}
    assert all(one.largest for one in found.differences)

    lines = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    true = lines[1]["grad_norm"]
    lines[1]["grad_norm"] = float(np.nextafter(true, 9))
    (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    found = explain(run_dir, 2, alone).compared
    assert found.step == 2
    [grad_norm] = found.differences
    assert (grad_norm.name, grad_norm.recorded, grad_norm.recomputed) == ("grad_norm", np.nextafter(true, 9), true)


def test_gradients_add_up_and_completions_move_as_the_weights_did(alone: Ranks, model: Path, tmp_path: Path) -> None:
    settings = ALL | {"replay_groups": 1, "replay_max_kl": 9.0, "learning_rate": 1e-3}
    loop = train(alone, model, tmp_path, Episodes(), **settings).loop
    run_dir = loop.settings.run_dir
    explained = explain(run_dir, 3, alone)
    assert sum(one.share for one in explained.groups) == pytest.approx(1)
    first, second = explained.groups
    assert first.grad_norm >= second.grad_norm > 0
    assert explained.metrics["grad_norm"] <= (first.grad_norm + second.grad_norm) * (1 + 1e-5)

    learner = make_learner(alone, model, STEPS)
    sums = []
    for step in (2, 3):
        loop.rank_calls.checkpoints.load(run_dir / f"checkpoints/step-{step:06d}", learner)
        trained = [one for one in loop_groups(run_dir, 3, loop) if one.group_id == "g3"]
        sums.append([float(x.sum()) for x in learner.logprobs(trained)[0]])
    [report] = [one for one in explained.groups if one.group_id == "g3"]
    assert [[one.before for one in report.completions], [one.after for one in report.completions]] == sums
    worse, better = report.completions
    assert worse.advantage < 0 < better.advantage
    assert better.after - better.before > worse.after - worse.before


def loop_groups(run_dir: Path, step: int, loop: Any) -> list[Any]:
    from trainer.reporting.group_records import GroupRecords

    return [loop.objective.training_group(one.group) for one in GroupRecords(run_dir).groups(step)]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"importance_correction": "none"}, "clip"),
        ({"importance_correction": "icepop"}, "cap"),
        ({"off_policy_max_kl": 0.01}, "mask"),
        ({"importance_correction": "truncated"}, "bounded"),
    ],
)
def test_tokens_are_counted_by_what_silences_them(
    alone: Ranks, model: Path, tmp_path: Path, settings: dict[str, Any], kind: str
) -> None:
    """The sampled tokens are 100 times less likely than the policy has them, those of the worse completion as often."""

    class Stale(Outside):
        def generate_and_score(self, *arguments: Any) -> list[Group]:
            [made] = super().generate_and_score(*arguments)
            worse, better = made.sequences
            ratio = math.log(100)
            pair = [changed(worse, logprobs=[-1e-4, -1e-4]), changed(better, logprobs=[-2.8 - ratio, -2.8 - ratio])]
            return [made.model_copy(update={"sequences": pair})]

    explained = explain(train(alone, model, tmp_path, Stale("", prompts=1), **ALL, **settings).directory, 1, alone)
    assert explained.silence["tokens"] == 4
    # A clip and a cap silence the tokens of both completions, a mask those of the worse one; the better one's weights
    # are truncated.
    expected = {kind: 4 if kind in ("clip", "cap") else 2} | ({"bounded": 2} if kind == "mask" else {})
    assert +explained.silence == expected | {"tokens": 4}
    assert explained.ratios[0].ratio > 50
    assert explained.ratios[0].before


def test_explaining_leaves_the_run_as_it_was(alone: Ranks, run_dir: Path) -> None:
    (run_dir / "checkpoints/.step-000005.partial").mkdir()  # a running run may be writing it
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    explain(run_dir, 2, alone)
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
