"""README.md is true: its commands run, its variables and files exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.reference import demo
from services.data_server.settings import DataSettings
from services.engines.settings import RolloutSettings
from services.replay_buffer.settings import ReplaySettings
from services.reward_server.settings import RewardSettings
from tests.skypilot_facts import check_command
from trainer.config import TrainerSettings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

FENCES = re.findall(r"^```(\w+)?( cluster)?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
HERE = [line for language, cluster, text in FENCES if language == "bash" and not cluster for line in text.splitlines()]
ON_A_CLUSTER = [line for language, cluster, text in FENCES if cluster for line in text.splitlines()]
MAKE = [command for command in HERE if command.startswith("make ")]
RUNNER = [command for command in HERE if command.startswith("grpo run ")]
LAUNCHES = [command for command in HERE + ON_A_CLUSTER if command.startswith("grpo launch ")]
OTHERS = [command for command in HERE + ON_A_CLUSTER if re.match(r"grpo (?!run |launch )", command)]


def test_every_command_is_of_a_kind_that_is_tried():
    assert {*HERE, *ON_A_CLUSTER} - {*MAKE, *RUNNER, *LAUNCHES, *OTHERS, "source .venv/bin/activate"} == {
        command for command in ON_A_CLUSTER if re.match(r"sky |python -m venv .venv-sky |export PATH=", command)
    }


@pytest.mark.parametrize("command", OTHERS)
def test_other_commands_have_their_options(command):
    _, name, *words = shlex.split(command)
    start = [sys.executable, "-m", "scripts.grpo", name, "--help"]
    shown = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(word in shown for word in words if word.startswith("-")), shown


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_its_targets(command):
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path, tiny_model):
    """A checkout with the demo's model, in which a reader has data and a reward of their own."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "runs":
            (tmp_path / entry.name).symlink_to(entry)
    model = tmp_path / ".cache/models/smollm2-135m"
    model.parent.mkdir(parents=True)
    model.symlink_to(tiny_model)
    (tmp_path / "my").mkdir()
    for name in ("questions", "held-out"):
        (tmp_path / f"my/{name}.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n' * 100)
    (tmp_path / "my_rewards.py").write_text("def close(response): return 0.0\n")
    return tmp_path


@pytest.mark.parametrize("command", RUNNER)
def test_the_runner_takes_its_options(command, folder):
    _, *arguments = shlex.split(command)
    start = [sys.executable, "-m", "scripts.grpo", *arguments, "--dry-run"]
    done = subprocess.run(start, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ppo-trainer" in done.stdout


@pytest.mark.parametrize("command", LAUNCHES)
def test_launches_are_accepted(command, tmp_path):
    _, _, *arguments = shlex.split(command)
    # Without SkyPilot, which takes seconds to ask: tests/scripts/test_launch.py does.
    start = (
        "import typer; from scripts.launch import __main__ as launch, skypilot; "
        "skypilot.interpreter = lambda: None; typer.run(launch.main)"
    )
    options = {*arguments, "--dry-run"} - set(arguments)
    done = subprocess.run(
        [sys.executable, "-c", start, *arguments, *options, "--output", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "jobgroup.yaml").exists()
    assert "to launch it: sky volumes apply" in done.stdout


def test_skypilot_takes_its_options():
    for command in ON_A_CLUSTER:
        if command.startswith("sky "):
            check_command(command)


def test_the_variables_in_its_table_are_settings():
    classes = (TrainerSettings, DataSettings, RewardSettings, ReplaySettings, RolloutSettings)
    known = {name.upper() for settings in classes for name in settings.model_fields} | {"HF_TOKEN", "WANDB_API_KEY"}
    rows = re.findall(r"^\| (`[A-Z_`, ]+) \|", README, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"[A-Z_]{3,}", row)}
    assert len(named) > 8
    assert named <= known


def test_the_time_beside_trl_is_that_of_the_results() -> None:
    results = (ROOT / "docs/results.md").read_text()
    [(ours, trls)] = re.findall(r"to a mean reward of 0\.9 .*: (\d+ s \(.*?\)), TRL (\d+ s \(.*?\))\.", results)
    assert f"it takes {ours} and {trls}" in README.replace("\n", " ")


def test_figures_are_those_of_the_records():
    assert demo.main(["--check"]) == 0
    [shares] = re.findall(r"\[([\d.]+) of TRL's time\]\S+ in float32 and ([\d.]+) in bfloat16", README)
    for said, record in zip(shares, ("step", "step-bfloat16"), strict=True):
        measured = json.loads((ROOT / f"docs/benchmarks/{record}.json").read_text())["output"]
        assert re.search(rf"│ ours .*│ +{said} │", measured)


def test_a_run_gives_the_figures(tmp_path, monkeypatch):
    steps = [
        {"step": n, "reward_mean": n / 4, "loss": 0.5, "seconds_train": 2.0, "seconds_step": 3.0} for n in (1, 2, 3, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    settings = {"components": {"ppo-trainer": {"settings": {"eval_prompts": 20}}}}
    summary = {"accuracy_before": 0.1, "accuracy_after": 0.9}
    for name, content in {"summary": summary, "runner": {"seconds": 90.0}, "config": settings}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    for name in ("README", "RECORD", "PLOT"):
        monkeypatch.setattr(demo, name, tmp_path / name)
    (tmp_path / "README").write_text(README)
    assert demo.main([str(tmp_path)]) == 0
    written = (tmp_path / "README").read_text()
    prose = " ".join(written.split())
    # As at the end of the run: means over the first and the last steps.
    assert "In 4 steps the mean reward rose from 0.38 to 0.88 (first and last 2 steps)" in prose
    assert "20 held-out questions from 0.10 to 0.90. It took 1.5 minutes" in prose
    assert "\n    step 2/4  reward 0.500  loss +0.5000  train 2.0s step 3.0s\n" in written


def test_files_it_points_to_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_its_plot_of_a_run_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.1}\n{"step": 2, "reward_mean": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    [line] = [line for _, _, text in FENCES for line in text.splitlines() if line.startswith("run.metrics.plot")]
    script = f"from pathlib import Path\nfrom local_runner.train import Run\nrun = Run(Path())\n{line}\n"
    subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_its_python_compiles():
    for language, _, text in FENCES:
        if language == "python":
            compile(text, "README.md", "exec")
