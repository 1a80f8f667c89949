"""What a person sees while an evaluation runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from evaluation.evaluation import Progress
from evaluation.servers import ServerPool

LINE_SECONDS = 10.0


class View:
    """Shows one model's progress. A context manager."""

    def __init__(self, console: Console, name: str, pool: ServerPool, *, live: bool) -> None:
        self._console = console
        self._name = name
        self._pool = pool
        self._said = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, TextColumn("{task.fields[told]}"), console=console) if live else None
        self._task = self._bar.add_task(name, told="", total=None) if self._bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Shows where it stands; plain lines come at the start, at the end and every few seconds."""
        told = self._told(progress)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress.done, total=progress.total, told=told)
            return
        is_edge = not progress.fresh or progress.done + sum(progress.left_out.values()) >= progress.total
        if is_edge or time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            line = f"{self._name}  {progress.done}/{progress.total} samples  {told}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _told(self, progress: Progress) -> str:
        servers = len(self._pool.servers)
        parts = [f"right {progress.correct / progress.greedy:.3f}"] if progress.greedy else []
        if progress.fresh:
            parts.append(f"{progress.tokens / progress.seconds:.0f} tokens/s")
        parts.append(f"{len(self._pool.alive)} of {servers} server{'' if servers == 1 else 's'}")
        if progress.left_out:
            parts.append(f"{sum(progress.left_out.values())} left out")
        return "  ".join(parts)
