"""Looks at the run page of a run under way, on a desk and on a phone, until its numbers and plots have moved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from playwright.sync_api import Page, expect

from tests.browser import DESKTOP, PHONE, browser, is_wider_than_window, problems_of, screenshot
from tests.e2e.system import System
from tests.waiting import IDLE_SECONDS, Deadline

PLOT = "#plot-reward"
HELD = "ppo-trainer-1"


@dataclass(frozen=True)
class Sight:
    """What the page showed at one moment: the step, the reward plot in words and as a picture, who is healthy."""

    step: int
    plot: str
    picture: str


@dataclass(frozen=True)
class Watch:
    """What was seen of a page: two moments of it, the components, and what was wrong."""

    first: Sight
    later: Sight
    healthy: set[str]
    cursor: str
    """Where the keyboard has put the cursor of the plots: Home, then one step on."""
    accuracy: str
    """The first point of the accuracy plot in words."""
    phone_is_wide: bool
    problems: list[str]


def watch(system: System) -> Watch:
    """Opens the page once the first step is done, and closes it when the page has moved on.

    The run is held while the page is looked at, so that it cannot end before all is seen: the second trainer node,
    without which there is no step, stands still.
    """
    with browser() as chrome:
        desk = chrome.new_page(viewport=DESKTOP)
        phone = chrome.new_page(viewport=PHONE, has_touch=True, is_mobile=True)
        problems = [problems_of(page) for page in (desk, phone)]
        # Not before: a browser may take longer to start than the run's steps.
        system.wait_for_step(1)
        url = f"http://{system.nodes.endpoints['ppo-trainer-0:8004']}"
        with system.held(HELD):
            for page in (desk, phone):
                page.set_default_timeout(1000 * IDLE_SECONDS)
                page.goto(url)
            first = later = look(desk)
        system.wait_for_step(first.step + 1)
        with system.held(HELD):
            deadline = Deadline("a page that moves", progress=partial(look, desk))
            while later.step == first.step or later.plot == first.plot or later.picture == first.picture:
                deadline.check()
                desk.wait_for_timeout(200)
                later = look(desk)
            screenshot(desk, system.run_dir.parent / "run-page.png")
            look(phone)
            screenshot(phone, system.run_dir.parent / "run-page-phone.png")
            is_wide = is_wider_than_window(phone)
            cursor = walk_by_keyboard(desk)
            desk.locator("#plot-accuracy canvas.top").press("Home")
            accuracy = desk.locator("#plot-accuracy .spoken").inner_text()
            desk.get_by_role("link", name="Components").click()
            expect(desk.locator(".component .pill.good")).to_have_count(7, timeout=1000 * IDLE_SECONDS)
            healthy = desk.locator(".component:has(.pill.good) strong").all_inner_texts()
        return Watch(first, later, set(healthy), cursor, accuracy, is_wide, [one for page in problems for one in page])


def look(page: Page) -> Sight:
    """What ``page`` shows at this moment."""
    expect(page.locator("#progress-text")).to_contain_text(re.compile(r"step \d+ of"), timeout=1000 * IDLE_SECONDS)
    step = re.search(r"step (\d+) of", page.locator("#progress-text").inner_text())
    assert step is not None
    plot = page.locator(f"{PLOT} canvas.top").get_attribute("aria-label") or ""
    picture = page.locator(f"{PLOT} canvas").first.evaluate("canvas => canvas.toDataURL()")
    return Sight(int(step[1]), plot, picture)


def walk_by_keyboard(page: Page) -> str:
    """Goes to the reward plot, to its first step and one further, by keys alone; returns what the page says of it."""
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.closest('{PLOT}') !== null"):
            break
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    return page.locator("#cursor").inner_text()
