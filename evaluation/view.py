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

    def __init__(self, console: Console, name: str, pool: ServerPool, *, live: bool) -> None:
        self._console = console
        self._name = name
        self._pool = pool
        self._printed = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, TextColumn("{task.fields[figures]}"), console=console) if live else None
        self._task = self._bar.add_task(name, figures="", total=None) if self._bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Show the progress; plain lines appear at the start, at the end and every LINE_SECONDS."""
        figures = self._figures(progress)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress.done, total=progress.total, figures=figures)
            return
        is_first_or_last = not progress.fresh or progress.done + progress.left_out.total() >= progress.total
        if is_first_or_last or time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            line = f"{self._name}  {progress.done}/{progress.total} samples  {figures}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _figures(self, progress: Progress) -> str:
        servers = len(self._pool.servers)
        parts = [f"right {progress.correct / progress.greedy:.3f}"] if progress.greedy else []
        if progress.fresh:
            parts.append(f"{progress.tokens / progress.seconds:.0f} tokens/s")
        parts.append(f"{len(self._pool.alive)} of {servers} server{'' if servers == 1 else 's'}")
        if progress.left_out:
            parts.append(f"{progress.left_out.total()} left out")
        return "  ".join(parts)
