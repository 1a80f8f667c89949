"""docs/results.md: its data, the runs that make it, the test of equivalence, and a run in one process."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import orjson
import pytest

from benchmarks.results import __main__ as page
from benchmarks.results import in_process, job_runs, plots, runs
from benchmarks.results.comparisons import (
    ACCURACY,
    REWARD,
    Comparison,
    Verdict,
    compare,
    comparison,
    paragraph,
    ranking,
    t_quantile,
)
from benchmarks.results.experiments import PARTS
from benchmarks.results.runs import Part, Result, Run, result_of, runs_of
from benchmarks.results.tasks import TINY, with_model
from services.engines.settings import EngineSettings
from trainer.config import TrainerSettings

pytestmark = pytest.mark.leaving

RUNS = [run for part in PARTS for run in part.runs]


def run_of(settings: dict[str, str], seed: int, variant: str, **own: str) -> Run:
    [run] = runs_of("tiny", TINY | settings, [seed], {variant: (own, in_process.train)})
    return run


def result(variant: str, seed: int, reward: float, accuracy: float | None = None) -> Result:
    return Result("tiny", variant, seed, {}, [reward] * 4, [10] * 4, [1.0] * 4, accuracy, 0.05, 8, 4)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of data and plots."""
    monkeypatch.setattr(runs, "KEPT", tmp_path)
    monkeypatch.setattr(plots, "KEPT", tmp_path)
    return tmp_path


def test_the_page_is_that_of_the_kept_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots, "KEPT", tmp_path)
    assert page.page() == page.PAGE.read_text(), "run `.venv/bin/python -m benchmarks.results --page-only`"
    text = page.PAGE.read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall("^#+ (.*)", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= headings
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in runs.KEPT.glob("*.svg")}


def test_a_section_has_the_figures_of_its_part_and_its_list_the_sentences_that_have_them(kept: Path) -> None:
    results = [result("GRPO", seed, 0.5, 0.5) for seed in range(3)]
    part = Part("part", [], {"steps": lambda results, task: f"{task} {len(results)}"})
    assert page.with_figures("There are {steps: runs:}", part, results) == "There are runs: 3"
    listed = "- a: {ranking: tiny | GRPO}\n- b: {steps: b}"
    assert page.with_figures(listed, part, results) == "- b: b 3", "GRPO alone has no ranking"


def test_every_part_has_a_section() -> None:
    sections = re.findall(r"(?m)^## .* \{(\w+)\}$", page.TEXT.read_text())
    assert sections == [part.name for part in PARTS]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_parts_runs_have_keys_of_their_own_and_its_first_seed_comes_first(part: Part) -> None:
    keys = [run.key for run in part.runs]
    assert len(set(keys)) == len(keys)
    for task in {run.task for run in part.runs}:
        seeds = [run.seed for run in part.runs if run.task == task]
        assert seeds == sorted(seeds), "an interruption would leave variants with different seeds"


def test_the_programs_take_the_settings_of_every_run() -> None:
    for settings in {orjson.dumps(run.settings): run.settings for run in RUNS}.values():
        given = {name.lower(): value for name, value in (settings | {"MODEL_NAME": "model"}).items()}
        TrainerSettings.load(**given)
        EngineSettings.load(**given)


def test_quantiles_of_students_t() -> None:
    table = {(0.95, 2): 2.9200, (0.95, 4): 2.1318, (0.975, 1): 12.706, (0.95, 200): 1.6525}
    for (probability, degrees), quantile in table.items():
        assert t_quantile(probability, degrees) == pytest.approx(quantile, abs=1e-3)
    assert t_quantile(0.5, 3) == pytest.approx(0, abs=1e-6)


def test_equivalence_is_shown_by_the_whole_interval_and_differences_are_taken_seed_by_seed() -> None:
    base = [result("base", seed, reward) for seed, reward in enumerate([0.1, 0.5, 0.9])]
    own = [result("own", seed, reward) for seed, reward in enumerate([0.11, 0.51, 0.92])]
    compared = compare(own, base, replace(REWARD, margin=0.05))
    assert compared is not None
    # The differences are 0.01, 0.01 and 0.02: mean 0.0133, standard error 0.00333.
    assert (compared.mean, compared.error) == pytest.approx((0.04 / 3, 0.01 / 3))
    low, high = compared.interval(0.9)
    assert (high - low) / 2 == pytest.approx(2.92 * 0.01 / 3, rel=1e-3)
    assert compared.verdict is Verdict.EQUAL, "the 95% interval is 4.30 standard errors wide on each side"
    assert compare(own[:2], base, REWARD) is None
    assert compare(own, base, ACCURACY) is None


