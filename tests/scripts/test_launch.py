"""``grpo launch`` writes a job group of the size that is asked for, and refuses what cannot run."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import typer
import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from local_runner import skypilot, spec
from scripts.launch.__main__ import main
from services.core.errors import ConfigurationError
from tests.skypilot_facts import ROOT
from tests.tasks import pass_checks, write_task
from tests.trainer.tiny import SHAPE

APP = typer.Typer()
APP.command()(main)


def launch(tmp_path: Path, *arguments: str) -> tuple[str, str]:
    """Return what a dry run prints, and the YAML that it writes."""
    done = CliRunner().invoke(APP, [*arguments, "--dry-run", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    [path] = tmp_path.glob("jobgroup.yaml")
    return done.output, path.read_text()


def refused(tmp_path: Path, *arguments: str) -> str:
    """Return why a launch is refused."""
    done = CliRunner().invoke(APP, [*arguments, "--dry-run", "--output", str(tmp_path)])
    is_configuration = isinstance(done.exception, ConfigurationError)
    assert is_configuration or done.exit_code == 2, (arguments, done.output)
    assert not list(tmp_path.glob("*"))
    return str(done.exception) if is_configuration else done.output


@pytest.fixture(autouse=True)
def no_skypilot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave SkyPilot out, since asking it takes seconds."""
    monkeypatch.setattr(skypilot, "interpreter", lambda: None)


def test_nodes_have_cpus_memory_and_a_volume_for_the_model_and_its_engines(tmp_path: Path) -> None:
    """MIN_WORKERS, CPUs and gigabytes of a rollout node, gigabytes of a trainer node, gibibytes of the volume."""
    for arguments, expected in [
        (["--model", "8B", "--gpus", "H100:8"], (16, 32, 192, 224, 600)),
        (["--model", "8B", "--gpus", "H100:8", "--env", "SGLANG_TP_SIZE=4"], (4, 16, 96, 224, 600)),
        # Four engines of two GPUs on an A100's node, eight of one on an H200's, and SkyPilot takes either.
        (["--model", "32B", "--gpus", "H200:8", "--rollout-gpus", "A100-80GB:8,H200:8"], (8, 32, 672, 736, 2100)),
        (["--model", "0.5B", "--gpus", "L4:1"], (2, 8, 32, 64, 200)),
        (["--model", "0.5B", "--gpus", "H100:8", "--env", "ROLLOUT_ENGINE=embedded"], (2, 16, 32, 64, 200)),
        (["--model", "8B", "--gpus", "H100:8", "--env", "MIN_WORKERS=3"], (3, 32, 192, 224, 600)),
    ]:
        _, text = launch(tmp_path, *arguments, "--rollout-nodes", "4", "--trainer-nodes", "4")
        values = skypilot.values(text)
        keys = [("rollout-server", "cpus"), ("rollout-server", "memory"), ("ppo-trainer", "memory")]
        sizes = [values[task, f"resources.{key}"].rstrip("+") for task, key in keys]
        volume = yaml.safe_load((tmp_path / "volume.yaml").read_text())
        assert volume["config"]["access_mode"] == "ReadWriteMany"
        workers = values["ppo-trainer", "envs.MIN_WORKERS"]
        assert tuple(map(int, [workers, *sizes, volume["size"].removesuffix("Gi")])) == expected, arguments


def test_only_what_is_given_and_what_follows_differs_from_the_file(tmp_path: Path) -> None:
    given = ["--model", "8B", "--rollout-nodes", "4", "--gpus", "H100:8", "--env", "MAX_STEPS=9"]
    output, text = launch(tmp_path, *given, "--stock")
    before = (ROOT / "jobgroup.yaml").read_text()
    old, new = skypilot.values(before), skypilot.values(text)
    changed = {key for key in new if new[key] != old.get(key)}
    assert old.keys() <= new.keys()
    assert changed == {
        ("ppo-trainer", "resources.accelerators"),
        ("ppo-trainer", "resources.memory"),
        ("ppo-trainer", "envs.MODEL_NAME"),
        ("ppo-trainer", "envs.MAX_STEPS"),
        ("ppo-trainer", "envs.MIN_WORKERS"),
        ("data-server", "envs.MODEL_NAME"),
        ("rollout-server", "envs.MODEL_NAME"),
        ("rollout-server", "num_nodes"),
        ("rollout-server", "resources.accelerators"),
        ("rollout-server", "resources.cpus"),
        ("rollout-server", "resources.memory"),
    }
    assert [line for line in before.splitlines() if "#" in line] == [line for line in text.splitlines() if "#" in line]
    sources = {
        (line.split("  ")[0], line.split()[-4]): line.split()[-1]
        for line in map(str.rstrip, output.splitlines())
        if line.endswith(("given", "derived")) and "[" not in line and "MODEL_NAME" not in line
    }
    assert sources["ppo-trainer", "resources.memory"] == sources["ppo-trainer", "MIN_WORKERS"] == "derived"
    assert sources["ppo-trainer", "MAX_STEPS"] == sources["rollout-server", "num_nodes"] == "given"
    # The sums over nodes: 2 x 8 and 4 x 8 GPUs.
    assert ["together", "9", "48"] in [line.split()[:3] for line in output.splitlines()]


