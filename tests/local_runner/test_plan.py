"""A dry run reads the rows, refuses what a run would refuse, and shows what will be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import trainer.capacity.__main__  # noqa: F401  # before a test has to wait for it
from services.core.errors import ConfigurationError
from services.data_server.batches import Batches
from services.data_server.settings import DataSettings
from services.harnesses import PRESETS
from tests.local_runner.in_process import call
from tests.services.core.hub_stand_in import MODEL, Hub, serving
from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/demo.env"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_here: None) -> Path:
    """A folder with a file of 90 sums."""
    write(tmp_path / "sums.jsonl", [{"question": f"{a}+{b}=", "answer": a + b} for a in range(9) for b in range(10)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Terminal:
    """Calls ``grpo run``."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def run(self, *options: object, **env: object) -> tuple[int, str, str]:
        """Return exit code, output and errors; ``env`` is for --env, with answers that the tiny model has room for."""
        env = {"MAX_NEW_TOKENS": 64} | env
        code = call("run", *options, *(f"--env={name}={value}" for name, value in env.items()))
        return code, *self._capfd.readouterr()

    def plan(self, *options: object, **env: object) -> str:
        """Return what a dry run prints."""
        code, out, err = self.run("--dry-run", *options, **env)
        assert code == 0, err
        return out

    def refusal(self, *options: object, **env: object) -> str:
        """Return why a dry run refuses what it is given, and check that it writes nothing."""
        code, out, err = self.run("--dry-run", *options, **env)
        assert (code, out) == (78, ""), err
        assert not Path("runs").exists()
        return err


@pytest.fixture
def terminal(here: Path, capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capfd)


def lines(printed: str) -> dict[str, str]:
    """Return the lines of a plan by their names."""
    found: dict[str, str] = {}
    for line in printed.splitlines():
        if cells := re.fullmatch(r"│ (.*?) *│ (.*?) *│", line):
            last = cells[1] or list(found)[-1]
            found[last] = f"{found.get(last, '')} {cells[2]}".strip()
    return found


BROKEN = {
    "latin.jsonl": b'{"question": "a", "answer": "1"}\n{"question": "caf\xe9", "answer": "1"}\n',
    "deep.jsonl": b'{"question": "a", "answer": 1, "more": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
    "cut.jsonl": b'{"question": "a", "answer": "1"}\n{"question": "b", "ans',
    "nan.jsonl": b'{"question": "a", "answer": NaN}\n',
    "large.jsonl": b'{"question": "a", "answer": 1e20}\n{"question": "b", "answer": 1}\n',
    "unanswered.jsonl": b'{"question": "a", "answer": null}\n{"question": "b", "answer": ""}\n',
    "one.jsonl": b'{"question": "a", "answer": "1"}\n',
    "empty.jsonl": b"",
    "rows.csv": b"question,answer\n1+1=,2\n",
    "rows.json": b'[{"question": "1+1=", "answer": 2}]\n',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_dry_run_and_a_run_refuse_rows_at_once_in_the_words_of_the_data_server(
    here: Path, terminal: Terminal, name: str
) -> None:
    (here / name).write_bytes(BROKEN[name])
    with pytest.raises(ConfigurationError, match=name) as refusal:
        Batches.load(DataSettings.load(dataset=name))
    for options in (["--dry-run"], []):
        done = terminal.run("--small", *options, DATASET=name)
        assert done == (78, "", f"error: data-server: {refusal.value}\n")
        assert not Path("runs").exists()


def test_a_row_of_20_mb_is_left_out_and_told(here: Path, terminal: Terminal, tiny_model: Path) -> None:
    with (here / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"question": "x" * 20_000_000, "answer": 1}) + "\n")
    shown = lines(terminal.plan("--small", DATASET="sums.jsonl", MODEL_NAME=tiny_model))
    assert shown["data"] == "sums.jsonl: 86 rows to train on, 4 held out; left out: more than 256 KiB (first row 90)"


