"""The page at first: a wait, a failure, a run that cannot learn; the plots and groups that matter."""

import json
import re
import socket
import time

import pytest
from playwright.sync_api import expect

from local_runner.progress import GrowingFile, advice, new_steps
from tests.browser import DESKTOP, chromium, is_wider_than_window
from tests.services.run_page.runs import append, group, metrics, write_run
from tests.services.run_page.serving import view
from tests.services.run_page.test_page import NOW, live, move_cursor

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")

NEVER_ANSWERED = NOW["components"][1] | {"seconds_since_answer": None}
WAITING = NOW | {
    "phase": "publish",
    "step": 0,
    "accuracy_before": None,
    "components": [NOW["components"][0], NEVER_ANSWERED],
    "activity": {
        "what": "waiting for 2 rollout workers",
        "done": "1 there",
        "since": 1_700_000_000.0,
        "until": 1_700_001_000.0,
    },
}
DASH = "\N{EN DASH}"
"""Stands on the page for what is not known."""
ERROR = "DATASET is 'q.csv', which is not on the hub"


def started(directory):
    """The directory of a run without a step."""
    path = directory / "started"
    path.mkdir()
    return path


def failed(path):
    """A run that a component's error ended before its first step."""
    (path / "logs").mkdir(parents=True)
    nodes = {"pid": 1, "started": 0.0, "endpoints": {}, "machine": socket.gethostname()}
    (path / "nodes.json").write_text(json.dumps(nodes))
    outcome = {"exit_code": 78, "reason": "data-server cannot run", "failed": "data-server-0"}
    (path / "runner.json").write_text(json.dumps(outcome))
    (path / "logs/data-server-0.log").write_text(f"=== 2026-01-31 12:00:00 start ===\nerror: {ERROR}\n")
    return path


def rewrite(run, records):
    """Replaces the metrics of a run."""
    (run / "metrics.jsonl").unlink()
    append(run / "metrics.jsonl", records)
    return run


def test_before_the_first_step_the_page_says_what_the_run_waits_for(open_page, tmp_path):
    now = WAITING | {"activity": WAITING["activity"] | {"since": time.time() - 65}}
    page = open_page(live(started(tmp_path), now))
    said = page.locator(".waiting")
    expect(said).to_contain_text(
        re.compile(r"Waiting for 2 rollout workers: 1 there, for 1m\d\ds, until \d\d:\d\d:\d\d")
    )
    expect(said).to_contain_text("1 of 2 components healthy")
    expect(page.locator(".tiles")).to_have_count(0)
    assert not re.search(f"[{DASH}-](/s|%)", page.locator("main").inner_text())
    expect(page.locator("#state"), "a component that never answered is starting").to_have_text("publish")
    page.get_by_role("link", name="Components").click()
    expect(page.locator("[data-name=rollout-server-1] .pill")).to_have_text("starting")


def test_a_component_that_never_answered_is_silent_once_there_are_steps(open_page, tmp_path):
    run = write_run(tmp_path / "run", 3, ended=False)
    page = open_page(live(run, NOW | {"components": [NEVER_ANSWERED]}))
    expect(page.locator("#state")).to_have_text("rollout-server-1 unwell")


def test_a_failed_run_says_why_in_one_banner(open_page, tmp_path):
    page = open_page(view(failed(tmp_path / "failed")))
    expect(page.locator("#error")).to_have_text(f"data-server cannot run: {ERROR}")
    expect(page.locator("#summary")).to_have_text("The run ended before its first step.")
    assert DASH not in page.locator("main").inner_text()
    expect(page.get_by_label("Smoothing")).to_be_hidden()


def test_a_cluster_run_that_failed_says_why(open_page, tmp_path):
    run = write_run(tmp_path / "run", 3, ended=False)
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": "reward-server: no answer", "steps": 3}))
    page = open_page(view(run))
    expect(page.locator("#error")).to_have_text("reward-server: no answer")
    expect(page.locator("#plot-reward")).to_be_visible()