@pytest.mark.parametrize(
    ("mean", "error", "verdict"),
    [
        # With four degrees of freedom, the 90% interval reaches 2.13 standard errors from the mean, the 95% one 2.78.
        (0.0, 0.004, Verdict.EQUAL),
        (0.01, 0.003, Verdict.SLIGHTLY_HIGHER),
        (-0.01, 0.003, Verdict.SLIGHTLY_LOWER),
        (0.01, 0.004, Verdict.EQUAL),
        (0.015, 0.004, Verdict.HIGHER),
        (-0.07, 0.02, Verdict.LOWER),
        (0.0, 0.02, Verdict.OPEN),
        (0.05, 0.02, Verdict.OPEN),
    ],
)
def test_the_place_of_the_intervals_is_the_verdict(mean: float, error: float, verdict: Verdict) -> None:
    assert Comparison(5, mean, error, 0.02).verdict is verdict


def test_runs_on_different_processors_are_no_pair() -> None:
    base = [replace(result("base", seed, 0.5), processor="one") for seed in range(4)]
    own = [replace(result("own", seed, 0.5), processor="one" if seed else "other") for seed in range(4)]
    compared = compare(own, base, REWARD)
    assert compared is not None
    assert compared.pairs == 3
    assert compare([replace(one, processor="other") for one in own], base, REWARD) is None


def test_tables_and_sentences_have_the_figures_of_the_data() -> None:
    base = [result("GRPO", seed, reward, 0.5) for seed, reward in enumerate([0.1, 0.5, 0.9])]
    better = [result("PPO", seed, reward + 0.1, 0.75) for seed, reward in enumerate([0.1, 0.5, 0.9])]
    same = [replace(one, variant="same") for one in base]
    everything = [*base, *better, *same]
    first, second, third = comparison(everything, "tiny", "GRPO").splitlines()[2:5]
    assert first == "| GRPO | 3 | 0.500 (0.100 to 0.900) |  |  | 0.50 (0.50 to 0.50) |  |  | 40 | 0 |"
    assert "+0.100 (+0.100 to +0.100) | higher" in second
    assert "+0.250 (+0.250 to +0.250) | higher" in second
    assert third.count("|  | identical |") == 2
    assert ranking(everything, "tiny", "GRPO") == "**identical** same; **higher** PPO (+0.100)."
    assert paragraph("  two\n lines ") == "two lines"


def test_variants_without_seeds_in_common_say_so() -> None:
    base = [result("GRPO", seed, 0.5, 0.5) for seed in range(3)]
    alone, unmeasured = [result("PPO", 0, 0.6, 0.6)], [result("GSPO", seed, 0.5) for seed in range(3)]
    rows = comparison([*base, *alone, *unmeasured], "tiny", "GRPO").splitlines()[2:5]
    first, second, third = (row.split(" | ") for row in rows)
    assert (first[4], first[7]) == ("", "")
    assert second[2:8] == ["0.600", "", "needs seeds", "0.60", "", "needs seeds"]
    assert third[4] == "identical"
    assert third[7] == ""
    part = Part("methods", [])
    sentence = " ".join(page.provenance(part, [*base, *alone]).split())
    assert "seeds: 0, 1, 2 (variants with fewer: 1, the least has 1);" in sentence
    assert "seeds: 0, 1, 2;" in page.provenance(part, base)


def test_a_command_goes_on_with_the_runs_that_are_missing(kept: Path) -> None:
    made: list[Run] = []

    def train(run: Run, *, stop_at: int | None = None) -> Result:
        if len(made) == stop_at:
            raise KeyboardInterrupt
        made.append(run)
        return replace(result(run.variant, run.seed, 0.5), settings=run.settings)

    planned = [
        Run("tiny", name, seed, {"SEED": str(seed)}, partial(train, stop_at=3)) for seed in (0, 1) for name in "ab"
    ]
    part = Part("part", planned)
    with pytest.raises(KeyboardInterrupt):
        part.make()
    assert [(r.variant, r.seed) for r in part.results()] == [("a", 0), ("b", 0), ("a", 1)]
    assert "3 runs of 4" in page.provenance(part, part.results())
    others = [replace(run, train=train) for run in planned]
    replace(part, runs=others).make(seeds=1)
    assert len(made) == 3
    # A line whose settings are no longer the run's is made again, unless they concern the machine alone.
    others[1] = replace(others[1], settings={"SEED": "0", "KEEP_MEMORY": "true"})
    others[0] = replace(others[0], settings={"SEED": "0", "GROUP_SIZE": "4"})
    replace(part, runs=others).make()
    assert [(run.variant, run.seed) for run in made[3:]] == [("a", 0), ("b", 1)]
    assert len((kept / "part.jsonl").read_bytes().splitlines()) == 5


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.1, 0.5], "identical"),
        ([0.49, 0.52], "equal"),
        # The kept values are 0.1, 0.5 and 0.9; two new ones lie within 4.3 x 0.4 x sqrt(1/3 + 1/2) of their mean.
        ([0.9, 0.9], "within the spread"),
        ([2.0, 2.2], "apart"),
    ],
)
def test_runs_made_again_agree_or_are_apart(rewards: list[float], verdict: str) -> None:
    kept = [result("GRPO", seed, reward) for seed, reward in enumerate([0.1, 0.5, 0.9])]
    made = [result("GRPO", seed, reward) for seed, reward in enumerate(rewards)]
    [row] = page.compared("methods", kept, made)
    assert row[:4] == ("methods", "tiny", "GRPO", "mean reward")
    assert row[-1] == verdict


