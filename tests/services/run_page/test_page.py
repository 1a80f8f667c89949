"""The page in a real browser: plots, samples, episodes, a live run, failures, comparisons, and text that stays text."""

import csv
import json
import re
import socket
import time
from contextlib import asynccontextmanager

import orjson
import pytest
from playwright.sync_api import Page, expect

from services.core.settings import Settings
from services.http.app import create_service_app
from services.run_page.directory import FIRST_FAILURE, Run
from services.run_page.routes import PUBLIC, add_run_page
from tests.browser import PHONE, chromium, contrast, hidden_focus, is_wider_than_window, violations_of
from tests.services.run_page.runs import append, episodes, group, metrics, write_run
from tests.services.run_page.serving import served, view
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")

REWARD = {"name": "reward-server", "url": "http://r:8002", "state": "healthy", "figures": {"waiting": 12}}
ENGINE = {"name": "rollout-server-1", "url": "http://w:30001", "state": "silent", "figures": {"running": 3}}
NOW = {
    "phase": "train",
    "step": 3,
    "total_steps": 100,
    "policy_version": 3,
    "accuracy_before": 0.25,
    "activity": {"what": "training step 4", "done": "", "since": 1_700_000_000.0, "until": None},
    "components": [
        REWARD | {"detail": None, "policy_version": None, "seconds_since_answer": 0.1},
        ENGINE | {"detail": "no answer", "policy_version": 1, "seconds_since_answer": 42.0},
    ],
}
WAITING = NOW | {
    "phase": "publish",
    "step": 0,
    "accuracy_before": None,
    "components": [NOW["components"][0], NOW["components"][1] | {"seconds_since_answer": None}],
    "activity": {"what": "waiting for 2 rollout workers", "done": "1 there", "since": 0.0, "until": 1_700_001_000.0},
}
DASH = "\N{EN DASH}"
"""Stands on the page for what is not known."""
ERROR = "DATASET is 'q.csv', which is not on the hub"
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "</pre><style>body { display: none }</style>",
    "javascript:window.hacked=1 \x1b[31m \u202e backwards",
]


def live(run, now):
    """The page over a run that is under way."""

    @asynccontextmanager
    async def nothing_to_load(_):
        yield

    app = create_service_app("ppo-trainer", settings=Settings(), lifespan=nothing_to_load, public=PUBLIC)
    add_run_page(app, [Run(run)], now=lambda: now, asks_token=False)
    return app


def failed(path):
    """A run that a component's error ended before its first step."""
    (path / "logs").mkdir(parents=True)
    nodes = {"pid": 1, "started": 0.0, "endpoints": {}, "machine": socket.gethostname()}
    (path / "nodes.json").write_text(json.dumps(nodes))
    outcome = {"exit_code": 78, "reason": "data-server cannot run", "failed": "data-server-0"}
    (path / "runner.json").write_text(json.dumps(outcome))
    (path / "logs/data-server-0.log").write_text(f"=== 2026-01-31 12:00:00 start ===\nerror: {ERROR}\n")
    return path


def move_cursor(page: Page, plot: str, key: str) -> str:
    """Press a key on a plot once its data are there; return what the plot says then of the step under the cursor."""
    canvas = page.locator(f"#plot-{plot} canvas.top")
    # A key that comes before the data moves nothing.
    expect(canvas).to_have_attribute("aria-label", re.compile(r"\ds?: "))
    canvas.press(key)
    expect(page.locator(f"#plot-{plot} .spoken")).to_contain_text(": ")
    return page.locator(f"#plot-{plot} .spoken").inner_text()


def says(page: Page, plot: str, pattern: str) -> None:
    """Wait until a plot's label, which has the newest values, matches."""
    expect(page.locator(f"#plot-{plot} canvas").last).to_have_attribute("aria-label", re.compile(pattern))


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