def test_a_failed_run_is_marked_among_others(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "good", 3), failed(tmp_path / "bad")))
    row = page.locator(".runs tbody tr").filter(has=page.get_by_label("show bad"))
    expect(row.locator("td.failed")).to_have_text("failed")
    expect(row.locator(".note")).to_contain_text(ERROR)
    expect(page.locator("td.failed")).to_have_count(1)


def in_vain(**fields):
    return [metrics(step) | {"trained_tokens": 0.0, **fields} for step in range(1, 5)]


@pytest.mark.parametrize(
    "fields",
    [
        {"reward_counts": [[0.0, 32]]},
        {"reward_counts": [[0.0, 8], [1.0, 24]]},
        {"reward_counts": [], "unscorable": 2.0, "failures": [["reward_error", 2, "x"]]},
        {"reward_counts": [[0.0, 30]], "unscorable": 2.0, "failures": [["reward_error", 2, "x"]]},
    ],
)
def test_the_page_says_that_nothing_was_learned_in_the_words_of_the_terminal(open_page, tmp_path, fields):
    run = rewrite(write_run(tmp_path / "run", 4, ended=False), in_vain(**fields))
    told = advice(new_steps(GrowingFile(run / "metrics.jsonl")))
    page = open_page(view(run))
    said = page.locator(".advice")
    expect(said).to_contain_text("The model has learned nothing in 4 steps")
    assert told.startswith(said.inner_text())
    append(run / "metrics.jsonl", [metrics(5) | {"trained_tokens": 9.0}])
    expect(said).to_have_count(0)


def test_the_most_important_plots_come_first_and_constant_ones_are_folded(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    page = open_page(view(run))
    expect(page.locator("#plot-reward canvas.top")).to_be_visible()
    ids = page.locator("#plots figure:visible").evaluate_all("figures => figures.map((figure) => figure.id)")
    first = ["reward", "histogram", "accuracy", "lengths", "entropy", "kl", "seconds"]
    assert ids[:7] == [f"plot-{name}" for name in first]
    expect(page.locator("#plots h2:visible")).to_have_text(["Answers and rewards", "Updates"])
    folded = page.locator("#constant > summary")
    expect(folded).to_contain_text("Learning rate 1e-6")
    expect(folded).to_contain_text("Staleness 0")
    expect(page.locator("#plot-learning-rate")).to_be_hidden()
    folded.click()
    move_cursor(page, "learning-rate", "End")
    expect(page.locator("#plot-learning-rate .spoken")).to_have_text("step 40: learning rate 1e-6.")
    append(run / "metrics.jsonl", [metrics(41) | {"learning_rate": 2e-6}])
    page.reload()
    expect(page.locator("#plot-learning-rate")).to_be_visible()


def test_a_plot_that_starts_to_change_joins_the_others_and_the_focus_stays(open_page, tmp_path):
    run = write_run(tmp_path / "run", 3, ended=False)
    page = open_page(live(run, NOW))
    move_cursor(page, "loss", "Home")
    expect(page.locator("#plot-gradient")).to_be_hidden()
    append(run / "metrics.jsonl", [metrics(4) | {"grad_norm": 2.5, "clip_fraction_high": 0.5}])
    expect(page.locator("#plot-gradient")).to_be_visible()
    expect(page.locator("#plot-loss canvas.top")).to_be_focused()
    expect(page.locator("#cursor")).to_contain_text("step 1,")


def test_every_plot_says_what_it_shows_and_what_is_good(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 40)))
    expect(page.locator("#plot-kl .note")).to_contain_text("behaviour policy, which sampled the completions")
    specs = page.evaluate("""async () => {
        const { PLOTS } = await import("/static/specs.js");
        return PLOTS.map(({ id, note }) => [id, note]);
    }""")
    assert len(specs) > 25
    assert [name for name, note in specs if not (note or "").endswith(".")] == []


