"""Tasks in Harbor's format as a dataset: what is read, what is refused by task, and what a run leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.data_server import dataset_rows
from services.data_server.checked_tasks import checks_file
from services.data_server.dockerfile import TaskRefusedError
from services.data_server.harbor import FIRST_NUMBER, Task, read_task, read_tasks, without_canary
from services.data_server.settings import DataSettings
from tests.tasks import TASKS, TOML, write_task


def test_the_examples_are_read() -> None:
    tasks, refused = read_tasks(f"harbor:{TASKS}")
    assert refused == {}
    by_name = {task.name: (number, task) for number, task in tasks.items()}
    assert {"tiny/make-file", "tiny/fix-middle", "tiny/find-answer", "tiny/two-steps", "tiny/part-marks"} <= {*by_name}
    number, steps = by_name["tiny/two-steps"]
    assert FIRST_NUMBER <= number < 2**31
    assert [step.name for step in steps.steps] == ["squares", "total"]
    assert steps.steps[0].min_reward == {"reward": 1.0}
    fix = by_name["tiny/fix-middle"][1]
    assert [*fix.copies] == ["/app/middle.py"]
    assert (fix.workdir, fix.memory_mb, fix.disk_mb, fix.notes) == ("/app", 512, 256, ())
    assert (fix.steps[0].agent_seconds, fix.steps[0].verifier_seconds) == (120.0, 30.0)


def test_older_spellings_are_read_and_unknown_keys_are_named(tmp_path: Path) -> None:
    old = """version = "1.0"
    [metadata]
    difficulty = "hard"
    anything = {at = "all"}
    [verifier]
    timeout_secs = 5
    [environment]
    workdir = "/srv/work"
    memory = "2G"
    storage = "512M"
    allow_internet = true
    env = {MODE = "${MODE:-fast}"}
    """
    task = read_task(write_task(tmp_path / "old", {"task.toml": old}))
    assert (task.name, task.category, task.memory_mb, task.disk_mb) == ("old", "hard", 2048, 512)
    assert (task.workdir, task.environment["MODE"]) == ("/srv/work", "fast")
    assert task.notes == ("unknown keys: verifier.timeout_secs", "network_mode public: there is no network")


def test_a_canary_is_cut() -> None:
    canaries = "<!-- task canary GUID 1 -->\n# harbor-canary 2\n\n"
    assert without_canary(f"{canaries}Do it.\n\n# Not the first\n") == "Do it.\n\n# Not the first"
    assert without_canary("# A heading\nDo it.") == "# A heading\nDo it."


def test_a_dockerfile_gives_files_and_variables(tmp_path: Path) -> None:
    lines = [
        "ARG KIND=slim",
        "FROM python:3.12-$KIND AS base",
        "# a comment",
        "ENV MODE=fast PLACE=/srv \\",
        '    NAME="two words"',
        "WORKDIR $PLACE/work",
        "COPY data/ ./data",
        "COPY *.py one.txt lib/",
        "COPY one.txt renamed.txt",
        'CMD ["sleep", "9"]',
    ]
    files = {"environment/Dockerfile": "\n".join(lines), "task.toml": ""}
    files |= {f"environment/{name}": name for name in ("data/a/b.csv", "m.py", "one.txt", "left.out")}
    task = read_task(write_task(tmp_path / "docker", files))
    assert task.image == "python:3.12-slim"
    assert task.environment == {"MODE": "fast", "PLACE": "/srv", "NAME": "two words"}
    names = {"data/a/b.csv": "data/a/b.csv", "lib/m.py": "m.py", "lib/one.txt": "one.txt", "renamed.txt": "one.txt"}
    assert {f"/srv/work/{name}": source for name, source in names.items()} == {
        name: path.read_text() for name, path in task.copies.items()
    }
    assert task.places[0] == "/srv/work"


REFUSED = {
    "RUN in its Dockerfile": {"environment/Dockerfile": "FROM a\nWORKDIR /app\nRUN apt-get install -y \\\n  jq"},
    "a Dockerfile of several stages": {"environment/Dockerfile": "FROM a\nFROM b"},
    "ADD in its Dockerfile": {"environment/Dockerfile": "FROM a\nADD x /x"},
    "docker-compose": {"environment/docker-compose.yaml": ""},
    "an image of the verifier": {"task.toml": '[verifier]\nenvironment_mode = "separate"\n' + TOML},
    "GPUs or TPUs": {"task.toml": TOML + "gpus = 1"},
    "os windows": {"task.toml": TOML + 'os = "windows"'},
    "needs a server": {"task.toml": TOML + '[environment.healthcheck]\ncommand = "true"'},
    "a variable of the host in verifier.env": {"task.toml": '[verifier]\nenv = {KEY = "${API_KEY}"}\n' + TOML},
    "a directory that is read-only": {"task.toml": '[environment]\nworkdir = "/usr/src/app"'},
    "task.toml": {"task.toml": 'schema_version = "2.0"'},
    "instruction.md": {"task.toml": TOML + '[[steps]]\nname = "one"'},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_box_cannot_do_is_refused_by_task(kind: str, tmp_path: Path) -> None:
    with pytest.raises(TaskRefusedError) as refusal:
        read_task(write_task(tmp_path / "task", REFUSED[kind]))
    assert refusal.value.kind == kind


def test_a_link_in_a_task_leads_nowhere(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    (task / "tests/passwords").symlink_to("/etc/passwd")
    with pytest.raises(TaskRefusedError, match="tests/passwords"):
        read_task(task)


def _settings(dataset: str, **others: object) -> DataSettings:
    return DataSettings(dataset=dataset, **others)  # type: ignore[arg-type]


def _write_checks(dataset: str, tasks: list[Task], **fields: object) -> None:
    with checks_file(dataset).open("a") as file:
        for task in tasks:
            file.write(json.dumps({"digest": task.digest, **fields}) + "\n")


def test_a_run_has_the_tasks_that_have_passed_and_counts_the_others(tmp_path: Path) -> None:
    for number in range(4):
        write_task(tmp_path / f"good-{number}", {"instruction.md": f"Write {number}."})
    write_task(tmp_path / "run", REFUSED["RUN in its Dockerfile"])
    write_task(tmp_path / "weak", {"instruction.md": "Do nothing."})
    write_task(tmp_path / "new", {"instruction.md": "Write 5."})
    dataset = f"harbor:{tmp_path}"
    with pytest.raises(ConfigurationError, match="grpo tasks check") as none:
        dataset_rows.load(_settings(dataset))
    assert "6 was not checked" in str(none.value)
    tasks = {task.name: task for task in read_tasks(dataset)[0].values()}
    _write_checks(dataset, [tasks["weak"]], passes=False, reason="doing nothing does not earn 0")
    _write_checks(dataset, [task for name, task in tasks.items() if name.startswith("good")], passes=True)
    rows = dataset_rows.load(_settings(dataset))
    assert (len(rows.train), len(rows.test)) == (3, 1)
    assert rows.refused == {
        "cannot be done: RUN in its Dockerfile": 1,
        "did not pass: doing nothing does not earn 0": 1,
        "was not checked": 1,
    }
    [row] = rows.test.take([0])
    named = {str(task.number): task.steps[0].instruction for task in tasks.values()}
    assert row.question == named[row.ground_truth]
    # A verdict is of the files as they were.
    (tmp_path / "good-0/tests/check.py").write_text("")
    assert dataset_rows.load(_settings(dataset)).refused["was not checked"] == 2


def test_a_list_file_names_tasks_and_another_one_holds_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_task(tmp_path / "all" / name, {"instruction.md": f"Write {name}."})
    for name, lines in (("train.txt", "# two\nall/a\nall/b\n"), ("test.txt", "all/c\n")):
        (tmp_path / name).write_text(lines)
        dataset = f"harbor:{tmp_path / name}"
        _write_checks(dataset, [*read_tasks(dataset)[0].values()], passes=True)
    rows = dataset_rows.load(_settings(f"harbor:{tmp_path / 'train.txt'}", dataset_test=tmp_path / "test.txt"))
    assert (len(rows.train), len(rows.test)) == (2, 1)
