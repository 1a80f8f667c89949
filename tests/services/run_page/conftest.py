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
    """``open_page(app or URL, path, **options of the window)``.

    The test fails of errors that the page did not expect and of requests to other servers.
    """
    windows = []

    def open_(app, part="", *, expected_problems="", **options):
        window = chrome.new_context(**{"viewport": DESKTOP, **options})
        page = window.new_page()
        page.set_default_timeout(1000 * IDLE_SECONDS)
        url = app if isinstance(app, str) else serve(app)
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        windows.append((window, problems_of(page), expected_problems, requests, url))
        page.goto(url + part)
        return page

    yield open_
    for window, problems, expected, requests, url in windows:
        window.close()
        here = (url, url.replace("http", "ws"), "data:", "blob:")
        assert [request for request in requests if not request.startswith(here)] == []
        assert [problem for problem in problems if not (expected and re.search(expected, problem))] == []
