"""Misspelt variables, wrong values, and files and functions that do not exist are refused before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from local_runner import run
from services.core.errors import ConfigurationError
from tests.fake_service import fake_service

ROOT = Path(__file__).parents[2]


def dry_run(*env: str, job_group: str = "jobgroup.yaml", **options) -> None:
    run.main(ROOT / job_group, env=list(env), dry_run=True, **options)


def refused(*env: str, **options) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        dry_run(*env, **options)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("BATCHSIZE=3", "BATCHSIZE is read by no component; the nearest setting is BATCH_SIZE"),
        ("SGLANG_TP_SIZ=2", "the nearest setting is SGLANG_TP_SIZE"),
        ("MY_THRESHOLD=2", "declare it under `envs` of its task"),
        ("EVAL_SPLIT=test", "EVAL_SPLIT is read by evaluate alone, which job group grpo does not have"),
        ("BATCH_SIZE=two", "ppo-trainer, rollout-server: BATCH_SIZE is 'two': Input should be a valid integer"),
        ("REWARD_FN=maths", "reward-server: REWARD_FN is 'maths'"),
        ("UPDATES_PER_BATCH=9", "UPDATES_PER_BATCH is 9; allowed is at most BATCH_SIZE (4)"),
        ("SGLANG_TP_SIZE=3", "rollout-server: an engine needs 3 GPUs"),
        ("LOG_LEVEL=loud", "ppo-trainer, data-server, rollout-server, reward-server, replay-buffer: LOG_LEVEL"),
    ],
)
def test_variables_that_no_component_accepts_are_refused(given, said):
    assert said in refused(given)


def test_all_errors_are_reported_at_once():
    said = refused("BATCH_SIZE=0", "REWARD_FN=maths")
    assert "BATCH_SIZE is '0'" in said
    assert "REWARD_FN is 'maths'" in said


def test_variables_of_libraries_and_components_pass(tmp_path):
    dry_run("NCCL_DEBUG=INFO", "HF_HUB_OFFLINE=1", "SGLANG_ENABLE_TORCH_COMPILE=1", "https_proxy=", "MAX_STEPS=3")
    # A file of settings may serve an evaluation of the run, too.
    settings = tmp_path / "settings.env"
    settings.write_text("MAX_STEPS=3\nEVAL_SPLIT=test\n")
    dry_run(env_file=[settings])
    dry_run(env_file=[settings], job_group="evaluation/evaluate.yaml")


def test_an_evaluation_takes_the_settings_of_its_questions() -> None:
    dry_run("DATASET=arithmetic", "PROMPT_STYLE=plain", "REWARD_FN=math", job_group="evaluation/evaluate.yaml")


def test_variables_that_the_file_declares_pass(tmp_path):
    document = (ROOT / "jobgroup.yaml").read_text()
    group = tmp_path / "group.yaml"
    group.write_text(document.replace("  REWARD_FN: math\n", "  REWARD_FN: math\n  MY_THRESHOLD: 1\n"))
    dry_run("MY_THRESHOLD=2", job_group=str(group))
    assert "the nearest setting is MY_THRESHOLD" in refused("MY_TRESHOLD=2", job_group=str(group))


def test_the_environment_of_this_process_is_checked_and_left_alone(monkeypatch):
    monkeypatch.setenv("GROUP_SIZE", "many")
    assert "GROUP_SIZE is 'many'" in refused()
    monkeypatch.setenv("GROUP_SIZE", "4")
    dry_run("GROUP_SIZE=2")
    assert "SKYPILOT_NODE_RANK" not in os.environ


MODULES = {
    "my_rewards.py": "def close(response): return 0.0\ndef by_level(response, level): return 0.0\n",
    "my_methods.py": "def quadratic(tokens): ...\nasync def solve(example): ...\ndef plain(example): ...\n",
    "my_game.py": """
from services.environment_server.environments import Conversation
class Empty(Conversation):
    pass
class Doors(Conversation):
    async def reset(self, seed): ...
    async def step(self, action): ...
""",
    "broken.py": "def close(response: return 0.0\n",
    "unhappy.py": "raise RuntimeError('no such table\\nsecond line')\n",
    "reads.py": "import os\nos.environ['MY_THRESHOLD']\ndef close(response): return 0.0\n",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with modules, a file of questions, and a job group that declares MY_THRESHOLD for its rewards."""
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "questions.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 8)
    (tmp_path / "late.jsonl").write_text('{"question": "1+1="}\n\n' + '{"question": "1+2=", "answer": 3}\n' * 8)
    (tmp_path / "sums.jsonl").write_text('{"sum": "1+1=", "total": "2"}\n' * 8)
    (tmp_path / "list.json").write_text('[{"sum": "1+1=", "total": "2"}]\n')
    pq.write_table(pa.table({"sum": ["1+1="] * 8, "answer": ["2"] * 8}), tmp_path / "sums.parquet")
    (tmp_path / "empty").mkdir()
    document = (ROOT / "jobgroup.yaml").read_text()
    declared = document.replace("  REWARD_FN: math\n", "  REWARD_FN: math\n  MY_THRESHOLD: 1\n")
    (tmp_path / "group.yaml").write_text(declared)
    return tmp_path