def test_a_plan_shows_what_will_be(terminal: Terminal, tiny_model: Path) -> None:
    given = {"MODEL_NAME": tiny_model, "DATASET": "sums.jsonl", "BATCH_SIZE": 8, "REWARD_FN": "exact_match=1,math=0.5"}
    options = ("--run-id", "mine", "--num-nodes", "rollout-server=1")
    printed = terminal.plan(*options, PROMPT_STYLE="plain", **given)
    shown = lines(printed)
    assert "note:" not in printed
    assert shown["model"] == str(tiny_model)
    assert shown["data"] == "sums.jsonl: 86 rows to train on, 4 held out"
    assert shown["reward"] == "exact_match=1,math=0.5"
    assert shown["steps"] == "32, each of 8 prompts with 8 answers of at most 64 tokens"
    # The tests' own environment sets the types.
    changed = [setting for setting in shown["not by default"].split(", ") if "TYPE" not in setting]
    assert changed == ["BATCH_SIZE=8", "MAX_NEW_TOKENS=64", "PROMPT_STYLE=plain"]
    assert shown["layout"] == "trees"
    assert re.fullmatch(r"[\d.]+ [MG]B of each trainer node; there is [\d.]+ GB", shown["memory"])
    sizes = r"[\d.]+ [kMG]B \(checkpoints .*, versions .*, model .*, recorded groups .*\); there is [\d.]+ [MG]B"
    assert re.fullmatch(sizes, shown["disk"])
    assert shown["a step trains"].startswith("once its batch is whole (engines share ")
    assert shown["nodes"].startswith("ppo-trainer 2, data-server 1, rollout-server 1, ")
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"TRAIN_WHILE_GENERATING": "true"}, "on its first groups while"),
        ({"ADVANTAGE": "batch_std"}, "once its batch is whole (ADVANTAGE=batch_std)"),
        ({"MODE": "async"}, "on the groups of collectors"),
    ],
)
def test_a_plan_says_when_a_step_trains_and_why_it_waits(
    terminal: Terminal, tiny_model: Path, settings: dict[str, object], told: str
) -> None:
    shown = lines(terminal.plan("--small", DATASET="sums.jsonl", MODEL_NAME=tiny_model, **settings))
    assert shown["a step trains"].startswith(told)


@pytest.mark.slow
def test_processes_of_their_own_read_the_rows_and_estimate_the_memory(tmp_path: Path, tiny_model: Path) -> None:
    """As users have it: each module in the environment of its node. The other tests run them in this process."""
    write(tmp_path / "sums.jsonl", [{"question": f"{a}+1=", "answer": a + 1} for a in range(90)])
    (tmp_path / "mine.py").write_text("def near(response, ground_truth):\n    return 1.0\n")
    given = {"MODEL_NAME": tiny_model, "MAX_NEW_TOKENS": 64, "DATASET": "sums.jsonl", "REWARD_FN": "mine:near"}
    command = [sys.executable, "-m", "scripts.grpo", "run", "--small", "--dry-run"]
    command += [f"--env={name}={value}" for name, value in given.items()]
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=wide, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout).keys() >= {"data", "reward", "memory", "disk"}
    assert lines(done.stdout)["data"] == "sums.jsonl: 86 rows to train on, 4 held out"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"DATASET": "three.jsonl", "MAX_STEPS": 2}, "3 rows, 1 held out, are enough for 1 of MAX_STEPS=2"),
        ({"DATASET": "three.jsonl", "EVAL_PROMPTS": 2}, "EVAL_PROMPTS is 2, but 1 rows are held out"),
        ({"DATASET": "arithmetic", "LEARNING_RATE": 20}, "LEARNING_RATE=20 is far above"),
        ({"DATASET": "three.jsonl"}, "BATCH_SIZE is 4, but 2 rows are trained on"),
        ({"DATASET": "arithmetic", "REWARD_FN": "math=-1"}, "no part of REWARD_FN says whether an answer is right"),
    ],
)
def test_what_is_hardly_meant_is_said(here: Path, terminal: Terminal, env: dict[str, object], told: str) -> None:
    write(here / "three.jsonl", [{"question": f"{a}+1=", "answer": a + 1} for a in range(3)])
    assert f"\nnote: {told}" in terminal.plan("--small", **env)


