"""The logs of a run's nodes, in one view."""

import io

from rich.console import Console

from local_runner import logs
from services.run_page.directory import RUNNING, Run


def test_following_shows_nodes_that_start_later(tmp_path, monkeypatch):
    directory = tmp_path / "logs"

    def advance():
        directory.mkdir()
        (directory / "data-server-0.log").write_text("2026-01-01T00:00:01 one\n")
        yield RUNNING
        (directory / "ppo-trainer-0.log").write_text("2026-01-01T00:00:02 two\n")
        yield "succeeded"

    states = advance()
    monkeypatch.setattr(Run, "state", property(lambda _: next(states)))
    monkeypatch.setattr(logs, "POLL_SECONDS", 0)
    console = Console(file=io.StringIO(), width=100)
    logs.show(console, Run(tmp_path), [], last=None, follow=True)
    shown = console.file.getvalue().splitlines()
    assert shown == ["2026-01-01T00:00:01 one", "ppo-trainer-0 │ 2026-01-01T00:00:02 two"]
