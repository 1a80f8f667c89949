"""Several runs on the page: a table to sort, to filter and to choose from, and curves in its colours."""

import re
import socket

import orjson
import pytest
from playwright.sync_api import Page, Route, expect

from local_runner.checks import READERS
from services.run_page.directory import FIRST_FAILURE, find_runs
from services.run_page.routes import STATIC
from tests.browser import PHONE, chromium, is_wider_than_window
from tests.services.run_page.runs import append, metrics, write_run
from tests.services.run_page.serving import view

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")


@pytest.fixture
def runs(tmp_path):
    """Three runs: a short one, a good one, and one under way."""
    short = write_run(tmp_path / "short", 10, level=0.1, seed=1)
    good = write_run(tmp_path / "good", 40, level=0.9, seed=2, loss="gspo")
    open_ = write_run(tmp_path / "under-way", 20, level=0.5, ended=False, seed=10)
    return short, good, open_


def names(page: Page) -> list[str]:
    return page.locator(".runs tbody label").all_inner_texts()


def cells(page: Page, run: str) -> list[str]:
    return page.locator(".runs tbody tr").filter(has=page.get_by_label(f"show {run}")).locator("td").all_inner_texts()


def press(page: Page, heading: str) -> str | None:
    """Press the heading of a column; return the order that it says then."""
    button = page.get_by_role("button", name=heading, exact=True)
    button.press("Enter")
    return button.locator("..").get_attribute("aria-sort")


def settled(page: Page, steps: int = 40) -> None:
    """Wait until the curves are there."""
    expect(page.locator("#plot-reward canvas.top")).to_have_attribute("aria-label", re.compile(f"step {steps}"))


def test_runs_are_sorted_by_any_column(open_page, runs):
    page = open_page(view(*runs))
    expect(page.locator(".runs tbody tr")).to_have_count(3)
    settled(page, 10)
    assert press(page, "steps") == "descending"
    assert names(page) == ["good", "under-way", "short"]
    assert press(page, "steps") == "ascending"
    assert names(page) == ["short", "under-way", "good"]
    press(page, "reward")
    assert names(page) == ["good", "under-way", "short"]
    press(page, "SEED")
    assert names(page) == ["under-way", "good", "short"], "numbers are sorted as numbers"
    for _ in range(2):
        press(page, "training time")
        assert names(page)[-1] == "under-way", "what is missing comes last in either order"
    assert press(page, "run") == "ascending"
    assert names(page) == ["good", "short", "under-way"]
    expect(page.get_by_role("button", name="run", exact=True)).to_be_focused()


def test_a_fork_shows_its_family_and_its_difference_from_the_run_before_it(open_page, runs):
    short, good, _ = runs
    fork = {"parent": "short", "at": 4, "changes": ["LOSS=gspo"]}
    (good / "fork.json").write_bytes(orjson.dumps(fork))
    page = open_page(view(short, good))
    settled(page)
    row = page.locator(".runs tbody tr").filter(has=page.get_by_label("show good"))
    expect(row.locator(".note")).to_contain_text("short → good (from step 4: LOSS=gspo)")
    plot = page.locator("#plot-paired canvas.top")
    expect(plot).to_have_attribute("aria-label", re.compile("good"))
    assert "short" not in (plot.get_attribute("aria-label") or "")
    (good / "fork.json").unlink()
    page = open_page(view(short, good))
    settled(page)
    expect(page.locator("#plot-paired")).to_be_hidden()


def test_settings_that_changed_while_a_run_ran_stand_beside_its_name(open_page, runs):
    short, good, _ = runs
    changes = [
        {"step": 4, "values": {"learning_rate": 5e-06}},
        {"step": 9, "values": {"max_steps": 50, "eval_every": 5}},
    ]
    append(good / "changes.jsonl", changes)
    said = "LEARNING_RATE=0.000005 from step 4; MAX_STEPS=50, EVAL_EVERY=5 from step 9"
    page = open_page(view(good))
    settled(page)
    expect(page.locator("#about")).to_contain_text(said)
    page = open_page(view(short, good))
    settled(page)
    expect(page.locator(".runs tbody tr").filter(has=page.get_by_label("show good")).locator(".note")).to_contain_text(
        said
    )


