"""The main job, whole: real processes of jobgroup.yaml's five tasks, the real router, a tiny model."""

import gzip
import json
import math
import re
import shutil
import signal
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.browser import chromium
from tests.e2e.system import System
from tests.e2e.watching import Watch, watch
from tests.waiting import IDLE_SECONDS

# The limit is for a hang; a run takes about a minute, and the first test waits for one and what looks at it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 16
SETTINGS = {"MAX_STEPS": str(STEPS), "MIN_WORKERS": "2", "PROFILE_STEPS": "3:4"}
NODES = ["data-server-0", "rollout-server-0", "rollout-server-1", "reward-server-0", "replay-buffer-0"]
TRAINERS = ["ppo-trainer-0", "ppo-trainer-1"]


@pytest.fixture(scope="module")
def started(tiny_model, tmp_path_factory) -> Iterator[System]:
    """A run with two rollout and two trainer nodes."""
    system = System(tmp_path_factory.mktemp("volume"), tiny_model, **SETTINGS)
    yield system
    if system.process.poll() is None:  # what looked at it failed
        system.process.terminate()
        system.process.wait(IDLE_SECONDS)


@pytest.fixture(scope="module")
def watched(started) -> Watch | None:
    """What its page showed while it ran; None where there is no browser."""
    return watch(started) if chromium() else None


@pytest.fixture(scope="module")
def finished(started, watched) -> System:
    """The run, gone to its end."""
    assert started.wait() == 0, started.text
    return started


def test_the_run_page_moves_with_the_run(watched):
    if watched is None:
        pytest.skip("no Chromium here; install it or name it in CHROMIUM")
    assert watched.problems == []
    assert watched.later.step > watched.first.step
    assert watched.later.plot != watched.first.plot
    assert watched.later.picture != watched.first.picture
    services = {"data-server", "reward-server", "replay-buffer", "router", "ppo-trainer"}
    assert watched.healthy == services | {"rollout-server-0", "rollout-server-1"}
    assert "step 2," in watched.cursor
    assert "step 0: greedy pass@1" in watched.accuracy
    assert not watched.phone_is_wide