@pytest.mark.parametrize("dataset", ["sums.jsonl", "arithmetic"])
def test_a_batch_larger_than_all_epochs_is_refused(terminal: Terminal, dataset: str) -> None:
    assert re.search(
        r"BATCH_SIZE is 500, but the data have (8\d) prompts to train on, 2\d\d in NUM_EPOCHS=3.* BATCH_SIZE=\1",
        terminal.refusal("--small", BATCH_SIZE=500, DATASET=dataset),
    )


@pytest.mark.parametrize("options", [["--small"], ["--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"]])
def test_the_demos_settings_fit_one_node(here: Path, terminal: Terminal, tiny_model: Path, options: list[str]) -> None:
    (here / ".cache/models").mkdir(parents=True)
    (here / ".cache/models/smollm2-135m").symlink_to(tiny_model)
    assert "memory" in lines(terminal.plan("--env-file", DEMO, *options))


def test_more_workers_than_engines_are_refused(terminal: Terminal) -> None:
    for options, workers, env in ((["--small"], 2, {}), ([], 3, {}), ([], 3, {"ROLLOUT_ENGINE": "embedded"})):
        refusal = terminal.refusal(*options, DATASET="sums.jsonl", MIN_WORKERS=workers, **env)
        assert f"MIN_WORKERS is {workers}" in refusal
        assert f"--num-nodes rollout-server={workers}" in refusal


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, which has one model and no dataset."""
    (tmp_path / "hub").mkdir()
    with serving(tmp_path / "hub", tmp_path / "cache") as (server, _):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        huggingface_hub.close_session()  # which has other proxies
        yield server
        huggingface_hub.close_session()


def test_a_dataset_that_the_hub_does_not_have_is_refused_at_once(hub: Hub, terminal: Terminal) -> None:
    assert "data-server: DATASET=team/summs: " in terminal.refusal(DATASET="team/summs", MODEL_NAME=MODEL)


def test_what_a_silent_hub_may_have_is_not_read(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    printed = terminal.plan(DATASET="team/sums", MODEL_NAME="nobody/knows")
    assert lines(printed)["data"] == "team/sums, not read"


def test_a_plan_says_that_a_run_with_a_checkpoint_has_no_room_to_go_on(
    here: Path, terminal: Terminal, tiny_model: Path
) -> None:
    (here / "runs" / "mine" / "checkpoints" / "step-000001").mkdir(parents=True)
    kept = {"CHECKPOINTS_KEPT": 10**9, "CHECKPOINT_EVERY": 1, "MAX_STEPS": 10**9, "NUM_EPOCHS": 10**9}
    settings = {"MODEL_NAME": tiny_model, "DATASET": "sums.jsonl"} | kept
    code, _, err = terminal.run("--dry-run", "--small", "--run-id=mine", **settings)
    assert code == 78
    assert "of the volume of the run directory" in err


REWARDS = """
def raises(response): return 1 / 0
def is_text(response): return "1.0"
async def later(response): return 1.0
def flat(response): return 0.5
def half(response): return 1.0 if response else 1 / 0
"""


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("raises", 78, "ZeroDivisionError"),
        ("is_text", 78, "'1.0', of type str"),
        ("later", 78, "coroutine"),
        ("flat", 0, "same reward"),
        ("half", 0, "ZeroDivisionError"),
    ],
)
def test_a_dry_run_calls_the_reward_on_rows(
    here: Path, terminal: Terminal, function: str, code: int, said: str
) -> None:
    (here / "theirs.py").write_text(REWARDS)
    ended, out, err = terminal.run("--dry-run", "--small", DATASET="sums.jsonl", REWARD_FN=f"theirs:{function}")
    assert ended == code
    assert said in (err if code else out)


def test_a_dry_run_refuses_what_a_run_would(here: Path, terminal: Terminal, tiny_model: Path) -> None:
    (here / "file").write_text("")
    code, _, err = terminal.run("--dry-run", "--small", "--shared-dir=file/below")
    assert (code, "give another --shared-dir" in err) == (78, True)
    assert "MAX_NEW_TOKENS is 100000" in terminal.refusal(MODEL_NAME=tiny_model, MAX_NEW_TOKENS=100000)


def test_the_first_prompt_of_a_preset_is_said_and_compared_with_the_context(
    here: Path, terminal: Terminal, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.harnesses.HARNESSES", here)
    codex = PRESETS["codex"]
    (here / codex.record).parent.mkdir(parents=True)
    (here / codex.record).write_text(json.dumps({"version": codex.version}))
    (here / codex.program).parent.mkdir(parents=True)
    (here / codex.program).touch()
    own = {"ROLLOUT": "program", "AGENT": "", "AGENT_COMMAND": "preset:codex", "MODEL_NAME": tiny_model}
    arguments = ("--dry-run", "--small", str(ROOT / "jobgroups/agent.yaml"))
    code, out, err = terminal.run(*arguments, **own, MAX_NEW_TOKENS=64, ENGINE_CONTEXT_LENGTH=4096)
    assert (code, f"codex {codex.version}" in out, "4,096 tokens" in out) == (0, True, True), err
    code, _, err = terminal.run(*arguments, **own, MAX_NEW_TOKENS=64, ENGINE_CONTEXT_LENGTH=512)
    assert (code, "does not fit into a context of 512" in err) == (78, True)


MIX = """
- {name: sums, ratio: 2, dataset: arithmetic, reward_fn: exact_match, max_new_tokens: 8}
- {name: files, dataset: sums.jsonl, reward_fn: "mine:near", group_size: 4}
- {name: exam, dataset: sums.jsonl, eval_only: true}
"""


@pytest.fixture
def mix(here: Path) -> None:
    """Files of sources, with their reward function."""
    (here / "mix.yaml").write_text(MIX)
    (here / "mine.py").write_text("def near(response, ground_truth):\n    return 1.0\n")
    (here / "none.jsonl").write_text("")


@pytest.mark.usefixtures("mix")
def test_a_plan_shows_each_source(terminal: Terminal) -> None:
    shown = lines(terminal.plan("--small", SOURCES="mix.yaml", MAX_STEPS=4, BATCH_SIZE=8))
    assert shown["source"] == (
        "exam, only evaluated: sums.jsonl: 0 rows to train on, 90 held out; "
        "completion, 8 answers of at most 64 tokens; reward math "
        "files, ratio 1: sums.jsonl: 86 rows to train on, 4 held out; "
        "completion, 4 answers of at most 64 tokens; reward mine:near "
        "sums, ratio 2: arithmetic: 80 rows to train on, 20 held out; "
        "completion, 8 answers of at most 8 tokens; reward exact_match"
    )
    assert shown["steps"] == "4, each of 8 prompts"
    assert "data" not in shown


@pytest.mark.usefixtures("mix")
def test_sources_that_cannot_run_are_refused_before_the_run(here: Path, terminal: Terminal) -> None:
    for old, new, named in (
        ("dataset: arithmetic", "dataset: gone.jsonl", "source 'sums': DATASET"),
        ("dataset: sums.jsonl, r", "dataset: none.jsonl, r", "source 'files': DATASET"),
        ("mine:near", "mine:nearer", "source 'files': REWARD_FN"),
        ("ratio: 2", "ratio: .nan", "source 1: ratio"),
        ("dataset: arithmetic", "rollout: environment", "ROLLOUT"),
        ("group_size: 4", "group_size: 1", "source 'files': GROUP_SIZE"),
        ("group_size: 4", "loss: gspo", "source 2: 'loss'"),
    ):
        assert old in MIX
        (here / "mix.yaml").write_text(MIX.replace(old, new))
        assert named in terminal.refusal("--small", SOURCES="mix.yaml", MAX_STEPS=4)


@pytest.mark.usefixtures("mix")
def test_a_held_out_file_belongs_to_a_source(terminal: Terminal) -> None:
    refusal = terminal.refusal("--small", SOURCES="mix.yaml", MAX_STEPS=4, DATASET_TEST="sums.jsonl")
    assert "DATASET_TEST is set, but each source" in refusal
