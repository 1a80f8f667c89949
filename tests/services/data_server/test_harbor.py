"""Tasks in Harbor's format as a dataset: what is read, what is refused by task, and what a run leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.data_server import dataset_rows
from services.data_server.harbor import FIRST_NUMBER, Task, TaskRefusedError, read_task
from services.data_server.settings import DataSettings
from services.data_server.task_sets import checks_file, read_tasks
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
    artifacts = ["/srv/out/a.txt", {source = "logs", sink = "x"}]
    [metadata]
    difficulty = 3
    agent = "all"
    [verifier]
    timeout_secs = 5
    user = "root"
    [environment]
    workdir = "/srv/work"
    memory = "1.5G"
    storage = "512M"
    allow_internet = true
    env = {MODE = "${MODE:-fast}", user = "a"}
    """
    task = read_task(write_task(tmp_path / "old", {"task.toml": old}))
    assert (task.schema_version, task.name, task.category) == ("1.0", "old", "3")
    assert (task.memory_mb, task.disk_mb, task.workdir, task.environment["MODE"]) == (1536, 512, "/srv/work", "fast")
    assert task.places[:2] == ("/srv/work", "/srv/out")
    assert task.notes == (
        "unknown keys: artifacts.sink, verifier.timeout_secs",
        "network_mode public: there is no network",
        "user root: programs run as the box's user",
    )


def test_a_step_has_its_own_limits_and_else_those_of_its_task(tmp_path: Path) -> None:
    toml = """multi_step_reward_strategy = "final"
    [agent]
    timeout_sec = 10
    [verifier]
    timeout_sec = 20
    env = {A = "task", B = "task"}
    [[steps]]
    name = "one"
    min_reward = 0.5
    [[steps]]
    name = "two"
    min_reward = {style = 1}
    agent = {timeout_sec = 1}
    verifier = {timeout_sec = 2, env = {B = "step"}}
    """
    canaries = "<!-- task canary GUID 1 -->\n# harbor-canary 2\n\n"
    files = {"steps/one/instruction.md": f"{canaries}Do it.\n\n# Not a canary\n", "steps/two/tests/test.sh": ""}
    task = read_task(write_task(tmp_path, {"task.toml": toml, "steps/two/instruction.md": "# A heading", **files}))
    one, two = task.steps
    assert (one.instruction, two.instruction) == ("Do it.\n\n# Not a canary", "# A heading")
    assert (one.agent_seconds, one.verifier_seconds, one.min_reward) == (10, 20, {"reward": 0.5})
    assert (two.agent_seconds, two.verifier_seconds, two.min_reward) == (1, 2, {"style": 1.0})
    assert (one.verifier_environment, two.verifier_environment) == (
        {"A": "task", "B": "task"},
        {"A": "task", "B": "step"},
    )
    assert (one.tests, two.tests) == ((tmp_path / "tests",), (tmp_path / "tests", tmp_path / "steps/two/tests"))
    assert task.reward_strategy == "final"


def test_a_dockerfile_gives_files_and_variables(tmp_path: Path) -> None:
    lines = [
        "ARG KIND=slim",
        "FROM --platform=linux/amd64 python:3.12-$KIND AS base",
        "# a comment",
        "ARG KIND",
        "ENV MODE=fast PLACE=/srv \\",
        '    NAME="two words"',
        "ENV OLDER $KIND form",
        "WORKDIR $PLACE/work",
        "COPY --chown=1 data/ ./data",
        "COPY *.py one.txt lib/",
        "COPY one.txt renamed.txt",
        'COPY ["one.txt", "/srv/work"]',
        'CMD ["sleep", "9"]',
        "USER nobody",
    ]
    files = {"environment/Dockerfile": "\n".join(lines), "task.toml": ""}
    files["environment/.dockerignore"] = "# not these\ndata/secret\n*.log\n"
    names = ("data/a/b.csv", "data/secret/key.csv", "data/c.log", "sub/n.py", "m.py", "one.txt", "left.out")
    files |= {f"environment/{name}": name for name in names}
    task = read_task(write_task(tmp_path / "docker", files))
    assert task.image == "python:3.12-slim"
    assert task.environment == {"MODE": "fast", "PLACE": "/srv", "NAME": "two words", "OLDER": "slim form"}
    copied = {"data/a/b.csv": "data/a/b.csv", "lib/m.py": "m.py"} | dict.fromkeys(
        ("lib/one.txt", "renamed.txt", "one.txt"), "one.txt"
    )
    assert {f"/srv/work/{name}": source for name, source in copied.items()} == {
        name: path.read_text() for name, path in task.copies.items()
    }
    assert task.places == ("/srv/work", "/tmp", "/home/agent", "/logs/agent", "/logs/artifacts")
    assert task.notes[-1] == "user nobody: programs run as the box's user"


