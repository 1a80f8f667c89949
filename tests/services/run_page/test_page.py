"""The page in a real browser: it loads, follows a run, is used by mouse, keyboard and phone, and trusts no text."""

import csv
import json
import re
from contextlib import asynccontextmanager

import pytest
from playwright.sync_api import Page, expect

from services.core.settings import Settings
from services.http.app import create_service_app
from services.run_page.directory import RunDirectory, read_object
from services.run_page.routes import PUBLIC, add_run_page
from tests.browser import PHONE, chromium, contrast, is_wider_than_window
from tests.services.run_page.runs import append, group, metrics, write_run
from tests.services.run_page.serving import served, view

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")


NOW = {
    "phase": "train",
    "step": 3,
    "total_steps": 100,
    "policy_version": 3,
    "accuracy_before": 0.25,
    "activity": {"what": "training step 4", "done": "", "since": 1_700_000_000.0, "until": None},
    "components": [
        {"name": "reward-server", "url": "http://r:8002", "state": "healthy", "figures": {"waiting": 12}}
        | {"detail": None, "policy_version": None, "seconds_since_answer": 0.1},
        {"name": "rollout-server-1", "url": "http://w:30001", "state": "silent", "figures": {"running": 3}}
        | {"detail": "no answer", "policy_version": 1, "seconds_since_answer": 42.0},
    ],
}


def live(run, now):
    """The page over a run that is under way."""

    @asynccontextmanager
    async def nothing_to_load(_):
        yield

    runs = [RunDirectory(run.name, run)]
    app = create_service_app("ppo-trainer", settings=Settings(), lifespan=nothing_to_load, public=PUBLIC)
    add_run_page(app, lambda: runs, lambda _: "running", now=lambda: now, asks_token=False)
    return app


def move_cursor(page: Page, plot: str, key: str) -> None:
    """Press a key on a plot once its data are there, because a key that comes before them moves nothing."""
    canvas = page.locator(f"#plot-{plot} canvas.top")
    expect(canvas).to_be_visible()
    expect(canvas).to_have_attribute("aria-label", re.compile(r"\ds?: "))
    canvas.press(key)


def test_a_run_opens_with_its_plots(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "grpo-1", 40)))
    expect(page).to_have_title(re.compile(r"step 40 · grpo-1"))
    expect(page.locator("#state")).to_have_text("succeeded")
    for plot in ("reward", "accuracy", "lengths", "entropy", "kl", "seconds", "loss", "groups"):
        expect(page.locator(f"#plot-{plot} canvas.top")).to_be_visible()
    page.get_by_text("Further metrics").click()
    expect(page.locator("#plot-metric-lovely_metric")).to_be_visible()
    assert is_drawn(page, "#plot-reward canvas")
    assert is_drawn(page, "#plot-histogram canvas")
    assert not is_wider_than_window(page)


def test_plots_say_quantity_unit_and_rounded_numbers(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 40)))
    expect(page.locator("#plot-groups figcaption")).to_have_text(re.compile("Groups in each step number of groups"))
    page.get_by_text("Further metrics").click()
    expect(page.locator("#plot-metric-lovely_metric")).to_be_visible()
    for figure in page.locator("figure:visible").all():
        assert all(figure.locator(f"figcaption {part}").inner_text() for part in ("strong", ".muted"))
    texts = [page.locator("main").inner_text()]
    texts += [canvas.get_attribute("aria-label") for canvas in page.locator("canvas[role=img]:visible").all()]
    page.get_by_role("link", name="Settings").click()
    texts.append(page.locator("#settings").inner_text())
    assert "0.3" in texts[-1]
    assert not [text for text in texts if re.search(r"\d\.\d{8}", text)]
    shown = page.evaluate("""async () => {
        const { number, tickLabels } = await import("/static/format.js");
        const numbers = [0.1 + 0.2, 999.6, 12345, 1234567, 0.00001234].map((value) => number(value));
        return [numbers, tickLabels([0.998, 1, 1.002])];
    }""")
    assert shown == [["0.3", "1,000", "12,345", "1.23M", "1.2e-5"], ["0.998", "1.000", "1.002"]]


