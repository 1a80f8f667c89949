"""An episode on the page: one answer with its figures, its conversation, its branches and its tokens."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser import PHONE, chromium, contrast, is_wider_than_window
from tests.services.run_page.runs import append, episodes, group, metrics, write_run
from tests.services.run_page.serving import view

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")


@pytest.fixture
def run(tmp_path):
    """A run whose newest group is one of episodes."""
    path = write_run(tmp_path / "run", 3)
    append(path / "samples.jsonl", episodes(4, 99))
    return path


def samples(open_page, run, **options):
    """The page's samples, those of groups with equal rewards included."""
    page = open_page(view(run), "/#samples", **options)
    page.get_by_role("button", name="Show all groups").click()
    return page


def opened(page, place=0):
    """The dialog after a press on an episode's button."""
    page.locator("article.group").first.locator(".completion").nth(place).get_by_role("button").press("Enter")
    return page.locator("#reader")


def test_an_episode_of_several_branches_is_one_answer(open_page, run):
    page = samples(open_page, run)
    card = page.locator("article.group").first
    expect(card.locator(".completion")).to_have_count(2)
    expect(card.locator(".strip i")).to_have_count(2)
    expect(card.locator("header")).to_contain_text("mean reward 1")
    right, wrong = card.locator(".completion dl").all()
    expect(right).to_contain_text("turns3")
    expect(right).to_contain_text("tool calls1")
    expect(right).to_contain_text("branches1")
    expect(wrong).to_contain_text("tool calls1 (1 unreadable)")


def test_a_conversation_has_speakers_tool_calls_and_results(open_page, run):
    reader = opened(samples(open_page, run))
    messages = reader.locator(".message")
    expect(messages.locator("h3")).to_have_text(["User", "Model", "Result of calculate", "Model"])
    expect(messages.nth(1).locator(".call")).to_have_text(
        re.compile(r'calls calculate\s*{\s*"expression": "12\*31"\s*}')
    )
    expect(messages.nth(2).locator("pre")).to_have_text("372")
    expect(reader).to_contain_text("turns 3 · tool calls 1 · branches 1")


def test_a_branch_folds_away_what_it_shares(open_page, run):
    reader = opened(samples(open_page, run))
    branch = reader.get_by_role("button", name="Branch 1")
    branch.press("Enter")
    expect(branch).to_have_attribute("aria-pressed", "true")
    expect(branch).to_be_focused()
    expect(reader.locator("summary")).to_have_text("2 messages as in the main line")
    visible = reader.locator(".message:visible")
    expect(visible.locator("pre")).to_have_text(["You found 372. Answer with just the number.", "372"])
    reader.locator("summary").click()
    expect(visible).to_have_count(4)


def test_an_episode_opens_where_its_last_answer_is(open_page, run):
    first, second, wrong = episodes(5, 100)
    second["messages"][-1] = second["messages"][-1] | {"is_last": True}
    append(run / "samples.jsonl", [first, second, wrong])
    reader = opened(samples(open_page, run))
    expect(reader.get_by_role("button", name="Branch 1")).to_have_attribute("aria-pressed", "true")
    expect(reader.locator(".message:visible h3")).to_have_text(["User", "Model last answer"])
    reader.get_by_role("button", name="Main line").click()
    expect(reader.locator(".message h3")).to_have_text(["User", "Model", "Result of calculate", "Model"])


def test_tokens_are_coloured_by_mask_and_advantage_and_tell_their_numbers(open_page, run):
    page = samples(open_page, run)
    reader = opened(page)
    reader.get_by_role("button", name="Tokens").press("Enter")
    tokens = reader.locator(".tokens .token")
    expect(tokens).to_have_text(["<call>", "12", "*31", "It is", " 372."])
    looks = [tokens.nth(n).evaluate("e => [e.className, e.style.getPropertyValue('--strength')]") for n in range(4)]
    assert looks == [["token plus", "1"], ["token plus", "0.5"], ["token zero", ""], ["token plus", "0.5"]]
    expect(reader.locator(".tokens .context")).to_have_text(
        ["<user>What is 12*31?<assistant>", "<tool>372</tool><assistant>"]
    )
    expect(reader.locator(".tokens .version")).to_have_text(["version 3", "version 4"])
    told = reader.locator(".explanation")
    tokens.nth(2).hover()
    expect(told).to_contain_text("3 of 5 sampled tokens")
    reader.locator(".tokens").press("ArrowRight")
    expect(told).to_have_text(
        '4 of 5 sampled tokens: "It is", probability 0.779 (log -0.25), advantage 0.75, policy version 4'
    )
    reader.get_by_role("button", name="Branch 1").click()
    expect(tokens).to_have_text(["372"])
    page.keyboard.press("Escape")
    expect(reader).to_be_hidden()
    expect(page.get_by_role("button", name="Whole conversation").first).to_be_focused()


