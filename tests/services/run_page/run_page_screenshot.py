"""Takes the README's picture: ``python -m tests.services.run_page.run_page_screenshot RUN_DIR docs/run_page.png``."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect

from scripts.view import create_view_app
from services.core.settings import Settings
from services.run_page.directory import Run
from tests.browser import DESKTOP, browser, screenshot
from tests.services.run_page.serving import served


def main(run: Path, target: Path) -> None:
    """Opens the page over ``run`` and writes what a window shows of it to ``target``."""
    app = create_view_app(Settings(), [Run(run)])
    with served(app) as url, browser() as chrome:
        page = chrome.new_page(viewport=DESKTOP)
        page.goto(url)
        expect(page.locator("#plot-reward canvas.top")).to_be_visible()
        page.locator("#plot-reward canvas.top").press("End")
        screenshot(page, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
