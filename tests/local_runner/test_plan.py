"""A dry run reads the rows, refuses what a run would refuse, and shows what will be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.core.hub_stand_in import MODEL, Hub, serving
from tests.waiting import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/demo.env"
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a file of 90 sums."""
    write(tmp_path / "sums.jsonl", [{"question": f"{a}+{b}=", "answer": a + b} for a in range(9) for b in range(10)])
    return tmp_path


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(here: Path, *options: object, **env: object) -> Done:
    """Run the local runner in ``here``; ``env`` is for --env."""
    given = [f"--env={name}={value}" for name, value in env.items()]
    command = [sys.executable, "-m", "scripts.grpo", "run", *map(str, options), *given]
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, cwd=here, env=wide, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def planned(here: Path, *options: object, **env: object) -> Done:
    done = run(here, "--dry-run", *options, **env)
    assert not (here / "runs").exists()
    return done


def lines(done: Done) -> dict[str, str]:
    """Return the lines of a plan by their names."""
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
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
def test_a_dry_run_and_a_run_refuse_rows_at_once_in_the_words_of_the_data_server(here: Path, name: str) -> None:
    (here / name).write_bytes(BROKEN[name])
    variables = os.environ | {"DATASET": name, "RUN_ID": "r"}
    server = subprocess.run(
        [sys.executable, "-m", "services.data_server", "--port", "0"],
        cwd=here,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert server.returncode == 78, server.stderr
    told = server.stderr.splitlines()[-1].removeprefix("error: ")
    assert name in told
    for options in (["--dry-run"], []):
        done = run(here, "--small", *options, DATASET=name)
        assert (done.returncode, done.stdout) == (78, "")
        assert done.stderr == f"error: data-server: {told}\n"
        assert not (here / "runs").exists()


def test_a_row_of_20_mb_is_left_out_and_told(here: Path, tiny_model: Path) -> None:
    with (here / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"question": "x" * 20_000_000, "answer": 1}) + "\n")
    shown = lines(planned(here, "--small", DATASET="sums.jsonl", MODEL_NAME=tiny_model))
    assert shown["data"] == "sums.jsonl: 86 rows to train on, 4 held out; left out: more than 256 KiB (first row 90)"


def test_a_plan_shows_what_will_be(here: Path, tiny_model: Path) -> None:
    given = {"MODEL_NAME": tiny_model, "DATASET": "sums.jsonl", "BATCH_SIZE": 8, "REWARD_FN": "exact_match=1,math=0.5"}
    done = planned(here, "--run-id", "mine", "--num-nodes", "rollout-server=1", PROMPT_STYLE="plain", **given)
    shown = lines(done)
    assert "note:" not in done.stdout
    assert shown["model"] == str(tiny_model)
    assert shown["data"] == "sums.jsonl: 86 rows to train on, 4 held out"
    assert shown["reward"] == "exact_match=1,math=0.5"
    assert shown["steps"] == "32, each of 8 prompts with 8 answers of at most 512 tokens"
    # The tests' own environment sets the types.
    changed = [setting for setting in shown["not by default"].split(", ") if "TYPE" not in setting]
    assert changed == ["BATCH_SIZE=8", "PROMPT_STYLE=plain"]
    assert re.fullmatch(r"[\d.]+ [MG]B of each trainer node; there is [\d.]+ GB", shown["memory"])
    sizes = r"[\d.]+ [kMG]B \(checkpoints .*, versions .*, model .*, recorded groups .*\); there is [\d.]+ [MG]B"
    assert re.fullmatch(sizes, shown["disk"])
    assert shown["recorded groups"] == "of the last 1000 steps (RECORD_GROUPS)"
    assert shown["where"] == "runs/mine, on this machine"
    assert shown["nodes"].startswith("ppo-trainer 2, data-server 1, rollout-server 1, ")
    assert "python -m trainer" not in done.stdout
    assert "python -m trainer" in planned(here, "--commands", **given).stdout


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"DATASET": "three.jsonl", "MAX_STEPS": 2}, "3 rows, 1 held out: 1 step of MAX_STEPS=2"),
        ({"DATASET": "three.jsonl"}, "BATCH_SIZE is 4, but 2 rows are trained on: a batch has prompts more than once"),
        (
            {"DATASET": "arithmetic", "REWARD_FN": "math=0.5,format=0.4"},
            "the weights of REWARD_FN sum to 0.9, but an a",
        ),
    ],
)
def test_what_is_hardly_meant_is_said(here: Path, env: dict[str, object], told: str) -> None:
    write(here / "three.jsonl", [{"question": f"{a}+1=", "answer": a + 1} for a in range(3)])
    done = planned(here, "--small", **env)
    assert done.returncode == 0
    assert f"\nnote: {told}" in done.stdout