def test_the_reward_says_how_many_completions_failed_and_are_not_in_it(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    page = open_page(view(run))
    reward = page.locator(".tiles .card").filter(has_text="Reward")
    expect(reward).to_contain_text("first to newest 3 steps")
    expect(reward).not_to_contain_text("failed")
    failed = {"unscorable": 1, "episodes_failed": 4, "over_limit": 1}
    append(run / "metrics.jsonl", [metrics(step) | failed for step in (41, 42)])
    page.reload()
    # Those over a limit have a reward.
    expect(reward).to_contain_text("first to newest 3 steps, without 6 failed completions")


def test_the_reward_of_trained_groups_is_a_plot_of_its_own_with_dynamic_sampling(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    page = open_page(view(run))
    plot = page.locator("#plot-reward-trained canvas.top")
    expect(page.locator("#plot-reward canvas.top")).to_be_visible()
    expect(plot).not_to_be_visible()
    append(run / "metrics.jsonl", [metrics(step) | {"reward_trained_mean": 0.5} for step in (41, 42)])
    page.reload()
    expect(plot).to_have_attribute("aria-label", re.compile(r"step 42: reward 0\.5\."))


def test_rewards_have_their_spread_their_parts_and_a_histogram_of_a_chosen_step(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    append(run / "metrics.jsonl", [metrics(41) | {"reward_counts": [[0.25, 7]]}])
    page = open_page(view(run))
    expect(page.locator("#plot-reward canvas.top")).to_have_attribute(
        "aria-label", re.compile(r"reward 0\.\d+ \(0\.\d+ to 0\.\d+\)\.")
    )
    parts = re.compile(r"step 41: math 0\.\d+, my_rewards:brevity 0\.5\.")
    expect(page.locator("#plot-reward-parts canvas.top")).to_have_attribute("aria-label", parts)
    histogram = page.locator("#plot-histogram canvas")
    expect(histogram).to_have_attribute("aria-label", re.compile(r"Step 41: 7 with reward 0\.25\."))
    page.locator("#plot-histogram").get_by_role("spinbutton", name="Step").fill("3")
    expect(histogram).to_have_attribute("aria-label", re.compile(r"Step 3: 20 with reward 0, 12 with reward 1\."))
    move_cursor(page, "reward", "End")
    expect(histogram).to_have_attribute("aria-label", re.compile(r"Step 41:"))


def test_the_accuracy_before_training_is_the_first_point(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 40)))
    move_cursor(page, "accuracy", "Home")
    expect(page.locator("#cursor")).to_have_text("step 0, before training")
    expect(page.locator("#plot-accuracy .spoken")).to_have_text("step 0: greedy pass@1 0.4 (0.25 to 0.55).")
    page.get_by_label("Against").select_option("time")
    move_cursor(page, "accuracy", "Home")
    expect(page.locator("#plot-accuracy .spoken")).to_contain_text("0.0s: greedy pass@1 0.4")


def test_an_accuracy_that_only_the_summary_has_is_the_newest(open_page, tmp_path):
    run = write_run(tmp_path / "run", 30)
    after = {"accuracy_after": 0.9, "accuracy_after_low": 0.8, "accuracy_after_high": 0.95}
    summary = read_object(run / "summary.json") | after | {"accuracy_after_prompts": 100, "accuracy_after_step": 30}
    (run / "summary.json").write_text(json.dumps(summary))
    page = open_page(view(run))
    tile = page.locator(".tiles .card").filter(has_text="Accuracy")
    expect(tile).to_contain_text("0.4 → 0.9 0.8 to 0.95, 100 prompts")
    move_cursor(page, "accuracy", "End")
    expect(page.locator("#plot-accuracy .spoken")).to_have_text("step 30: greedy pass@1 0.9 (0.8 to 0.95).")


def is_drawn(page, canvas):
    """Return whether the series' colour is on the canvas."""
    return page.locator(canvas).first.evaluate(
        """canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let coloured = 0;
            for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && data[i + 2] - data[i] > 60) coloured++;
            return coloured > 100;
        }"""
    )


def test_a_plot_tells_the_values_under_the_mouse_and_shows_a_steps_samples(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 40)))
    plot = page.locator("#plot-reward canvas.top")
    plot.hover(position={"x": 200, "y": 80})
    tip = page.locator("#plot-reward .tip")
    expect(tip).to_contain_text("reward")
    step = re.search(r"step (\d+)", tip.inner_text())[1]
    expect(page.locator("#cursor")).to_contain_text(f"step {step}")
    page.get_by_role("button", name="its samples").click()
    expect(page.locator("article.group")).to_have_count(2)
    expect(page.locator("article.group strong").first).to_have_text(f"step {step}")


