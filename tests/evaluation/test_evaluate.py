"""The command itself, with real servers and the embedded engine: results, resumption, dead servers, agents."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest

from evaluation.report import Results
from local_runner.processes import MARK
from scripts.evaluate import run_directory
from services.core.errors import ConfigurationError
from tests.evaluation.conftest import ARITHMETIC, ROOT
from tests.evaluation.tool_model import questions
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import IDLE_SECONDS, LIMIT_SECONDS, wait_until


def servers_of(output):
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


def correct(sample):
    return sample["result"]["reward"] == 1.0


def test_by_default_the_newest_run_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODEL_NAME", raising=False)
    with pytest.raises(ConfigurationError, match="there is no run below runs/"):
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


@pytest.mark.slow
def test_several_checkpoints_give_results_and_a_curve(evaluate, tiny_model, tmp_path):
    run = tmp_path / "run"
    for name in ("policy/v000000", "policy/v000003"):
        shutil.copytree(tiny_model, run / name)
    command = evaluate(run, "--samples", "4", **ARITHMETIC)
    content = command.succeed()

    everything = [Results.model_validate(one) for one in content["checkpoints"]]
    assert [(r.name, r.step, r.prompts) for r in everything] == [("v000000", 0, 20), ("v000003", 3, 20)]
    for results in everything:
        samples = command.samples(results.name)
        assert Counter(s["kind"] for s in samples) == {"greedy": 20, "sampled": 80}
        greedy = statistics.fmean(correct(s) for s in samples if s["kind"] == "greedy")
        by_prompt = defaultdict(list)
        for sample in samples:
            if sample["kind"] == "sampled":
                by_prompt[sample["prompt_id"]].append(correct(sample))
        metrics = results.metrics
        assert metrics["greedy pass@1"].value == pytest.approx(greedy)
        assert metrics["avg@4"].value == pytest.approx(statistics.fmean(map(statistics.fmean, by_prompt.values())))
        assert metrics["pass@4"].value == pytest.approx(statistics.fmean(map(any, by_prompt.values())))
        assert 0.2 < metrics["greedy pass@1"].value < 1  # the tiny model knows some answers, and not all
        assert all(m.low <= m.value <= m.high for m in metrics.values())
        assert list(results.categories) == ["1-digit +"]
        assert results.left_out == {}
        assert results.completion_tokens["greedy"]["max"] <= 4
        assert results.throughput["completion_tokens_per_second"] > 0
    # The same weights give the same greedy answers; the engine computes in float32.
    assert everything[0].metrics["greedy pass@1"] == everything[1].metrics["greedy pass@1"]

    curve = json.loads((command.output / "curve.json").read_text())
    assert [point["step"] for point in curve] == [0, 3]
    assert (command.output / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "greedy pass@1" in command.text
    assert servers_of(command.output) == []


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_from_its_samples(evaluate, tiny_model):
    arguments = ("--model", tiny_model, "--split", "all", "--samples", "24", "--concurrency", "2")
    first = evaluate(*arguments, **ARITHMETIC)
    first.wait_for_samples(300)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(IDLE_SECONDS)
    wait_until(lambda: not servers_of(first.output), "the end of the servers that a killed evaluation started")
    before = first.lines()
    assert 300 <= len(before) < 2500, "it was to be killed on its way"
    with (first.output / "samples.jsonl").open("ab") as file:
        file.write(b'{"prompt_id": "arithmetic/te')

    second = evaluate(*arguments, **ARITHMETIC)
    results = Results.model_validate(second.succeed())
    after = second.lines()
    assert after[: len(before)] == before
    keys = Counter((s["prompt_id"], s["kind"], s["index"]) for s in second.samples())
    assert len(keys) == 100 * 25
    assert set(keys.values()) == {1}
    assert results.throughput["samples_resumed"] == len(before)
    assert results.throughput["samples"] == 2500 - len(before)
    assert all(metric.prompts == 100 for metric in results.metrics.values())

    # Nothing is left to do, and the numbers stay.
    third = evaluate(*arguments, **ARITHMETIC)
    again = Results.model_validate(third.succeed())
    assert again.metrics == results.metrics
    assert third.lines() == after

    # Other settings must not be mixed in.
    fourth = evaluate(*arguments, "--temperature", "0.5", **ARITHMETIC)
    assert fourth.wait() == 78
    assert "temperature was 1.0 and is 0.5" in fourth.text


@pytest.mark.slow
def test_a_server_that_dies_costs_nothing_but_time(evaluate, tiny_model, tmp_path):
    pair = [Nodes(tmp_path / name, tiny_model, environment={"ENGINE_DTYPE": "float32"}) for name in ("one", "two")]
    for nodes in pair:
        nodes.directory.mkdir()
    try:
        for nodes in pair:
            nodes.start_all()
        urls = [option for nodes in pair for option in ("--url", nodes.router.url)]
        arguments = ("--model", tiny_model, "--split", "all", "--samples", "24", "--concurrency", "4")
        command = evaluate(*arguments, *urls, JOBGROUP_TOKEN=TOKEN, **ARITHMETIC)
        command.wait_for_samples(300)
        node = pair[0].nodes[0]
        for process in [*psutil.Process(node.process.pid).children(recursive=True), node.process]:
            process.kill()
        results = Results.model_validate(command.succeed())
    finally:
        for nodes in pair:
            nodes.stop()
    assert results.left_out == {}
    assert all(metric.prompts == 100 for metric in results.metrics.values())
    assert len(command.samples()) == 2500
    assert results.servers["deaths"] == 1
    used = Counter(sample["server"] for sample in command.samples())
    assert set(used) == {nodes.router.url for nodes in pair}


def test_each_source_is_asked_whole_and_counts_the_same(evaluate, tiny_model, engine, tmp_path):
    rows = [{"question": f"{a}+{a}=", "answer": str(2 * a), "level": a} for a in range(1, 5)]
    (tmp_path / "leveled.py").write_text("def never(response, level):\n    return 1.0 - (level > 0)\n")
    (tmp_path / "doubles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mix.yaml").write_text(
        "- {name: sums, dataset: arithmetic}\n"
        f"- {{name: doubles, dataset: {tmp_path}/doubles.jsonl, eval_only: true, "
        'reward_fn: "leveled:never", max_new_tokens: 2}\n'
        "- {name: game, dataset: seeds, rollout: environment, environment: guessing}\n"
    )
    mix = {**ARITHMETIC, "SOURCES": str(tmp_path / "mix.yaml"), "PYTHONPATH": str(tmp_path)}
    command = evaluate("--model", tiny_model, "--url", engine, **mix)
    results = Results.model_validate(command.succeed())
    assert results.prompts == results.available == 20 + 4
    assert {name: metrics["greedy pass@1"].prompts for name, metrics in results.sources.items()} == {
        "doubles": 4,
        "sums": 20,
    }
    # The one source's reward reads a column, which makes every answer wrong; the tiny model adds.
    values = {name: metrics["greedy pass@1"].value for name, metrics in results.sources.items()}
    assert values["doubles"] == 0.0 < values["sums"]
    assert results.metrics["greedy pass@1"].value == values["sums"] / 2
    assert {s["prompt_id"].split("/")[0]: s["completion_tokens"] <= 2 for s in command.samples()}["doubles"]
    assert "left out, because this command plays no environments: game" in command.text


@pytest.mark.slow
def test_an_endpoint_is_evaluated_as_a_rollout_node_is(evaluate, tiny_model, engine):
    arguments = ("--model", tiny_model, "--split", "all", "--samples", "4")
    node = evaluate(*arguments, "--url", engine, **ARITHMETIC)
    expected = Results.model_validate(node.succeed())
    completions = ("--endpoint", f"{engine}/v1", "--api", "completions", "--api-key-env", "THE_KEY")
    first = evaluate(*arguments, *completions, output=node.output.with_name("endpoint"), THE_KEY="k", **ARITHMETIC)
    first.wait_for_samples(50)
    first.process.kill()
    first.process.wait(IDLE_SECONDS)
    again = evaluate(*arguments, *completions, output=first.output, THE_KEY="k", **ARITHMETIC)
    results = Results.model_validate(again.succeed())
    assert results.throughput["samples_resumed"] >= 50
    assert results.metrics["greedy pass@1"] == expected.metrics["greedy pass@1"]
    assert set(results.metrics) == set(expected.metrics)
    assert results.completion_tokens["greedy"] == expected.completion_tokens["greedy"]
    assert results.left_out == {}
    assert results.not_given == ["token ids", "whether seeds are used"]
    assert "the servers do not give: token ids, whether seeds are used" in again.text


@pytest.mark.slow
def test_without_its_token_servers_refuse(evaluate, tiny_model, tmp_path):
    nodes = Nodes(tmp_path, tiny_model)
    try:
        nodes.start_all()
        command = evaluate("--model", tiny_model, "--url", nodes.router.url, "--limit", "2", **ARITHMETIC)
        assert command.wait() == 78
    finally:
        nodes.stop()
    assert "JOBGROUP_TOKEN" in command.text


@pytest.mark.slow
def test_the_math_agent_solves_by_its_tools_against_the_embedded_engine(evaluate, tool_model, tmp_path):
    rows = tmp_path / "questions.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions()[::4]))
    command = evaluate(
        *("--model", tool_model, "--dataset", rows, "--split", "all", "--workflow", "agent", "--samples", "2"),
        *("--temperature", "0.2", "--max-new-tokens", "24"),
        INSTRUCTION="none",
        ENGINE_DTYPE="float32",
    )
    results = Results.model_validate(command.succeed())
    assert results.prompts == 32
    assert results.metrics["greedy pass@1"].value == 1.0, command.samples()[:3]
    assert results.metrics["avg@2"].value > 0.9
    assert results.agent["turns"] == pytest.approx(2, abs=0.2)
    sample = next(s for s in command.samples() if s["kind"] == "greedy" and "*" in s["prompt"])
    roles = [message["role"] for message in sample["messages"]]
    assert roles[-4:] == ["user", "assistant", "tool", "assistant"]
    [call] = sample["messages"][-3]["tool_calls"]
    assert call["function"]["name"] == "multiply"
    assert sample["messages"][-2]["content"] == sample["ground_truth"] == sample["completion"]
    assert (sample["tool_calls"], sample["turns"]) == (1, 2)
    assert sample["completion_tokens"] >= 6


REFUSED = [
    (["--dataset", "no/such.jsonl"], 78, r"no/such.jsonl' is not a file"),
    (["--dataset", "nobody/has-this"], 78, "DATASET 'nobody/has-this' cannot be loaded"),
    (["--dataset", "arithmetic", "--split", "validation"], 78, "Input should be 'test', 'train' or 'all'"),
    (["--model", "./no-such-model"], 78, "--model './no-such-model' is not a directory"),
    (["--model", "nobody/has-this", "--dataset", "arithmetic"], 78, "tokenizer of MODEL_NAME 'nobody/has-this'"),
    (["--samples", "4", "--k", "2,8"], 78, "--k 8 needs as many samples"),
    (["--k", "two"], 78, "EVAL_K is 'two'; give each k from 1 on, with commas, such as 1,4,16"),
    (["--workflow", "agent", "--agent", "nothing:here"], 78, "AGENT is 'nothing:here'"),
    (["--env", "AGENT=nothing:here"], 78, "AGENT is 'nothing:here'"),
    (["--env", "AGENT=nothing:here", "--workflow", "agent"], 78, "AGENT is 'nothing:here'"),
    (["--workflow", "agent", "--agent", "json:loads"], 78, "is not an `async def`"),
    (["--env", "ENVIRONMENT=shop:Shop", "--dataset", "seeds"], 78, "services.rollout_server and play it by"),
    (["--env", "ROLLOUT=environment", "--env", "DATASET=seeds"], 78, "ROLLOUT is environment, and this command asks"),
    (["--env", "ENVIRONMENT=shop:Shop", "--dataset", "no/such.jsonl"], 78, "no/such.jsonl' is not a file"),
    (["--workflow", "single-turn", "--agent", "json:loads"], 78, "--workflow single-turn has no agent"),
    (["--agent", "json:loads", "--agent-command", "true"], 78, "AGENT and AGENT_COMMAND are both set"),
    (["--scheduler", "endpoints"], 78, "needs --url, --endpoint or --discover"),
    (["--endpoint", "http://127.0.0.1:1/v1", "--url", "http://127.0.0.1:1"], 78, "--endpoint and --url are both given"),
    (["--endpoint", "http://127.0.0.1:1/v1", "--workflow", "agent"], 78, "--endpoint serves texts, but an agent is"),
    (["--endpoint", "http://127.0.0.1:1/v1", "."], 78, "--endpoint and a run are both given"),
    (["--endpoint", "http://127.0.0.1:1/v1", "--api-key-env", "NO_KEY"], 78, "--api-key-env NO_KEY: this variable"),
    (["--api", "chat"], 78, "--api is for --endpoint"),
    (["--url", "http://127.0.0.1:1", "--api-key-env", "HOME"], 78, "--api-key-env is for --endpoint"),
    (["--url", "http://127.0.0.1:1", "--num-servers", "2"], 78, "are for servers that this command starts"),
    (["--scheduler", "skypilot", "--reward-url", "http://127.0.0.1:2"], 78, "starts its own reward-server"),
    (["--backend", "vllm"], 78, "there is no vllm in PATH"),
    (["--allocation", "d2t2d2"], 78, "--allocation 'd2t2d2' is not an allocation; give"),
    (["--allocation", "d2", "--num-servers", "2"], 78, "--allocation and --num-servers are both given"),
    (["--allocation", "d2p1t4"], 78, "--allocation d2p1t4 needs 8 GPUs, and this machine has 0"),
    (["--scheduler", "skypilot", "--allocation", "p4t4"], 78, "needs 16 GPUs of one node"),
    (["--scheduler", "local", "--url", "http://127.0.0.1:1"], 78, "starts its own servers"),
    (["--url", "nonsense:port"], 78, "is not an address"),
    (["--stop", "Q:", "--workflow", "agent"], 78, "an agent gives its own stop texts"),
    (["--stop", ""], 78, "EVAL_STOP_0"),
    (["--temperature", "-1"], 78, "TEMPERATURE is -1.0"),
    (["--url", "http://127.0.0.1:1", "--reward-url", "http://127.0.0.1:2"], 33, "http://127.0.0.1:1: ConnectError"),
]


@pytest.fixture(scope="module")
def refusals(tiny_model, tmp_path_factory):
    """The command's answers to REFUSED."""
    cases = []
    for arguments, _, _ in REFUSED:
        given = arguments if "--model" in arguments else ["--model", str(tiny_model), *arguments]
        variables = {"PROMPT_STYLE": "plain", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {} if "--dataset" in arguments else {"DATASET": "arithmetic"}
        output = tmp_path_factory.mktemp("refused")
        cases.append({"arguments": [*given, "--output", str(output)], "variables": variables})
    done = subprocess.run(
        [sys.executable, "-m", "tests.evaluation.refusals"],
        input=json.dumps(cases),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_SECONDS,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "number", range(len(REFUSED)), ids=lambda number: " ".join(REFUSED[number][0]).replace("/", "_")
)
def test_bad_input_is_named(refusals, number):
    _, code, said = REFUSED[number]
    told = refusals[number]
    assert told["unexpected"] is None
    assert told["code"] == code, told["text"]
    assert said in told["text"]


def test_an_endpoints_model_is_checked_before_servers_are_started(evaluate, engine):
    command = evaluate("--model", "another", "--endpoint", f"{engine}/v1", **ARITHMETIC)
    assert command.wait() == 78
    assert "has no model 'another'" in command.text
    assert "starting" not in command.text


def test_the_commands_own_reward_server_is_waited_for(evaluate, engine, tiny_model):
    command = evaluate("--model", tiny_model, "--url", engine, "--limit", "2", **ARITHMETIC)
    assert command.succeed()["prompts"] == 2
    assert "starting 1 reward-server" in command.text
    assert "warning" not in command.text


AGENT = """
async def solve(example, *, base_url, api_key, http_client):
    body = {"model": example.model, "messages": [{"role": "user", "content": example.prompt + "\\u2028."}]}
    reply = await http_client.post(f"{base_url}/chat/completions", json=body)
    return await example.score(reply.json()["choices"][0]["message"]["content"])
"""


def test_a_check_plays_one_episode_of_the_agent_that_is_set_and_keeps_nothing(evaluate, engine, tiny_model, tmp_path):
    (tmp_path / "agent_of_mine.py").write_text(AGENT)
    given = {"AGENT": "agent_of_mine:solve", "PYTHONPATH": str(tmp_path), **ARITHMETIC}
    command = evaluate("--model", tiny_model, "--url", engine, "--check", **given)
    assert command.wait() == 0, command.text
    assert "AGENT=agent_of_mine:solve is set and answers; --workflow single-turn leaves it out" in command.text
    assert re.search(r"\nuser: \d\+\d=\u2028\.\n\nassistant: .*\n\nturns 1, tokens \d, reward [01]\.0\n", command.text)
    assert not command.output.exists()


def test_the_command_ends_with_a_refusals_code_and_words(evaluate, tiny_model):
    command = evaluate("--model", tiny_model, "--dataset", "arithmetic", "--k", "two")
    assert command.wait() == 78
    assert command.text.startswith("error: EVAL_K is 'two'")
    assert "Traceback" not in command.text


@pytest.mark.slow
def test_ctrl_c_ends_everything_in_order(evaluate, tiny_model):
    command = evaluate("--model", tiny_model, "--split", "all", "--samples", "64", "--concurrency", "1", **ARITHMETIC)
    command.wait_for_samples(100)
    os.kill(command.process.pid, signal.SIGINT)
    assert command.wait() == 128 + signal.SIGINT
    assert "the same command continues" in command.text
    assert servers_of(command.output) == []
