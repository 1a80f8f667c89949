"""Headless Chromium for the tests of pages and for screenshots."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, sync_playwright

PHONE = {"width": 360, "height": 812}
DESKTOP = {"width": 1280, "height": 900}


def chromium() -> str | None:
    """Return the path of Chromium or Chrome, from CHROMIUM or the PATH; None if none is installed.

    The headless shell takes two thirds of the whole browser's processor time.
    """
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser that ends with the context."""
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work in containers, and it opens only our own pages.
        running = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


def problems_of(page: Page) -> list[str]:
    """Return a list that collects the page's console errors, uncaught exceptions and failed requests."""
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(f"{request.url}: {request.failure}"))
    return problems


def is_wider_than_window(page: Page) -> bool:
    """Return whether the whole page scrolls sideways, which it never should."""
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def violations_of(page: Page) -> list[str]:
    """Return the rules of accessibility that the page breaks, as axe-core finds them, with the elements."""
    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {', '.join(node['html'][:120] for node in rule['nodes'])}" for rule in found]


def hidden_focus(page: Page, presses: int) -> list[str]:
    """Press the Tab key and return the elements that had the focus without an outline to show it."""
    hidden: list[str] = []
    for _ in range(presses):
        page.keyboard.press("Tab")
        hidden += page.evaluate(
            """() => {
                const element = document.activeElement;
                const { outlineStyle, outlineWidth } = getComputedStyle(element);
                const isShown = outlineStyle !== "none" && parseFloat(outlineWidth) > 0;
                return isShown || element === document.body ? [] : [element.outerHTML.slice(0, 120)];
            }"""
        )
    return hidden


def screenshot(page: Page, path: Path) -> None:
    """Write a screenshot of the window."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(path))


def contrast(element: Locator) -> float:
    """Return the contrast between an element's text and what is behind it, as WCAG 2.1 counts it."""
    found: float = element.evaluate(
        """element => {
            const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const over = (colour, below) => {
                canvas.fillStyle = below; canvas.fillRect(0, 0, 1, 1);
                canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
                return `rgb(${r} ${g} ${b})`;
            };
            const parents = [];
            for (let e = element; e; e = e.parentElement) parents.unshift(getComputedStyle(e).backgroundColor);
            const background = parents.reduce((below, colour) => over(colour, below), "white");
            const luminance = (colour) => {
                over(colour, background);
                const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => {
                    const c = v / 255;
                    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const [a, b] = [luminance(getComputedStyle(element).color), luminance(background)].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05);
        }"""
    )
    return found
