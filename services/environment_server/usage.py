"""The processor cores and the memory that this process uses."""

from __future__ import annotations

import time

from prometheus_client import PROCESS_COLLECTOR

from services.protocol.evaluation import Usage


class UsageMeter:
    """A meter of this process's use, read once a second or less often."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        """The use between the last two readings; None before them, and on systems without /proc."""
        self._last = self._read()

    def update(self) -> None:
        """Read the counters again."""
        last, self._last = self._last, self._read()
        if last is not None and self._last is not None and self._last[0] > last[0]:
            cores = (self._last[1] - last[1]) / (self._last[0] - last[0])
            self.usage = Usage(cores=max(0.0, cores), memory_bytes=self._last[2])

    @staticmethod
    def _read() -> tuple[float, float, int] | None:
        """Return the time, the seconds of processor time so far, and the bytes of memory."""
        values = {sample.name: sample.value for metric in PROCESS_COLLECTOR.collect() for sample in metric.samples}
        if "process_cpu_seconds_total" not in values:
            return None
        return time.monotonic(), values["process_cpu_seconds_total"], int(values["process_resident_memory_bytes"])
