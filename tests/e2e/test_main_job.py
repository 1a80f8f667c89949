"""A synchronous run, whole: real processes of all components, the real router, a tiny model, four kinds of sources.

It is looked at after its first step, its trainer is killed, and it goes on to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import sqlite3
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.core.endpoints import ROUTER_INNER_PORT, ROUTER_METRICS_PORT, STATUS_PORT
from services.core.errors import ConfigurationError
from services.core.files import saved_steps
from services.core.sources import Schedule
from services.run_page.directory import FIRST_FAILURE
from services.sandbox import probe
from services.sandbox.backends import BackendName, Interpreter
from tests.e2e.system import System, grpo, one_each
from tests.waiting import IDLE_SECONDS, wait_until
from trainer.reporting.group_records import GroupRecords

# The limit is for a hang; the first test waits for the whole run, which takes about a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RUN_ID = "main-job"
STEPS, BATCH, GROUP = 12, 8, 16
TRAINERS = ["ppo-trainer-0", "ppo-trainer-1"]
NODES = [
    *("data-server-0", "rollout-server-0", "rollout-server-1", "reward-server-0", "replay-buffer-0", "gateway-0"),
    "environment-server-0",
]
COMPONENTS = {"data-server", "reward-server", "replay-buffer", "router", "rollout-server-0", "rollout-server-1"}
"""Some of the components, by their names on the page."""
STATUS = f"ppo-trainer-0:{STATUS_PORT}"
"""Where the trainer's own pages are."""
INNER = (f":{ROUTER_INNER_PORT}", f":{ROUTER_METRICS_PORT}")
SECRETS = {
    "JOBGROUP_TOKEN": "recognisable-token-of-the-job-group",
    "HF_TOKEN": "hf_recognisableTokenOfTheHub",
    "WANDB_API_KEY": "recognisable" + 28 * "0",
}
PAGES = (
    *("/", "/health", "/stats", "/settings", "/metrics", "/docs", "/openapi.json"),
    *("/get_server_info", "/get_model_info", "/workers", "/v1/models"),
)

SOURCES = """
- name: sums
  ratio: 5
  dataset: arithmetic
  dataset_config: {template: "{a}{op}{b}="}
  rollout: completion
  # What the game teaches, too, so that few steps suffice.
  reward_fn: tests.e2e.rewards:odd_length
- name: game
  ratio: 1
  dataset: seeds
  rollout: environment
  environment: tests.e2e.agents:Moods
  group_size: 4
- name: moods
  ratio: 1
  dataset: arithmetic
  dataset_config: {template: "{a}{op}{b}="}
  rollout: agent
  agent: tests.e2e.agents:moody
  group_size: 4
"""
PROGRAMS = """
- name: programs
  ratio: 1
  dataset: {rows}
  ground_truth_format: plain
  dataset_held_out: 0.1
  rollout: agent
  agent: tests.e2e.agents:programmer
  reward_fn: code
  group_size: 4
"""
MOODY = "ValueError: not one digit"
"""Why an agent of the source `moods` fails now and then."""
RATIOS = {"sums": 5, "game": 1, "moods": 1, "programs": 1}


class Page(NamedTuple):
    """What an address answered."""

    node: str
    path: str
    has_token: bool
    status: int
    content: bytes


