"""Headless Chromium for the tests of the page."""

import re
from contextlib import ExitStack

import pytest
from playwright.sync_api import expect

from tests.browser import DESKTOP, browser, problems_of
from tests.services.run_page.serving import served
from tests.waiting import IDLE_SECONDS

expect.set_options(timeout=1000 * IDLE_SECONDS)


@pytest.fixture(scope="module")
def chrome():
    with browser() as running:
        yield running


@pytest.fixture
def serve():
    """``serve(app)`` gives the URL of an application that is served until the test is over."""
    with ExitStack() as stack:
        yield lambda app: stack.enter_context(served(app))


@pytest.fixture
def open_page(chrome, serve):
    """``open_page(app or URL, **options of the window)``; the test fails of errors that the page did not expect."""
    windows = []

    def open_(app, part="", *, expected_problems="", **options):
        window = chrome.new_context(**{"viewport": DESKTOP, **options})
        page = window.new_page()
        page.set_default_timeout(1000 * IDLE_SECONDS)
        windows.append((window, problems_of(page), expected_problems))
        page.goto((app if isinstance(app, str) else serve(app)) + part)
        return page

    yield open_
    for window, problems, expected in windows:
        window.close()
        assert [problem for problem in problems if not (expected and re.search(expected, problem))] == []