def test_of_an_image_that_is_built_the_dockerfile_says_what_a_box_can_have(tmp_path: Path) -> None:
    lines = [
        "FROM golang:1.23 AS tools",
        "WORKDIR /src",
        "ENV SECRET=builder",
        "COPY one.txt .",
        "FROM debian:12 AS base",
        "ENV MODE=slow LEVEL=1",
        "FROM base",
        "RUN apt-get install -y jq",
        "COPY --from=tools /src/tool /usr/bin/tool",
        "COPY missing.txt .",
        "ENV MODE=fast",
        "COPY one.txt /usr/bin/",
        "WORKDIR /work",
        "COPY one.txt .",
    ]
    toml = '[environment]\ndocker_image = "example.org/jq:1"\nnetwork_mode = "no-network"\n'
    files = {"environment/Dockerfile": "\n".join(lines), "environment/one.txt": "1", "task.toml": toml}
    task = read_task(write_task(tmp_path / "built", files))
    assert (task.image, task.workdir) == ("example.org/jq:1", "/work")
    assert task.environment == {"MODE": "fast", "LEVEL": "1"}
    assert [*task.copies] == ["/work/one.txt"]
    assert task.notes == ("what environment/Dockerfile builds is in example.org/jq:1 alone",)


def _toml(text: str) -> dict[str, str]:
    return {"task.toml": text}


def _image(*lines: str) -> dict[str, str]:
    return {"environment/Dockerfile": "\n".join(("FROM a", "WORKDIR /app", *lines))}