@dataclass
class Seen:
    """What was seen of the run while it ran."""

    commands: list[str]
    pages: list[Page]
    status: str
    """What `grpo status` said."""
    now: dict[str, Any]
    """What the run page was told."""
    later: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def has_boxes() -> bool:
    """Whether this machine can run code in a sandbox."""
    try:
        asyncio.run(probe.choose(BackendName.AUTO, Interpreter.find(sys.executable), writes=False))
    except ConfigurationError:
        return False
    return True


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, has_boxes: bool) -> dict[str, str]:
    """The run's settings, in files of their own where they are files."""
    directory = tmp_path_factory.mktemp("sources")
    rows, sources = directory / "rows.jsonl", directory / "sources.yaml"
    tests = [{"question": f"{a}+{b}=", "answer": expects(a + b)} for a in range(10) for b in range(10)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in tests))
    sources.write_text(SOURCES + (PROGRAMS.format(rows=rows) if has_boxes else ""))
    return {
        "SOURCES": str(sources),
        "DATASET_CONFIG": "",
        "MAX_STEPS": str(STEPS),
        "BATCH_SIZE": str(BATCH),
        "GROUP_SIZE": str(GROUP),
        "LEARNING_RATE": "2e-4",
        # So that the run is the same each time, and what it learns.
        "ENGINE_DETERMINISTIC": "true",
        "MIN_WORKERS": "2",
        "CHECKPOINT_EVERY": "2",
        "PUBLISH_TYPE": "float32",
        "RECORD_GROUPS": "all",
        # Groups of equal rewards, which teach nothing, are computed for their entropy, so that the ratios have them.
        "ENTROPY_COEF": "1e-12",
        "LOG_LEVEL": "debug",
        "WANDB_MODE": "offline",
    }


def expects(number: int) -> str:
    """The tests of a program that prints a number."""
    return json.dumps({"inputs": [""], "outputs": [str(number)]})


def start(volume: Path, model: Path, settings: dict[str, str]) -> System:
    return System(
        volume,
        model,
        *one_each("environment-server"),
        run_id=RUN_ID,
        job_group="jobgroups/environment.yaml",
        secrets=SECRETS,
        WANDB_DIR=str(volume),
        **settings,
    )


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, settings: dict[str, str]) -> Iterator[System]:
    """A run with two rollout and two trainer nodes."""
    system = start(tmp_path_factory.mktemp("volume"), tiny_model, settings)
    yield system
    if system.process.poll() is None:  # what looked at it failed
        system.process.terminate()
        system.process.wait(IDLE_SECONDS)


@pytest.fixture(scope="module")
def seen(started: System) -> Seen:
    """The run after its first step, and its page after another one.

    It is held meanwhile: the second trainer node, without which there is no step, stands still.
    """
    started.wait_for_step(1)
    with started.held(TRAINERS[1]):
        commands = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                commands.append(" ".join(process.cmdline()))
        wait_until(lambda: healthy(now(started)) >= COMPONENTS, "healthy components")
        # What the other node does without this one, such as the record of a step, may still be under way.
        status, shown = wait_until(lambda: stands_still(started), "a page that stands still")
        seen = Seen(commands, list(pages(started)), status, shown)
    seen.later = wait_until(lambda: (told := now(started))["step"] > seen.now["step"] and told, "a page that moves")
    return seen


def client(address: str, *, has_token: bool = True) -> httpx.Client:
    given = {"Authorization": f"Bearer {SECRETS['JOBGROUP_TOKEN']}"} if has_token else {}
    return httpx.Client(base_url=f"http://{address}", headers=given, timeout=IDLE_SECONDS, trust_env=False)


def now(system: System) -> dict[str, Any]:
    with client(system.nodes.endpoints[STATUS]) as http:
        return http.get("/api/now").raise_for_status().json()


def healthy(told: dict[str, Any]) -> set[str]:
    """Return the names of the components that the page calls healthy."""
    return {component["name"] for component in told["components"] if component["state"] == "healthy"}


def stands_still(system: System) -> tuple[str, dict[str, Any]] | None:
    """Return what `grpo status` says and what the page is told, once both are of the same step."""
    before, status, after = now(system), grpo("status", system.run_dir), now(system)
    is_whole = healthy(after) >= COMPONENTS  # A busy router may miss a question about its workers.
    return (status, after) if is_whole and before["step"] == after["step"] == after["policy_version"] else None


def pages(system: System) -> Iterator[Page]:
    for node, address in system.nodes.endpoints.items():
        if (node.startswith("ppo-trainer") and node != STATUS) or node.endswith(INNER):
            continue  # where ranks meet, in torch's own protocol, and what others than its node cannot reach
        for has_token in (False, True):
            with client(address, has_token=has_token) as http:
                for path in PAGES:
                    # A port may be a router's of a node that has none.
                    with contextlib.suppress(httpx.TransportError):
                        reply = http.get(path)
                        yield Page(node, path, has_token, reply.status_code, reply.content)


