"""All commands take a run in one way: its id or its directory, by default the newest."""

import os
import time
from pathlib import Path

import pytest
import typer

from local_runner import directory
from scripts import chat, clean, evaluate, logs, status, view
from services.core.errors import ConfigurationError


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    """Two runs below runs/, and one elsewhere."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("runs/newer", "runs/older", "volume/runs/other")):
        run = tmp_path / name
        (run / "logs").mkdir(parents=True)
        (run / "logs" / "ppo-trainer-0.log").write_text(f"trainer of {run.name}\n")
        (run / "logs" / "data-server-0.log").write_text(f"data of {run.name}\n")
        (run / "metrics.jsonl").write_text("")
        when = time.time() - 60 * age
        for path in [*run.rglob("*"), run]:
            os.utime(path, (when, when))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "runs/newer"),
        ("older", "runs/older"),
        ("runs/older", "runs/older"),
        ("volume/runs/other", "volume/runs/other"),
    ],
)
def test_a_run_is_named_by_id_or_directory_and_is_the_newest_by_default(given, found):
    assert directory.find_run(given) == Path(found)


def test_an_unknown_run_is_refused_with_the_existing_ones():
    with pytest.raises(ConfigurationError, match=r"oldest is neither .*: newer, older"):
        directory.find_run("oldest")


def shown(capfd, *names: str, **options) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        logs.main(list(names) or None, **options)
    said = capfd.readouterr()
    assert ended.value.code == 0, said.err
    return said.out.splitlines()


def test_logs_are_of_a_run_and_of_tasks(capfd):
    assert shown(capfd, "ppo-trainer") == ["trainer of newer"]
    assert shown(capfd, "older", "data-server-0") == ["data of older"]
    assert shown(capfd, "volume/runs/other", "ppo-trainer") == ["trainer of other"]
    assert len(shown(capfd, "older")) == len(shown(capfd)) == 2


def test_logs_of_an_unknown_task_are_refused(capfd):
    with pytest.raises(SystemExit):
        logs.main(["oldest"])
    assert "oldest is no run, and there is no log of it" in capfd.readouterr().err


def test_status_takes_an_id(capfd):
    with pytest.raises(SystemExit):
        status.main("older", token=None)
    assert "run older  may be under way" in capfd.readouterr().out


@pytest.mark.parametrize(
    "named",
    [
        lambda: status.main("oldest", token=None),
        lambda: logs.main(["oldest"]),
        lambda: view.main(["newer", "oldest"]),
        lambda: clean.main(["oldest"]),
        lambda: chat.main("oldest"),
        lambda: evaluate.main(run="oldest"),
    ],
    ids=["status", "logs", "view", "clean", "chat", "evaluate"],
)
def test_every_command_says_in_one_line_which_runs_there_are(capfd, named):
    with pytest.raises((SystemExit, typer.Exit)):
        named()
    [line] = capfd.readouterr().err.splitlines()
    assert "oldest" in line
    assert line.endswith(": newer, older")


def test_a_directory_of_runs_is_a_directory_but_no_run(runs):
    assert directory.find_directory("older") == Path("runs/older")
    assert directory.find_directory("runs") == Path("runs")
    with pytest.raises(ConfigurationError, match="runs is neither a run"):
        directory.find_run("runs")