def told(here: Path, *env: str, job_group: str = "group.yaml") -> tuple[int, str]:
    """Return the exit code and the error of a dry run in ``here``."""
    options = [option for assignment in env for option in ("--env", assignment)]
    command = [sys.executable, "-m", "scripts.grpo", "run", job_group, "--small", *options, "--dry-run"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert not (here / "runs").exists()
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            ["DATASET=answers.jsonl"],
            "data-server: DATASET 'answers.jsonl' is not a file, seen from {here}; give",
        ),
        (
            ["DATASET=questions.jsonl", "DATASET_TEST=more.jsonl"],
            "data-server: DATASET_TEST 'more.jsonl' is not a file",
        ),
        (["DATASET=late.jsonl"], None),
        (["DATASET=list.json"], "data-server: DATASET 'list.json': allowed are files that end in .jsonl or .parquet; "),
        (["DATASET=sums.jsonl", "PROMPT_COLUMN=sum", "GROUND_TRUTH_COLUMN=total"], None),
        (
            ["DATASET=questions.jsonl", "DATASET_TEST=sums.jsonl"],
            "data-server: DATASET_TEST 'sums.jsonl' has none of the columns question, prompt, problem; "
            "set PROMPT_COLUMN to one of ['sum', 'total']",
        ),
        (
            ["DATASET=sums.parquet", "PROMPT_COLUMN=sums"],
            "PROMPT_COLUMN is 'sums', which DATASET 'sums.parquet' lacks; it has ['sum', 'answer']",
        ),
        (
            ["DATASET=sums.jsonl", "PROMPT_COLUMN=sum"],
            "none of the columns answer, ground_truth, solution; set GROUND_TRUTH_COLUMN to one of ['sum', 'total']",
        ),
        (["MODEL_NAME=./models/x"], "rollout-server: MODEL_NAME=./models/x: the directory does not exist, seen from"),
        (["MODEL_NAME=empty"], "MODEL_NAME=empty: {here}/empty has no config.json, so it is not a model's directory"),
        (["REWARD_FN=nowhere:close"], "reward-server: REWARD_FN 'nowhere:close' cannot be loaded: ModuleNotFoundError"),
        (["REWARD_FN=math=1,my_rewards:far=1"], "module 'my_rewards' has no attribute 'far'; correct it or its module"),
        (["REWARD_FN=my_rewards:closs"], "has no attribute 'closs', the nearest is close; correct it or its module"),
        (["REWARD_FN=broken:close"], "SyntaxError: "),
        (
            ["REWARD_FN=my_rewards:by_level", "DATASET=questions.jsonl"],
            "REWARD_FN 'my_rewards:by_level' needs level, which DATASET 'questions.jsonl' lacks; its columns are ",
        ),
        (["REWARD_FN=reads:close", "MY_THRESHOLD="], None),
        (["LOSS=nowhere:quadratic"], "ppo-trainer: LOSS is 'nowhere:quadratic', which cannot be imported"),
        (["LOSS=unhappy:quadratic"], "cannot be imported: RuntimeError: no such table; give module:function"),
        (["LOSS=my_methods:quadratik"], "has no attribute 'quadratik', the nearest is quadratic; give module:function"),
        (["ADVANTAGE=my_methods:cubic"], "ppo-trainer: ADVANTAGE is 'my_methods:cubic', which cannot be imported"),
    ],
)
def test_what_is_not_there_is_refused_with_its_setting(here, env, said):
    code, error = told(here, *env)
    if said is None:
        assert (code, error) == (0, "")
        return
    assert code == 78
    assert re.fullmatch(r"error: .*\n", error), "one line"
    assert said.format(here=here) in error


@pytest.mark.parametrize(
    ("job_group", "env", "said"),
    [
        (
            "agent",
            ["ROLLOUT=agent", "AGENT=nowhere:solve"],
            "ppo-trainer: AGENT is 'nowhere:solve', which cannot be imported: ModuleNotFoundError: No module named "
            "'nowhere'; give module:function, with the module on PYTHONPATH or in the working directory\n",
        ),
        ("agent", ["ROLLOUT=agent", "AGENT=my_methods:plain"], "AGENT 'my_methods:plain' is not an `async def`"),
        ("agent", ["ROLLOUT=agent", "AGENT=my_methods:solve"], None),
        (
            "environment",
            ["ENVIRONMENT=nowhere:Game"],
            "environment-server: ENVIRONMENT is 'nowhere:Game', which cannot",
        ),
        (
            "environment",
            ["ENVIRONMENT=my_game:Empty"],
            "ENVIRONMENT is 'my_game:Empty', which cannot be made: TypeError",
        ),
        ("environment", ["ENVIRONMENT=my_game:Door"], "module my_game has no class Door; it has Doors, Empty; give"),
        ("environment", ["ENVIRONMENT=my_game"], "my_game is a module; name its class, too, as in my_game:Doors"),
        (
            "environment",
            ["ENVIRONMENT=nothing"],
            "ENVIRONMENT is 'nothing', which cannot be made: Environment `nothing`",
        ),
        ("environment", ["ENVIRONMENT=recipes.wordle:Wordle"], None),
    ],
)
def test_agents_and_environments_are_looked_for(here, job_group, env, said):
    code, error = told(here, *env, job_group=str(ROOT / f"jobgroups/{job_group}.yaml"))
    assert (said or "") in error
    assert code == (78 if said else 0), error