@pytest.fixture(scope="module")
def finished(started: System, seen: Seen) -> System:
    """The run at its end, one of whose trainer nodes was killed on the way."""
    # It is written beside the training, which may be some steps ahead of it.
    checkpoints = started.run_dir / "checkpoints"
    started.wait_until(lambda: max(saved_steps(checkpoints), default=0) >= seen.now["step"], "a checkpoint")
    started.kill(TRAINERS[0])
    assert started.wait() == 0, started.text
    return started


def found_in(text: str | bytes) -> list[str]:
    """Return the names of the secrets whose values are in ``text``."""
    content = text if isinstance(text, bytes) else text.encode()
    return [name for name, value in SECRETS.items() if value.encode() in content]


def of_source(finished: System, source: str) -> list[dict[str, Any]]:
    """Return the samples of a source in the order of the steps."""
    samples = [sample for sample in finished.samples() if sample["source"] == source]
    assert {sample["step"] for sample in samples} == set(range(1, STEPS + 1))
    return samples


# While it runs


def test_the_run_page_moves_and_shows_every_component_healthy(seen: Seen) -> None:
    assert (seen.now["total_steps"], seen.now["policy_version"]) == (STEPS, seen.now["step"])
    assert seen.later["step"] > seen.now["step"] >= 1
    assert healthy(seen.now) >= COMPONENTS


def test_the_status_has_the_step_and_every_node(seen: Seen) -> None:
    assert re.search(rf"steps +{seen.now['step']} ", seen.status), seen.status
    up = set(re.findall(r"(\S+) +up ", seen.status))
    assert up == {*NODES, TRAINERS[0]}, seen.status
    assert TRAINERS[1] in seen.status, "which has no page of its own"


def test_no_process_has_a_secret_in_its_arguments(seen: Seen) -> None:
    assert [command for command in seen.commands if found_in(command)] == []
    assert sum("-m services." in command or "-m trainer" in command for command in seen.commands) >= 9


def test_no_page_shows_a_secret(seen: Seen) -> None:
    assert sum(page.status == 200 for page in seen.pages) > 50
    assert [page[:3] for page in seen.pages if found_in(page.content)] == []


def test_only_the_health_and_a_page_without_data_are_for_those_without_the_token(seen: Seen) -> None:
    shown = {page.path for page in seen.pages if page.status == 200 and not page.has_token}
    assert shown == {"/", "/health"}, [page[:3] for page in seen.pages if page.status == 200 and not page.has_token]
    assert {page.node for page in seen.pages if page.path == "/" and page.status == 200} == {STATUS}
    answered = {page.node for page in seen.pages if page.has_token and page.path == "/stats" and page.status == 200}
    refused = {page.node for page in seen.pages if not page.has_token and page.path == "/stats" and page.status == 401}
    assert len(answered) >= len(NODES) + 1, "every service, and the trainer"
    assert answered <= refused


# Its end


def test_a_killed_trainer_node_has_its_task_start_again_and_go_on(finished: System, seen: Seen) -> None:
    assert re.findall(r"\S+ restarting, exit code \d+; restart \d+", finished.text) == [
        "ppo-trainer restarting, exit code 137; restart 1"
    ]
    for node in TRAINERS:
        assert "restart 1" in finished.log(node)
    [resumed] = re.findall(r"resumed .*?step=(\d+)", finished.log(TRAINERS[0]))
    assert seen.now["step"] <= int(resumed) < STEPS


def test_a_healthy_start_logs_no_warning(finished: System) -> None:
    first_step = datetime.fromtimestamp(finished.metrics()[0]["time"], UTC).isoformat()
    lines = [line for log in (finished.run_dir / "logs").iterdir() for line in log.read_text().splitlines()]
    told = [line for line in lines if re.match(r"\S+Z (warning|error) ", line) and line < first_step]
    assert [line for line in told if MOODY not in line] == []