def test_a_launch_begins_with_the_preset_for_gpus_and_says_so(tmp_path: Path) -> None:
    output, text = launch(tmp_path, "--model", "0.5B", "--gpus", "H100:1")
    values, written = skypilot.values(text), skypilot.values((ROOT / "jobgroup.yaml").read_text())
    preset = spec.env_file(ROOT / "examples/gpu.env")
    quoted = {name: skypilot.scalar(value) for name, value in preset.items()}
    assert {name: values["ppo-trainer", f"envs.{name}"] for name in preset} == quoted
    assert values["ppo-trainer", "num_nodes"] == "1"
    assert values["rollout-server", "num_nodes"] == written["rollout-server", "num_nodes"] == "2"
    rows = {tuple(line.split()[-4:]) for line in output.splitlines() if line.split()[-1:] == ["preset"]}
    assert rows == {
        ("num_nodes", "2", "1", "preset"),
        ("BATCH_SIZE", "4", "128", "preset"),
        ("BATCH_SIZE", "-", "128", "preset"),
        ("GROUP_SIZE", "-", "16", "preset"),
        ("PUBLISH_TRANSPORT", "-", "broadcast", "preset"),
        ("DROP_EQUAL_GROUPS", "-", "true", "preset"),
        ("MODE", "-", "async", "preset"),
        ("MAX_STALENESS", "-", "1", "preset"),
    }
    assert "MICRO_BATCH_TOKENS" not in output


ONE_L4 = ["--model", "0.5B", "--gpus", "L4:1", "--secret", "HF_TOKEN=a-secret"]
EIGHT_B = ["--model", "8B", "--gpus", "H100:4", "--rollout-gpus", "H100:1"]


# Arguments, rollout nodes and MIN_WORKERS.
NODES: list[tuple[list[str], int, int]] = [
    (EIGHT_B, 2, 1),
    # Eight engines of one GPU on each node.
    (["--model", "8B", "--gpus", "H100:8"], 2, 8),
    ([*EIGHT_B, "--rollout-nodes", "3"], 3, 1),
    ([*ONE_L4, "--env", "MIN_WORKERS=2"], 2, 2),
    ([*ONE_L4, "--stock"], 2, 1),
]


def test_a_launch_has_the_rollout_nodes_of_the_options_or_of_the_file(tmp_path: Path) -> None:
    for arguments, nodes, workers in NODES:
        _, text = launch(tmp_path, *arguments)
        values = skypilot.values(text)
        assert values["rollout-server", "num_nodes"] == str(nodes), arguments
        assert values["ppo-trainer", "envs.MIN_WORKERS"] == str(workers), arguments


# Arguments, MODE as the launch has it, and whether there are forecasts.
MODES: list[tuple[list[str], str | None, bool]] = [
    (["--gpus", "H100:1"], "async", True),
    (["--gpus", "H100:1", "--env", "MODE=sync"], "sync", True),
    (["--gpus", "H100:1", "--env", "TRAIN_WHILE_GENERATING=true"], None, True),
    (["--gpus", "H100:1", "--env", "DYNAMIC_SAMPLING_TRIES=2"], None, True),
    (["--gpus", "H100:1", "--env", "METHOD=sft"], None, False),
    (["--gpus", "H100:1", "--env", "ENGINE_SLEEPS=true"], None, True),
    (["--gpus", "H100:1", "--stock"], None, True),
    (["--gpus", "H100:1", "--agent", "mine:solve"], None, False),
    (["--gpus", "H100:8", "--colocate"], None, False),
]


