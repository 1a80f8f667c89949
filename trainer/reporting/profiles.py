"""The profile of a few steps (PROFILE_STEPS): torch's trace, a snapshot of GPU memory, a timeline of phases and groups.

All are files that Perfetto (ui.perfetto.dev) or, for the snapshot, pytorch.org/memory_viz shows.
"""

from __future__ import annotations

from contextlib import suppress

import orjson
import torch
from torch.profiler import ProfilerActivity, profile

from services.core.logs import get_logger
from services.core.timeline import TIMELINE
from trainer.config import TrainerSettings
from trainer.config.sections import steps_of

log = get_logger(__name__)

DIRECTORY = "profile"
"""The directory of a run directory with its profiles."""
ALLOCATIONS = 200_000
"""Most allocations that the snapshot of the GPU's memory has, the newest."""


class StepProfile:
    """The recorder of the steps of PROFILE_STEPS, in the process of rank 0."""

    def __init__(self, settings: TrainerSettings, device: torch.device) -> None:
        self._steps = steps_of(settings.profile_steps)
        self._directory = settings.run_dir / DIRECTORY
        self._on_gpu = device.type == "cuda"
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Begin to record, if ``step`` is one of the steps and nothing is recorded yet."""
        if step not in self._steps or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        TIMELINE.begin()

    def end(self, step: int) -> None:
        """Write the files after the last of the steps."""
        if self._profile is not None and step + 1 not in self._steps:
            self.close(step)

    def close(self, step: int) -> None:
        """Write the files of what has been recorded, up to ``step``; a full disk costs the profile and not the run."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        events = TIMELINE.end()
        directory = self._directory / f"steps-{self._steps.start}-{step}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(directory / "trace.json.gz"))
            (directory / "timeline.json").write_bytes(orjson.dumps({"traceEvents": events}))
            if self._on_gpu:
                torch.cuda.memory._dump_snapshot(str(directory / "memory.pickle"))
        except OSError as error:
            log.error("the profile is not written", directory=str(directory), reason=str(error))
            return
        finally:
            if self._on_gpu:
                with suppress(RuntimeError):
                    torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profile written", directory=str(directory))