def test_a_failed_episode_says_why_and_has_tokens_without_advantage(open_page, run):
    page = samples(open_page, run)
    reader = opened(page, 1)
    expect(reader).to_contain_text("the verifier stumbled")
    reader.get_by_role("button", name="Tokens").click()
    expect(reader.locator(".tokens .untrained")).to_have_text(["Hm", "."])
    reader.locator(".tokens").press("End")
    expect(reader.locator(".explanation")).to_contain_text("not trained on")


def test_a_completion_has_its_tokens_and_one_without_them_no_button(open_page, run):
    spans = [{"version": 4, "tokens": ["99", "!"], "logprobs": [-0.1, -0.2], "advantages": -0.5}]
    append(run / "samples.jsonl", group(5, 8, rewards=[0.0], spans=spans) + group(5, 9, rewards=[1.0]))
    page = samples(open_page, run)
    cards = page.locator("article.group")
    expect(cards.nth(0).locator(".completion").get_by_role("button")).to_have_count(0)
    cards.nth(1).get_by_role("button", name="Its tokens").click()
    reader = page.locator("#reader")
    expect(reader.locator(".tokens .minus")).to_have_text(["99", "!"])
    expect(reader.locator("h2")).to_have_text("Completion 1 of group run-0-8, step 5")


def test_an_answer_beyond_the_tokens_that_a_step_writes_says_so(open_page, run):
    records = [{name: value for name, value in record.items() if name != "spans"} for record in episodes(6, 7)]
    append(run / "samples.jsonl", episodes(6, 7)[:1] + records[1:])
    reader = opened(samples(open_page, run))
    reader.get_by_role("button", name="Tokens").click()
    expect(reader.locator(".tokens")).to_be_visible()
    reader.get_by_role("button", name="Branch 1").click()
    expect(reader).to_contain_text("are not in the file")


def test_saved_samples_have_conversations_and_no_tokens(open_page, run):
    page = samples(open_page, run)
    page.get_by_placeholder("first").fill("4")
    expect(page.locator("article.group")).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save shown as JSONL").click()
    first, *_ = map(json.loads, download.value.path().read_text().splitlines())
    assert first["messages"][1]["tool_calls"][0]["name"] == "calculate"
    assert "spans" not in first


def test_what_models_and_tools_wrote_stays_text(open_page, run):
    hostile = "<img src=x onerror='window.hacked = 1'>"
    calls = [{"name": hostile, "arguments": hostile}]
    said = [{"role": hostile, "content": hostile}, {"role": "assistant", "sampled": True, "tool_calls": calls}]
    spans = [{"text": hostile}, {"version": 1, "tokens": [hostile], "logprobs": [-1], "advantages": 1}]
    append(run / "samples.jsonl", group(9, 9, rewards=[1.0], episode=0, messages=said, spans=spans))
    page = samples(open_page, run)
    reader = opened(page)
    expect(reader.locator(".message").first).to_contain_text(hostile)
    reader.get_by_role("button", name="Tokens").click()
    expect(reader.locator(".tokens .token")).to_have_text(hostile)
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_episode_is_readable_in_light_and_dark_and_fits_a_phone(open_page, run, scheme):
    page = samples(open_page, run, viewport=PHONE, has_touch=True, is_mobile=True, color_scheme=scheme)
    reader = opened(page)
    for selector in (".of-model h3", ".call", ".choices [aria-pressed=true]"):
        assert contrast(reader.locator(selector).first) >= 4.5, selector
    reader.get_by_role("button", name="Tokens").click()
    expect(reader.locator(".tokens")).to_be_visible()
    for kind in ("plus", "minus", "zero", "untrained", "context"):
        assert contrast(reader.locator(f".token-legend .{kind}")) >= 4.5, kind
    for selector in (".tokens .plus", ".tokens .context", ".version", ".explanation"):
        assert contrast(reader.locator(selector).first) >= 4.5, selector
    assert not is_wider_than_window(page)
    assert reader.bounding_box()["width"] <= PHONE["width"]


def test_turns_tool_calls_and_failures_are_plots(open_page, run):
    for step in (4, 5):
        told = {"turns_mean": 2.5, "turns_max": 4.0, "tool_calls_mean": 1.5, "tool_calls_parsed": 0.9}
        told |= {"branches_mean": 0.25, "episodes_failed": 2.0} | (
            {"episodes_failed_timeout": 2.0} if step == 4 else {}
        )
        append(run / "metrics.jsonl", [metrics(step) | told])
    page = open_page(view(run))
    page.locator("#constant > summary").click()
    said = {
        "turns": "step 5: mean 2.5, most 4.",
        "tool-calls": "step 5: tool calls 1.5, branches 0.25.",
        "parsed": "step 5: parsed 0.9.",
        "failed": "step 5: all 2, timeout 0.",
    }
    for plot, text in said.items():
        expect(page.locator(f"#plot-{plot} canvas.top")).to_have_attribute("aria-label", re.compile(re.escape(text)))
    page.locator("#plot-failed canvas.top").press("Home")
    expect(page.locator("#plot-failed .spoken")).to_have_text("step 4: all 2, timeout 2.")
