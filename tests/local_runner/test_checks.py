"""Misspelt variables, wrong values, and files and functions that do not exist are refused before anything starts."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig

from local_runner import checks, run
from local_runner.launch import Launch
from local_runner.nodes import Addresses, LocalRun
from local_runner.spec import JobGroup, TaskSpec
from services.core.errors import ConfigurationError
from services.reward_server import judging
from tests.fake_service import fake_service
from tests.local_runner.in_process import call
from tests.trainer.tiny import SHAPE, save_model
from tests.waiting import IDLE_SECONDS
from toys.arithmetic import build_tokenizer

ROOT = Path(__file__).parents[2]


def dry_run(*env: str, job_group: str = "jobgroup.yaml", **options) -> None:
    run.main(ROOT / job_group, env=list(env), dry_run=True, **options)


def refused(*env: str, **options) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        dry_run(*env, **options)
    return str(refusal.value)


def test_a_model_that_engine_or_trainer_cannot_compute_is_refused_by_its_type(tmp_path):
    arithmetic = ("DATASET=arithmetic", "PROMPT_STYLE=plain", "REWARD_FN=math", "ROLLOUT_ENGINE=embedded")
    for config, named in (
        ({"model_type": "of-our-own", "auto_map": {"AutoConfig": "code.Config"}}, "ROLLOUT_ENGINE"),
        ({"model_type": "vit"}, "MODEL_NAME"),
    ):
        build_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))
        refusal = refused(f"MODEL_NAME={tmp_path}", "TRUST_REMOTE_CODE=true", *arithmetic)
        assert config["model_type"] in refusal, refusal
        assert named in refusal, refusal


ADAPTERS = ("LORA_RANK=8", "DATASET=arithmetic", "PROMPT_STYLE=plain", "REWARD_FN=math")


def adapters(config: dict, *env: str, gpus: tuple[str, ...] = ()) -> list[str]:
    """Return the cautions about the adapters of a model in ``model/``."""
    Path("model/config.json").write_text(json.dumps(config))
    launch = Launch(ROOT / "jobgroup.yaml", ["MODEL_NAME=model", *ADAPTERS, *env])
    with run.planned(launch, None, own_hosts=False) as planned:
        here = replace(planned, gpus=gpus)
        return checks.check_adapters(checks.load_all(here), here)


def test_adapters_that_sglang_does_not_load_are_refused_before_the_start(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    lfm2, image = {"model_type": "lfm2"}, {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    for config, env, gpus in (
        (lfm2, ["ROLLOUT_ENGINE=sglang"], ()),
        (lfm2, [], ("0",)),
        (image, ["ROLLOUT_ENGINE=sglang"], ()),
        ({"model_type": "smollm3"}, ["ROLLOUT_ENGINE=sglang"], ()),
    ):
        with pytest.raises(ConfigurationError) as refusal:
            adapters(config, *env, gpus=gpus)
        kind = config.get("text_config", config)["model_type"]
        assert all(word in str(refusal.value) for word in ("LORA_RANK", repr(kind), "ROLLOUT_ENGINE=embedded"))
    code, error = told(capfd, "MODEL_NAME=model", "ROLLOUT_ENGINE=sglang", *ADAPTERS, job_group="jobgroup.yaml")
    assert (code, "'smollm3'" in error) == (78, True), error


def test_other_adapters_and_engines_pass_and_an_untried_family_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    lfm2 = {"model_type": "lfm2"}
    assert adapters(lfm2) == []  # without a GPU the engine is the embedded one
    assert adapters(lfm2, "ROLLOUT_ENGINE=embedded", gpus=("0",)) == []
    assert adapters(lfm2, "ROLLOUT_ENGINE=sglang", "LORA_RANK=0") == []
    assert adapters(lfm2, "ROLLOUT_ENGINE=sglang", "METHOD=sft", "EVAL_PROMPTS=0") == []
    assert adapters({"model_type": "qwen3"}, "ROLLOUT_ENGINE=sglang") == []
    assert adapters({}, "ROLLOUT_ENGINE=sglang") == []
    [caution] = adapters({"model_type": "arcee"}, "ROLLOUT_ENGINE=sglang")
    assert "'arcee'" in caution


@pytest.mark.usefixtures("asks_here")
def test_a_dry_run_says_that_nobody_has_loaded_the_adapters_of_a_family(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    save_model(Path("model"), AutoConfig.for_model("arcee", **SHAPE | {"max_position_embeddings": 1024}))
    dry_run("MODEL_NAME=model", "ROLLOUT_ENGINE=sglang", *ADAPTERS)
    assert "'arcee'" in capfd.readouterr().out


def test_variables_that_no_component_accepts_are_refused():
    for given, named in (
        (["BATCHSIZE=3"], ["BATCHSIZE", "BATCH_SIZE"]),
        (["SGLANG_TP_SIZ=2"], ["SGLANG_TP_SIZE"]),
        (["MY_THRESHOLD=2"], ["MY_THRESHOLD"]),
        (["EVAL_SPLIT=test"], ["EVAL_SPLIT", "evaluate"]),
        (["BATCH_SIZE=two"], ["ppo-trainer", "rollout-server", "BATCH_SIZE"]),
        (["UPDATES_PER_BATCH=9"], ["UPDATES_PER_BATCH"]),
        (["SGLANG_TP_SIZE=3"], ["rollout-server", "SGLANG_TP_SIZE"]),
        (["LOG_LEVEL=loud"], ["ppo-trainer, data-server, rollout-server, reward-server, replay-buffer", "LOG_LEVEL"]),
        (["BATCH_SIZE=0", "REWARD_FN=maths"], ["BATCH_SIZE", "reward-server", "REWARD_FN"]),
    ):
        refusal = refused(*given)
        assert all(name in refusal for name in named), refusal


@pytest.mark.usefixtures("asks_here")
def test_variables_of_libraries_components_and_the_file_pass(tmp_path):
    dry_run("NCCL_DEBUG=INFO", "HF_HUB_OFFLINE=1", "SGLANG_ENABLE_TORCH_COMPILE=1", "https_proxy=", "MAX_STEPS=3")
    # A file of settings may serve an evaluation of the run, too.
    settings = tmp_path / "settings.env"
    settings.write_text("MAX_STEPS=3\nEVAL_SPLIT=test\n")
    dry_run(env_file=[settings])
    dry_run(env_file=[settings], job_group="evaluation/evaluate.yaml")
    dry_run("DATASET=arithmetic", "PROMPT_STYLE=plain", "REWARD_FN=math", job_group="evaluation/evaluate.yaml")
    group = tmp_path / "group.yaml"
    group.write_text(DECLARED)
    dry_run("MY_THRESHOLD=2", job_group=str(group))
    assert "the nearest setting is MY_THRESHOLD" in refused("MY_TRESHOLD=2", job_group=str(group))


@pytest.mark.usefixtures("asks_here")
def test_the_environment_of_this_process_is_checked_and_left_alone(monkeypatch):
    monkeypatch.setenv("GROUP_SIZE", "many")
    assert "GROUP_SIZE is 'many'" in refused()
    monkeypatch.setenv("GROUP_SIZE", "4")
    dry_run("GROUP_SIZE=2")
    assert "SKYPILOT_NODE_RANK" not in os.environ


DECLARED = (ROOT / "jobgroup.yaml").read_text().replace("  REWARD_FN: math\n", "  REWARD_FN: math\n  MY_THRESHOLD: 1\n")
MODULES = {
    "my_rewards.py": "def close(response): return 0.0\ndef by_level(response, level): return 0.0\n"
    "def typo(respone): return 0.0\n",
    "my_methods.py": "def quadratic(tokens): ...\nasync def solve(example): ...\ndef plain(example): ...\n",
    "my_game.py": """