@pytest.mark.parametrize("env", [{"DATASET": "sums.jsonl"}, {"DATASET": "arithmetic"}])
def test_a_batch_larger_than_all_epochs_is_refused(here: Path, env: dict[str, object]) -> None:
    done = planned(here, "--small", BATCH_SIZE=500, **env)
    assert done.returncode == 78
    assert re.fullmatch(
        r"error: BATCH_SIZE is 500, but the data have (8\d) prompts to train on, 2\d\d in NUM_EPOCHS=3: not one "
        r"step; set BATCH_SIZE=\1, or give more rows\n",
        done.stderr,
    )


@pytest.mark.parametrize("options", [["--small"], ["--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"]])
def test_the_demos_settings_fit_one_node(here: Path, tiny_model: Path, options: list[str]) -> None:
    (here / ".cache/models").mkdir(parents=True)
    (here / ".cache/models/smollm2-135m").symlink_to(tiny_model)
    assert planned(here, "--env-file", DEMO, *options).returncode == 0


@pytest.mark.parametrize(
    ("options", "env", "told"),
    [
        (["--small"], {"MIN_WORKERS": 2}, "rollout-server has 1 node for 1 engine here; give --env MIN_WORKERS=1, or"),
        ([], {"MIN_WORKERS": 3}, "give --env MIN_WORKERS=2, or --num-nodes rollout-server=3"),
        ([], {"MIN_WORKERS": 3, "ROLLOUT_ENGINE": "embedded"}, "rollout-server has 2 nodes for 2 engines here; "),
    ],
)
def test_more_workers_than_engines_are_refused(here: Path, options: list[str], env: dict[str, str], told: str) -> None:
    done = planned(here, *options, DATASET="sums.jsonl", **env)
    assert done.returncode == 78
    assert f"error: MIN_WORKERS is {env['MIN_WORKERS']}, but " in done.stderr
    assert told in done.stderr


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, which has one model and no dataset."""
    (tmp_path / "hub").mkdir()
    with serving(tmp_path / "hub", tmp_path / "cache") as (server, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_a_model_that_the_hub_does_not_have_is_refused_at_once(here: Path, options: list[str]) -> None:
    done = run(here, *options, DATASET="sums.jsonl", MODEL_NAME="team/tinny")
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == (
        "error: MODEL_NAME=team/tinny: the Hugging Face hub has no such model, or it is private; check the name, "
        "give --secret HF_TOKEN, or give a path\n"
    )
    assert not (here / "runs").exists()


@pytest.mark.usefixtures("hub")
def test_a_dataset_that_the_hub_does_not_have_is_refused(here: Path) -> None:
    done = planned(here, DATASET="team/summs", MODEL_NAME=MODEL)
    assert done.returncode == 78
    assert "data-server: DATASET=team/summs: the Hugging Face hub has no such dataset, or it is private" in done.stderr


def test_what_a_silent_hub_may_have_is_said_to_be_unchecked(here: Path) -> None:
    done = planned(here, DATASET="team/sums", MODEL_NAME="nobody/knows")
    assert lines(done)["data"] == "team/sums, not read"
    assert "not looked for on the Hugging Face hub: MODEL_NAME=nobody/knows, DATASET=team/sums\n" in done.stdout


def test_a_plan_says_that_a_run_with_a_checkpoint_has_no_room_to_go_on(here: Path, tiny_model: Path) -> None:
    (here / "runs" / "mine" / "checkpoints" / "step-1").mkdir(parents=True)
    kept = {"CHECKPOINTS_KEPT": 10**9, "CHECKPOINT_EVERY": 1, "MAX_STEPS": 10**9, "NUM_EPOCHS": 10**9}
    done = run(here, "--dry-run", "--small", "--run-id=mine", MODEL_NAME=tiny_model, DATASET="sums.jsonl", **kept)
    assert done.returncode == 0, done.stderr
    assert "note: here it would not start: " in done.stdout
    assert "of the volume of the run directory" in done.stdout


MIX = """
- {name: sums, ratio: 2, dataset: arithmetic, reward_fn: exact_match, max_new_tokens: 8}
- {name: files, dataset: sums.jsonl, reward_fn: "mine:near", group_size: 4}
- {name: exam, dataset: sums.jsonl, eval_only: true}
"""


def test_a_plan_shows_each_source(here: Path) -> None:
    (here / "mix.yaml").write_text(MIX)
    (here / "mine.py").write_text("def near(response, ground_truth):\n    return 1.0\n")
    shown = lines(planned(here, "--small", SOURCES="mix.yaml", MAX_STEPS=4, BATCH_SIZE=8))
    assert shown["source"] == (
        "exam, only evaluated: sums.jsonl: 0 rows to train on, 90 held out; "
        "completion, 8 answers of at most 512 tokens; reward math "
        "files, ratio 1: sums.jsonl: 86 rows to train on, 4 held out; "
        "completion, 4 answers of at most 512 tokens; reward mine:near "
        "sums, ratio 2: arithmetic: 80 rows to train on, 20 held out; "
        "completion, 8 answers of at most 8 tokens; reward exact_match"
    )
    assert shown["steps"] == "4, each of 8 prompts"
    assert "data" not in shown


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "dataset: arithmetic",
            "dataset: gone.jsonl",
            "data-server: SOURCES mix.yaml, source 'sums': DATASET 'gone.jsonl'",
        ),
        ("dataset: sums.jsonl, r", "dataset: none.jsonl, r", "source 'files': DATASET 'none.jsonl' is empty"),
        ("mine:near", "mine:nearer", "reward-server: SOURCES mix.yaml, source 'files': REWARD_FN 'mine:nearer' cannot"),
        ("ratio: 2", "ratio: .nan", "SOURCES mix.yaml, line 2: ratio is nan"),
        ("dataset: arithmetic", "rollout: environment", "needs gateway and environment-server, but job group grpo has"),
        ("group_size: 4", "group_size: 1", "source 'files': GROUP_SIZE is 1, but ADVANTAGE=grpo"),
        ("group_size: 4", "loss: gspo", "mix.yaml, line 3: 'loss' is not a key of a source"),
    ],
)
def test_sources_that_cannot_run_are_refused_before_the_run(here: Path, old: str, new: str, told: str) -> None:
    assert old in MIX
    (here / "mix.yaml").write_text(MIX.replace(old, new))
    (here / "mine.py").write_text("def near(response, ground_truth):\n    return 1.0\n")
    (here / "none.jsonl").write_text("")
    done = run(here, "--small", "--dry-run", SOURCES="mix.yaml", MAX_STEPS=4)
    assert done.returncode == 78
    assert told in done.stderr


def test_a_held_out_file_belongs_to_a_source(here: Path) -> None:
    (here / "mix.yaml").write_text(MIX)
    done = run(here, "--small", "--dry-run", SOURCES="mix.yaml", MAX_STEPS=4, DATASET_TEST="sums.jsonl")
    assert "DATASET_TEST is set, but each source in SOURCES has a dataset of its own; write it as" in done.stderr


def test_a_column_with_a_reserved_name_is_told_with_the_way_to_it(here: Path, tiny_model: Path) -> None:
    write(here / "chats.jsonl", [{"question": f"q{i}", "answer": i, "messages": [], "level": 1} for i in range(90)])
    (here / "mine.py").write_text("def check(response, level):\n    return 1.0\n")
    done = planned(here, "--small", DATASET="chats.jsonl", REWARD_FN="mine:check", MODEL_NAME=tiny_model)
    assert done.returncode == 0, done.stderr
    assert "columns messages of DATASET reach rewards only by `row`, as row['messages']" in done.stdout + done.stderr