def saved(page, button, name):
    """The content of the file ``name`` that a button saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button, exact=True).click()
    assert download.value.suggested_filename == name
    return download.value.path().read_bytes()


def test_a_run_opens_with_its_plots_and_the_important_ones_come_first(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    append(run / "metrics.jsonl", [metrics(41) | {"reward_counts": [[0.25, 7]]}])
    page = open_page(view(run))
    expect(page).to_have_title(re.compile(r"step 41 · run"))
    expect(page.locator("#state")).to_have_text("succeeded")
    expect(page.locator("#plot-reward canvas.top")).to_be_visible()
    ids = page.locator("#plots figure:visible").evaluate_all("figures => figures.map((figure) => figure.id)")
    first = ["reward", "histogram", "accuracy", "lengths", "entropy", "kl", "seconds"]
    assert ids[:7] == [f"plot-{name}" for name in first]
    assert {"plot-loss", "plot-groups"} <= set(ids)
    expect(page.locator("#plots h2:visible")).to_have_text(["Answers and rewards", "Updates"])
    assert is_drawn(page, "#plot-reward canvas")
    assert is_drawn(page, "#plot-histogram canvas")
    page.get_by_text("Further metrics").click()
    expect(page.locator("#plot-metric-lovely_metric")).to_be_visible()
    assert page.locator("[id^='plot-metric-reward_']").count() == 0
    assert not is_wider_than_window(page)

    says(page, "reward", r"reward 0\.\d+ \(0\.\d+ to 0\.\d+\)\.")
    says(page, "reward-parts", r"step 41: math 0\.\d+, my_rewards:brevity 0\.5\.")
    says(page, "histogram", r"Step 41: 7 with reward 0\.25\.")
    page.locator("#plot-histogram").get_by_role("spinbutton", name="Step").fill("3")
    says(page, "histogram", r"Step 3: 20 with reward 0, 12 with reward 1\.")
    move_cursor(page, "reward", "End")
    says(page, "histogram", r"Step 41:")
    assert move_cursor(page, "accuracy", "Home") == "step 0: greedy pass@1 0.4 (0.25 to 0.55)."
    expect(page.locator("#cursor")).to_have_text("step 0, before training")
    folded = page.locator("#constant > summary")
    expect(folded).to_contain_text("Learning rate 1e-6")
    expect(folded).to_contain_text("Staleness 0")
    expect(page.locator("#plot-learning-rate")).to_be_hidden()
    folded.click()
    assert move_cursor(page, "learning-rate", "End") == "step 41: learning rate 1e-6."
    append(run / "metrics.jsonl", [metrics(42) | {"learning_rate": 2e-6}])
    page.reload()
    expect(page.locator("#plot-learning-rate")).to_be_visible()


def test_metrics_that_only_some_runs_have_are_shown_where_they_are(open_page, tmp_path):
    told = {"reward_trained_mean": 0.5, "turns_mean": 2.5, "turns_max": 4.0, "tool_calls_mean": 1.5}
    told |= {"tool_calls_parsed": 0.9, "branches_mean": 0.25, "episodes_failed": 4, "episodes_failed_timeout": 4}
    run = write_run(tmp_path / "run", 3)
    append(run / "metrics.jsonl", [metrics(4) | told])
    page = open_page(view(run))
    page.locator("#constant > summary").click()
    for plot, text in {
        "reward-trained": r"step 4: reward 0\.5\.",
        "turns": r"step 4: mean 2\.5, most 4\.",
        "tool-calls": r"step 4: tool calls 1\.5, branches 0\.25\.",
        "parsed": r"step 4: parsed 0\.9\.",
        "failed": r"step 4: all 4, timeout 4\.",
    }.items():
        says(page, plot, text)
    rows = list(csv.DictReader(saved(page, "Save metrics as CSV", "run-metrics.csv").decode().splitlines()))
    assert (rows[0]["accuracy"], rows[-1]["turns_max"]) == ("0.4", "4")


def test_a_plot_is_used_by_mouse_and_by_keyboard_alone(open_page, tmp_path):
    page = open_page(view(write_run(tmp_path / "run", 40)))
    expect(page.locator("#plot-reward canvas.top")).to_be_visible()
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim()"))
        if page.evaluate("document.activeElement.closest('#plot-reward') !== null"):
            break
    assert {"Plots", "Samples", "Settings"} <= set(reached)
    for key, step in (("Home", 1), ("ArrowRight", 2)):
        page.keyboard.press(key)
        expect(page.locator("#cursor")).to_contain_text(f"step {step},")
    expect(page.locator("#plot-reward .spoken")).to_contain_text("step 2: reward 0.")
    page.keyboard.press("Enter")
    expect(page.locator("article.group strong").first).to_have_text("step 2")

    page.get_by_role("link", name="Plots").click()
    page.locator("#plot-reward canvas.top").hover(position={"x": 200, "y": 80})
    tip = page.locator("#plot-reward .tip")
    expect(tip).to_contain_text("reward")
    step = re.search(r"step (\d+)", tip.inner_text())[1]
    expect(page.locator("#cursor")).to_contain_text(f"step {step}")
    page.get_by_role("button", name="its samples").click()
    expect(page.locator("article.group strong").first).to_have_text(f"step {step}")
    expect(page.locator("article.group")).to_have_count(2)

    page.get_by_role("link", name="Plots").click()
    plot = page.locator("#plot-loss canvas.top")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 60, steps=4)
    page.mouse.up()
    whole = page.get_by_role("button", name="Whole run")
    expect(whole).to_be_visible()
    assert int(re.search(r"step (\d+)", move_cursor(page, "entropy", "End"))[1]) < 40, "all plots are zoomed"
    whole.click()
    expect(whole).to_be_hidden()
    assert move_cursor(page, "entropy", "End").startswith("step 40:")


def test_samples_are_groups_that_are_searched_filtered_followed_and_saved(open_page, tmp_path):
    run = write_run(tmp_path / "run", 40)
    equal = group(
        41, 7, rewards=[1.0, 1.0], group_id="again", spans=[{"version": 2, "tokens": ["8"], "logprobs": [-0.1]}]
    )
    asked = {"rendered_prompt": "<|user|>What is 99 plus 1?", "completion": '=1+1, "so"'}
    append(run / "samples.jsonl", equal + group(42, 99, rewards=[1.0, 0.0, None], **asked))
    page = open_page(view(run), "/#samples")
    cards, form = page.locator("article.group"), page.locator("#samples-form")
    expect(page.locator("#only-mixed")).to_contain_text("Only groups whose rewards differ")
    first = cards.first
    completions = first.locator(".completion")
    expect(completions).to_have_count(3)
    assert len({box.bounding_box()["y"] for box in completions.all()}) == 1, "side by side"
    expect(first.locator(".prompt")).to_contain_text("What is 99 plus 1?")
    first.get_by_text("As the model saw it").click()
    expect(first.get_by_text("<|user|>What is 99 plus 1?")).to_be_visible()
    expect(completions.nth(0)).to_contain_text("▲ above the group's mean")
    expect(completions.nth(1)).to_contain_text("▼ below the group's mean")
    expect(completions.nth(1)).to_contain_text("compared as numbers")
    expect(completions.nth(2)).to_contain_text("not scored")
    expect(completions.nth(2)).to_contain_text("the verifier stumbled")
    form.get_by_placeholder("in prompts").fill("no such words")
    expect(page.locator("#samples-state")).to_have_text("No group fits.")
    form.get_by_placeholder("in prompts").fill("what is 14 plus")
    expect(cards).to_have_count(1)
    expect(page.locator("mark")).to_have_text("What is 14 plus")
    form.get_by_role("button", name="Clear").click()
    form.get_by_placeholder("first").fill("5")
    form.get_by_placeholder("last").fill("6")
    expect(cards).to_have_count(2)
    page.get_by_role("button", name="Show all groups").click()
    expect(cards).to_have_count(4)
    expect(page.locator("#only-mixed")).to_be_hidden()
    form.get_by_placeholder("highest").fill("0.6")
    expect(cards).to_have_count(2)
    form.get_by_role("button", name="Clear").click()
    page.get_by_role("button", name="Show all groups").click()
    untaught = cards.filter(has_text="again").first
    expect(untaught.locator(".reward span").first).to_have_text("equal to the group's mean: not trained on")

    form.get_by_placeholder("first").fill("42")
    expect(cards).to_have_count(1)
    lines = saved(page, "Save shown as JSONL", "run-training-samples.jsonl").splitlines()
    record = json.loads(lines[0])
    assert (len(lines), record["step"], record["prompt"], record["completion"]) == (
        3,
        42,
        "What is 99 plus 1?",
        '=1+1, "so"',
    )
    row, *_ = csv.DictReader(saved(page, "Save shown as CSV", "run-training-samples.csv").decode().splitlines())
    assert row["completion"] == """'=1+1, "so\"""", "a spreadsheet must not run what a model wrote"

    form.get_by_placeholder("first").fill("")
    page.get_by_label("of prompts sampled more than once").check()
    expect(cards).to_have_count(2)
    page.get_by_role("button", name="Follow this prompt (2 groups)").first.click()
    columns = page.locator("#followed section.step")
    expect(columns.locator("strong")).to_have_text(["step 3", "step 41"])
    assert len({column.bounding_box()["y"] for column in columns.all()}) == 1
    expect(columns.nth(1)).to_contain_text("policy version 40")
    expect(columns.nth(1)).to_contain_text("mean reward 1")
    expect(page.locator("#followed")).to_contain_text("What is 7 plus 1?")
    assert not is_wider_than_window(page)
    page.get_by_role("button", name="Back to all groups").click()
    page.get_by_label("From").select_option("evaluation")
    expect(page.locator("article.group[aria-label^=evaluation]")).to_have_count(6)
    page.get_by_role("button", name="Follow this prompt (3 groups)").last.click()
    expect(columns.locator("strong")).to_have_text(["step 0", "step 20", "step 40"])
    expect(page.locator("#followed")).to_contain_text("mean reward 0 → 1")