from services.environment_server.environments import Conversation
class Empty(Conversation):
    pass
class Doors(Conversation):
    async def reset(self, seed): ...
    async def step(self, action): ...
""",
    "adapter/adapter_config.json": "{}",
    "trained/model/config.json": "{}",
    "broken.py": "def close(response: return 0.0\n",
    "unhappy.py": "raise RuntimeError('no such table\\nsecond line')\n",
    "reads.py": "import os\nos.environ['MY_THRESHOLD']\ndef close(response): return 0.0\n",
    "fine.yaml": "criteria:\n- name: b\n  text: x\n- name: a\n  text: y\n",
    "twice.yaml": "criteria:\n- name: a\n  text: x\n- name: a\n  text: y\n",
    "column.yaml": "criteria:\n- name: a\n  text: It passes {tests}\n",
    "questions.jsonl": "".join(f'{{"question": "{a}+1=", "answer": "{a + 1}"}}\n' for a in range(8)),
    "late.jsonl": '{"question": "1+1="}\n\n'
    + 4 * '{"question": "1+2=", "answer": 3}\n{"question": "2+2=", "answer": 4}\n',
    "sums.jsonl": "".join(f'{{"sum": "{a}+1=", "total": "{a + 1}"}}\n' for a in range(8)),
    "list.json": '[{"sum": "1+1=", "total": "2"}]\n',
    "group.yaml": DECLARED,
}
"""Files of a folder, with modules, rubrics, rows, and a job group that declares MY_THRESHOLD for its rewards."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_here: None) -> Path:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    pq.write_table(pa.table({"sum": ["1+1="] * 8, "answer": ["2"] * 8}), tmp_path / "sums.parquet")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(judging, "CHECK_SECONDS", 0.1)
    return tmp_path


