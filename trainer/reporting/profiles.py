"""Profiles of a few steps (PROFILE_STEPS): traces of trainer and engines, GPU memory, a timeline of phases and groups.

All are files that Perfetto (ui.perfetto.dev) or, for the snapshot, pytorch.org/memory_viz shows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson
import torch
from torch.profiler import ProfilerActivity, profile

from services.core.errors import DependencyLostError
from services.core.logs import get_logger
from services.core.tasks import TIMELINE
from trainer.config import TrainerSettings
from trainer.config.sections import steps_of

log = get_logger(__name__)

DIRECTORY = "profile"
"""The directory of a run directory with its profiles."""
ALLOCATIONS = 200_000
"""Most allocations that the snapshot of the GPU's memory has, the newest."""


AskEngines = Callable[[str, Callable[[Any], Awaitable[None]]], None]
"""Asks every engine of a run for what the first argument names; see ServiceCalls.ask_engines."""


class StepProfile:
    """The recorder of the steps of PROFILE_STEPS, in the process of rank 0, and of what the engines do meanwhile."""

    def __init__(self, settings: TrainerSettings, device: torch.device, ask_engines: AskEngines) -> None:
        """Make a recorder of the steps of PROFILE_STEPS on this rank's device."""
        self._steps = steps_of(settings.profile_steps)
        self._root = settings.run_dir / DIRECTORY
        self._on_gpu = device.type == "cuda"
        self._ask_engines = ask_engines
        self._directory = self._root
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Begin to record, if ``step`` is one of the steps and nothing is recorded yet."""
        if step not in self._steps or self._profile is not None:
            return
        self._directory = self._root / f"from-step-{step}"
        with _logged("the engines are not profiled"):
            self._ask_engines("record a profile", lambda engine: engine.begin_profile(self._directory))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        TIMELINE.begin()

    def end(self, step: int) -> None:
        """Write the files after the last of the steps."""
        if self._profile is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the files of what has been recorded; a full disk or a lost engine costs its profile and not the run."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        events = TIMELINE.end()
        with _logged("the engines' profiles are not written"):
            self._ask_engines("write its profile", lambda engine: engine.end_profile())
        with _logged("the profile is not written"):
            self._directory.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._directory / "trace.json.gz"))
            (self._directory / "timeline.json").write_bytes(orjson.dumps({"traceEvents": events}))
            if self._on_gpu:
                torch.cuda.memory._dump_snapshot(str(self._directory / "memory.pickle"))
            log.info("profile written", directory=str(self._directory))
        if self._on_gpu:
            with suppress(RuntimeError):
                torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log what a full disk or a lost service costs."""
    try:
        yield
    except (OSError, DependencyLostError) as error:
        log.error(what, reason=str(error))