def test_separate_tiers_train_asynchronously_where_the_forecast_is_shorter(tmp_path: Path) -> None:
    for arguments, mode, has_forecast in MODES:
        output, text = launch(tmp_path, "--model", "0.5B", *arguments)
        values = skypilot.values(text)
        assert values.get(("ppo-trainer", "envs.MODE")) == mode, arguments
        assert values.get(("ppo-trainer", "envs.MAX_STALENESS")) == ("1" if mode == "async" else None)
        seconds = re.findall(r"([0-9.]+) s (?:synchronous|asynchronous)", output)
        assert len(seconds) == 2 * has_forecast, arguments
        assert sorted(seconds, key=float, reverse=True) == seconds
        assert ("--env MODE=sync" in output) == (mode == "async")


# Arguments, and variables of the trainer; the file has no PUBLISH_TRANSPORT.
FOLLOWS: list[tuple[list[str], dict[str, str | None]]] = [
    (["--gpus", "H100:1", "--env", "ROLLOUT_ENGINE=embedded"], {"PUBLISH_TRANSPORT": None}),
    (["--gpus", "H100:1", "--env", "CUDA_VISIBLE_DEVICES="], {"PUBLISH_TRANSPORT": None}),
    (["--gpus", "H100:1", "--env", "ENGINE_SLEEPS=true"], {"PUBLISH_TRANSPORT": None}),
    (["--gpus", "H100:8", "--env", "COLOCATE=true", "--trainer-nodes", "2"], {"PUBLISH_TRANSPORT": "disk"}),
    (["--gpus", "H100:8", "--env", "COLOCATE=true", "--env", "LORA_RANK=32"], {"PUBLISH_TRANSPORT": "disk"}),
    (["--env", "ROLLOUT=program", "--env", "AGENT_COMMAND=true"], {"ROLLOUT": "program", "AGENT": "''"}),
    # An engine that gets one completion a step has room for a prompt and an answer.
    (
        ["--gpus", "H100:8", "--colocate", "--stock", "--trainer-nodes", "4", "--env", "MAX_NEW_TOKENS=256"],
        {"ENGINE_MAX_TOTAL_TOKENS": "768"},
    ),
    (["--gpus", "L40S"], {"MODEL_NAME": "Qwen/Qwen2.5-0.5B-Instruct"}),
]


def test_the_trainer_has_the_settings_that_follow_from_the_options(tmp_path: Path) -> None:
    for arguments, expected in FOLLOWS:
        _, text = launch(tmp_path, *arguments)
        values = skypilot.values(text)
        assert {name: values.get(("ppo-trainer", f"envs.{name}")) for name in expected} == expected, arguments


def test_engines_on_the_trainers_gpus_have_the_room_that_is_left(tmp_path: Path) -> None:
    output, text = launch(tmp_path, "--model", "8B", "--gpus", "H100:8", "--colocate")
    values = skypilot.values(text)
    assert {task for task, _ in values} == {"ppo-trainer", "data-server", "reward-server", "replay-buffer"}
    assert values["ppo-trainer", "resources.accelerators"] == "[H100:8]"
    assert values["ppo-trainer", "envs.PUBLISH_TRANSPORT"] == "local"
    assert values["ppo-trainer", "envs.MIN_WORKERS"] == "4", "half of eight engines"
    tokens = int(values["ppo-trainer", "envs.ENGINE_MAX_TOTAL_TOKENS"])
    assert 100_000 < tokens < 262_144, "of a step's 262,144 tokens of an engine, what fits beside the trainer's 8B"
    [together] = [line.split() for line in output.splitlines() if line.startswith("together")]
    assert together[1:3] == ["4", "8"], "no node and no GPU for engines alone"
    given = ["--model", "8B", "--gpus", "H100:8", "--colocate", "--image", "r/grpo:1"]
    _, text = launch(tmp_path, *given, "--env", f"ENGINE_MAX_TOTAL_TOKENS={tokens}")
    assert skypilot.values(text)["ppo-trainer", "resources.image_id"] == "'docker:r/grpo:1-colocated'"
    (tmp_path / "jobgroup.yaml").unlink()
    (tmp_path / "volume.yaml").unlink()
    assert "ENGINE_MAX_TOTAL_TOKENS" in refused(tmp_path, *given, "--env", f"ENGINE_MAX_TOTAL_TOKENS={3 * tokens}")