def test_runs_are_filtered_by_words_and_settings_with_their_curves(open_page, runs):
    page = open_page(view(*runs))
    expect(page.get_by_role("status").filter(has_text="3 of 3 runs, 3 in the plots")).to_be_visible()
    words = page.get_by_label("Filter")
    words.fill("LOSS=gspo succ")
    expect(page.locator(".runs tbody tr")).to_have_count(1)
    assert names(page) == ["good"]
    said = page.locator("#plot-reward canvas.top")
    expect(said).to_have_attribute("aria-label", re.compile(r"step 40: good \d"))
    expect(said).not_to_have_attribute("aria-label", re.compile("short"))
    words.fill("no such run")
    expect(page.get_by_role("status").filter(has_text="0 of 3 runs, 0 in the plots")).to_be_visible()
    words.fill("")
    expect(said).to_have_attribute("aria-label", re.compile("short"))


def test_curves_have_the_colours_of_the_table(open_page, runs):
    page = open_page(view(*runs))
    settled(page, 10)
    page.locator("#plot-reward canvas.top").press("Home")
    tips = page.locator("#plot-reward .tip div:has(b)")
    expect(tips).to_have_count(3)
    # Now all three runs are loaded, and have their colours.
    in_table = {
        name: page.get_by_label(f"show {name}").locator("..").locator(".swatch").evaluate(COLOUR)
        for name in ("short", "good", "under-way")
    }
    in_plot = {tip.locator("span").inner_text(): tip.locator(".swatch").evaluate(COLOUR) for tip in tips.all()}
    assert in_plot == in_table
    assert len(set(in_table.values())) == 3
    page.get_by_label("show good").uncheck()
    page.locator("#plot-reward canvas.top").press("Home")
    expect(tips).to_have_count(2)


COLOUR = """element => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = getComputedStyle(element).backgroundColor;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].join(" ");
}"""


def test_runs_are_told_apart_by_their_settings_or_else_by_their_ids(open_page, tmp_path):
    paths = [
        write_run(tmp_path / "one" / "grpo-1", 3, seed=1, run_id="grpo-1"),
        write_run(tmp_path / "two" / "grpo-1", 3, seed=2, run_id="other"),
        write_run(tmp_path / "two" / "grpo-2", 3, seed=2, run_id="grpo-2"),
    ]
    page = open_page(view(*paths, names=[run.name for run in find_runs(paths)]))
    press(page, "run")
    assert names(page) == ["grpo-2", "one/grpo-1", "two/grpo-1"]
    notes = page.locator(".runs .note")
    expect(notes).to_have_text(["same settings as two/grpo-1", "", "same settings as grpo-2"])
    assert page.locator(".runs thead th").all_inner_texts()[-2:] == ["last step", "SEED"]
    assert [cells(page, name)[-1] for name in names(page)] == ["2", "1", "2"]


def test_accuracies_have_their_interval_and_their_prompts(open_page, runs):
    page = open_page(view(*runs))
    settled(page)
    assert re.fullmatch(r"0\.9 → \S+ \(0\.3 to 0\.9, 40 prompts\)", cells(page, "good")[3])


def test_important_settings_come_first(open_page, tmp_path):
    plumbing = {"min_workers": 1, "publish_type": "float32", "batch_size": 4, "loss": "clipped", "learning_rate": 1e-6}
    first = write_run(tmp_path / "first", 2, model_name="small", reward_fn="math", **plumbing)
    other = {"min_workers": 2, "publish_type": "bfloat16", "batch_size": 8, "loss": "gspo", "learning_rate": 2e-6}
    second = write_run(tmp_path / "second", 2, model_name="large", reward_fn="exact_match", **other)
    page = open_page(view(first, second))
    expect(page.locator(".runs tbody tr")).to_have_count(2)
    titles = page.locator(".runs thead th").all_inner_texts()
    important = ["MODEL_NAME", "REWARD_FN", "LOSS", "LEARNING_RATE", "BATCH_SIZE"]
    assert titles[-7:] == [*important, "MIN_WORKERS", "PUBLISH_TYPE"]


def test_the_important_settings_are_settings():
    listed = (STATIC / "differences.js").read_text().partition("const IMPORTANT = ")[2].partition(";")[0]
    names = re.findall(r'"(\w+)"', listed)
    assert len(names) > 20
    assert set(names) <= {name for reader in READERS for name in reader.settings_class().model_fields}


def test_of_many_runs_the_newest_are_drawn_at_first(open_page, tmp_path):
    paths = [write_run(tmp_path / f"run-{number:02}", 2, seed=number) for number in range(20)]
    page = open_page(view(*paths))
    expect(page.get_by_role("status").filter(has_text="20 of 20 runs, 8 in the plots")).to_be_visible()
    drawn = page.locator(".runs tbody tr:has(:checked) label")
    assert sorted(drawn.all_inner_texts()) == [f"run-{number}" for number in range(12, 20)]
    page.get_by_label("show all listed runs").check()
    expect(drawn).to_have_count(20)
    swatches = page.locator(".runs tbody .swatch")
    assert len({swatch.evaluate(COLOUR) for swatch in swatches.all()}) == 20
    page.locator("#plot-reward canvas.top").press("Home")
    expect(page.locator("#plot-reward .tip")).to_contain_text("and 8 lower")
    page.get_by_label("show all listed runs").uncheck()
    expect(page.locator("#plot-reward")).to_be_hidden()


