"""The display of an evaluation under way: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from evaluation.evaluation import Progress
from evaluation.servers import ServerPool

LINE_SECONDS = 10.0


class View:
    """The progress of one model's evaluation. A context manager."""

    def __init__(self, console: Console, name: str, pool: ServerPool) -> None:
        self._console = console
        self._name = name
        self._pool = pool
        self._printed = float("-inf")
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, figures="", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Show the progress; plain lines appear at the start, at the end and every LINE_SECONDS."""
        figures = self._figures(progress)
        self._bar.update(self._task, completed=progress.done, total=progress.total, figures=figures)
        is_last = progress.done + progress.left_out.total() >= progress.total
        if self._bar.disable and (is_last or time.monotonic() - self._printed >= LINE_SECONDS):
            self._printed = time.monotonic()
            self._console.print(f"{self._name}  {progress.done}/{progress.total} samples  {figures}")

    def _figures(self, progress: Progress) -> str:
        servers = len(self._pool.servers)
        parts = [f"right {progress.correct / progress.greedy:.3f}"] if progress.greedy else []
        if progress.fresh:
            parts.append(f"{progress.tokens / progress.seconds:.0f} tokens/s")
        parts.append(f"{len(self._pool.alive)} of {servers} server{'' if servers == 1 else 's'}")
        if progress.left_out:
            parts.append(f"{progress.left_out.total()} left out")
        return "  ".join(parts)