def told(capfd: pytest.CaptureFixture[str], *env: str, job_group: str = "group.yaml") -> tuple[int, str]:
    """Return the exit code and the error of a dry run."""
    code = call("run", job_group, "--small", "--dry-run", *(f"--env={assignment}" for assignment in env))
    assert not Path("runs").exists()
    return code, capfd.readouterr().err


JUDGED = ("REWARD_FN=math,judge=0.3", "JUDGE_MODEL=m")
JUDGE = (*JUDGED, "JUDGE_URL=http://127.0.0.1:1/v1")
QUESTIONS = "DATASET=questions.jsonl"
BELOW = "REWARD_FN=math=1,exact_match=-0.5"
REFUSALS: dict[str, list[list[str]]] = {
    "DATASET": [
        [f"DATASET={name}"] for name in ("answers.jsonl", "list.json", "empty", "https://host.test/sums.jsonl")
    ],
    "DATASET_TEST": [[QUESTIONS, f"DATASET_TEST={name}"] for name in ("more.jsonl", "sums.jsonl")],
    "PROMPT_COLUMN": [["DATASET=sums.parquet", "PROMPT_COLUMN=sums"]],
    "GROUND_TRUTH_COLUMN": [["DATASET=sums.jsonl", "PROMPT_COLUMN=sum"]],
    "MODEL_NAME": [[f"MODEL_NAME={name}"] for name in ("trained", "adapter", "./models/x", "empty")],
    "ROLLOUT": [["ROLLOUT=agent", "AGENT=my_methods:solve"]],
    "REWARD_FN": [
        *([f"REWARD_FN={name}"] for name in ("nowhere:close", "math=1,my_rewards:far=1", "broken:close")),
        *([f"REWARD_FN=my_rewards:{name}", QUESTIONS] for name in ("typo", "by_level", "closs")),
        [BELOW, "ADVANTAGE=maxrl"],
        [*JUDGE, "REWARD_FN=judge_group"],
    ],
    "LOSS": [[f"LOSS={name}"] for name in ("nowhere:quadratic", "unhappy:quadratic", "my_methods:quadratik")],
    "ADVANTAGE": [["ADVANTAGE=my_methods:cubic"]],
    "LOSS.*DATASET.*REWARD_FN": [["DATASET=answers.jsonl", "REWARD_FN=nowhere:close", "LOSS=nowhere:quadratic"]],
    "JUDGE_URL and JUDGE_RUBRIC": [[*JUDGED]],
    "JUDGE_RUBRIC": [
        *([*JUDGE, f"JUDGE_RUBRIC={name}"] for name in ("no.yaml", "twice.yaml")),
        [*JUDGE, "JUDGE_RUBRIC=column.yaml", "DATASET=sums.jsonl", "PROMPT_COLUMN=sum"],
    ],
    "JUDGE_API_KEY_ENV": [[*JUDGE, "JUDGE_RUBRIC=fine.yaml", "JUDGE_API_KEY_ENV=NO_KEY"]],
    "GDPO_WEIGHTS": [[BELOW, "ADVANTAGE=gdpo", "GDPO_WEIGHTS=math=1,frmat=0.5"]],
    "JUDGE_SECONDS": [["JUDGE_SECONDS=5"]],
}
"""Variables of runs that are refused, by the variable that the message names."""


@pytest.mark.parametrize(("variable", "env"), [(name, env) for name, cases in REFUSALS.items() for env in cases])
def test_what_is_not_there_is_refused_in_one_line_with_its_setting(here, capfd, variable, env):
    code, error = told(capfd, *env)
    assert code == 78
    assert re.fullmatch(rf"(note: JUDGE_URL .*\n)?error: .*\b{variable}\b.*\n", error), "one line"


def test_what_is_there_passes(here, capfd):
    both = "REWARD_FN=math=1,exact_match=-0.5"
    for env in (
        ["DATASET=late.jsonl"],
        ["DATASET=sums.jsonl", "PROMPT_COLUMN=sum", "GROUND_TRUTH_COLUMN=total"],
        ["REWARD_FN=reads:close", "MY_THRESHOLD="],
        [both, "ADVANTAGE=gdpo", "GDPO_WEIGHTS=math=1,exact_match=0.5"],
        [both, "ADVANTAGE=rloo"],
        [
            QUESTIONS,
            "REWARD_FN=my_rewards:close=1,math=0.5",
            "LOSS=my_methods:quadratic",
            "ADVANTAGE=my_methods:quadratic",
        ],
        [*JUDGE, "REWARD_FN=judge_group", "EVAL_PROMPTS=0"],
    ):
        code, error = told(capfd, *env)
        assert (code, "error:" in error) == (0, False), (env, error)