def edges(page):
    """The ends of the reward's band at step 1, as the page says them."""
    move_cursor(page, "reward", "Home")
    told = page.locator("#plot-reward .spoken")
    expect(told).to_contain_text("step 1: reward")
    low, high = re.search(r"\((\S+) to (\S+)\)", told.inner_text()).groups()
    return float(low), float(high)


def test_the_rewards_band_is_of_quantiles_and_that_of_older_runs_ends_at_their_rewards(open_page, tmp_path):
    with_quantiles = [metrics(step) | {"reward_q10": 0.125, "reward_q90": 0.75} for step in range(1, 5)]
    page = open_page(view(rewrite(write_run(tmp_path / "new", 4), with_quantiles)))
    assert edges(page) == (0.125, 0.75)
    expect(page.locator("#plot-reward figcaption")).to_contain_text("from the 10% to the 90% quantile")
    wide = [metrics(step) | {"reward_std": 5.0, "reward_counts": [[-0.5, 3], [0.9, 1]]} for step in range(1, 5)]
    page = open_page(view(rewrite(write_run(tmp_path / "old", 4), wide)))
    assert edges(page) == (-0.5, 0.9)
    expect(page.locator("#plot-reward figcaption")).to_contain_text("within the rewards that occurred")
    page.get_by_text("Further metrics").click()
    assert page.locator("[id^='plot-metric-reward_']").count() == 0


def test_the_reward_of_the_evaluation_before_training_is_step_0(open_page, tmp_path):
    run = rewrite(write_run(tmp_path / "run", 4), [metrics(step) | {"eval_reward": 0.5 + step / 10} for step in (1, 2)])
    told = json.loads((run / "summary.json").read_text()) | {"eval_reward_before": 0.25}
    (run / "summary.json").write_text(json.dumps(told))
    page = open_page(view(run))
    move_cursor(page, "evaluation", "Home")
    expect(page.locator("#plot-evaluation .spoken")).to_have_text("step 0: greedy 0.25.")


def painted(page, code):
    """What ``code`` returns, with the page's modules."""
    return page.evaluate(f"""async () => {{
        const {{ Plane, paintAxes, paintLine }} = await import("/static/paint.js");
        const {{ ticks }} = await import("/static/series.js");
        const {{ duration }} = await import("/static/format.js");
        const {{ Histogram }} = await import("/static/histogram.js");
        const canvas = Object.assign(document.createElement("canvas"), {{ width: 362, height: 200 }});
        const context = canvas.getContext("2d");
        {code}
    }}""")


@pytest.fixture
def page(open_page, tmp_path):
    return open_page(view(write_run(tmp_path / "run", 4)))


def test_the_name_of_an_axis_does_not_touch_its_first_label(page):
    texts = painted(
        page,
        """
        const texts = [];
        context.fillText = (text, x) => texts.push([text, x, context.measureText(text).width, context.textAlign]);
        paintAxes(context, new Plane(362, 200, [0, 80], [0, 1]), { name: "time", label: duration });
        return texts;
    """,
    )
    found = {text: (x, width) for text, x, width, align in texts if text in ("time", "0.0s")}
    assert found["time"][0] + 4 < found["0.0s"][0] - found["0.0s"][1] / 2
    assert found["time"][0] >= found["time"][1]


@pytest.mark.parametrize(("low", "high"), [(-1.06, 0.43), (0.0, 0.375), (-0.55, 0.4), (0.02, 1.06)])
def test_an_axis_has_labels_near_both_of_its_ends(page, low, high):
    values = painted(page, f"return ticks({low}, {high}, 5, false, true);")
    assert values[0] - low <= (high - low) / 4
    assert high - values[-1] <= (high - low) / 4
    assert 4 <= len(values) <= 12


def test_a_line_of_a_single_value_is_a_dot_that_one_sees(page):
    coloured = painted(
        page,
        """
        const series = { xs: [5], color: "rgb(255, 0, 0)", dash: [] };
        paintLine(context, new Plane(362, 200, [0, 10], [0, 1]), series, [0.5]);
        const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
        return [...Array(canvas.width * canvas.height).keys()].filter((i) => data[4 * i + 3] > 128).length;
    """,
    )
    assert coloured > 50


