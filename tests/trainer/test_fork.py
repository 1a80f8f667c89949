"""A fork has all of a run's state: without any part of it, the steps after the fork are others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from local_runner.fork import Fork
from services.core.errors import ConfigurationError
from services.protocol.groups import Group
from services.run_page.directory import Run as RunFiles
from tests.sequences import changed
from tests.trainer.runs import STEPS, Outside, Run, train
from trainer.algorithm.policy_losses import LossTokens, TokenLosses
from trainer.checkpoints.checkpoint import write_manifest
from trainer.model.ranks import Ranks, join_ranks

AT = 2
SETTINGS: dict[str, Any] = {
    "advantage": "rae",
    "loss": f"{__name__}:forgetful",
    "lr_schedule": "linear",
    "checkpoint_every": 0,
    "keep_checkpoints_every": AT,
    "record_groups": "all",
}


def forgetful(tokens: LossTokens) -> TokenLosses:
    """A loss of the user's that forgets tokens at random."""
    kept = torch.rand(len(tokens.advantages)) < 0.5
    return TokenLosses(-tokens.ratio * tokens.advantages * (0.5 + kept))


class Prompts(Outside):
    """Hands out another group for each prompt."""

    def generate_and_score(self, *arguments: Any) -> list[Group]:
        [made] = super().generate_and_score(*arguments)
        sequences = [changed(one, completion_ids=[5 + self.steps, 6 + n]) for n, one in enumerate(made.sequences)]
        return [made.model_copy(update={"sequences": sequences})]


def run(ranks: Ranks, model: Path, directory: Path, run_id: str) -> Run:
    """Train from the newest checkpoint, if any, to the end."""
    run = train(ranks, model, directory, Prompts(""), STEPS - 1, run_id=run_id, **SETTINGS)
    ends = {"accuracy_before": None, "accuracy_after": None, "accuracy_after_step": None}
    run.loop.files.write_summary({"status": "succeeded", **ends})
    return run


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run to fork, which tests must not write to."""
    torch.manual_seed(5)
    with join_ranks() as ranks:
        return run(ranks, model, tmp_path_factory.mktemp("base"), "base")


@pytest.fixture
def parent(base: Run, tmp_path: Path) -> Path:
    """A copy of its directory."""
    return Path(shutil.copytree(base.directory, tmp_path / "runs/base"))


def forked(parent: Path) -> Path:
    fork = Fork(RunFiles(parent), AT, [], "fork")
    fork.check()
    fork.write()
    return fork.new


def leave_out(field: str, value: Any) -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        checkpoint = run_dir / "checkpoints" / f"step-{AT:06d}"
        state = orjson.loads((checkpoint / "state.json").read_bytes())
        assert state[field] != value
        # Another file, because the run's own has the same inode.
        (checkpoint / "state.json").unlink()
        (checkpoint / "state.json").write_bytes(orjson.dumps(state | {field: value}))
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint)

    return change


LEFT_OUT = {
    "random state": leave_out("random_state", []),
    "cursor": leave_out("cursors", {}),
    "baselines": leave_out("role_baselines", {}),
    "place in the schedule": leave_out("prompts_used", 0),
}


@pytest.mark.parametrize("left_out", [None, *LEFT_OUT])
def test_a_fork_ends_with_the_weights_of_its_run_only_with_all_of_its_state(
    alone: Ranks, model: Path, tmp_path: Path, base: Run, parent: Path, left_out: str | None
) -> None:
    run_dir = forked(parent)
    if left_out is not None:
        LEFT_OUT[left_out](run_dir)
    torch.manual_seed(6)  # a new process has another state
    fork = run(alone, model, tmp_path, "fork")
    assert fork.ends_as(base) is (left_out is None)
    assert [line["step"] for line in fork.metrics] == [1, 2, 3, 4]


def test_a_fork_shares_what_nobody_writes(parent: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    fork = Fork(RunFiles(parent), AT, ["LOSS=cispo", "WANDB_API_KEY=abc"], "fork")
    fork.check()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "a check writes nothing"
    fork.write()
    files = [path for path in fork.new.rglob("*") if path.is_file()]
    shared = {path for path in files if path.stat().st_nlink == 2}
    assert {path.relative_to(fork.new).parts[0] for path in shared} == {"checkpoints", "groups"}
    assert sorted(path.name for path in fork.new.glob("groups/*")) == ["step-000001", "step-000002"]
    assert orjson.loads((fork.new / "fork.json").read_bytes()) == {
        "parent": "base",
        "at": AT,
        "changes": ["LOSS=cispo", "WANDB_API_KEY"],
    }


def test_a_fork_is_refused_where_its_state_is_not_that_of_the_step(parent: Path, tmp_path: Path) -> None:
    run = RunFiles(parent)
    with pytest.raises(ConfigurationError, match=r"--at 3: .*/runs/base has checkpoints of the steps 2, 4;"):
        Fork(run, 3, []).check()
    with pytest.raises(ConfigurationError, match="base exists; name the new run with --run-id"):
        Fork(run, AT, [], "base").check()
    config = orjson.loads((parent / "config.json").read_bytes())
    config["components"]["data-server"] = {"settings": {"curriculum": "balanced"}}
    (parent / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(ConfigurationError, match=r"fork the run there, --at 4"):
        Fork(run, AT, []).check()
    Fork(run, STEPS, []).check()
    (parent / "summary.json").unlink()
    with pytest.raises(ConfigurationError, match="may be under way, and holds its replay buffer"):
        Fork(run, STEPS, []).check()
