from __future__ import annotations

import functools
import subprocess
import sys

SPEAK = """
import logging
from services.core import logs
logs.configure("data-server", "info")
log = logs.get_logger("x")
log.info("loaded", rows=3, share=0.25, path="a b", nothing=None)
log.debug("unheard")
log.info("asked", path="/x\\n2026 error data-server: forged")
logging.getLogger("uvicorn.error").warning("from %s", "uvicorn")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


@functools.cache
def spoken() -> list[str]:
    process = subprocess.run([sys.executable, "-c", SPEAK], env={}, capture_output=True, text=True, check=True)
    assert process.stdout == ""
    return process.stderr.splitlines()


def test_a_line_has_time_level_component_event_and_fields() -> None:
    lines = spoken()
    assert lines[0].endswith("Z info data-server: loaded rows=3 share=0.25 path='a b'")
    assert lines[2].endswith("warning data-server: from uvicorn")
    assert lines[3].endswith("error data-server: failed")
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_value_cannot_forge_a_line() -> None:
    assert spoken()[1].endswith(r"asked path='/x\n2026 error data-server: forged'")