def test_options_win_over_the_preset_and_stock_leaves_it_out(tmp_path: Path) -> None:
    given = ["BATCH_SIZE=8", "GROUP_SIZE=4", "PUBLISH_TRANSPORT=disk", "DROP_EQUAL_GROUPS=false", "MODE=sync"]
    given = [part for setting in given for part in ("--env", setting)]
    output, text = launch(tmp_path, "--model", "0.5B", "--trainer-nodes", "2", *given)
    values = skypilot.values(text)
    assert [values["ppo-trainer", f"envs.{name}"] for name in ("BATCH_SIZE", "GROUP_SIZE")] == ["8", "4"]
    assert values["ppo-trainer", "envs.PUBLISH_TRANSPORT"] == "disk"
    assert values["ppo-trainer", "num_nodes"] == "2"
    assert "preset" not in output
    output, text = launch(tmp_path, "--model", "0.5B", "--stock")
    changed = skypilot.values(text).items() - skypilot.values((ROOT / "jobgroup.yaml").read_text()).items()
    assert {key for (_, key), _ in changed} <= {"envs.MIN_WORKERS", "resources.accelerators"}
    assert "preset" not in output


@pytest.mark.parametrize("other", ["KL_COEF=0.01", "ENTROPY_COEF=0.001", "TEACHER_MODEL=Qwen/Qwen2.5-1.5B-Instruct"])
def test_groups_of_equal_rewards_stay_where_something_is_learned_from_them(tmp_path: Path, other: str) -> None:
    _, text = launch(tmp_path, "--model", "0.5B", "--gpus", "H100:1", "--env", other)
    values = skypilot.values(text)
    assert ("ppo-trainer", "envs.DROP_EQUAL_GROUPS") not in values
    assert values["ppo-trainer", "envs.BATCH_SIZE"] == "128"


def test_settings_go_to_the_tasks_that_read_them_and_secrets_into_no_file(tmp_path: Path) -> None:
    variables = ["LORA_RANK=8", "NCCL_DEBUG=INFO", "DATASET=arithmetic", "WANDB_MODE=offline"]
    given = [part for variable in variables for part in ("--env", variable)]
    output, text = launch(tmp_path, "--model", "0.5B", *given, "--secret", "HF_TOKEN=a-secret", "--agent", "mine:solve")
    tasks = {document["name"]: document["envs"] for document in list(yaml.safe_load_all(text))[1:]}
    assert {name for name, envs in tasks.items() if "LORA_RANK" in envs} >= {"ppo-trainer", "rollout-server"}
    assert "LORA_RANK" not in tasks["reward-server"]
    assert all(envs["NCCL_DEBUG"] == "INFO" for envs in tasks.values())
    assert tasks["data-server"]["DATASET"] == tasks["ppo-trainer"]["DATASET"] == "arithmetic"
    assert tasks["ppo-trainer"]["AGENT"] == "mine:solve"
    assert "a-secret" not in text + output
    assert "--secret HF_TOKEN" in output


SHORT = ("--env", "MAX_NEW_TOKENS=64")
"""Answers for which the tiny model has room."""


def test_a_model_may_be_a_directory_and_gpus_a_choice(tmp_path: Path, tiny_model: Path) -> None:
    _, text = launch(tmp_path, "--model", str(tiny_model), "--gpus", "h100:2,A100-80GB:4", *SHORT)
    values = skypilot.values(text)
    assert values["ppo-trainer", "resources.accelerators"] == "[H100:2, A100-80GB:4]"
    assert values["ppo-trainer", "envs.MODEL_NAME"] == str(tiny_model)
    group = spec.load(next(tmp_path.glob("jobgroup.yaml")))
    assert {task.gpus_per_node for task in group.tasks} == {0, 2}