VERIFIER, HOST, READ_ONLY = "an image of the verifier", "a variable of the host", "a directory that is read-only"
STEP = '[[steps]]\nname = "one"\n'
REFUSED: list[tuple[str, str, dict[str, str]]] = [
    ("RUN in its Dockerfile", "RUN apt-get", _image("RUN apt-get install -y \\\n  jq")),
    ("ADD in its Dockerfile", "ADD x /x", _image("ADD x /x")),
    ("COPY in its Dockerfile", "environment/ has no x", _image("COPY x /x")),
    ("COPY in its Dockerfile", "../tests", _image("COPY ../tests /x")),
    ("COPY in its Dockerfile", "COPY [x", _image("COPY [x")),
    ("COPY in its Dockerfile", "--from=b", _image("COPY --from=b /x /x")),
    ("COPY in its Dockerfile", ".dockerignore", _image("COPY . /x") | {"environment/.dockerignore": "*\n!x"}),
    ("ENV in its Dockerfile", "ENV A", _image('ENV A="x')),
    ("a Dockerfile of several stages", "FROM b", _image("FROM b")),
    ("no image", "docker_image", {"environment/Dockerfile": "WORKDIR /app"}),
    ("task.toml", "environment.docker_image", _toml('[environment]\ndocker_image = "a\\n  b: {c: d}"')),
    ("docker-compose", "environment/docker-compose.yaml", {"environment/docker-compose.yaml": ""}),
    ("GPUs or TPUs", "environment.gpus", _toml(TOML + "gpus = 1")),
    ("GPUs or TPUs", "environment.tpu", _toml(TOML + 'tpu = "v5e"')),
    ("MCP servers", "environment.mcp_servers", _toml(TOML + 'mcp_servers = [{name = "a"}]')),
    ("another system than Linux", "environment.os", _toml(TOML + 'os = "windows"')),
    ("a health check of a step", "steps.healthcheck", _toml(STEP + 'healthcheck = {command = "true"}')),
    ("artifacts of a service", "artifacts.service", _toml('artifacts = [{source = "a", service = "db"}]')),
    ("verifier.collect", "verifier.collect", _toml('[[verifier.collect]]\ncommand = "true"')),
    (VERIFIER, "verifier.environment_mode", _toml('[verifier]\nenvironment_mode = "separate"')),
    (VERIFIER, "steps.verifier.environment", _toml(STEP + 'verifier.environment = {docker_image = "a"}')),
    (VERIFIER, "tests/Dockerfile", {"tests/Dockerfile": "FROM a"}),
    ("needs a server", "environment.healthcheck", _toml(TOML + '[environment.healthcheck]\ncommand = "true"')),
    (HOST, "KEY", _toml('[verifier]\nenv = {KEY = "${API_KEY}"}')),
    (HOST, "${API_KEY}", _toml('[environment]\nenv = {KEY = "${API_KEY}"}')),
    (HOST, "KEY", _toml('[solution]\nenv = {KEY = "${A:-b} ${API_KEY}"}')),
    (READ_ONLY, "/usr/src/app", _toml('[environment]\nworkdir = "/usr/src/app"')),
    (READ_ONLY, "write to /;", {"environment/Dockerfile": "FROM a", "task.toml": ""}),
    (READ_ONLY, "/etc", _image("COPY Dockerfile /etc/x")),
    ("task.toml", "schema_version", _toml('schema_version = "2.0"')),
    ("task.toml", "environment.memory", _toml(TOML + 'memory = "much"')),
    ("task.toml", "environment.storage_mb", _toml(TOML + "storage_mb = 0")),
    ("task.toml", "steps.0.agent.timeout_sec", _toml(STEP + "agent.timeout_sec = -1")),
    ("task.toml", "multi_step_reward_strategy", _toml('multi_step_reward_strategy = "most"')),
    ("task.toml", "environment.env.A", _toml("[environment]\nenv = {A = 1}")),
    ("task.toml", "steps", _toml("steps = 1")),
    ("task.toml", "artifacts", _toml('artifacts = "x"')),
    ("task.toml", "agent", _toml("[[agent]]\ntimeout_sec = 1")),
    ("task.toml", "line 1", _toml("= 1")),
    ("task.toml", "steps.0.name", _toml('[[steps]]\nname = "."')),
    ("instruction.md", "steps/two", _toml('[[steps]]\nname = "two"')),
]
"""The kind of each refusal, the file, key or line that its message names, and the files of the task."""


@pytest.mark.parametrize(("kind", "place", "files"), REFUSED)
def test_what_a_box_cannot_do_is_refused_by_task(kind: str, place: str, files: dict[str, str], tmp_path: Path) -> None:
    own = {"steps/one/instruction.md": "Do it.", "steps/instruction.md": "Do it."}
    with pytest.raises(TaskRefusedError) as refusal:
        read_task(write_task(tmp_path / "task", own | files))
    assert (refusal.value.kind, place in str(refusal.value)) == (kind, True), refusal.value


def test_links_too_many_bytes_and_a_lack_of_tests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path / "task")

    def kind() -> str:
        with pytest.raises(TaskRefusedError) as refusal:
            read_task(task)
        return refusal.value.kind

    (task / "tests/test.sh").unlink()
    assert kind() == "no tests/test.sh"
    monkeypatch.setattr("services.data_server.harbor.LARGEST_TASK", 100)
    assert kind() == "size"
    (task / "a").symlink_to("/etc/passwd")
    assert kind() == "a link"


def _settings(dataset: str, **others: object) -> DataSettings:
    return DataSettings(dataset=dataset, **others)  # type: ignore[arg-type]


def _write_checks(dataset: str, tasks: list[Task], **fields: object) -> None:
    with checks_file(dataset).open("a") as file:
        for task in tasks:
            file.write(json.dumps({"digest": task.digest, **fields}) + "\n")


def test_a_run_has_the_tasks_that_have_passed_and_counts_the_others(tmp_path: Path) -> None:
    for number in range(4):
        write_task(tmp_path / f"good-{number}", {"instruction.md": f"Write {number}."})
    write_task(tmp_path / "run", REFUSED[0][2])
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
