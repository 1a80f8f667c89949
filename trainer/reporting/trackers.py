"""Trackers that have a run's metrics besides its own files: Weights & Biases, trackio and MLflow (TRACKER).

A resumed run continues its run at the tracker, and sends no step twice. A tracker that does not answer costs the run
its points there and nothing else, because metrics.jsonl has them all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from services.core.errors import ConfigurationError
from services.core.files import read_object, write_json
from services.core.logs import get_logger
from trainer.config import TrainerSettings

log = get_logger(__name__)

RECORD = "tracker.json"
"""The file of a run directory with the tracker, its id of the run, and the last step that was sent."""
PROJECT = "grpo"
"""The project, or experiment, of all runs, unless the tracker's own variable names another."""
MLFLOW_TRIES, MLFLOW_SECONDS = "2", "10"
"""Attempts of a request to MLflow, and the longest that one takes."""
KEPT_PARAMETER = 500
"""Most characters of a setting at MLflow."""


class Curve:
    """A run at Weights & Biases, whose own variables wandb reads itself, or at trackio, which has wandb's interface.

    trackio's files are in SHARED_DIR/trackio, or where TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say.
    """

    id = ""
    """The tracker's id of the run, where the tracker chooses it."""

    def __init__(self, package: str, settings: TrainerSettings, _former: str) -> None:
        """Begin the run there, or continue the one of the same name."""
        self._is_wandb = package == "wandb"
        options: dict[str, Any] = {"id": settings.run_id, "dir": str(settings.run_dir)}
        if not self._is_wandb:
            os.environ.setdefault("TRACKIO_DIR", str(settings.shared_dir.resolve() / "trackio"))
            options = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = import_module(package).init(
            project=os.environ.get(f"{package.upper()}_PROJECT", PROJECT),
            name=settings.run_id,
            resume="allow",
            config=_parameters(settings),
            **options,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a step's metrics, without waiting for an answer."""
        self._run.log(dict(metrics), step=step)

    def finish(self, *, succeeded: bool) -> None:
        """Wait until the metrics have been sent, and end the run there."""
        self._run.finish(**({"exit_code": 0 if succeeded else 1} if self._is_wandb else {}))


class MLflow:
    """A run at the MLflow server of MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, settings: TrainerSettings, former: str) -> None:
        """Begin the run there, or continue the one whose id is ``former``."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", MLFLOW_TRIES)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", MLFLOW_SECONDS)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        self._sender = ThreadPoolExecutor(1, "mlflow")
        self._under_way: deque[Future[None]] = deque()
        if former:
            self._client.update_run(former, status="RUNNING")
            self.id = former
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.id = self._client.create_run(experiment_id, run_name=settings.run_id).info.run_id
        parameters = [Param(name, str(value)[:KEPT_PARAMETER]) for name, value in _parameters(settings).items()]
        for start in range(0, len(parameters), 100):  # the most of a request
            self._client.log_batch(self.id, params=parameters[start : start + 100])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a step's metrics from a thread; raise what became of earlier ones."""
        now = int(time.time() * 1000)
        points = [self._metric(name, float(value), now, step) for name, value in metrics.items()]
        self._under_way.append(self._sender.submit(self._client.log_batch, self.id, metrics=points))
        while self._under_way[0].done() and len(self._under_way) > 1:
            self._under_way.popleft().result()

    def finish(self, *, succeeded: bool) -> None:
        """Wait for the thread, and end the run there."""
        while self._under_way:
            self._under_way.popleft().result()
        self._sender.shutdown()
        self._client.set_terminated(self.id, "FINISHED" if succeeded else "FAILED")


def tracker_of(settings: TrainerSettings) -> str:
    """Return the name of a run's tracker; "" without one.

    Raises:
        ConfigurationError: its package is missing, or it has no address.
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
    if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigurationError(
            "TRACKER=mlflow needs the address of a server in MLFLOW_TRACKING_URI, such as http://host:5000, because "
            "files on a node go with the node"
        )
    return name


class Tracker:
    """A run at the tracker that TRACKER names, if it names one."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Begin a run there, or continue the one that an earlier attempt has begun.

        Raises:
            ConfigurationError: a new run cannot begin there.
        """
        self._name = tracker_of(settings)
        self._path = settings.run_dir / RECORD
        record = read_object(self._path)
        former = record if record.get("tracker") == self._name else {}
        self._sent: int = former.get("step", -1)
        """The last step that an earlier attempt has sent."""
        self._backend: Curve | MLflow | None = None
        if not self._name:
            return
        try:
            begin = MLflow if self._name == "mlflow" else partial(Curve, self._name)
            self._backend = begin(settings, former.get("id", ""))
        except Exception as error:  # of whatever kind the tracker's package raises
            reason = f"TRACKER={self._name}: no run could be begun there: {error}"
            if not former:
                raise ConfigurationError(f"{reason}. Correct its settings, or set TRACKER=none") from error
            log.error("the tracker has nothing of this attempt", reason=reason)
            return
        self._note(self._sent)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a step's metrics, unless an earlier attempt has sent this step."""
        if self._backend is None or step <= self._sent:
            return
        self._note(step)
        try:
            self._backend.log(metrics, step)
        except Exception as error:  # noqa: BLE001 (of whatever kind the tracker's package raises)
            log.warning("the tracker lacks a step", tracker=self._name, step=step, reason=str(error))

    def finish(self, *, succeeded: bool) -> None:
        """End the run there; metrics that do not arrive are only warned of."""
        if self._backend is None:
            return
        try:
            self._backend.finish(succeeded=succeeded)
        except Exception as error:  # noqa: BLE001 (as above)
            log.warning("the tracker lacks steps", tracker=self._name, reason=str(error))

    def _note(self, step: int) -> None:
        """Write the last step before it is sent, so that a kill between the two costs a point and repeats none."""
        assert self._backend is not None
        with contextlib.suppress(OSError):  # a full disk, of which metrics.jsonl tells
            write_json(self._path, {"tracker": self._name, "id": self._backend.id, "step": step})


def _parameters(settings: TrainerSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude={"jobgroup_token"})
