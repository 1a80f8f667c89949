"""Take the picture of docs/evaluation_head.md: ``python -m tests.services.evaluation_head.dashboard_screenshot FILE``.

The head plays on two servers, a third server pushes, and nothing listens at a fourth address.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import expect

from services.environment_server.app import create_app as create_environment_app
from services.environment_server.settings import EnvironmentSettings
from services.evaluation_head.app import create_app
from services.evaluation_head.settings import HeadSettings
from tests.browser import browser, screenshot
from tests.ports import free_port
from tests.services.evaluation_head.policies import publish_lean, publish_wobbles
from tests.services.run_page.serving import served
from tests.waiting import IDLE_SECONDS

PLAYING_SECONDS = 45
WINDOW = {"width": 1280, "height": 1480}


def main(target: Path) -> None:
    """Play for a while, then write the picture."""
    with contextlib.ExitStack() as stack:
        # The page shows paths of policies, which must not be those of this machine.
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        directory = Path("policies")
        publish_wobbles(directory / "cartpole", version=3)
        publish_lean(directory / "careful", version=12)
        port = free_port()

        def serve(name: str, **options: object) -> str:
            settings = EnvironmentSettings(environment_server_name=name, **options)
            return stack.enter_context(served(create_environment_app(settings)))

        driven = [serve(f"game-server-{number}") for number in (1, 2)]
        head = create_app(
            HeadSettings(
                head_policies=f"cartpole={directory / 'cartpole'} careful={directory / 'careful'}",
                game_server_addresses=" ".join([*driven, f"127.0.0.1:{free_port()}"]),
            )
        )
        url = stack.enter_context(served(head, port))
        serve("laptop", eval_head_endpoint=url)
        page = stack.enter_context(browser()).new_page(viewport=WINDOW)
        page.goto(f"{url}/dashboard")
        expect(page.locator("#state")).to_have_text("live", timeout=1000 * IDLE_SECONDS)
        time.sleep(PLAYING_SECONDS)
        screenshot(page, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
