"""The settings of boxes, for the services that run code."""

from __future__ import annotations

import sys
from functools import cached_property

from services.core.settings import Settings
from services.sandbox.backends import BackendName, Interpreter


class SandboxSettings(Settings):
    """The isolation of code, and the Python that it runs on."""

    sandbox: BackendName = BackendName.AUTO
    """The isolation of code from the machine: `bwrap` (bubblewrap), `landlock` (Landlock and seccomp, which default
    containers allow too) or `seatbelt` (macOS). `auto` takes the first of bwrap and landlock that keeps every attack of
    its check at the start; docs/security.md."""
    sandbox_python: str | None = None
    """The Python (3.11 or newer) that runs code, whose packages code can import; unset: the service's own.
    [advanced]"""

    @cached_property
    def interpreter(self) -> Interpreter:
        """The Python with its directories; ConfigurationError where it cannot be used."""
        return Interpreter.find(self.sandbox_python or sys.executable)