def test_a_single_reward_has_an_axis_from_0_to_1(page):
    labels = painted(
        page,
        """
        const texts = [];
        context.fillText = (text, x, y) => y > 180 && texts.push(text);
        const histogram = new Histogram(() => {});
        histogram.update([{ name: "run", color: "rgb(255, 0, 0)", rewardCounts: new Map([[1, [[0, 32]]]]) }], null);
        histogram.paint(context, 362, 200);
        return texts;
    """,
    )
    assert labels[0] == "reward"
    assert {"0", "1.0"} <= set(labels)
    assert not [label for label in labels if label.startswith("-")]


def test_several_runs_have_one_line_each_of_throughput(open_page, tmp_path):
    runs = [write_run(tmp_path / name, 4) for name in ("one", "two")]
    runs = [rewrite(run, [metrics(s) | {"completion_tokens": 100.0 * s} for s in range(1, 5)]) for run in runs]
    page = open_page(view(*runs))
    expect(page.locator("#plot-throughput .legend")).to_have_text("generated, over the whole step")


def test_groups_that_teach_something_come_first_and_all_are_one_press_away(open_page, tmp_path):
    run = write_run(tmp_path / "run", 2)
    spans = [{"version": 2, "tokens": ["99"], "logprobs": [-0.1], "advantages": 0.0}]
    append(run / "samples.jsonl", group(3, 8, rewards=[1.0, 1.0], spans=spans) + group(3, 9, rewards=[0.0, 0.5, 1.0]))
    page = open_page(view(run), "/#samples")
    cards = page.locator("article.group")
    expect(cards).to_have_count(3)
    expect(cards.nth(0).locator(".reward span")).to_have_text(
        ["▼ below the group's mean", "equal to the group's mean: not trained on", "▲ above the group's mean"]
    )
    expect(page.locator("#only-mixed")).to_contain_text("Only groups whose rewards differ")
    page.get_by_role("button", name="Show all groups").click()
    expect(cards).to_have_count(6)
    expect(page.locator("#only-mixed")).to_be_hidden()
    equal = page.locator("article.group").filter(has_text="run-0-8")
    expect(equal.locator(".reward span").first).to_have_text("equal to the group's mean: not trained on")
    equal.get_by_role("button", name="Its tokens").first.click()
    page.locator("#reader .tokens").press("End")
    expect(page.locator("#reader .explanation")).to_contain_text("advantage 0: all rewards of the group are equal,")
    page.get_by_role("button", name="Close").click()
    page.get_by_label("From").select_option("evaluation")
    expect(page.locator("article.group[aria-label^=evaluation]")).to_have_count(2)


def test_where_equal_rewards_are_trained_on_all_groups_are_shown(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 2, advantage="gae")), "/#samples")
    expect(page.locator("article.group")).to_have_count(4)
    expect(page.locator("main")).not_to_contain_text("not trained on")


def test_a_completion_without_further_facts_has_no_dot_behind_its_reward(open_page, tmp_path):
    run = write_run(tmp_path / "run", 2)
    spans = [{"version": 2, "tokens": ["99"], "logprobs": [-0.1], "advantages": 1.0}]
    bare = {"spans": spans, "result": {"status": "scored"}}
    append(run / "samples.jsonl", group(3, 9, rewards=[0.0, 1.0], **bare))
    page = open_page(view(run), "/#samples")
    page.get_by_role("button", name="Its tokens").first.click()
    expect(page.locator("#reader p").first).to_have_text("reward 0")


