"""The page breaks no rule of axe-core, in light and dark, and the keyboard's focus is always visible."""

import pytest
from playwright.sync_api import expect

from tests.browser import PHONE, chromium, hidden_focus, violations_of
from tests.services.run_page.runs import append, episodes, group, write_run
from tests.services.run_page.serving import view
from tests.services.run_page.test_first_look import WAITING, failed, started
from tests.services.run_page.test_page import NOW, live

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")
both = pytest.mark.parametrize("scheme", ["light", "dark"])


@pytest.fixture
def run(tmp_path):
    """A run with completions, episodes and a prompt that was sampled twice."""
    path = write_run(tmp_path / "run", 40, reward_fn="exact_match")
    append(path / "samples.jsonl", group(41, 7, rewards=[0.0, None]) + group(42, 7, rewards=[1.0]) + episodes(43, 9))
    return path


@both
def test_every_part_of_a_runs_page_is_accessible(open_page, run, scheme):
    page = open_page(view(run), color_scheme=scheme)
    canvas = page.locator("#plot-reward canvas.top")
    expect(canvas).to_be_visible()
    page.locator("#plot-reward-parts .legend button").first.click()
    page.get_by_text("Further metrics").click()
    canvas.press("End")
    expect(page.locator("#plot-reward .tip")).to_be_visible()
    assert violations_of(page) == []
    page.locator("#constant > summary").click()
    expect(page.locator("#plot-learning-rate")).to_be_visible()
    assert violations_of(page) == []
    page.get_by_role("link", name="Settings").click()
    expect(page.locator("#settings")).to_contain_text("REWARD_FN")
    assert violations_of(page) == []
    page.get_by_role("link", name="Samples").click()
    assert violations_of(page) == []
    page.get_by_role("button", name="Show all groups").click()
    page.get_by_placeholder("in prompts").fill("plus")
    expect(page.locator("mark").first).to_be_visible()
    assert violations_of(page) == []
    page.get_by_role("button", name="Follow this prompt (3 groups)").first.click()
    expect(page.locator("#followed section.step")).to_have_count(3)
    assert violations_of(page) == []


@both
def test_an_episode_is_accessible(open_page, run, scheme):
    page = open_page(view(run), "/#samples", color_scheme=scheme)
    page.get_by_role("button", name="Show all groups").click()
    page.get_by_role("button", name="Whole conversation").first.click()
    expect(page.locator("#reader .message").first).to_be_visible()
    assert violations_of(page) == []
    page.get_by_role("button", name="Tokens").click()
    expect(page.locator(".tokens")).to_be_visible()
    page.locator(".tokens").press("End")
    assert violations_of(page) == []


@both
def test_a_run_under_way_is_accessible(open_page, tmp_path, scheme):
    run = write_run(tmp_path / "run", 3, ended=False)
    (run / "summary.json").write_text("{")
    page = open_page(live(run, NOW), "/#components", color_scheme=scheme)
    expect(page.locator("#damage")).to_contain_text("summary.json")
    expect(page.locator("[data-name=reward-server]")).to_be_visible()
    assert violations_of(page) == []


@both
def test_a_comparison_is_accessible(open_page, tmp_path, run, scheme):
    other = write_run(tmp_path / "other", 30, seed=2)
    (other / "config.json").write_text("{")
    page = open_page(view(run, other), color_scheme=scheme)
    expect(page.locator("#plot-reward canvas.top")).to_be_visible()
    page.get_by_role("button", name="steps", exact=True).click()
    page.get_by_label("show other").uncheck()
    assert violations_of(page) == []
    page.get_by_role("link", name="Settings").click()
    assert violations_of(page) == []


@both
def test_a_run_without_a_step_is_accessible(open_page, tmp_path, scheme):
    page = open_page(live(started(tmp_path), WAITING), color_scheme=scheme)
    expect(page.locator(".waiting")).to_be_visible()
    assert violations_of(page) == []
    page = open_page(view(failed(tmp_path / "failed")), color_scheme=scheme)
    expect(page.locator("#error")).to_be_visible()
    assert violations_of(page) == []


def test_the_token_form_is_accessible(open_page, run):
    page = open_page(view(run, token="secret"), expected_problems="401")
    page.get_by_label("JOBGROUP_TOKEN").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#token-refused")).to_be_visible()
    assert violations_of(page) == []


@pytest.mark.parametrize("part", ["plots", "samples", "settings"])
def test_whoever_uses_the_keyboard_sees_where_they_are(open_page, tmp_path, run, part):
    other = write_run(tmp_path / "other", 30, seed=2)
    page = open_page(view(run, other), f"/#{part}")
    expect(page.locator(f"#{part}")).to_be_visible()
    assert hidden_focus(page, 40) == []


def test_a_comparison_is_used_by_keyboard_alone(open_page, tmp_path, run):
    page = open_page(view(run, write_run(tmp_path / "other", 30, seed=2)), viewport=PHONE)
    expect(page.locator("#plot-reward canvas.top")).to_be_visible()
    page.get_by_label("Filter").focus()
    page.keyboard.type("oth")
    expect(page.locator(".runs tbody tr")).to_have_count(1)
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent"))
    assert reached[:3] == ["runs", "show all listed runs", "run"]
    assert {"show run", "show other"} <= set(reached)
    box = page.get_by_label("show other")
    box.press("Space")
    expect(box).not_to_be_checked()
    expect(box).to_be_focused()