def test_the_mouse_zooms_a_plot_and_the_others_follow(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 40)))
    plot = page.locator("#plot-loss canvas.top")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 60, steps=4)
    page.mouse.up()
    reset = page.get_by_role("button", name="Whole run")
    expect(reset).to_be_visible()
    move_cursor(page, "entropy", "End")
    assert int(re.search(r"step (\d+)", page.locator("#cursor").inner_text())[1]) < 40
    reset.click()
    move_cursor(page, "entropy", "End")
    expect(page.locator("#cursor")).to_contain_text("step 40")


def test_the_page_is_used_by_keyboard_alone(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 40)))
    expect(page.locator("#plot-reward canvas.top")).to_be_visible()
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim()"))
        if page.evaluate("document.activeElement.closest('#plot-reward') !== null"):
            break
    assert {"Plots", "Samples", "Settings"} <= set(reached)
    page.keyboard.press("Home")
    expect(page.locator("#cursor")).to_contain_text("step 1,")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#cursor")).to_contain_text("step 2,")
    expect(page.locator("#plot-reward .spoken")).to_contain_text("step 2: reward 0.")
    page.keyboard.press("Enter")
    expect(page.locator("article.group strong").first).to_have_text("step 2")


def test_samples_show_a_groups_completions_side_by_side(open_page, tmp_path):
    run = write_run(tmp_path / "run", 12)
    append(run / "samples.jsonl", group(13, 99, rewards=[1.0, 0.0, None], rendered_prompt="<|user|>What is 99 plus 1?"))
    page = open_page(view(run), "/#samples")
    first = page.locator("article.group").first
    expect(first.locator(".completion")).to_have_count(3)
    tops = [box.bounding_box()["y"] for box in first.locator(".completion").all()]
    assert len(set(tops)) == 1
    expect(first.locator(".prompt")).to_contain_text("What is 99 plus 1?")
    first.get_by_text("As the model saw it").click()
    expect(first.get_by_text("<|user|>What is 99 plus 1?")).to_be_visible()
    expect(first.locator(".completion").nth(0)).to_contain_text("▲")
    expect(first.locator(".completion").nth(1)).to_contain_text("compared as numbers")
    expect(first.locator(".completion").nth(2)).to_contain_text("not scored")
    expect(first.locator(".completion").nth(2)).to_contain_text("the verifier stumbled")
    shown = page.locator("article.group").count()
    page.get_by_role("button", name="Older groups").click()
    expect(page.locator("article.group")).to_have_count(2 * shown)


def test_samples_are_searched_and_filtered(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 30)), "/#samples")
    form = page.locator("#samples-form")
    form.get_by_placeholder("in prompts").fill("what is 14 plus")
    expect(page.locator("article.group")).to_have_count(1)
    expect(page.locator("mark")).to_have_text("What is 14 plus")
    form.get_by_placeholder("in prompts").fill("no such words")
    expect(page.locator("#samples-state")).to_have_text("No group fits.")
    form.get_by_role("button", name="Clear").click()
    form.get_by_placeholder("first").fill("5")
    form.get_by_placeholder("last").fill("6")
    expect(page.locator("article.group")).to_have_count(2)
    page.get_by_role("button", name="Show all groups").click()
    expect(page.locator("article.group")).to_have_count(4)
    form.get_by_placeholder("highest").fill("0.6")
    expect(page.locator("article.group")).to_have_count(2)


