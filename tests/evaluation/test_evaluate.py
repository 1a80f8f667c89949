"""The command itself, with the embedded engine: results, resumption, refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from evaluation import servers
from evaluation.metrics import Results
from local_runner.processes import MARK
from scripts.evaluate import run_directory
from services.core.errors import ConfigurationError
from tests.evaluation.conftest import ARITHMETIC, Evaluate, Here
from tests.tasks import pass_checks, write_task
from tests.waiting import IDLE_SECONDS, wait_until


def servers_of(output: Path) -> list[psutil.Process]:
    """Return the processes of servers that an evaluation started."""
    found = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
        except psutil.Error:
            continue
        if MARK in variables and variables.get("SHARED_DIR", "").startswith(str(output)):
            found.append(process)
    return found


def correct(sample: dict[str, Any]) -> bool:
    return bool(sample["result"]["reward"] == 1.0)


def test_by_default_the_newest_run_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODEL_NAME", raising=False)
    with pytest.raises(ConfigurationError, match="runs/"):
        run_directory(None, is_named=False)
    for name in ("older", "newer"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    os.utime(tmp_path / "runs/older/metrics.jsonl", (1, 1))
    os.utime(tmp_path / "runs/older", (1, 1))
    assert run_directory(None, is_named=False) == Path("runs/newer")
    assert run_directory("older", is_named=True) == Path("runs/older")
    assert run_directory(None, is_named=True) is None
    monkeypatch.setenv("MODEL_NAME", "m")
    assert run_directory(None, is_named=False) is None


def test_results_are_those_of_the_samples(
    here: Here, engine: str, rewards: str, tiny_model: Path, tmp_path: Path
) -> None:
    everything = []
    for name in ("v000000", "v000003"):
        model = shutil.copytree(tiny_model, tmp_path / "run" / "policy" / name)
        given = ("--model", model, "--url", engine, "--reward-url", rewards, "--samples", "2")
        command = here(*given, output=tmp_path / name, **ARITHMETIC)
        everything.append(results := Results.model_validate(command.results))
        samples = command.samples()
        assert Counter(s["kind"] for s in samples) == {"greedy": 20, "sampled": 40}
        greedy = statistics.fmean(correct(s) for s in samples if s["kind"] == "greedy")
        by_prompt = defaultdict(list)
        for sample in samples:
            if sample["kind"] == "sampled":
                by_prompt[sample["prompt_id"]].append(correct(sample))
        metrics = results.metrics
        assert metrics["greedy pass@1"].value == pytest.approx(greedy)
        assert metrics["avg@2"].value == pytest.approx(statistics.fmean(map(statistics.fmean, by_prompt.values())))
        assert metrics["pass@2"].value == pytest.approx(statistics.fmean(map(any, by_prompt.values())))
        assert 0.2 < metrics["greedy pass@1"].value < 1  # the tiny model knows some answers, and not all
        assert all(m.low <= m.value <= m.high for m in metrics.values())
        assert list(results.categories) == ["1-digit +"]
        assert results.left_out == {}
        assert results.completion_tokens["greedy"]["max"] <= 4
        assert results.throughput["completion_tokens_per_second"] > 0
        assert results.server == engine
        assert "greedy pass@1" in command.text
    assert [(r.name, r.step, r.prompts) for r in everything] == [("v000000", 0, 20), ("v000003", 3, 20)]
    # The same weights give the same greedy answers; the engine computes in float32.
    assert everything[0].metrics["greedy pass@1"] == everything[1].metrics["greedy pass@1"]


@pytest.mark.slow
def test_an_evaluation_goes_on_after_ctrl_c_and_after_a_kill(
    evaluate: Evaluate, here: Here, engine: str, tiny_model: Path
) -> None:
    arguments = ("--model", tiny_model, "--split", "all", "--samples", "24", "--concurrency", "2")
    first = evaluate(*arguments, **ARITHMETIC)
    first.wait_for_samples(100)
    os.kill(first.process.pid, signal.SIGINT)
    assert first.wait() == 128 + signal.SIGINT
    assert "the same command continues" in first.text
    assert servers_of(first.output) == []

    second = evaluate(*arguments, **ARITHMETIC)
    second.wait_for_samples(len(first.lines()) + 200)
    second.process.send_signal(signal.SIGKILL)
    second.process.wait(IDLE_SECONDS)
    wait_until(lambda: not servers_of(first.output), "the end of the servers that a killed evaluation started")
    before = first.lines()
    assert 300 <= len(before) < 2500, "it was to be killed on its way"
    with (first.output / "samples.jsonl").open("ab") as file:
        file.write(b'{"prompt_id": "arithmetic/te')

    third = evaluate(*arguments, **ARITHMETIC)
    results = Results.model_validate(third.succeed())
    after = third.lines()
    assert after[: len(before)] == before
    keys = Counter((s["prompt_id"], s["kind"], s["index"]) for s in third.samples())
    assert len(keys) == 100 * 25
    assert set(keys.values()) == {1}
    assert results.throughput["samples_resumed"] == len(before)
    assert results.throughput["samples"] == 2500 - len(before)
    assert all(metric.prompts == 100 for metric in results.metrics.values())
    assert servers_of(first.output) == []

    # Nothing is left to do, and the numbers stay.
    again = here(*arguments, "--url", engine, output=first.output, **ARITHMETIC)
    assert Results.model_validate(again.results).metrics == results.metrics
    assert third.lines() == after


def test_samples_are_kept_and_other_settings_are_not_mixed_in(
    here: Here, engine: str, rewards: str, tiny_model: Path
) -> None:
    given = ("--model", tiny_model, "--url", engine, "--reward-url", rewards, "--samples", "2")
    first = here(*given, "--limit", "4", **ARITHMETIC)
    assert first.results["throughput"]["samples"] == 4 * 3
    kept = first.samples()
    longer = here(*given, "--limit", "6", **ARITHMETIC)
    assert (longer.results["throughput"]["samples_resumed"], longer.results["throughput"]["samples"]) == (12, 6)
    assert longer.samples()[:12] == kept
    other = here(*given, "--limit", "6", "--temperature", "0.5", **ARITHMETIC)
    assert other.code == 78
    assert "temperature was 1.0 and is 0.5" in other.text


def test_each_source_is_asked_whole_and_counts_the_same(
    here: Here, engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The rewards are those of a reward-server that the command starts."""
    rows = [{"question": f"{a}+{a}=", "answer": str(2 * a), "level": a} for a in range(1, 5)]
    (tmp_path / "leveled.py").write_text("def never(response, level):\n    return 1.0 - (level > 0)\n")
    (tmp_path / "doubles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mix.yaml").write_text(
        "- {name: sums}\n"
        f"- {{name: doubles, dataset: {tmp_path}/doubles.jsonl, eval_only: true, "
        'reward_fn: "leveled:never", max_new_tokens: 2}\n'
        "- {name: game, dataset: seeds, rollout: environment, environment: guessing}\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    mix = {**ARITHMETIC, "SOURCES": str(tmp_path / "mix.yaml"), "PYTHONPATH": path}
    command = here("--model", tiny_model, "--url", engine, **mix)
    results = Results.model_validate(command.results)
    assert results.prompts == results.available == 20 + 4
    assert {name: metrics["greedy pass@1"].prompts for name, metrics in results.sources.items()} == {
        "doubles": 4,
        "sums": 20,
    }
    # The one source's reward reads a column, which makes every answer wrong; the tiny model adds.
    values = {name: metrics["greedy pass@1"].value for name, metrics in results.sources.items()}
    assert values["doubles"] == 0.0 < values["sums"]
    assert results.metrics["greedy pass@1"].value == values["sums"] / 2
    assert all(s["completion_tokens"] <= 2 for s in command.samples() if s["prompt_id"].startswith("doubles"))
    assert re.search(r"left out, .*: game", command.text)
    assert "starting 1 reward-server" in command.text
    assert "warning" not in command.text


def test_an_endpoint_is_evaluated_as_a_rollout_node_is(
    here: Here, tiny_model: Path, engine: str, rewards: str, tmp_path: Path
) -> None:
    arguments = ("--model", tiny_model, "--limit", "8", "--samples", "2", "--reward-url", rewards)
    expected = Results.model_validate(here(*arguments, "--url", engine, **ARITHMETIC).results)
    address = ("--endpoint", f"{engine}/v1", "--api-key-env", "THE_KEY")
    command = here(*arguments, *address, output=tmp_path / "endpoint", THE_KEY="k", **ARITHMETIC)
    results = Results.model_validate(command.results)
    assert results.metrics["greedy pass@1"] == expected.metrics["greedy pass@1"]
    assert set(results.metrics) == set(expected.metrics)
    assert results.completion_tokens["greedy"] == expected.completion_tokens["greedy"]
    assert results.left_out == {}
    assert results.not_given == ["token ids", "whether seeds are used"]
    assert "the server does not give: token ids, whether seeds are used" in command.text


REFUSED = [
    (["--dataset", "no/such.jsonl"], "no/such.jsonl"),
    (["--dataset", "nobody/has-this"], "DATASET"),
    (["--dataset", "arithmetic", "--split", "validation"], "'test', 'train' or 'all'"),
    (["--model", "./no-such-model", "--dataset", "arithmetic"], "no-such-model"),
    (["--model", "nobody/has-this", "--dataset", "arithmetic"], "MODEL_NAME"),
    (["--samples", "4", "--k", "2,8"], "k 8"),
    (["--k", "two"], "EVAL_K"),
    (["--agent", "nothing:here"], "AGENT"),
    (["--env", "AGENT=nothing:here"], "AGENT"),
    (["--agent", "json:loads"], "async def"),
    (["--env", "ENVIRONMENT=shop:Shop", "--dataset", "seeds"], "services.rollout_server"),
    (["--env", "ROLLOUT=environment", "--env", "DATASET=seeds"], "ROLLOUT"),
    (["--env", "ENVIRONMENT=shop:Shop", "--dataset", "no/such.jsonl"], "no/such.jsonl"),
    (["--agent", "json:loads", "--agent-command", "true"], "AGENT_COMMAND"),
    (["--agent-command", "preset:nosuch"], "claude-code"),
    (["--agent-command", "preset:opencode", "--env", "ENGINE_CONTEXT_LENGTH=1024"], "a context of 1024"),
    (["--endpoint", "http://127.0.0.1:1/v1", "--url", "http://127.0.0.1:1"], "--url and --endpoint"),
    (["--endpoint", "http://127.0.0.1:1/v1", "--agent", "evaluation.multiplying_agent:solve"], "--endpoint"),
    (["--endpoint", "http://127.0.0.1:1/v1", "--api-key-env", "NO_KEY"], "--api-key-env NO_KEY"),
    (["--url", "http://127.0.0.1:1", "--api-key-env", "HOME"], "--api-key-env"),
    (["--url", "http://127.0.0.1:1", "--num-servers", "2"], "--num-servers"),
    (["--scheduler", "skypilot", "--reward-url", "http://127.0.0.1:2"], "reward-server"),
    (["--backend", "vllm", "--scheduler", "slurm"], "--backend vllm"),
    (["--env", "SGLANG_TP_SIZE=4", "--num-servers", "2"], "need 8 GPUs"),
    (["--scheduler", "local", "--url", "http://127.0.0.1:1"], "starts its own servers"),
    (["--agent", "evaluation.multiplying_agent:solve", "--url", "https://a.example"], "http://host:port"),
    (["--url", "nonsense:port"], "nonsense:port"),
    (["--stop", "Q:", "--agent-command", "true"], "stop"),
    (["--dataset", "harbor:a", "--agent", "evaluation.multiplying_agent:solve"], "plays no tasks of harbor:DIR"),
    (["--dataset", "harbor:a", "--scheduler", "skypilot"], "boxes on this machine"),
    (["--dataset", "harbor:a", "--endpoint", "http://127.0.0.1:1/v1"], "--endpoint"),
    (["--dataset", "harbor:no/such", "--agent-command", "true"], "no/such"),
    (["--stop", ""], "EVAL_STOP_0"),
    (["--temperature", "-1"], "TEMPERATURE"),
]


def test_bad_input_is_named(here: Here, tiny_model: Path, tmp_path: Path) -> None:
    for number, (arguments, named) in enumerate(REFUSED):
        given = arguments if "--model" in arguments else ["--model", tiny_model, *arguments]
        variables = {"PROMPT_STYLE": "plain", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {} if "--dataset" in arguments else {"DATASET": "arithmetic"}
        told = here(*given, output=tmp_path / str(number), **variables)
        assert (told.code, named in told.text) == (78, True), (arguments, told.text)


def test_servers_that_do_not_answer_or_lack_the_model_are_named(
    here: Here, tiny_model: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = servers.START_SECONDS
    monkeypatch.setattr(servers, "START_SECONDS", 0.5)
    given = ("--url", "http://127.0.0.1:1", "--reward-url", "http://127.0.0.1:2")
    away = here("--model", tiny_model, *given, **ARITHMETIC)
    assert (away.code, "http://127.0.0.1:1 did not answer" in away.text) == (33, True), away.text
    monkeypatch.setattr(servers, "START_SECONDS", usual)
    other = here("--model", "another", "--endpoint", f"{engine}/v1", **ARITHMETIC)
    assert (other.code, "no model 'another'" in other.text) == (78, True), other.text


ASK_AND_WORK = """
import json, os, subprocess, sys, urllib.request
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "1+1="}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
subprocess.run(["sh", "-c", f"echo {json.load(sys.stdin)['prompt'][6]} > value.txt"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap")
def test_tasks_are_played_by_a_program_in_their_boxes_or_by_the_models_own(
    here: Here, engine: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for number in (6, 7, 8, 9):
        write_task(tmp_path / f"tasks/{number}", {"instruction.md": f"Write {number} into `/app/value.txt`.\n"})
    pass_checks(tmp_path / "tasks")
    (tmp_path / "agent.py").write_text(ASK_AND_WORK)
    given = ("--model", tiny_model, "--url", engine, "--dataset", "harbor:tasks", "--split", "all", "--samples", "2")
    limits = {"SANDBOX": "bwrap", "CODE_CPU_SECONDS": "20", "ENVIRONMENT_STEP_SECONDS": "300", "PROMPT_STYLE": "plain"}
    outcome = here(*given, "--agent-command", "python agent.py", **ARITHMETIC | limits | {"DATASET": "harbor:tasks"})
    results = Results.model_validate(outcome.results)
    samples = outcome.samples()
    assert len(samples) == 12
    by_prompt = Counter(sample["prompt_id"] for sample in samples if correct(sample))
    # The tests of all four tasks want a 7.
    assert sorted(by_prompt.values()) == [3]
    metrics = results.metrics
    assert (metrics["greedy pass@1"].value, metrics["pass@2"].value, metrics["avg@2"].value) == (0.25, 0.25, 0.25)
    assert metrics["pass@2"].low < 0.25 < metrics["pass@2"].high
    assert {sample["turns"] for sample in samples} == {1}
    limits |= {"ENVIRONMENT_MAX_STEPS": "2", "DATASET": "harbor:tasks"}
    tools = here(*given, "--limit", "2", output=tmp_path / "tools", **ARITHMETIC | limits)
    assert tools.results["metrics"]["pass@2"]["value"] == 0.0
    assert len(tools.samples()) == 6