def test_an_episode_is_one_answer_with_its_conversation_branches_and_tokens(open_page, tmp_path):
    run = write_run(tmp_path / "run", 3, advantage="gae")  # Equal rewards are trained on, so all groups are shown.
    bare = [record | {"spans": None} for record in episodes(3, 98)]
    plain = {"spans": [{"version": 4, "tokens": ["99", "!"], "logprobs": [-0.1, -0.2], "advantages": -0.5}]}
    groups = group(3, 8, rewards=[0.0], **plain, result={"status": "scored"}) + episodes(4, 99) + episodes(5, 100)
    append(run / "samples.jsonl", [{k: v for k, v in r.items() if v is not None} for r in bare] + groups)
    page = open_page(view(run), "/#samples")
    cards, reader = page.locator("article.group"), page.locator("#reader")
    expect(page.locator("main")).not_to_contain_text("not trained on")
    expect(cards.first.locator(".completion")).to_have_count(2)
    expect(cards.first.locator(".strip i")).to_have_count(2)
    expect(cards.first.locator("header")).to_contain_text("mean reward 1")
    right, wrong = cards.first.locator(".completion dl").all()
    for figure in ("turns3", "tool calls1", "branches1"):
        expect(right).to_contain_text(figure)
    expect(wrong).to_contain_text("tool calls1 (1 unreadable)")

    def open_reader(number: int, place: int = 0) -> None:
        """Press an episode's button in the dialog's stead."""
        if reader.is_visible():
            page.keyboard.press("Escape")
            expect(reader).to_be_hidden()
        cards.nth(number).locator(".completion").nth(place).get_by_role("button").press("Enter")

    open_reader(0)
    messages = reader.locator(".message")
    expect(messages.locator("h3")).to_have_text(["User", "Model", "Result of calculate", "Model"])
    expect(messages.nth(1).locator(".call")).to_have_text(
        re.compile(r'calls calculate\s*{\s*"expression": "12\*31"\s*}')
    )
    expect(messages.nth(2).locator("pre")).to_have_text("372")
    expect(reader).to_contain_text("turns 3 · tool calls 1 · branches 1")
    branch = reader.get_by_role("button", name="Branch 1")
    branch.press("Enter")
    expect(branch).to_have_attribute("aria-pressed", "true")
    expect(branch).to_be_focused()
    expect(reader.locator("summary")).to_have_text("2 messages as in the main line")
    visible = reader.locator(".message:visible")
    expect(visible.locator("pre")).to_have_text(["You found 372. Answer with just the number.", "372"])
    reader.locator("summary").click()
    expect(visible).to_have_count(4)

    reader.get_by_role("button", name="Main line").click()
    reader.get_by_role("button", name="Tokens").press("Enter")
    tokens = reader.locator(".tokens .token")
    expect(tokens).to_have_text(["<call>", "12", "*31", "It is", " 372."])
    looks = tokens.evaluate_all("all => all.map((e) => [e.className, e.style.getPropertyValue('--strength')])")
    assert looks[:4] == [["token plus", "1"], ["token plus", "0.5"], ["token zero", ""], ["token plus", "0.5"]]
    between = ["<user>What is 12*31?<assistant>", "<tool>372</tool><assistant>"]
    expect(reader.locator(".tokens .context")).to_have_text(between)
    expect(reader.locator(".tokens .version")).to_have_text(["version 4", "version 5"])
    tokens.nth(2).hover()
    expect(reader.locator(".explanation")).to_contain_text("3 of 5 sampled tokens")
    reader.locator(".tokens").press("ArrowRight")
    expect(reader.locator(".explanation")).to_have_text(
        '4 of 5 sampled tokens: "It is", probability 0.779 (log -0.25), advantage 0.75, policy version 5'
    )
    page.keyboard.press("Escape")
    expect(reader).to_be_hidden()
    expect(page.get_by_role("button", name="Whole conversation").first).to_be_focused()

    open_reader(0, 1)
    expect(reader).to_contain_text("the verifier stumbled")
    reader.get_by_role("button", name="Tokens").click()
    expect(reader.locator(".tokens .untrained")).to_have_text(["Hm", "."])
    open_reader(2)
    expect(reader.locator(".tokens .minus")).to_have_text(["99", "!"])
    expect(reader.locator("h2")).to_have_text("Completion 1 of group run-0-8, step 3")
    expect(reader.locator("p").first).to_have_text("reward 0")
    page.keyboard.press("Escape")
    expect(cards.nth(4).locator(".completion").first.get_by_role("button"), "it has no tokens").to_have_count(0)

    page.get_by_placeholder("first").fill("5")
    expect(cards).to_have_count(1)
    first, *_ = map(json.loads, saved(page, "Save shown as JSONL", "run-training-samples.jsonl").splitlines())
    assert first["messages"][1]["tool_calls"][0]["name"] == "calculate"
    assert "spans" not in first


