"""The dashboard in a real browser: no console errors, numbers that move, a button that discovers, and it reconnects."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect
from pydantic import SecretStr

from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head import head as head_module
from services.evaluation_head.head import servers_at
from tests.browser import (
    DESKTOP,
    PHONE,
    browser,
    chromium,
    hidden_focus,
    is_wider_than_window,
    problems_of,
    violations_of,
)
from tests.services.evaluation_head.policies import publish_wobbles
from tests.services.run_page.serving import served, served_ready
from tests.waiting import IDLE_SECONDS

expect.set_options(timeout=1000 * IDLE_SECONDS)
needs_browser = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def open_page(chrome: Any) -> Iterator[Any]:
    windows = []

    def open_(url: str, *, expected_problems: str = "", **options: Any) -> Any:
        window = chrome.new_context(**{"viewport": DESKTOP, **options})
        page = window.new_page()
        page.set_default_timeout(1000 * IDLE_SECONDS)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        windows.append((window, problems_of(page), expected_problems, requests, url))
        page.goto(f"{url}/dashboard")
        return page

    yield open_
    for window, problems, expected, requests, url in windows:
        window.close()
        assert [p for p in problems if not (expected and re.search(expected, p))] == []
        assert [r for r in requests if not r.startswith((url, url.replace("http", "ws"), "data:"))] == []


@pytest.fixture
def play(head: Any, tmp_path: Path) -> Iterator[Callable[..., tuple[str, str]]]:
    """``play()``: start a head and an environment server that it plays on, and return their URLs."""
    publish_wobbles(tmp_path)
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> tuple[str, str]:
            environment = stack.enter_context(served(create_environment_app(EnvironmentSettings())))
            settings = {"head_policies": f"wobbles={tmp_path}", "game_server_addresses": environment, **options}
            return stack.enter_context(served(head(**settings))), environment

        yield start


def tile(page: Any, name: str) -> Any:
    return page.locator(f"#tiles [data-name='{name}'] b")


@needs_browser
def test_numbers_move_while_the_head_plays(open_page: Any, play: Any) -> None:
    url, environment = play(head_drive_episodes=4)
    page = open_page(url)
    expect(page.locator("#state")).to_have_text("live")
    row = page.locator(f"#servers [data-name='{environment.removeprefix('http://')}']")
    expect(row).to_contain_text("connected")
    expect(row).to_contain_text("driven")
    expect(row).to_contain_text("CartPole-v1")
    # The cores that the server uses, and its memory.
    expect(row).to_contain_text(re.compile(r"\d\.\d\d[\d.]+[MG]B"))
    expect(tile(page, "active episodes")).to_have_text("4")
    expect(tile(page, "mean return")).to_have_text(re.compile(r"\d"))
    expect(tile(page, "states a second")).not_to_have_text("0")
    finished = page.locator("#tiles [data-name='active episodes'] dd span")
    before = finished.inner_text()
    expect(finished).not_to_have_text(before)
    for plot in ("rates", "batch", "active", "returns"):
        expect(page.locator(f"#plot-{plot} canvas.top")).to_have_attribute("aria-label", re.compile(r"\d"))
    expect(page).to_have_title(re.compile(r"states/s"))
    # The state is a badge inside its cell; the cell itself has no style of its own.
    expect(row.locator("td span.pill.good")).to_have_text("connected")
    expect(page.locator("td.pill")).to_have_count(0)
    assert not is_wider_than_window(page)
    # The whole table is there, without scrolling, and a plot without values is not.
    assert page.evaluate(
        "document.querySelector('#servers').offsetWidth <= document.querySelector('.scroll').clientWidth"
    )
    expect(page.locator("#plot-latency")).to_be_hidden()
    assert httpx.post(f"{url}/evaluate", json={"state": [0, 0, 0, 0]}, trust_env=False, timeout=60).status_code == 200
    expect(page.locator("#plot-latency canvas.top")).to_have_attribute("aria-label", re.compile(r"median [\d.]"))


@needs_browser
def test_the_table_says_why_a_server_is_not_there_below_its_name(open_page: Any, head: Any) -> None:
    with served(head(game_server_addresses="127.0.0.1:9")) as url:
        row = open_page(url).locator("#servers [data-name='127.0.0.1:9']")
        expect(row).to_contain_text("unreachable")
        expect(row.locator("td").first.locator(".note")).to_contain_text("did not answer")


@needs_browser
def test_the_discover_button_finds_new_servers(open_page: Any, head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(head_module, "servers_at", lambda _urls: servers_at(addresses))
    with (
        served(create_environment_app(EnvironmentSettings())) as environment,
        served(head(game_server_addresses="replaced:1", INTERVAL_SECONDS=3600)) as url,
    ):
        page = open_page(url)
        expect(page.locator("#discovered")).to_contain_text("None found.")
        addresses.append(environment)
        page.get_by_role("button", name="Discover").click()
        expect(page.locator("#discovered")).to_contain_text(environment)
        expect(page.locator("#discovery")).to_contain_text("looked")
        expect(page.locator("#servers")).to_contain_text("connected")


@needs_browser
def test_the_dashboard_reconnects_by_itself(open_page: Any, head: Any) -> None:
    with served(head()) as url:
        page = open_page(url, expected_problems="ERR_CONNECTION|WebSocket")
        expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#state")).to_have_text("no connection")
    expect(page.locator("#trouble")).to_contain_text("connecting again")
    with served(head(), port=urlsplit(url).port):
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#trouble")).to_be_hidden()


@needs_browser
def test_the_token_is_asked_for_once(open_page: Any, head: Any) -> None:
    with served(head(jobgroup_token=SecretStr("secret"))) as url:
        page = open_page(url)
        page.get_by_label("JOBGROUP_TOKEN").fill("wrong")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#token-refused")).to_be_visible()
        page.get_by_label("JOBGROUP_TOKEN").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("live")
        page.get_by_role("button", name="Discover").click()
        expect(page.locator("#discovery")).to_contain_text("looked")
        page.reload()
        expect(page.locator("#state")).to_have_text("live")


HOSTILE = "<img src=x onerror='window.hacked = 1'>"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_dashboard_fits_a_phone_is_accessible_and_shows_text_as_text(
    open_page: Any, head: Any, scheme: str
) -> None:
    with served_ready(head()) as url:
        report = {"server": "a-server-with-a-rather-long-name/1", "environment": "x" * 100, "state": [0, 0]}
        assert httpx.post(f"{url}/evaluate", json=report, timeout=IDLE_SECONDS, trust_env=False).status_code == 200
        odd = httpx.post(f"{url}/evaluate", json={**report, "server": HOSTILE}, timeout=IDLE_SECONDS, trust_env=False)
        assert odd.status_code == 422
        page = open_page(url, viewport=PHONE, has_touch=True, is_mobile=True, color_scheme=scheme)
        expect(page.locator("#servers")).to_contain_text("a-server-with-a-rather-long-name/1")
        assert not is_wider_than_window(page)
        assert page.evaluate("window.hacked") is None
        assert violations_of(page) == []
        assert hidden_focus(page, 8) == []
