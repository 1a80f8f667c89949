"""Actions from an evaluation head over one connection that stays open.

A worker sends a request for each step of its episodes, so it uses the standard library's client, which takes a fraction
of httpx's processor time.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from evaluation.policy.records import Work
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.evaluation import Action, EpisodePosition, EvaluateRequest, FinishedEpisode, State

CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
ATTEMPT_SECONDS = 60.0
PAUSE_SECONDS = 0.5
_LATER = (429, 502, 503, 504)
_OF_THE_EPISODE = (400, 422, 500)
"""The policy does not take this state, or gives no action for it."""


class HeadActor:
    """The policy of an evaluation head; see Actor. Repeating a request does no harm at the head."""

    def __init__(self, work: Work) -> None:
        self._url = work.head
        self._patience = work.patience_seconds
        self._about: dict[str, Any] = {"server": work.name, "environment": work.environment, "policy": work.policy}
        parts = urlsplit(work.head)
        self._path = f"{parts.path.rstrip('/')}/evaluate"
        self._connection = CONNECTIONS[parts.scheme](parts.netloc, timeout=ATTEMPT_SECONDS)
        self._headers = {"Content-Type": "application/json"}
        if token := os.environ.get("JOBGROUP_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"

    def act(self, positions: Sequence[EpisodePosition], states: Sequence[State]) -> list[tuple[Action, int | None]]:
        """Return for each state the action, and the version of the policy that chose it.

        Raises:
            RuntimeError: the head has no action for one of the states.
            ConfigurationError: the head refuses this worker.
            DependencyLostError: the head does not answer within the worker's patience.
        """
        reply = self._ask(states=states, episodes=positions)
        return list(zip(reply["actions"], reply["policy_versions"], strict=True))

    def finish(self, report: FinishedEpisode) -> None:
        """Tell the head that an episode has ended; raises as ``act`` does."""
        self._ask(finished=[report])

    def _ask(self, **fields: Any) -> Any:
        request = EvaluateRequest.model_construct(**self._about, **fields)
        body = request.__pydantic_serializer__.to_json(request, exclude_unset=True)
        end = time.monotonic() + self._patience
        while True:
            pause = PAUSE_SECONDS
            try:
                self._connection.request("POST", self._path, body, self._headers)
                response = self._connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                # The next request opens the connection anew.
                self._connection.close()
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.status == 200:
                    return orjson.loads(content)
                reason = f"{response.status} {content[:300].decode(errors='replace')}"
                if response.status in _OF_THE_EPISODE:
                    raise RuntimeError(f"the head at {self._url} answers {reason}")
                if response.status not in _LATER:
                    raise ConfigurationError(f"the head at {self._url} answers {reason}")
                after = response.headers.get("Retry-After", "")
                pause = max(pause, float(after)) if after.isdecimal() else pause
            if time.monotonic() + pause > end:
                raise DependencyLostError(
                    f"the head at {self._url} gave no action within {self._patience:g} s: {reason}"
                )
            time.sleep(pause)