def test_what_models_and_tools_wrote_stays_text(open_page, tmp_path):
    run = write_run(tmp_path / "<b>run", 2, model_name=HOSTILE[0])
    for number, text in enumerate(HOSTILE):
        append(run / "samples.jsonl", group(3, 10 + number, rewards=[1.0], completion=text, prompt=text))
        append(run / "metrics.jsonl", [{"step": 3 + number, "time": 1.0, text: 1.0}])
    hostile = HOSTILE[1]
    calls = [{"name": hostile, "arguments": hostile}]
    wrote = [{"role": hostile, "content": hostile}, {"role": "assistant", "sampled": True, "tool_calls": calls}]
    spans = [{"text": hostile}, {"version": 1, "tokens": [hostile], "logprobs": [-1], "advantages": 1}]
    append(run / "samples.jsonl", group(9, 9, rewards=[1.0], episode=0, messages=wrote, spans=spans))
    page = open_page(view(run))
    page.get_by_text("Further metrics").click()
    expect(page.locator("figure").filter(has_text=hostile)).to_be_visible()
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("only what is not the default").uncheck()
    expect(page.locator("#settings")).to_contain_text(HOSTILE[0])
    page.get_by_role("link", name="Samples").click()
    page.get_by_role("button", name="Show all groups").click()
    for text in HOSTILE[:3]:
        expect(page.locator(".completion pre").filter(has_text=text).first).to_be_visible()
    page.get_by_role("button", name="Whole conversation").first.click()
    expect(page.locator("#reader .message").first).to_contain_text(hostile)
    page.locator("#reader").get_by_role("button", name="Tokens").click()
    expect(page.locator("#reader .tokens .token")).to_have_text(hostile)
    assert page.evaluate("window.hacked") is None


