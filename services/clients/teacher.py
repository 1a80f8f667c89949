"""The client of a teacher behind an endpoint that scores token ids: an SGLang server, or the embedded engine."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence

import numpy as np
from prometheus_client import Counter

from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.engines.engine import ROUTED
from services.http.client import HttpClient, RequestRefusedError
from services.protocol.base import PROBE
from services.protocol.groups import TEACHER, TokenSequence

log = get_logger(__name__)

UNTAUGHT = Counter("teacher_sequences_unscored", "Sequences that the teacher's endpoint did not score.")

REQUESTS_AT_ONCE = 64
"""Further requests wait, so that the endpoint's queue stays short."""
SAME = 0.05
"""Largest mean difference, in nats, of an endpoint's two answers for the same tokens, of which it may have cached some.
Engines that compute in bfloat16 differ by less."""


LEAST, ROUNDING = -1e4, 1e-3
"""Log-probabilities beyond these are not a model's: no token is as unlikely, and 0 is the largest but for rounding."""

PROBE_TOLERANCE = 0.1
"""Largest mean difference, in nats a token, of two answers of one endpoint to the same probe. Engines that round to
bfloat16 differ by up to 0.05."""


def probe_distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the mean difference of two models' log-probabilities of a probe's tokens; 0 without tokens."""
    return statistics.fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True)) if ours else 0.0


class FalseScoresError(DependencyLostError):
    """A teacher that answered with something else than log-probabilities of the tokens that it was asked for."""


class TeacherClient(HttpClient):
    """A teacher at its URL. An async context manager."""

    def __init__(self, url: str, longest_answer: int, *, deadline: float) -> None:
        """Make a client.

        Args:
            url: TEACHER_URL.
            longest_answer: most tokens that follow a prompt.
            deadline: seconds that a request may take with all its attempts.
        """
        super().__init__(url, service="teacher", timeout=deadline, deadline=deadline)
        self._longest_answer = longest_answer
        self._places = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self.probe_ids: list[int] = []
        """The tokens of PROBE by the teacher's tokenizer, once it has scored them."""
        self.probe: list[float] = []
        """The teacher's log-probabilities of these tokens but the first."""

    async def wait_ready(self, deadline_seconds: float) -> None:
        """Wait until the endpoint answers, and check that it scores token ids and has room for an answer.

        Raises:
            ConfigurationError: it does not score token ids, or its context is too short.
            DependencyLostError: it does not answer within ``deadline_seconds``.
        """
        try:
            async with asyncio.timeout(deadline_seconds):
                ids, scores = await self._ask({"text": PROBE}, 1)
                half = len(ids) // 2
                again = await self.score(ids, half)
                # The length of the context, where the endpoint tells it.
                info = (await self.request("GET", "/get_server_info")).json()
        except TimeoutError as error:
            raise DependencyLostError(f"teacher at {self.url}: no answer within {deadline_seconds:g} s") from error
        except (RequestRefusedError, FalseScoresError) as error:
            raise self._cannot_score(str(error)) from error
        numbers = (info.get("context_length"), info.get("max_req_input_len"), info.get("max_total_num_tokens"))
        known = [number for number in numbers if isinstance(number, int)]
        check_context(f"TEACHER_URL={self.url}", min(known, default=math.inf), self._longest_answer)
        if probe_distance(again, scores[half - 1 :]) > SAME:
            raise self._cannot_score("two requests for the same tokens gave other numbers")
        self.probe_ids, self.probe = ids, scores

    async def taught(self, prompt_ids: Sequence[int], sequence: TokenSequence) -> TokenSequence:
        """Return a sequence with the teacher's log-probabilities of its L tokens, 0 outside the loss mask.

        They are missing, and the sequence is counted, if the endpoint refuses it, such as one beyond its context.

        Raises:
            DependencyLostError: it does not answer within the client's deadline.
        """
        try:
            scores = await self.score([*prompt_ids, *sequence.completion_ids.tolist()], len(prompt_ids))
        except RequestRefusedError as error:
            UNTAUGHT.inc()
            log.warning("the teacher refuses a sequence", tokens=sequence.tokens, reason=str(error))
            return sequence
        arrays = {**sequence.arrays, TEACHER: np.where(sequence.mask, scores, 0.0)}
        return sequence.model_copy(update={"arrays": arrays})

    async def score(self, token_ids: Sequence[int], start: int) -> list[float]:
        """Return the log-probabilities of ``token_ids[start:]``, each given the tokens before it; ``start`` >= 1.

        Raises:
            RequestRefusedError: the endpoint refuses the request.
            FalseScoresError: it answers with something else.
            DependencyLostError: it does not answer within the client's deadline.
        """
        ids, scores = await self._ask({"input_ids": list(token_ids)}, start)
        if ids != list(token_ids[start - 1 :]):
            raise FalseScoresError(f"teacher at {self.url} scored other tokens than it was asked for")
        return scores

    async def _ask(self, prompt: dict[str, object], start: int) -> tuple[list[int], list[float]]:
        """Return the tokens from ``start - 1`` on, and the log-probabilities of those from ``start`` on."""
        async with self._places:
            response = await self.request("POST", ROUTED.generate_path, ROUTED.score_body(prompt, start))
        try:
            ids, scores = ROUTED.read_scores(response.json())
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise FalseScoresError(f"teacher at {self.url} gave no log-probabilities of the prompt") from error
        if wrong := [score for score in scores if not LEAST < score <= ROUNDING]:
            raise FalseScoresError(f"teacher at {self.url} gave {wrong[0]} as a log-probability; see its log")
        return ids, scores

    def _cannot_score(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"TEACHER_URL={self.url} does not score token ids: {reason}. Hosted APIs give no log-probabilities of a "
            "prompt; serve the teacher with SGLang, or set TEACHER_MODEL"
        )


def check_context(teacher: str, context: float, longest: int) -> None:
    """Check that a teacher's context holds an answer of ``longest`` tokens and a prompt of one token at least.

    Raises:
        ConfigurationError: it does not.
    """
    if context <= longest:
        raise ConfigurationError(
            f"{teacher} has a context of {context} tokens, but an answer may have {longest} besides its prompt; lower "
            "MAX_NEW_TOKENS (of an agent AGENT_MAX_TOKENS), or name a teacher with a longer context"
        )
