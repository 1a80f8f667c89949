"""Errors that end a component, and the exit codes that SkyPilot's ``job_recovery`` reads."""

from __future__ import annotations

EXIT_RECOVERABLE = 33
"""A dependency was lost; a restart may cure it. Listed in ``recover_on_exit_codes`` of every task."""

EXIT_CONFIGURATION = 78
"""A setting, dataset or model cannot be had; a restart would fail alike. sysexits.h calls it EX_CONFIG."""


class ConfigurationError(Exception):
    """A setting, dataset or model that cannot be had. The message says what, where and what to do."""


class DependencyLostError(Exception):
    """A service did not answer within its deadline, retries included. The message names it and the last error."""