def test_a_run_is_followed_from_its_wait_to_the_end_of_its_server(open_page, tmp_path):
    run, now = tmp_path / "run", WAITING | {"activity": WAITING["activity"] | {"since": time.time() - 65}}
    with served(live(run, now)) as url:
        page = open_page(url, expected_problems="ERR_|Failed to fetch")
        waits = page.locator(".waiting")
        expect(waits).to_contain_text(
            re.compile(r"Waiting for 2 rollout workers: 1 there, for \dm\d\ds, until \d\d:\d\d:\d\d")
        )
        expect(waits).to_contain_text("1 of 2 components healthy")
        expect(page.locator(".tiles")).to_have_count(0)
        assert not re.search(f"[{DASH}-](/s|%)", page.locator("main").inner_text())
        expect(page.locator("#state"), "a component that never answered is starting").to_have_text("publish")
        page.get_by_role("link", name="Components").click()
        expect(page.locator("[data-name=rollout-server-1] .pill")).to_have_text("starting")

        write_run(run, 3, ended=False)
        now |= NOW | {"components": WAITING["components"]}
        expect(page.locator("#progress-text")).to_contain_text("step 3 of 100")
        expect(page.locator("#state"), "once there are steps, it is silent").to_have_text("rollout-server-1 unwell")
        now |= NOW
        expect(page.locator("[data-name=reward-server] dl")).to_contain_text("waiting12")
        for text in ("1, 2 behind", "42s ago"):
            expect(page.locator("[data-name=rollout-server-1]")).to_contain_text(text)
        page.get_by_role("link", name="Plots").click()
        says(page, "accuracy", r"step 0: greedy pass@1 0\.25\.")
        move_cursor(page, "loss", "Home")
        expect(page.locator("#plot-gradient")).to_be_hidden()
        append(run / "metrics.jsonl", [metrics(4) | {"grad_norm": 2.5, "clip_fraction_high": 0.5}])
        expect(page.locator("#plot-gradient"), "it is constant no more").to_be_visible()
        expect(page.locator("#plot-loss canvas.top")).to_be_focused()
        expect(page.locator("#cursor")).to_contain_text("step 1,")
        append(run / "metrics.jsonl", [metrics(5)])
        now |= {"phase": "publish", "components": []}
        expect(page.locator("#progress-text")).to_contain_text("step 5 of 100")
        expect(page.locator("#state")).to_have_text("publish")
        wait_until(lambda: "step 5" in move_cursor(page, "reward", "End"), "the plots have the last step")
    expect(page.locator("#trouble")).to_contain_text(f"grpo view {run}")
    expect(page.locator("#plot-reward")).to_be_visible()