def test_what_was_trained_loads_as_any_model(finished: System, tiny_model: Path) -> None:
    directory = finished.run_dir / "model"
    model, first = map(AutoModelForCausalLM.from_pretrained, (directory, tiny_model))
    assert model.num_parameters() == first.num_parameters()
    assert any((a != b).any() for a, b in zip(model.parameters(), first.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(directory).encode("3+4=") == [5, 12, 6, 15]


def test_no_process_is_left(finished: System) -> None:
    assert finished.processes() == []


def test_no_file_and_no_output_has_a_secret(finished: System) -> None:
    volume = finished.run_dir.parents[1]
    files = [path for path in volume.rglob("*") if path.is_file()]
    assert finished.output in files
    assert any(path.suffix == ".wandb" for path in files)
    assert [str(path) for path in files if found_in(path.read_bytes())] == []


# Its steps


def test_it_learns(finished: System) -> None:
    rewards = [record["reward_mean/sums"] for record in finished.metrics()]
    assert statistics.fmean(rewards[-4:]) > statistics.fmean(rewards[:3]), rewards


def test_every_step_has_its_metrics_once(finished: System) -> None:
    records = finished.metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert {"reward_mean", "loss", "entropy", "policy_version"} <= set(record)
        assert {"seconds_generate", "seconds_score", "seconds_train", "seconds_publish"} <= set(record)
        assert record["policy_version"] == record["step"]
        assert record["grad_norm"] > 0
        scored = record["completions"] - record["unscorable"]
        assert sum(count for _, count in record["reward_counts"]) == scored


def test_every_second_of_a_step_belongs_to_a_phase(finished: System) -> None:
    for record in finished.metrics():
        phases = {name for name in record if name.startswith("seconds_")} - {"seconds_step"}
        assert phases >= {f"seconds_{phase}" for phase in ("fetch", "store", "replay")}
        assert "seconds_evaluate" in phases or "accuracy" not in record
        assert sum(record[name] for name in phases) == pytest.approx(record["seconds_step"], rel=0.02)


def test_steps_follow_one_another_without_a_gap(finished: System) -> None:
    [resumed] = re.findall(r"resumed .*?step=(\d+)", finished.log(TRAINERS[0]))
    # Those of the trainer's second life: their seconds are the time between their records.
    first, *others = [record for record in finished.metrics() if record["step"] > int(resumed)]
    passed = others[-1]["time"] - first["time"]
    assert sum(record["seconds_step"] for record in others) == pytest.approx(passed, rel=0.05, abs=0.3)


def test_every_token_is_of_the_newest_version(finished: System) -> None:
    assert {record["staleness_max"] for record in finished.metrics()} == {0}
    samples = finished.samples()
    assert samples
    for sample in samples:
        versions = {span["version"] for span in sample["spans"] if "version" in span}
        assert versions == {sample["step"] - 1}


def test_the_trainer_agrees_with_the_engines_on_every_token(finished: System) -> None:
    for record in finished.metrics():
        assert abs(math.log(record["ratio_max"])) < 1e-4
        assert abs(math.log(record["ratio_min"])) < 1e-4


def test_every_version_reaches_both_rollout_nodes(finished: System) -> None:
    assert {record["workers"] for record in finished.metrics()} == {2}
    for node in ("rollout-server-0", "rollout-server-1"):
        assert f"policy/v{STEPS:06d}" in finished.log(node)


def test_every_step_is_computed_again_to_the_bit_on_two_ranks(finished: System) -> None:
    """Also those beside the kill: the model is that of an undisturbed training on the recorded groups."""
    assert finished.verify() == list(range(1, STEPS + 1))


# Its sources


def test_every_step_has_its_groups_of_each_source_in_order(finished: System, has_boxes: bool) -> None:
    records = GroupRecords(finished.run_dir)
    fresh = [[one.group.prompt for one in records.groups(step) if not one.is_replayed] for step in records.steps]
    assert len(fresh) == STEPS
    ratios = RATIOS if has_boxes else {name: ratio for name, ratio in RATIOS.items() if name != "programs"}
    schedule = Schedule(ratios)
    for number, prompts in enumerate(fresh):
        expected = schedule.counts(BATCH * number, BATCH * (number + 1))
        assert Counter(prompt.source for prompt in prompts) == Counter(expected), f"step {number + 1}"
    for source in ratios:
        places = [(one.epoch, one.position) for prompts in fresh for one in prompts if one.source == source]
        assert places == sorted(set(places)), f"a prompt of {source} was taken twice, or out of order"
    assert finished.summary()["sources"].keys() == ratios.keys()


def test_an_agent_is_trained_on_what_the_model_said_and_on_nothing_else(finished: System) -> None:
    samples = of_source(finished, "moods")
    assert any(sample["trained_tokens"] < sample["tokens"] for sample in samples)
    for sample in samples:
        *_, last = sample["messages"]
        assert (last["sampled"], last.get("content", "")) == (True, sample["completion"])
        sampled = [span for span in sample["spans"] if "tokens" in span]
        assert sum(len(span["tokens"]) for span in sampled) == sample["trained_tokens"]
        assert all((span["advantages"] is None) == (sample["reward"] is None) for span in sampled)


def test_an_agent_that_fails_is_on_record_with_its_reason(finished: System) -> None:
    assert f"an answer failed: exception: {MOODY}" in finished.text
    failed = [sample for sample in of_source(finished, "moods") if sample["reward"] is None]
    assert all(MOODY in sample["result"]["reason"] for sample in failed)
    [resumed] = re.findall(r"resumed .*?step=(\d+)", finished.log(TRAINERS[0]))
    if any(sample["step"] > int(resumed) for sample in failed):  # a resumed run has dropped what failed before
        assert MOODY in (finished.run_dir / FIRST_FAILURE).read_text()
    for record in finished.metrics():
        failures = sum(value for name, value in record.items() if name.startswith("episodes_failed_"))
        assert record["episodes_failed"] == failures >= record["unscorable"]


def test_every_token_that_the_engines_sampled_for_an_episode_is_in_a_trace_or_counted_as_lost(finished: System) -> None:
    records = finished.metrics()
    for record in records:
        lost = sum(value for name, value in record.items() if name.startswith("episode_tokens_lost_"))
        kept = record["episode_tokens_traces"] + record["episode_tokens_open"]
        assert record["episode_tokens_engines"] == kept + lost > 0
    with sqlite3.connect(finished.run_dir / "gateway" / "gateway.sqlite") as db:
        account = dict(db.execute("SELECT name, tokens FROM account"))
    last = records[-1]
    assert last["episode_tokens_open"] == 0
    recorded = account.pop("recorded")
    assert last["episode_tokens_engines"] == recorded == sum(account.values()), account


def test_the_rewards_of_an_environment_are_those_of_its_turns(finished: System) -> None:
    for sample in of_source(finished, "game"):
        assert len(sample["turn_rewards"]) == 3
        assert sum(sample["turn_rewards"]) == pytest.approx(sample["reward"])
        said = [len(m.get("content", "")) % 2 for m in sample["messages"] if m["role"] == "assistant"]
        assert sample["turn_rewards"] == pytest.approx([0.5 * parity for parity in said])


def test_the_rewards_of_programs_are_those_of_their_output(finished: System, has_boxes: bool) -> None:
    if not has_boxes:
        pytest.skip("no sandbox here for code, such as bubblewrap")
    rewards = Counter()
    for sample in of_source(finished, "programs"):
        expected = json.loads(sample["ground_truth"])["outputs"][0]
        assert sample["reward"] == (printed_by(sample["completion"]) == expected), sample["completion"]
        rewards[sample["reward"]] += 1
    assert set(rewards) == {0.0, 1.0}


def printed_by(said: str) -> str | None:
    """Return what a program prints that prints the value of ``said``, which has digits, signs and spaces alone."""
    try:
        return str(eval(said))
    except SyntaxError:
        return None
