"""The log format of every component: one line an event on stderr, with time, level, component, event and fields.

Records of the standard library's logging (uvicorn, transformers, ...) have the same format.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

# They log every request or connection, which the metrics count already.
_VERBOSE = ("httpx", "httpx2", "httpcore", "asyncio", "urllib3", "filelock", "fsspec", "huggingface_hub")


def configure(component: str, level: str = "info") -> None:
    """Set up this process's logging; every line names ``component``, such as ``data-server``."""
    number = logging.getLevelNamesMapping()[level.upper()]

    def add_component(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"component": component, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_component,
        structlog.processors.StackInfoRenderer(),
    ]
    formatter = structlog.stdlib.ProcessorFormatter
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, formatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        formatter(
            foreign_pre_chain=shared,
            processors=[formatter.remove_processors_meta, structlog.processors.format_exc_info, _text_line],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def get_logger(name: str | None = None) -> structlog.stdlib.BoundLogger:
    """Return a module's logger: ``log = get_logger(__name__)``, then ``log.info("step done", step=3)``."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def _text_line(_logger: Any, _method: str, event: structlog.typing.EventDict) -> str:
    """Return ``2026-01-31T12:00:00.123456Z info data-server: loaded rows=7473``, with any traceback below."""
    time = event.pop("timestamp", "")
    level = event.pop("level", "info")
    component = event.pop("component", "")
    # A newline in a value would let a request forge log lines.
    text = str(event.pop("event", "")).replace("\r", "\\r").replace("\n", "\\n")
    trace = "".join(f"\n{event.pop(key)}" for key in ("exception", "stack") if event.get(key))
    fields = "".join(f" {key}={_field(value)}" for key, value in event.items() if value is not None)
    return f"{time} {level} {component}: {text}{fields}{trace}"


def _field(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if " " in text or not text.isprintable() else text