def test_a_failed_or_damaged_run_says_why_and_the_token_is_asked_for_once(open_page, tmp_path):
    page = open_page(view(failed(tmp_path / "failed")))
    expect(page.locator("#error")).to_have_text(f"data-server cannot run: {ERROR}")
    expect(page.locator("#summary")).to_have_text("The run ended before its first step.")
    assert DASH not in page.locator("main").inner_text()
    expect(page.get_by_label("Smoothing")).to_be_hidden()

    run = write_run(tmp_path / "run", 3, ended=False)
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": "reward-server: no answer", "steps": 3}))
    (run / "config.json").write_text("[]")
    (run / FIRST_FAILURE).write_text("reward_error: mine:score: KeyError (mine.py, line 3, in score)")
    page = open_page(view(run, token="secret"), expected_problems="401")
    page.get_by_label("JOBGROUP_TOKEN").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#token-refused")).to_be_visible()
    assert violations_of(page) == []
    page.get_by_label("JOBGROUP_TOKEN").fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#plot-reward")).to_be_visible()
    expect(page.locator("#error")).to_have_text("reward-server: no answer")
    expect(page.locator("#damage")).to_contain_text("config.json cannot be read")
    expect(page.locator("#damage")).to_contain_text("The first answer that failed: reward_error: mine:score: KeyError")
    page.reload()
    expect(page.locator("#plot-reward")).to_be_visible()
    assert "secret" not in page.url


@pytest.fixture
def runs(tmp_path):
    """Three runs: a short one, a good one, and one under way."""
    short = write_run(tmp_path / "short", 10, level=0.1, seed=1)
    good = write_run(tmp_path / "good", 40, level=0.9, seed=2, loss="gspo", reward_fn="exact_match")
    open_ = write_run(tmp_path / "under-way", 20, level=0.5, ended=False, seed=10)
    return short, good, open_


def names(page: Page) -> list[str]:
    return page.locator(".runs tbody label").all_inner_texts()


