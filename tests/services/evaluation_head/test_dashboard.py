"""The dashboard in a real browser: no console errors, numbers that move, a button that discovers, and it reconnects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect
from pydantic import SecretStr

from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head import discovery
from services.evaluation_head.discovery import servers_at
from tests.browser import PHONE, chromium, hidden_focus, is_wider_than_window, violations_of
from tests.services.evaluation_head.policies import publish_wobbles
from tests.services.run_page.conftest import chrome, open_page, serve
from tests.services.run_page.serving import served, served_ready
from tests.waiting import IDLE_SECONDS

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here; install it or name it in CHROMIUM")
__all__ = ["chrome", "open_page", "serve"]
HOSTILE = "<img src=x onerror='window.hacked = 1'>"


def test_numbers_move_while_the_head_plays_on_what_the_button_discovers(
    open_page: Any, head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["http://127.0.0.1:9"]
    monkeypatch.setattr(discovery, "servers_at", lambda _urls: servers_at(addresses))
    publish_wobbles(tmp_path)
    settings = {"head_policies": f"wobbles={tmp_path}", "head_drive_episodes": 4, "INTERVAL_SECONDS": 3600}
    with (
        served(create_environment_app(EnvironmentSettings())) as environment,
        served(head(game_server_addresses="replaced:1", **settings)) as url,
    ):
        page = open_page(url, "/dashboard", expected_problems="ERR_CONNECTION|WebSocket")
        expect(page.locator("#state")).to_have_text("live")
        away = page.locator("#servers [data-name='127.0.0.1:9']")
        expect(away).to_contain_text("unreachable")
        expect(away.locator("td").first.locator(".note")).to_contain_text("did not answer")
        addresses[:] = [environment]
        page.get_by_role("button", name="Discover").click()
        expect(page.locator("#discovered")).to_contain_text(environment)
        expect(page.locator("#discovery")).to_contain_text("looked")

        row = page.locator(f"#servers [data-name='{environment.removeprefix('http://')}']")
        # The state is a badge inside its cell; the cell itself has no style of its own.
        expect(row.locator("td span.pill.good")).to_have_text("connected")
        expect(page.locator("td.pill")).to_have_count(0)
        expect(row).to_contain_text("driven")
        expect(row).to_contain_text("CartPole-v1")

        def tile(name: str) -> Any:
            return page.locator(f"#tiles [data-name='{name}'] b")

        expect(tile("active episodes")).to_have_text("4")
        expect(tile("mean return")).to_have_text(re.compile(r"\d"))
        expect(tile("states a second")).not_to_have_text("0")
        finished = page.locator("#tiles [data-name='active episodes'] dd span")
        expect(finished).not_to_have_text(finished.inner_text())
        for plot in ("rates", "batch", "active", "returns"):
            expect(page.locator(f"#plot-{plot} canvas.top")).to_have_attribute("aria-label", re.compile(r"\d"))
        expect(page).to_have_title(re.compile(r"states/s"))
        assert not is_wider_than_window(page)
        # The whole table is there, without scrolling, and a plot without values is not.
        assert page.evaluate(
            "document.querySelector('#servers').offsetWidth <= document.querySelector('.scroll').clientWidth"
        )
        expect(page.locator("#plot-latency")).to_be_hidden()
        reply = httpx.post(f"{url}/evaluate", json={"state": [0, 0, 0, 0]}, trust_env=False, timeout=IDLE_SECONDS)
        assert reply.status_code == 200
        expect(page.locator("#plot-latency canvas.top")).to_have_attribute("aria-label", re.compile(r"median [\d.]"))
    expect(page.locator("#state")).to_have_text("no connection")
    expect(page.locator("#trouble")).to_contain_text("connecting again")
    with served(head(), port=urlsplit(url).port):
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#trouble")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_dashboard_asks_for_the_token_fits_a_phone_is_accessible_and_shows_text_as_text(
    open_page: Any, head: Any, scheme: str
) -> None:
    with served_ready(head(jobgroup_token=SecretStr("secret"))) as url:
        headers = {"Authorization": "Bearer secret"}
        report = {"server": "a-server-with-a-rather-long-name/1", "environment": "x" * 100, "state": [0, 0]}
        for name, status in ((report["server"], 200), (HOSTILE, 422)):
            body = {**report, "server": name}
            reply = httpx.post(f"{url}/evaluate", json=body, headers=headers, timeout=IDLE_SECONDS, trust_env=False)
            assert reply.status_code == status
        page = open_page(url, "/dashboard", viewport=PHONE, has_touch=True, is_mobile=True, color_scheme=scheme)
        page.get_by_label("JOBGROUP_TOKEN").fill("wrong")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#token-refused")).to_be_visible()
        assert violations_of(page) == []
        page.get_by_label("JOBGROUP_TOKEN").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("live")
        page.reload()
        expect(page.locator("#servers")).to_contain_text("a-server-with-a-rather-long-name/1")
        assert not is_wider_than_window(page)
        assert page.evaluate("window.hacked") is None
        assert violations_of(page) == []
        assert hidden_focus(page, 8) == []