def test_the_table_is_there_before_the_metrics(open_page, runs):
    page = open_page(view(*runs[:2]), "/static/style.css", expected_problems="404")
    waiting: list[Route] = []
    page.route("**/api/metrics*", lambda route: waiting.append(route))
    with page.expect_request("**/api/metrics*"):
        page.goto(page.url.replace("/static/style.css", "/"))
    expect(page.locator(".runs tbody tr")).to_have_count(2)
    assert cells(page, "good")[:2] == ["succeeded", "40"]
    for route in waiting:
        route.continue_()


def test_only_runs_that_go_on_and_chosen_ones_are_asked_for_their_metrics(open_page, runs):
    page = open_page(view(*runs))
    settled(page, 20)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "api/metrics" in request.url else None)
    append(runs[2] / "metrics.jsonl", [metrics(21)])
    row = page.locator(".runs tbody tr").filter(has=page.get_by_label("show under-way"))
    expect(row.locator("td").nth(1)).to_have_text("21")
    assert cells(page, "under-way")[0] == "may be under way"
    assert asked
    assert all("under-way" in url for url in asked)


def test_pointing_at_a_run_makes_its_curves_stand_out(open_page, runs):
    page = open_page(view(*runs))
    settled(page)
    picture = page.locator("#plot-reward canvas").first
    page.mouse.move(0, 0)
    before = picture.evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("show good").hover()
    assert picture.evaluate("canvas => canvas.toDataURL()") != before
    page.mouse.move(0, 0)
    assert picture.evaluate("canvas => canvas.toDataURL()") == before


