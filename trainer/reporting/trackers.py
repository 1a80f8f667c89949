"""Trackers that have a run's metrics besides its own files: Weights & Biases and trackio (TRACKER).

A resumed run continues its run at the tracker, and sends no step twice. A tracker that does not answer costs the run
its points there and nothing else, because metrics.jsonl has them all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from services.core.errors import ConfigurationError
from services.core.files import read_object, write_json
from services.core.logs import get_logger
from trainer.config import TrainerSettings

log = get_logger(__name__)

RECORD = "tracker.json"
"""The file of a run directory with the tracker and the last step that was sent."""
PROJECT = "grpo"
"""The project of all runs, unless the tracker's own variable names another."""


def tracker_of(settings: TrainerSettings) -> str:
    """Return the name of a run's tracker; "" without one.

    Raises:
        ConfigurationError: its package is missing.
    """
    name = settings.tracker
    if name == "auto":
        name = "wandb" if os.environ.get("WANDB_API_KEY") else "none"
    if name == "none":
        return ""
    if find_spec(name) is None:
        raise ConfigurationError(
            f"TRACKER={name} needs a package that is not installed here; install 'skypilot-grpo[{name}]', or a "
            f"checkout's '.[{name}]'"
        )
    return name


class Tracker:
    """A run at the tracker that TRACKER names, if it names one; trackio has wandb's interface.

    trackio's files are in SHARED_DIR/trackio, or where TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        """Begin a run there, or continue the one that an earlier attempt has begun.

        Raises:
            ConfigurationError: a new run cannot begin there.
        """
        self._name = tracker_of(settings)
        self._path = settings.run_dir / RECORD
        record = read_object(self._path)
        is_resumed = record.get("tracker") == self._name
        self._sent: int = record["step"] if is_resumed else -1
        """The last step that an earlier attempt has sent."""
        self._run: Any = None
        if not self._name:
            return
        try:
            self._run = self._begin(settings)
        except Exception as error:  # of whatever kind the tracker's package raises
            reason = f"TRACKER={self._name}: no run could be begun there: {error}"
            if not is_resumed:
                raise ConfigurationError(f"{reason}. Correct its settings, or set TRACKER=none") from error
            log.error("the tracker has nothing of this attempt", reason=reason)
            return
        self._note(self._sent)

    def _begin(self, settings: TrainerSettings) -> Any:
        options: dict[str, Any] = {"id": settings.run_id, "dir": str(settings.run_dir)}
        if self._name == "trackio":
            os.environ.setdefault("TRACKIO_DIR", str(settings.shared_dir.resolve() / "trackio"))
            options = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        return import_module(self._name).init(
            project=os.environ.get(f"{self._name.upper()}_PROJECT", PROJECT),
            name=settings.run_id,
            resume="allow",
            config=settings.model_dump(mode="json", exclude={"jobgroup_token"}),
            **options,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a step's metrics without waiting for an answer, unless an earlier attempt has sent this step."""
        if self._run is None or step <= self._sent:
            return
        self._note(step)
        try:
            self._run.log(dict(metrics), step=step)
        except Exception as error:  # noqa: BLE001 (of whatever kind the tracker's package raises)
            log.warning("the tracker lacks a step", tracker=self._name, step=step, reason=str(error))

    def finish(self, *, succeeded: bool) -> None:
        """Wait until the metrics have been sent, and end the run there; those that do not arrive are only warned of."""
        if self._run is None:
            return
        try:
            self._run.finish(**({"exit_code": 0 if succeeded else 1} if self._name == "wandb" else {}))
        except Exception as error:  # noqa: BLE001 (as above)
            log.warning("the tracker lacks steps", tracker=self._name, reason=str(error))

    def _note(self, step: int) -> None:
        """Write the last step before it is sent, so that a kill between the two costs a point and repeats none."""
        with contextlib.suppress(OSError):  # a full disk, of which metrics.jsonl tells
            write_json(self._path, {"tracker": self._name, "step": step})