COLOCATED = ["--gpus", "H100:8", "--colocate"]
REFUSED = [
    (["--model", "8B", "--stock"], "MICRO_BATCH_TOKENS"),
    (["--model", "70B", "--gpus", "H100:8", "--stock"], "CPU_OFFLOAD"),
    (["--model", "32B", "--gpus", "L4:1"], "--rollout-gpus"),
    ([*COLOCATED, "--model", "32B"], "CPU_OFFLOAD"),
    (["--model", "8B", "--gpus", "V100:1"], "--gpus V100:1"),
    (["--model", "8B", "--gpus", "H100:0"], "--gpus H100:0"),
    (["--model", "8B", "--gpus", "H100 8"], "--gpus H100 8"),
    (["--model", "0.5B", "--trainer-nodes", "0"], "--trainer-nodes"),
    (["--model", "8B", "--gpus", "H100:8", "--env", "SGLANG_TP_SIZE=16"], "SGLANG_TP_SIZE"),
    (["--model", "0.5B", "--gpus", "H100:8", "--env", "SGLANG_TP_SIZE=4"], "SGLANG_TP_SIZE"),
    (["--model", "8B", "--rollout-nodes", "2", "--gpus", "H100:8", "--env", "MIN_WORKERS=17"], "MIN_WORKERS"),
    (["--image", "registry.example.org:5000/grpo"], "--image"),
    (["--image", "grpo@sha256:0123"], "--image"),
    (["--model", "no-such-directory/model"], "--model"),
    (["--model", "0.5B", "--env", "BATCHSIZE=4"], "BATCH_SIZE"),
    (["--model", "0.5B", "--env", "BATCH_SIZE=none"], "BATCH_SIZE"),
    (["--model", "0.5B", "--env", "DATASET=README.md"], "DATASET"),
    (["--model", "0.5B", "--env", "DATASET=none.jsonl"], "DATASET"),
    (["--model", "0.5B", "--env", "PUBLISH_TRANSPORT=local"], "PUBLISH_TRANSPORT"),
    (["--model", "0.5B", "--agent", "a:b", "--environment", "c:d"], "--environment"),
    (["--model", "0.5B", "--env", "ADVANTAGE=gdpo", "--env", "GDPO_WEIGHTS=tone=1"], "GDPO_WEIGHTS"),
    (["--model", "0.5B", "--gpus", "H100:1", "--colocate", "--env", "COLOCATE=false"], "COLOCATE"),
    ([*COLOCATED, "--rollout-nodes", "2"], "--colocate"),
    ([*COLOCATED, "--async"], "--async"),
    ([*COLOCATED, "--agent", "mine:solve"], "--agent"),
]


def test_adapters_that_sglang_does_not_load_are_refused_and_untried_ones_named(tmp_path: Path) -> None:
    for kind in ("starcoder2", "arcee"):
        AutoConfig.for_model(kind, **SHAPE | {"max_position_embeddings": 1024}).save_pretrained(tmp_path / kind)
    untried, refused_kind = (["--model", str(tmp_path / kind), "--gpus", "H100:1"] for kind in ("arcee", "starcoder2"))
    given = ["--env", "LORA_RANK=8"]
    refusal = refused(tmp_path / "none", *refused_kind, *given)
    assert all(word in refusal for word in ("LORA_RANK", "'starcoder2'", "ROLLOUT_ENGINE=embedded"))
    outputs = [
        launch(tmp_path / str(place), *arguments)[0]
        for place, arguments in enumerate(
            ([*refused_kind, *given, "--env", "ROLLOUT_ENGINE=embedded"], refused_kind, [*untried, *given], untried)
        )
    ]
    assert ["nobody has loaded adapters" in output for output in outputs] == [False, False, True, False]


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    for arguments, named in REFUSED:
        assert named in refused(tmp_path, *arguments), arguments


def test_a_file_that_nodes_do_not_get_is_said(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    output, _ = launch(tmp_path, "--model", tiny_model.name, "--gpus", "L4:1", *SHORT)
    assert f"caution: nodes do not get MODEL_NAME={tiny_model.name}: SkyPilot uploads what is below {ROOT}" in output
    output, _ = launch(tmp_path, "--model", str(tiny_model), "--gpus", "L4:1", *SHORT)
    assert "caution" not in output


def test_without_skypilot_a_launch_says_how_to_install_it(tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--model", "0.5B", "--output", str(tmp_path)])
    assert isinstance(done.exception, ConfigurationError)
    assert "pip install 'skypilot[kubernetes]==" in str(done.exception)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, ...]]:
    """The files that SkyPilot was asked to launch; it says job 7."""
    asked: list[tuple[Path, ...]] = []

    def ask(_: Path, files: tuple[Path, Path], __: object, *, launch: bool) -> tuple[int, str]:
        assert launch
        asked.append(files)
        return 7, ""

    monkeypatch.setattr(skypilot, "interpreter", lambda: Path("python"))
    monkeypatch.setattr(skypilot, "ask", ask)
    return asked