def test_damaged_files_cost_only_what_they_contained(open_page, runs):
    short, good, under_way = runs
    (short / "summary.json").write_text('{"status": ')
    (good / "config.json").write_bytes(b"\xff\x00")
    broken = [b"{", b'{"step": null}', b"[1]", b"\x00" * 9, b'{"step": 11, "loss": NaN}', b"\xff\xfe"]
    with (under_way / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\n".join(broken) + b"\n" + orjson.dumps(metrics(21) | {"reward_counts": "many"}) + b"\n{")
    (short / "metrics.jsonl").unlink()
    (short / "metrics.jsonl").mkdir()
    page = open_page(view(*runs), expected_problems="500")
    expect(page.locator(".note").filter(has_text="metrics.jsonl has 6 broken lines")).to_be_visible()
    expect(page.locator(".note").filter(has_text="summary.json cannot be read")).to_contain_text("metrics.jsonl: 500")
    expect(page.locator(".note").filter(has_text="config.json cannot be read")).to_be_visible()
    settled(page)
    assert cells(page, "under-way")[1] == "21"
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("only what is not the default").uncheck()
    expect(page.locator("#settings")).to_contain_text("LEARNING_RATE")


def test_the_damage_of_a_single_run_is_below_its_name(open_page, runs):
    (runs[0] / "config.json").write_text("[]")
    (runs[0] / FIRST_FAILURE).write_text("reward_error: mine:score: KeyError (mine.py, line 3, in score)")
    page = open_page(view(runs[0]))
    expect(page.locator("#damage")).to_contain_text("config.json cannot be read")
    expect(page.locator("#damage")).to_contain_text("The first answer that failed: reward_error: mine:score: KeyError")
    settled(page, 10)


@pytest.mark.parametrize("part", ["plots", "samples", "settings"])
def test_a_comparison_fits_a_phone(open_page, tmp_path, part):
    paths = [write_run(tmp_path / f"a-run-with-a-rather-long-name-2026013{n}-120000", 3, seed=n) for n in range(3)]
    page = open_page(view(*paths), f"/#{part}", viewport=PHONE, has_touch=True, is_mobile=True)
    expect(page.locator(f"#{part}")).to_be_visible()
    if part == "plots":
        settled(page, 3)
        tops = [page.locator(".runs tbody tr").nth(n).bounding_box() for n in range(3)]
        assert max(box["height"] for box in tops) < PHONE["height"] / 4
        page.locator("#plot-reward canvas.top").press("Home")
    assert not is_wider_than_window(page)


def test_a_run_that_failed_before_its_first_step_is_in_the_table(open_page, tmp_path):
    write_run(tmp_path / "runs" / "good", 4)
    failed = tmp_path / "runs" / "failed"
    failed.mkdir()
    nodes = {"pid": 1, "started": 0.0, "endpoints": {}, "machine": socket.gethostname()}
    (failed / "nodes.json").write_bytes(orjson.dumps(nodes))
    (failed / "runner.json").write_bytes(orjson.dumps({"exit_code": 78, "failed": "data-server-0"}))
    found = find_runs([tmp_path / "runs"])
    page = open_page(view(*[run.path for run in found]))
    settled(page, 4)
    assert cells(page, "failed")[:2] == ["failed", "\N{EN DASH}"]
    assert cells(page, "good")[:2] == ["succeeded", "4"]
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("only what differs").check()
    expect(page.locator("#settings")).to_contain_text("Outcome")
    expect(page.locator("#settings")).not_to_contain_text("LEARNING_RATE")


def test_each_runs_newest_rewards_stand_around_their_marks(open_page, runs):
    page = open_page(view(*runs))
    settled(page)
    histogram = page.locator("#plot-histogram canvas")
    said = r"The newest step of each run: short, step 10: 20 with reward 0, 12 with reward 1; good, step 40: 20 with"
    expect(histogram).to_have_attribute("aria-label", re.compile(said))
    page.locator("#plot-histogram").get_by_role("spinbutton", name="Step").fill("30")
    # Only one run has this step, and its columns stand on the marks of their rewards.
    expect(histogram).to_have_attribute("aria-label", re.compile(r"Step 30: .*good: 20 with reward 0"))
    left, right = page.evaluate(COLUMNS_BESIDE_ZERO, [40])
    assert abs(left - right) <= 1
    # Of two runs, neither is cut off at the edge.
    left, right = page.evaluate(COLUMNS_BESIDE_ZERO, [10, 40])
    assert abs(left - right) <= 1
    assert left > 30


COLUMNS_BESIDE_ZERO = """async (newest) => {
    const { Histogram } = await import("/static/histogram.js");
    const { Plane } = await import("/static/paint.js");
    const colors = ["rgb(255, 0, 0)", "rgb(250, 0, 0)"];
    const runs = newest.map((step, n) => ({
        name: `run ${n}`, color: colors[n], rewardCounts: new Map([[step, [[0, 5], [1, 5]]]]),
    }));
    const histogram = new Histogram(() => {});
    // A run without the chosen step is there, too.
    histogram.update([...runs, { name: "none", color: "rgb(0, 0, 255)", rewardCounts: new Map() }], null);
    const canvas = Object.assign(document.createElement("canvas"), { width: 362, height: 200 });
    const context = canvas.getContext("2d");
    histogram.paint(context, canvas.width, canvas.height);
    const room = newest.length > 1 ? 0.445 : 0.12;
    const zero = new Plane(canvas.width, canvas.height, [-room, 1 + room], [0, 1]).x(0);
    const { data } = context.getImageData(0, 150, canvas.width, 1);
    const isRed = (x) => data[4 * x] > 240 && data[4 * x + 1] < 10;
    const red = [...Array(canvas.width).keys()].filter((x) => x < zero + 60 && isRed(x));
    return [zero - red[0], red.at(-1) + 1 - zero];
}"""


def test_without_a_ticked_run_the_page_says_so(open_page, runs):
    page = open_page(view(*runs))
    settled(page, 10)
    box = page.get_by_label("show all listed runs")
    expect(box).to_be_checked()
    box.uncheck()
    expect(page.locator("#no-curves")).to_have_text("No run of the table above is ticked.")


def test_outcomes_have_times_and_only_rows_with_a_value(open_page, runs):
    for run in runs[:2]:
        summary = orjson.loads((run / "summary.json").read_bytes()) | {"job": None, "ended": 1_700_000_000.5}
        (run / "summary.json").write_bytes(orjson.dumps(summary))
    page = open_page(view(*runs[:2]), "/#settings")
    outcome = page.locator("#settings tbody").filter(has_text="Outcome")
    expect(outcome).to_contain_text("Outcome")
    heads = outcome.locator("th[scope=row]").all_inner_texts()
    assert "job" not in heads
    ended = outcome.locator("tr").filter(has=page.get_by_role("rowheader", name="ended", exact=True)).locator("td")
    assert re.fullmatch(r"2023-11-1\d \d\d:\d\d", ended.first.inner_text())
    assert heads[0] == "state"