CUT_PLACEHOLDERS = """() => [...document.querySelectorAll("input[placeholder]")].filter((input) => {
    const style = getComputedStyle(input);
    const context = document.createElement("canvas").getContext("2d");
    context.font = style.font;
    // A number has buttons at its end.
    const room = input.clientWidth - 2 * parseFloat(style.paddingLeft) - (input.type === "number" ? 16 : 0);
    return input.offsetParent && context.measureText(input.placeholder).width > room;
}).map((input) => input.placeholder)"""


def test_no_placeholder_is_cut(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 2)), "/#samples")
    expect(page.locator("article.group")).to_have_count(2)
    assert page.evaluate(CUT_PLACEHOLDERS) == []


def edge(page, element, *, scrolled):
    """The pixels at the right edge of a row, unscrolled or scrolled to its end, as a picture."""
    element.evaluate("(e, scrolled) => (e.scrollLeft = scrolled ? e.scrollWidth : 0)", scrolled)
    box = element.bounding_box()
    clip = {"x": box["x"] + box["width"] - 6, "y": box["y"] + box["height"] - 12, "width": 4, "height": 6}
    return page.screenshot(clip=clip, animations="disabled")


def test_a_row_that_scrolls_sideways_has_a_shadow_where_it_goes_on(open_page, tmp_path):
    run = write_run(tmp_path / "run", 2)
    append(run / "samples.jsonl", group(3, 9, rewards=[0.0, 1.0] * 6))
    page = open_page(view(run), "/#samples", viewport=DESKTOP | {"height": 1400})
    long, short = page.locator(".completions").nth(0), page.locator(".completions").nth(1)
    expect(short).to_be_visible()
    page.locator(".completion").evaluate_all("cards => cards.forEach((card) => (card.style.visibility = 'hidden'))")
    assert edge(page, long, scrolled=False) != edge(page, long, scrolled=True)
    assert edge(page, short, scrolled=False) == edge(page, short, scrolled=True)


def test_settings_begin_with_what_is_not_the_default(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 2, reward_fn="exact_match")), "/#settings")
    expect(page.get_by_label("only what is not the default")).to_be_checked()
    heads = page.locator("#settings th[scope=rowgroup]")
    expect(heads.first).to_have_text("Settings of reward-server")
    expect(page.locator("#settings")).not_to_contain_text("LEARNING_RATE")
    expect(page.locator("#settings")).to_contain_text("reward first")
    page.get_by_label("only what is not the default").uncheck()
    expect(page.locator("#settings")).to_contain_text("LEARNING_RATE")


LINES = """(cells) => cells.map((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map(({ top }) => top)).size;
})"""


def test_settings_are_not_broken_in_mid_word(open_page, tmp_path):
    types = ["bfloat16", "float32"]
    runs = [write_run(tmp_path / f"{n}", 2, compute_type=types[n % 2]) for n in range(24)]
    page = open_page(view(*runs), "/#settings")
    cells = page.locator("#settings td").filter(has_text=re.compile("bfloat16|succeeded"))
    expect(cells).to_have_count(12 + 24)
    assert cells.evaluate_all(LINES) == [1] * 36
    assert not is_wider_than_window(page)


def test_one_of_a_thing_is_singular(open_page, tmp_path):
    run = write_run(tmp_path / "run", 20)
    only = [metrics(s) | ({"eval_prompts": 1.0, "eval_left_out": 0.0} if s == 20 else {}) for s in range(1, 21)]
    page = open_page(view(rewrite(run, only)))
    tile = page.locator(".tiles .card").filter(has_text="Accuracy")
    expect(tile).to_contain_text("0.3 to 0.9, 1 prompt,")


def test_the_policy_version_says_how_old_the_completions_are(open_page, tmp_path):
    run = write_run(tmp_path / "run", 4)
    tile = open_page(view(run)).locator(".tiles .card").filter(has_text="Policy version")
    expect(tile).to_contain_text("completions by the policy in training")
    append(run / "metrics.jsonl", [metrics(5) | {"staleness_max": 2.0}])
    tile = open_page(view(run)).locator(".tiles .card").filter(has_text="Policy version")
    expect(tile).to_contain_text("completions up to 2 versions older")