def row(page: Page, run: str):
    return page.locator(".runs tbody tr").filter(has=page.get_by_label(f"show {run}"))


def cells(page: Page, run: str) -> list[str]:
    return row(page, run).locator("td").all_inner_texts()


def press(page: Page, heading: str) -> str | None:
    """Press the heading of a column; return the order that it says then."""
    button = page.get_by_role("button", name=heading, exact=True)
    button.press("Enter")
    return button.locator("..").get_attribute("aria-sort")


def test_runs_are_compared_in_a_table_and_in_plots(open_page, runs):
    page = open_page(view(*runs))
    says(page, "reward", "good")
    expect(page.get_by_role("status").filter(has_text="3 of 3 runs, 3 in the plots")).to_be_visible()
    for heading, order, listed in [
        ("steps", "descending", ["good", "under-way", "short"]),
        ("steps", "ascending", ["short", "under-way", "good"]),
        ("reward", "descending", ["good", "under-way", "short"]),
        ("SEED", "descending", ["under-way", "good", "short"]),
        # What is missing comes last in either order.
        ("training time", "descending", ["good", "short", "under-way"]),
        ("training time", "ascending", ["short", "good", "under-way"]),
        ("run", "ascending", ["good", "short", "under-way"]),
    ]:
        assert (press(page, heading), names(page)) == (order, listed)
    expect(page.get_by_role("button", name="run", exact=True)).to_be_focused()
    assert re.fullmatch(r"0\.9 → \S+ \(0\.3 to 0\.9, 40 prompts\)", cells(page, "good")[3])
    expect(page.locator("#plot-throughput .legend")).to_have_text("generated, over the whole step")
    newest = r"The newest step of each run: short, step 10: 20 with reward 0, 12 with reward 1; good, step 40: 20 with"
    says(page, "histogram", newest)
    page.locator("#plot-histogram").get_by_role("spinbutton", name="Step").fill("30")
    says(page, "histogram", r"Step 30: .*good: 20 with reward 0")

    page.get_by_label("show good").uncheck()
    page.locator("#plot-reward canvas.top").press("Home")
    expect(page.locator("#plot-reward .tip div:has(b)")).to_have_count(2)
    page.get_by_label("show good").check()

    words = page.get_by_label("Filter")
    words.fill("LOSS=gspo succ")
    expect(page.locator(".runs tbody tr")).to_have_count(1)
    assert names(page) == ["good"]
    says(page, "reward", r"^(?!.*short).*step 40: good \d")
    words.fill("no such run")
    expect(page.get_by_role("status").filter(has_text="0 of 3 runs, 0 in the plots")).to_be_visible()
    words.fill("")
    says(page, "reward", "short")

    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "api/metrics" in request.url else None)
    with page.expect_request("**/api/metrics*"):
        append(runs[2] / "metrics.jsonl", [metrics(21)])
    expect(row(page, "under-way").locator("td").nth(1)).to_have_text("21")
    assert cells(page, "under-way")[0] == "may be under way"
    assert all("under-way" in url for url in asked), "a run that ended has nothing new"
    page.get_by_label("show all listed runs").uncheck()
    expect(page.locator("#no-curves")).to_have_text("No run of the table above is ticked.")

    page.get_by_role("link", name="Settings").click()
    page.get_by_label("only what is not the default").uncheck()
    expect(page.locator("#settings")).to_contain_text("LEARNING_RATE")
    page.get_by_label("only what differs").check()
    expect(page.locator("#settings")).not_to_contain_text("LEARNING_RATE")
    expect(page.locator("#settings tr.differs .changed")).to_have_text("exact_match")