def test_runs_made_again_lie_in_a_directory_of_their_own(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def train(run: Run) -> Result:
        return replace(result(run.variant, run.seed, 0.5), settings=run.settings)

    planned = [Run("tiny", "a", seed, {"SEED": str(seed)}, train) for seed in range(2)]
    part = Part("part", planned)
    part.make()
    written = (kept / "part.jsonl").read_bytes()
    other = tmp_path_factory.mktemp("again")
    part.make(seeds=1, directory=other)
    assert len(part.results(other)) == 1
    assert (kept / "part.jsonl").read_bytes() == written
    assert "1 of 1 rows agree" in page.report([part], other)


def test_plots_show_curves(kept: Path) -> None:
    curves = [result("base", 0, 0.5), result("own", 0, 0.6)]
    assert plots.curves(curves, "curves", "tiny", "Curves") == "![Curves](results/curves.svg)"
    first = (kept / "curves.svg").read_bytes()
    assert b"own" in first
    plots.curves(curves, "curves", "tiny", "Curves")
    assert (kept / "curves.svg").read_bytes() == first
    assert b"seconds of steps" not in first
    plots.curves([replace(one, processor="the processor") for one in curves], "timed", "tiny", "Timed", "timed")
    assert b"the processor" in (kept / "timed.svg").read_bytes()
    assert plots.curves(curves, "none", "another task", "None") == ""


def test_a_run_in_one_process_replays_evaluates_and_repeats_itself() -> None:
    settings = {"MAX_STEPS": "5", "EVAL_PROMPTS": "4", "EVAL_SAMPLES": "2"}
    plain = in_process.train(run_of(settings, 0, "plain"))
    replay = in_process.train(run_of(settings, 0, "replay", REPLAY_GROUPS="2"))
    again = in_process.train(run_of(settings, 0, "again"))
    assert again.rewards == plain.rewards
    assert plain.rewards[:2] == replay.rewards[:2], "the first step has nothing to replay"
    assert plain.rewards != replay.rewards
    assert 0 < plain.figures.pop(in_process.STEP_SECONDS) < plain.processor_seconds
    assert plain.figures == {"replayed": 0, "left_out": 0}
    assert replay.figures["replayed"] + replay.figures["left_out"] == 8
    assert all(0 < tokens <= 64 * 8 for tokens in plain.tokens)
    assert (plain.prompts, plain.samples) == (4, 2)
    assert plain.accuracy is not None
    assert plain.processor_seconds > 0


def test_a_job_group_has_the_rewards_of_a_run_in_one_process() -> None:
    settings = {"MAX_STEPS": "4", "EVAL_PROMPTS": "8", "EVAL_SAMPLES": "2"}
    alone = in_process.train(run_of(settings, 3, "alone"))
    job = job_runs.train(run_of(settings, 3, "job"))
    assert job.rewards == alone.rewards
    assert job.tokens == alone.tokens
    assert (job.accuracy, job.accuracy_error) == (alone.accuracy, alone.accuracy_error)
    assert job.processor_seconds > alone.processor_seconds


def test_a_job_groups_measurements_are_those_of_its_metrics() -> None:
    run = Run("tiny", "job", 0, {"EVAL_SAMPLES": "4"}, job_runs.train)
    step = {"reward_mean": 0.5, "completion_tokens": 20.0, "seconds_step": 2.0, "staleness_mean": 1.0}
    last = {"avg_at_4": 0.25, "avg_at_4_stderr": 0.1, "eval_prompts": 9.0, "eval_left_out": 1.0}
    measured = job_runs.measured(run, [step, step | last])
    assert (measured.rewards, measured.tokens, measured.seconds) == ([0.5, 0.5], [20, 20], [2.0, 2.0])
    assert (measured.accuracy, measured.accuracy_error, measured.prompts, measured.samples) == (0.25, 0.1, 8, 4)
    assert measured.figures == {"staleness": 1.0}
    assert result_of(run).settings == {"EVAL_SAMPLES": "4"}


def test_a_model_is_made_only_for_settings_without_one() -> None:
    with with_model({"MODEL_NAME": "given"}) as settings:
        assert settings == {"MODEL_NAME": "given"}
    with with_model({}) as settings:
        assert (Path(settings["MODEL_NAME"]) / "config.json").exists()
    assert not Path(settings["MODEL_NAME"]).exists()