def test_a_prompt_is_followed_over_the_steps_at_which_it_was_sampled(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    append(run / "samples.jsonl", group(41, 7, rewards=[0.0, 1.0]) + group(42, 7, rewards=[1.0, 1.0]))
    page = open_page(view(run), "/#samples")
    page.get_by_role("button", name="Show all groups").click()
    page.get_by_label("of prompts sampled more than once").check()
    expect(page.locator("article.group")).to_have_count(3)
    page.get_by_role("button", name="Follow this prompt (3 groups)").first.click()
    columns = page.locator("#followed section.step")
    expect(columns.locator("strong")).to_have_text(["step 3", "step 41", "step 42"])
    assert len({column.bounding_box()["y"] for column in columns.all()}) == 1
    expect(columns.nth(1)).to_contain_text("policy version 40")
    expect(columns.nth(1)).to_contain_text("mean reward 0.5")
    expect(columns.nth(1).locator(".completion")).to_have_count(2)
    expect(page.locator("#followed")).to_contain_text("What is 7 plus 1?")
    assert not is_wider_than_window(page)
    page.get_by_role("button", name="Back to all groups").click()
    page.get_by_label("From").select_option("evaluation")
    expect(page.locator("article.group")).to_have_count(6)
    page.get_by_role("button", name="Follow this prompt (3 groups)").last.click()
    expect(columns.locator("strong")).to_have_text(["step 0", "step 20", "step 40"])
    expect(page.locator("#followed")).to_contain_text("mean reward 0 → 1")


def test_metrics_samples_and_plots_are_saved_as_files(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    append(run / "samples.jsonl", group(41, 99, rewards=[1.0], completion='=1+1, "so"'))
    page = open_page(view(run))
    expect(page).to_have_title(re.compile(r"step 40 · "))
    rows = list(csv.DictReader(saved(page, "Save metrics as CSV", "run-metrics.csv").decode().splitlines()))
    assert [row["step"] for row in rows] == [str(step) for step in range(41)]
    assert (rows[0]["accuracy"], rows[0]["loss"], rows[20]["accuracy_low"]) == ("0.4", "", "0.3")
    for plot, name in (("Reward", "reward"), ("Rewards of one step", "rewards-of-step-40")):
        assert saved(page, f"Save {plot} as a picture", f"{name}.png").startswith(b"\x89PNG")
    page.get_by_role("link", name="Samples").click()
    page.get_by_role("button", name="Show all groups").click()
    page.get_by_placeholder("first").fill("41")
    expect(page.locator("article.group")).to_have_count(1)
    [line] = saved(page, "Save shown as JSONL", "run-training-samples.jsonl").splitlines()
    record = json.loads(line)
    assert (record["step"], record["prompt"], record["completion"]) == (41, "What is 99 plus 1?", '=1+1, "so"')
    [row] = csv.DictReader(saved(page, "Save shown as CSV", "run-training-samples.csv").decode().splitlines())
    assert row["completion"] == """'=1+1, "so\"""", "a spreadsheet must not run what a model wrote"


def saved(page, button, name):
    """The content of the file ``name`` that a button saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button, exact=True).click()
    assert download.value.suggested_filename == name
    return download.value.path().read_bytes()


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "</pre><style>body { display: none }</style>",
    "javascript:window.hacked=1 \x1b[31m \u202e backwards",
]


def test_what_a_model_wrote_stays_text(open_page, tmp_path):
    run = write_run(tmp_path / "<b>run", 2, model_name=HOSTILE[0])
    for number, text in enumerate(HOSTILE):
        append(run / "samples.jsonl", group(3, 10 + number, rewards=[1.0], completion=text, prompt=text))
        append(run / "metrics.jsonl", [{"step": 3 + number, "time": 1.0, text: 1.0}])
    page = open_page(view(run))
    page.get_by_text("Further metrics").click()
    expect(page.locator("figure").filter(has_text=HOSTILE[1])).to_be_visible()
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("only what is not the default").uncheck()
    expect(page.locator("#settings")).to_contain_text(HOSTILE[0])
    page.get_by_role("link", name="Samples").click()
    page.get_by_role("button", name="Show all groups").click()
    for text in HOSTILE[:3]:
        expect(page.locator(".completion pre").filter(has_text=text)).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_numbers_move_while_the_run_goes_on(open_page, tmp_path):
    run, now = write_run(tmp_path / "run", 3, ended=False), dict(NOW)
    page = open_page(live(run, now))
    expect(page.locator("#progress-text")).to_contain_text("step 3 of 100")
    before = re.compile(r"step 0: greedy pass@1 0\.25\.")
    expect(page.locator("#plot-accuracy canvas.top")).to_have_attribute("aria-label", before)
    append(run / "metrics.jsonl", [metrics(4), metrics(5)])
    now["phase"] = "publish"
    expect(page.locator("#progress-text")).to_contain_text("step 5 of 100")
    expect(page.locator("#plot-reward canvas.top")).to_have_attribute("aria-label", re.compile("step 5"))
    now["components"] = []
    expect(page.locator("#state")).to_have_text("publish")


def test_components_show_health_queues_and_policy_versions(open_page, tmp_path):
    page = open_page(live(write_run(tmp_path / "run", 3, ended=False), NOW))
    expect(page.locator("#state")).to_have_text("rollout-server-1 unwell")
    page.get_by_role("link", name="Components").click()
    reward = page.locator("[data-name=reward-server]")
    expect(reward).to_contain_text("healthy")
    expect(reward.locator("dl")).to_contain_text("waiting12")
    worker = page.locator("[data-name=rollout-server-1]")
    expect(worker).to_contain_text("1, 2 behind")
    expect(worker).to_contain_text("42s ago")


def test_a_page_whose_server_ends_says_so_and_how_to_go_on(open_page, tmp_path):
    run = write_run(tmp_path / "run", 3, ended=False)
    with served(live(run, NOW)) as url:
        page = open_page(url, expected_problems="ERR_|Failed to fetch")
        expect(page.locator("#progress-text")).to_contain_text("step 3")
    expect(page.locator("#trouble")).to_contain_text(f"grpo view {run}")
    expect(page.locator("#plot-reward")).to_be_visible()


def test_several_runs_are_compared(open_page, tmp_path):
    runs = [
        write_run(tmp_path / "slow", 30, level=0.1),
        write_run(tmp_path / "fast", 30, level=0.6, reward_fn="exact_match"),
    ]
    page = open_page(view(*runs))
    rows = page.locator("#summary tbody tr")
    expect(rows).to_have_count(2)
    move_cursor(page, "reward", "End")
    expect(page.locator("#plot-reward .tip")).to_contain_text("slow")
    expect(page.locator("#plot-reward .tip")).to_contain_text("fast")
    expect(page.locator("#plot-groups .legend")).to_have_text("fresh, all rewards equal")
    page.get_by_label("show fast").uncheck()
    move_cursor(page, "reward", "End")
    expect(page.locator("#plot-reward .tip")).not_to_contain_text("fast")
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("only what is not the default").uncheck()
    expect(page.locator("#settings")).to_contain_text("LEARNING_RATE")
    page.get_by_label("only what differs").check()
    expect(page.locator("#settings")).not_to_contain_text("LEARNING_RATE")
    differing = page.locator("#settings tr.differs")
    expect(differing).to_have_text(["REWARD_FNmathexact_match", "accuracy before0.10.6"])
    expect(differing.locator(".changed")).to_have_text("exact_match")


def test_the_token_is_asked_for_once(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 3), token="secret"), expected_problems="401")
    page.get_by_label("JOBGROUP_TOKEN").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#token-refused")).to_be_visible()
    page.get_by_label("JOBGROUP_TOKEN").fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#plot-reward")).to_be_visible()
    page.reload()
    expect(page.locator("#plot-reward")).to_be_visible()
    assert "secret" not in page.url


@pytest.mark.parametrize("part", ["plots", "samples", "components", "settings"])
def test_the_page_fits_a_phone(open_page, tmp_path, part):
    run = write_run(tmp_path / "a-run-with-a-rather-long-name-20260131-120000", 30, ended=False)
    append(run / "samples.jsonl", group(31, 99, rewards=[1.0], completion="long" * 500))
    page = open_page(live(run, NOW), f"/#{part}", viewport=PHONE, has_touch=True, is_mobile=True)
    expect(page.locator(f"#{part}")).to_be_visible()
    expect(page.locator("#progress-text")).to_contain_text("step 30")
    assert not is_wider_than_window(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(open_page, tmp_path, scheme):
    page = open_page(live(write_run(tmp_path / "run", 3, ended=False), NOW), "/#components", color_scheme=scheme)
    expect(page.locator("[data-name=reward-server]")).to_be_visible()
    for selector in ("h1", ".muted >> nth=0", ".component dd >> nth=0", ".pill.good", ".pill.bad", "nav a"):
        assert contrast(page.locator(selector).first) >= 4.5, selector
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