AGENT, ENVIRONMENT = (str(ROOT / f"jobgroups/{name}.yaml") for name in ("agent", "environment"))


def test_agents_and_environments_are_looked_for(here, capfd, monkeypatch):
    monkeypatch.setattr("services.harnesses.HARNESSES", here / "empty")
    for job_group, env, named in (
        (AGENT, ["ROLLOUT=agent", "AGENT=nowhere:solve"], "AGENT"),
        (AGENT, ["ROLLOUT=agent", "AGENT=my_methods:plain"], "AGENT"),
        (AGENT, ["ROLLOUT=agent", "AGENT=my_methods:solve"], None),
        (AGENT, ["ROLLOUT=program", "AGENT=", "AGENT_COMMAND=nosuchprogram -x"], "nosuchprogram"),
        (AGENT, ["ROLLOUT=program", "AGENT=", "AGENT_COMMAND=preset:nosuch"], "codex"),
        (AGENT, ["ROLLOUT=program", "AGENT=", "AGENT_COMMAND=preset:codex"], "make harnesses PRESETS=codex"),
        (AGENT, ["ROLLOUT=program", "AGENT=", "AGENT_COMMAND=cd . && A=1 nosuchprogram"], None),
        (AGENT, ["DATASET=harbor:tasks", "AGENT=my_methods:solve"], "ROLLOUT is agent, but the tasks"),
        (AGENT, ["DATASET=harbor:tasks", "ROLLOUT=program", "AGENT=", "AGENT_COMMAND=true"], "environment.yaml"),
        (ENVIRONMENT, ["ENVIRONMENT=nowhere:Game"], "ENVIRONMENT"),
        (ENVIRONMENT, ["ENVIRONMENT=my_game:Empty"], "ENVIRONMENT"),
        (ENVIRONMENT, ["ENVIRONMENT=my_game:Door"], "my_game:Door"),
        (ENVIRONMENT, ["ENVIRONMENT=my_game"], "my_game"),
        (ENVIRONMENT, ["ENVIRONMENT=nothing"], "ENVIRONMENT"),
        (ENVIRONMENT, ["ENVIRONMENT=my_game:Doors"], None),
    ):
        code, error = told(capfd, *env, job_group=job_group)
        assert (code, (named or "") in error) == (78 if named else 0, True), (env, error)


def test_a_judge_is_asked_and_one_that_does_not_answer_is_told(here, capfd, monkeypatch):
    page = (200, "<html>Log in</html>", {"Content-Type": "text/html"})
    with fake_service({"POST /v1/chat/completions": lambda _: page}) as html:
        for url, expected, said in (
            (f"{html.endpoint.url}/v1", 78, "answers text/html that is not a chat completion"),
            (html.endpoint.url, 78, "refuses a request for JUDGE_MODEL m: 404"),
            ("http://127.0.0.1:1/v1", 0, "note: JUDGE_URL http://127.0.0.1:1/v1 was not checked"),
        ):
            monkeypatch.setattr(judging, "CHECK_SECONDS", IDLE_SECONDS if expected else 0.1)
            code, error = told(capfd, *JUDGED, "JUDGE_RUBRIC=fine.yaml", f"JUDGE_URL={url}")
            assert (code, said in error) == (expected, True), error


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import sys\nprint('found')\nprint('note: a', file=sys.stderr)", None),
        ("import sys\nprint('error: the last\\nnoise', file=sys.stderr)\nsys.exit(78)", "the last"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import sys\nsys.exit(3)", r".* asked ended with exit code 3"),
        ("import time\ntime.sleep(600)", None),
    ],
)
def test_a_module_is_asked_in_a_process_with_the_variables_of_a_node(tmp_path, monkeypatch, module, said):
    monkeypatch.chdir(tmp_path)
    Path("asked.py").write_text(f"import os\nassert os.environ['SKYPILOT_NODE_RANK'] == '0'\n{module}\n")
    task = TaskSpec("reward-server", "")
    run = LocalRun(JobGroup("group", (task,)), "run-1", tmp_path, Addresses({task.name: ["127.0.0.1"]}, {}))
    if "600" in module:
        with pytest.raises(TimeoutError, match="asked takes more than 1 s"):
            checks.ask(run, task, "asked", seconds=1)
    elif said is None:
        assert checks.ask(run, task, "asked") == "found\n"
    else:
        with pytest.raises(ConfigurationError, match=f"^{said}$"):
            checks.ask(run, task, "asked")