def test_failed_and_forked_runs_are_in_the_table(open_page, runs, tmp_path):
    short, good, _ = runs
    (good / "fork.json").write_bytes(orjson.dumps({"parent": "short", "at": 4, "changes": ["LOSS=gspo"]}))
    page = open_page(view(short, good, failed(tmp_path / "bad")))
    expect(row(page, "good").locator(".note")).to_contain_text("short → good (from step 4: LOSS=gspo)")
    expect(row(page, "bad").locator(".note")).to_contain_text(ERROR)
    assert cells(page, "bad")[:2] == ["failed", DASH]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_part_is_accessible_readable_and_fits_a_phone(open_page, runs, tmp_path, scheme):
    phone = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "color_scheme": scheme}
    run = write_run(tmp_path / "a-run-with-a-rather-long-name-20260131-120000", 30, ended=False)
    long = group(31, 99, rewards=[1.0, 0.5], completion="long" * 500)
    append(run / "samples.jsonl", group(30, 7, rewards=[0.0, 1.0]) + long + episodes(32, 9))
    (run / "summary.json").write_text("{")

    def check(page: Page, *selectors: str) -> None:
        """Check the part that is open, and the contrast of some of its elements."""
        assert violations_of(page) == []
        assert not is_wider_than_window(page)
        for element in map(page.locator, selectors):
            # The page renews its parts, and an element that it has just replaced has no colours.
            wait_until(lambda element=element: contrast(element.first) >= 4.5, f"{element} can be read")

    page = open_page(live(run, NOW), **phone)
    expect(page.locator("#progress-text")).to_contain_text("step 30")
    expect(page.locator("#damage")).to_contain_text("summary.json")
    page.locator("#plot-reward-parts .legend button").first.click()
    page.get_by_text("Further metrics").click()
    page.locator("#constant > summary").click()
    move_cursor(page, "reward", "End")
    expect(page.locator("#plot-reward .tip")).to_be_visible()
    check(page, "h1", ".muted", "nav a", ".pill.bad")
    page.get_by_role("link", name="Components").click()
    expect(page.locator("[data-name=reward-server]")).to_be_visible()
    check(page, ".component dd", ".pill.good")
    page.get_by_role("link", name="Settings").click()
    check(page)
    page.get_by_role("link", name="Samples").click()
    page.get_by_role("button", name="Show all groups").click()
    page.get_by_placeholder("in prompts").fill("plus")
    expect(page.locator("mark").first).to_be_visible()
    check(page)
    page.get_by_role("button", name="Follow this prompt").first.click()
    expect(page.locator("#followed section.step")).to_have_count(2)
    check(page)
    page.get_by_role("button", name="Back to all groups").click()
    page.get_by_placeholder("in prompts").fill("12*31")
    page.get_by_role("button", name="Whole conversation").first.click()
    expect(page.locator("#reader .message").first).to_be_visible()
    check(page, "#reader .of-model h3", "#reader .call", "#reader .choices [aria-pressed=true]")
    page.locator("#reader").get_by_role("button", name="Tokens").click()
    page.locator("#reader .tokens").press("End")
    legend = [f"#reader .token-legend .{kind}" for kind in ("plus", "minus", "zero", "untrained", "context")]
    check(page, *legend, *(f"#reader {part}" for part in (".tokens .plus", ".tokens .context", ".version")))
    assert page.locator("#reader").bounding_box()["width"] <= PHONE["width"]
    page.keyboard.press("Escape")
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"

    page = open_page(live(tmp_path / "not-yet", WAITING), color_scheme=scheme)
    expect(page.locator(".waiting")).to_be_visible()
    check(page)
    (runs[0] / "config.json").write_text("{")
    page = open_page(view(*runs), **phone)
    says(page, "reward", "under-way")
    page.locator("#plot-reward canvas.top").press("Home")
    assert max(line.bounding_box()["height"] for line in page.locator(".runs tbody tr").all()) < PHONE["height"] / 4
    page.get_by_role("button", name="steps", exact=True).click()
    page.get_by_label("show good").uncheck()
    check(page)
    page.get_by_role("link", name="Settings").click()
    check(page)


def test_whoever_uses_the_keyboard_sees_where_they_are_and_reaches_every_run(open_page, runs):
    page = open_page(view(*runs))
    for part in ("plots", "samples", "settings"):
        page.goto(page.url.partition("#")[0] + f"#{part}")
        expect(page.locator(f"#{part}")).to_be_visible()
        assert hidden_focus(page, 40) == [], part
    page.get_by_role("link", name="Plots").click()
    box = page.get_by_label("show short")
    # A hidden box takes no focus, and a key does not wait for it.
    expect(box).to_be_visible()
    box.press("Space")
    expect(box).not_to_be_checked()
    expect(box).to_be_focused()