def test_without_a_terminal_a_launch_needs_a_yes_and_prints_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[Path, ...]]
) -> None:
    arguments = [*ONE_L4, "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [".venv/bin/grpo", "launch", *arguments])
    done = CliRunner().invoke(APP, arguments)
    assert done.exit_code == 2
    assert not launched
    line = done.output.splitlines()[-1]
    assert line.startswith("launch: there is no terminal on which to ask about 6 nodes with 3 GPUs; to launch them: ")
    assert line.endswith(f"--model 0.5B --gpus L4:1 --secret HF_TOKEN --output {tmp_path} --yes")
    assert ".venv/bin/grpo launch " in line
    assert typer.main.get_command(APP).main([*arguments, "--yes"], standalone_mode=False) == 7
    assert launched == [(tmp_path / "jobgroup.yaml", tmp_path / "volume.yaml")]


def test_on_a_terminal_a_launch_asks(tmp_path: Path, launched: list[tuple[Path, ...]]) -> None:
    for answer, code in [("n\n", 1), ("\n", 1), ("y\n", 0)]:
        with patch("typer.testing._NamedTextIOWrapper.isatty", return_value=True, create=True):
            done = CliRunner().invoke(APP, [*ONE_L4, "--output", str(tmp_path)], input=answer)
        assert "Launch 6 nodes with 3 GPUs? [y/N]" in done.output
        assert done.exit_code == code
        assert len(launched) == (code == 0)


class SecretTask:
    """As much of SkyPilot's task as secrets need."""

    def __init__(self, *declared: str) -> None:
        self.secrets = dict.fromkeys(declared, "")

    def update_secrets(self, given: dict[str, str]) -> None:
        self.secrets |= given


def test_a_secret_goes_to_the_tasks_that_declare_it_and_an_unknown_one_to_all() -> None:
    trainer, service = SecretTask("HF_TOKEN", "JOBGROUP_TOKEN"), SecretTask("JOBGROUP_TOKEN")
    skypilot.give_secrets([trainer, service], {"HF_TOKEN": "hub", "JOBGROUP_TOKEN": "job", "OF_MY_CODE": "mine"})
    assert trainer.secrets == {"HF_TOKEN": "hub", "JOBGROUP_TOKEN": "job", "OF_MY_CODE": "mine"}
    assert service.secrets == {"JOBGROUP_TOKEN": "job", "OF_MY_CODE": "mine"}


def test_an_image_of_ones_own_is_that_of_each_task(tmp_path: Path) -> None:
    _, text = launch(tmp_path, "--model", "0.5B", "--image", "registry.example.org/grpo:v1")
    images = {task["name"]: task["resources"]["image_id"] for task in list(yaml.safe_load_all(text))[1:]}
    services = "docker:registry.example.org/grpo:v1-services"
    assert images == {
        "ppo-trainer": "docker:registry.example.org/grpo:v1-trainer",
        "rollout-server": "docker:registry.example.org/grpo:v1-rollout",
        **dict.fromkeys(("data-server", "reward-server", "replay-buffer"), services),
    }


def _tasks_of_images(folder: Path, *images: str) -> tuple[str, ...]:
    for number, image in enumerate(images):
        files = {"environment/Dockerfile": f"FROM {image}\nWORKDIR /app\n", "instruction.md": f"{number}"}
        write_task(folder / str(number), files)
    pass_checks(folder)
    write_task(folder / "unchecked", {"environment/Dockerfile": "FROM unchecked\nWORKDIR /app\n"})
    given = (f"DATASET=harbor:{folder}", "SANDBOX=bwrap", "DATASET_HELD_OUT=0.2", 'SANDBOX_TREES={"tree": "/tree"}')
    return ("--model", "0.5B", *(part for one in given for part in ("--env", one)))


def test_each_image_of_the_tasks_has_an_environment_server_of_its_own(tmp_path: Path) -> None:
    options = _tasks_of_images(tmp_path / "tasks", "debian:12", "tree", "example.org/a:1", "debian:12")
    (tmp_path / "out").mkdir()
    output, text = launch(tmp_path / "out", *options)
    tasks = {task["name"]: task for task in list(yaml.safe_load_all(text))[1:]}
    servers = {name: task for name, task in tasks.items() if name.startswith("environment-server")}
    images = {name: (task["resources"]["image_id"], task["envs"]["SANDBOX_IMAGE"]) for name, task in servers.items()}
    assert images == {
        "environment-server": ("docker:debian:12", "debian:12"),
        "environment-server-2": ("docker:example.org/a:1", "example.org/a:1"),
    }
    for task in servers.values():
        assert task["num_nodes"] == 1
        assert task["config"]["kubernetes"]["pod_config"]["spec"]["hostUsers"] is False
        assert (task["envs"]["SANDBOX"], task["envs"]["DATASET_HELD_OUT"]) == ("bwrap", "0.2")
    assert {task["envs"]["JOBGROUP_ENVIRONMENT_SERVERS"] for task in tasks.values()} == {2}
    group = spec.load(tmp_path / "out/jobgroup.yaml")
    assert [task.components for task in group.tasks if task.name in servers] == [["environment-server"]] * 2
    assert all(part in output for part in ("debian:12 (2 tasks)", "example.org/a:1 (1 task)", f"DATASET={tmp_path}"))
    assert tasks["ppo-trainer"]["envs"]["BATCH_SIZE"] == 2, "half of the tasks"
    (tmp_path / "none").mkdir()
    few = ("--env", "BATCH_SIZE=99", "--env", "ROLLOUT=program", "--env", "AGENT_COMMAND=true")
    assert "not one step" in refused(tmp_path / "none", *options, *few)


def test_one_image_keeps_the_number_of_nodes_and_too_many_are_refused_with_their_size(tmp_path: Path) -> None:
    options = _tasks_of_images(tmp_path / "tasks", "a", "b")
    (tmp_path / "refused").mkdir()
    message = refused(tmp_path / "refused", *options, "--max-images", "1")
    assert all(part in message for part in ("2 images", "2 pods", "4 CPUs", "16 GB", "--max-images"))
    options = _tasks_of_images(tmp_path / "one", "a")
    (tmp_path / "out").mkdir()
    _, text = launch(tmp_path / "out", *options, "--image", "registry.example.org/grpo:v1")
    tasks = {task["name"]: task for task in list(yaml.safe_load_all(text))[1:]}
    assert tasks["environment-server"]["num_nodes"] == 2
    assert tasks["environment-server"]["resources"]["image_id"] == "docker:a"
    assert tasks["data-server"]["resources"]["image_id"] == "docker:registry.example.org/grpo:v1-services"
    assert "SANDBOX_IMAGE" in refused(tmp_path / "refused", *options, "--env", "SANDBOX_IMAGE=b")
    in_home = {"environment/Dockerfile": "FROM a\nWORKDIR /root\n", "task.toml": '[task]\nname = "in-home"\n'}
    write_task(tmp_path / "one/home", in_home)
    pass_checks(tmp_path / "one")
    assert "in-home" in refused(tmp_path / "refused", *options)
    (tmp_path / "one/tasks-check.jsonl").unlink()
    assert "grpo tasks check" in refused(tmp_path / "refused", *options)


MIX = """
- {name: sums, dataset: arithmetic}
- {name: game, dataset: seeds, rollout: environment, environment: guessing, agent_max_tokens: 9000}
"""


def test_sources_choose_the_job_group_and_reach_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.launch.plan.ROOT", tmp_path)
    for name in ("jobgroups", ".skyignore"):
        (tmp_path / name).symlink_to(ROOT / name)
    for folder in (tmp_path, tmp_path / "below", tmp_path / "out"):
        folder.mkdir(exist_ok=True)
        (folder / "mix.yaml").write_text(MIX)
    options = ("--model", "0.5B", "--env", "SOURCES=mix.yaml", "--env", "MAX_STEPS=9")
    monkeypatch.chdir(tmp_path)
    _, text = launch(tmp_path / "out", *options)
    tasks = {document["name"]: document for document in list(yaml.safe_load_all(text))[1:]}
    assert {"gateway", "environment-server"} <= tasks.keys()
    readers = ("ppo-trainer", "data-server", "reward-server", "environment-server")
    assert {tasks[name]["envs"]["SOURCES"] for name in readers} == {"mix.yaml"}
    assert tasks["ppo-trainer"]["envs"]["ROLLOUT"] == "completion"
    monkeypatch.chdir(tmp_path / "below")
    (tmp_path / "none").mkdir()
    assert "SOURCES" in refused(tmp_path / "none", *options)