def test_all_that_is_missing_is_named_at_once(here):
    _, error = told(here, "DATASET=answers.jsonl", "REWARD_FN=nowhere:close", "LOSS=nowhere:quadratic")
    assert all(name in error for name in ("'answers.jsonl'", "'nowhere:close'", "'nowhere:quadratic'"))


def test_what_is_there_passes(here):
    methods = ("LOSS=my_methods:quadratic", "ADVANTAGE=my_methods:quadratic")
    assert told(here, "DATASET=questions.jsonl", "REWARD_FN=my_rewards:close=1,math=0.5", *methods) == (0, "")


RUBRIC = "criteria:\n- name: a\n  text: x\n- name: a\n  text: y\n"
JUDGED = ("REWARD_FN=math,judge=0.3", "JUDGE_MODEL=m")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ([], "reward-server: REWARD_FN=math,judge=0.3 asks a judge, which needs JUDGE_URL and JUDGE_RUBRIC; set it as"),
        (["JUDGE_URL=http://127.0.0.1:1/v1", "JUDGE_RUBRIC=no.yaml"], "JUDGE_RUBRIC no.yaml cannot be read, seen from"),
        (
            ["JUDGE_URL=http://127.0.0.1:1/v1", "JUDGE_RUBRIC=twice.yaml"],
            "reward-server: JUDGE_RUBRIC twice.yaml, line 4: criteria.1.name: a is there twice; rename or remove one",
        ),
        (
            ["JUDGE_URL=http://127.0.0.1:1/v1", "JUDGE_RUBRIC=fine.yaml", "JUDGE_API_KEY_ENV=NO_KEY"],
            "reward-server: JUDGE_API_KEY_ENV names NO_KEY, which is not set; give it a value",
        ),
        (["JUDGE_URL={html}/v1", "JUDGE_RUBRIC=fine.yaml"], "answers text/html that is not a chat completion"),
        (["JUDGE_URL={html}", "JUDGE_RUBRIC=fine.yaml"], "refuses a request for JUDGE_MODEL m: 404"),
        (
            ["JUDGE_URL=http://127.0.0.1:1/v1", "JUDGE_RUBRIC=fine.yaml"],
            "note: JUDGE_URL http://127.0.0.1:1/v1 was not checked, because it does not answer: ",
        ),
        (
            ["JUDGE_URL=http://127.0.0.1:1/v1", "JUDGE_RUBRIC=column.yaml", "DATASET=sums.jsonl", "PROMPT_COLUMN=sum"],
            "needs tests, which DATASET 'sums.jsonl' lacks; its columns are sum, total. Name columns in JUDGE_RUBRIC",
        ),
        (
            ["JUDGE_URL=http://127.0.0.1:1/v1", "JUDGE_RUBRIC=fine.yaml", "JUDGE_SECONDS=300"],
            "JUDGE_SECONDS=300 must be less than SERVICE_DEADLINE_SECONDS=300",
        ),
        (
            ["JUDGE_URL=http://127.0.0.1:1/v1", "REWARD_FN=judge_group"],
            "REWARD_FN=judge_group compares the answers of a group, and a held-out answer is alone: give a",
        ),
        (["JUDGE_URL=http://127.0.0.1:1/v1", "REWARD_FN=judge_group", "EVAL_PROMPTS=0"], None),
    ],
)
def test_judges_are_checked(here, env, said):
    (here / "twice.yaml").write_text(RUBRIC)
    (here / "fine.yaml").write_text(RUBRIC.replace("name: a", "name: b", 1))
    (here / "column.yaml").write_text("criteria:\n- name: a\n  text: It passes {tests}\n")
    page = (200, "<html>Log in</html>", {"Content-Type": "text/html"})
    with fake_service({"POST /v1/chat/completions": lambda _: page}) as html:
        code, error = told(here, *JUDGED, *(one.format(html=html.endpoint.url) for one in env))
    assert code == (0 if said is None or said.startswith("note: ") else 78), error
    assert (said or "") in error


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (["ADVANTAGE=gdpo", "GDPO_WEIGHTS=math=1,exact_match=0.5"], None),
        (
            ["ADVANTAGE=gdpo", "GDPO_WEIGHTS=math=1,frmat=0.5"],
            "GDPO_WEIGHTS names frmat, but REWARD_FN has exact_match,",
        ),
        (["ADVANTAGE=maxrl"], "REWARD_FN gives exact_match a negative weight, which ADVANTAGE=maxrl cannot have"),
        (["ADVANTAGE=rloo"], None),
    ],
)
def test_rewards_that_an_advantage_does_not_fit_are_refused(here, env, said):
    code, error = told(here, "REWARD_FN=math=1,exact_match=-0.5", *env)
    assert code == (0 if said is None else 78), error
    assert (said or "") in error