def test_the_profiled_steps_show_when_each_group_was_generated_and_scored(finished):
    directory = finished.run_dir / "profile" / "from-step-3"
    events = json.loads((directory / "timeline.json").read_bytes())["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["ph"] == "M"]
    groups = [track for track in tracks if track.startswith("group ")]
    samples = [json.loads(line) for line in (finished.run_dir / "samples.jsonl").read_text().splitlines()]
    prompts = {sample["group_id"] for sample in samples if sample["step"] in (3, 4)}
    assert {group.removeprefix("group ") for group in groups} >= prompts
    traces = [directory / "trace.json.gz", *directory.glob("engine-*/trace.json.gz")]
    assert len(traces) == 3
    assert all(b"aten::" in gzip.decompress(trace.read_bytes()) for trace in traces)


def test_a_run_says_what_it_did(finished):
    summary = finished.summary()
    assert summary["status"] == "succeeded"
    assert summary["steps"] == STEPS
    assert (summary["dataset"], summary["rows_left_out"]) == ("arithmetic", None)
    assert summary["rows"] > 0
    assert {"seconds", "reward_first", "reward_last", "accuracy_before", "accuracy_after", "model", "device"} <= set(
        summary
    )
    components = json.loads((finished.run_dir / "config.json").read_text())["components"]
    assert components.keys() == {"ppo-trainer", "data-server", "rollout-server", "reward-server", "replay-buffer"}
    assert "reward_fn" in components["reward-server"]["changed"]
    assert components["rollout-server"]["settings"]["run_id"] == finished.run_dir.name


def test_a_healthy_start_logs_no_warning(finished):
    first_step = datetime.fromtimestamp(finished.metrics()[0]["time"], UTC).isoformat()
    lines = [line for log in (finished.run_dir / "logs").iterdir() for line in log.read_text().splitlines()]
    assert [line for line in lines if re.match(r"\S+Z (warning|error) ", line) and line < first_step] == []


def test_accuracies_have_their_intervals_and_prompts(finished):
    summary, last = finished.summary(), finished.metrics()[-1]
    p, n = last["accuracy"], last["eval_prompts"] - last["eval_left_out"]
    assert last["accuracy_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / n))
    low, high = last["accuracy_low"], last["accuracy_high"]
    assert 0 <= low <= p <= high <= 1
    after = [summary[f"accuracy_after{part}"] for part in ("", "_low", "_high", "_prompts")]
    assert after == [p, low, high, n]
    for when in ("before", "after"):
        value, low, high, n = (summary[f"accuracy_{when}{part}"] for part in ("", "_low", "_high", "_prompts"))
        shown = f"{value:.3f} ({low:.3f} to {high:.3f})"
        assert re.search(rf"accuracy {when}, {n} held-out prompts +│ {re.escape(shown)} ", finished.text)


def test_given_again_it_starts_nothing_and_shows_its_result(finished, tiny_model):
    before = finished.log("ppo-trainer-0")
    again = System(finished.run_dir.parents[1], tiny_model, run_id=finished.run_dir.name, **SETTINGS)
    assert again.wait() == 0, again.text
    assert f"nothing is left to do: run {finished.run_dir.name} has ended after step {STEPS}" in again.text
    assert finished.log("ppo-trainer-0") == before
    assert finished.summary()["status"] == "succeeded"


def test_the_main_job_learns(finished):
    rewards = [record["reward_mean"] for record in finished.metrics() if "reward_mean" in record]
    assert statistics.fmean(rewards[-8:]) > statistics.fmean(rewards[:4])


def test_every_step_has_its_metrics(finished):
    records = finished.metrics()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert {"reward_mean", "loss", "entropy", "policy_version"} <= set(record)
        assert {"seconds_generate", "seconds_score", "seconds_train", "seconds_publish"} <= set(record)
        assert record["policy_version"] == record["step"]
        scored = record["completions"] - record["unscorable"]
        assert sum(count for _, count in record["reward_counts"]) == scored


def test_every_second_of_a_step_belongs_to_a_phase(finished):
    records = finished.metrics()
    for record in records:
        phases = {name for name in record if name.startswith("seconds_")} - {"seconds_step"}
        assert phases >= {f"seconds_{phase}" for phase in ("fetch", "store", "replay", "evaluate")} - (
            set() if "accuracy" in record else {"seconds_evaluate"}
        )
        assert sum(record[name] for name in phases) == pytest.approx(record["seconds_step"], rel=0.02)
    # Steps follow one another without a gap: their seconds are the time between their records.
    passed = records[-1]["time"] - records[0]["time"]
    assert sum(record["seconds_step"] for record in records[1:]) == pytest.approx(passed, rel=0.02, abs=0.1)


def test_in_synchronous_mode_every_token_is_of_the_newest_version(finished):
    assert {record["staleness_max"] for record in finished.metrics()} == {0}
    samples = [json.loads(line) for line in (finished.run_dir / "samples.jsonl").read_text().splitlines()]
    assert samples
    for sample in samples:
        versions = {span["version"] for span in sample["spans"] if "version" in span}
        assert versions == {sample["step"] - 1}


def test_every_component_was_up_and_has_a_log(finished):
    for node in NODES:
        assert f"{node} up" in finished.text
    for node in NODES + TRAINERS:
        assert finished.log(node)


def test_every_version_reaches_both_rollout_nodes(finished):
    assert {record["workers"] for record in finished.metrics()} == {2}
    for node in ("rollout-server-0", "rollout-server-1"):
        assert f"policy/v{STEPS:06d}" in finished.log(node)


def test_what_was_trained_loads_as_any_model(finished, tiny_model):
    directory = finished.run_dir / "model"
    model = AutoModelForCausalLM.from_pretrained(directory)
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.num_parameters() == start.num_parameters()
    assert any((a != b).any() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(directory).encode("3+4=") == [5, 12, 6, 15]


def test_every_step_is_computed_again_to_the_bit_on_two_ranks(finished):
    [line] = finished.verify()
    assert line.startswith("equal to the bit: "), line
    assert f"steps 1 to {STEPS} and the " in line


def test_the_reward_curve_is_a_picture(finished):
    assert (finished.run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_no_process_is_left(finished):
    assert finished.processes() == []


ONE_NODE_EACH = ("--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1")


@pytest.fixture(scope="module")
def interrupted(tiny_model, tmp_path_factory) -> System:
    """A run that was interrupted after its second step."""
    directory = tmp_path_factory.mktemp("interrupted")
    # All on 127.0.0.1, as on machines that have no other loopback addresses; another life may be elsewhere.
    run = System(directory, tiny_model, "--shared-host", *ONE_NODE_EACH, MAX_STEPS="200")
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    return run


def test_ctrl_c_ends_every_process_and_leaves_a_checkpoint_of_the_last_step(interrupted):
    assert interrupted.processes() == []
    checkpoints = [path.name for path in (interrupted.run_dir / "checkpoints").iterdir()]
    assert f"step-{interrupted.metrics()[-1]['step']:06d}" in checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "the weights of MODEL_NAME"),
        ({"ARITHMETIC_OPERATIONS": "-"}, "the data: 'arithmetic' then, 'arithmetic' now; training prompts"),
    ],
)
def test_a_run_does_not_go_on_with_another_model_of_the_same_shape_or_other_data(
    interrupted, tiny_model, tmp_path, settings, said
):
    completed = interrupted.metrics()[-1]["step"]
    model = tiny_model if settings else with_other_weights(tiny_model, tmp_path / "other")
    directory = interrupted.run_dir.parents[1]
    second = System(
        directory, model, *ONE_NODE_EACH, run_id=interrupted.run_dir.name, MAX_STEPS=str(completed + 2), **settings
    )
    assert second.wait() == 78, second.text
    assert f"which is of something else: {said}" in second.log("ppo-trainer-0")
    assert second.metrics()[-1]["step"] == completed


def with_other_weights(model, directory):
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    changed = {name: 1.01 * value for name, value in weights.items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.slow
def test_an_interrupted_run_goes_on_from_its_checkpoint(interrupted, tiny_model):
    completed = interrupted.metrics()[-1]["step"]
    directory = interrupted.run_dir.parents[1]
    steps = str(completed + 2)
    second = System(directory, tiny_model, *ONE_NODE_EACH, run_id=interrupted.run_dir.name, MAX_STEPS=steps)
    assert second.wait() == 0, second.text
    assert [record["step"] for record in second.metrics()] == list(range(1, completed + 3))
    assert "resumed" in second.log("ppo-trainer-0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [("MODEL_NAME", "no-such-model", "no-such-model"), ("DATASET", "no-such-file.jsonl", "no-such-file.jsonl")],
)
def test_what_cannot_be_had_stops_the_run_before_training(tiny_model, tmp_path, setting, value, said):
    settings = {setting: value}
    system = System(tmp_path, settings.pop("MODEL_NAME", tiny_model), "--num-nodes", "ppo-trainer=1", **settings)
    assert system.wait() == 78, system.text
    assert said in system.text
    assert system.metrics() == []
