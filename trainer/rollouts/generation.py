"""Completions of prompts, where a prompt that cannot be generated is left out and counted, and ends nothing."""

from __future__ import annotations

from prometheus_client import Counter

from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.http.client import RequestRefusedError
from services.protocol import Completion, Prompt

log = get_logger(__name__)

PROMPTS_FAILED = Counter(
    "trainer_prompts_failed", "Prompts left out because no completion of theirs could be generated."
)


LEAST_FAILURES = 8
"""So many prompts in a row without a completion are the engine's fault, not theirs."""


class PromptGenerator:
    """Asks the rollout workers for completions, and remembers which prompts got none and why."""

    def __init__(self, rollouts: RolloutClient) -> None:
        self.rollouts = rollouts
        self.last_failure: DependencyLostError | RequestRefusedError | None = None
        self.failed_in_a_row = 0
        """How many prompts got none since one did."""

    async def generate(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> list[Completion]:
        """At most ``n`` completions; none (counted) when the engine refuses the prompt, or none came in time."""
        try:
            answers = await self.rollouts.generate(prompt.prompt_ids, params, n=n, seed=seed)
            completions = [c for c in answers if c.completion_ids]
            if not completions:
                raise DependencyLostError("every completion came back aborted or empty")
        except (DependencyLostError, RequestRefusedError) as error:
            self.last_failure = error
            self.failed_in_a_row += 1
            PROMPTS_FAILED.inc()
            log.warning("prompt left out: no completion could be generated", prompt_id=prompt.id, reason=str(error))
            return []
        self.failed_in_a_row = 0
        return completions

    def check(self, batch_size: int) -> None:
        """Passes until a batch of prompts in a row, and no fewer than LEAST_FAILURES, got no completion.

        Raises:
            ConfigurationError: the engine refuses them.
            DependencyLostError: there is none that answers.
        """
        if self.failed_in_a_row >= max(batch_size, LEAST_FAILURES):
            raise self.all_failed()

    def all_failed(self) -> ConfigurationError | DependencyLostError:
        """What to raise when no prompt got a completion: there is nothing to go on with."""
        prompts, failure = self.failed_in_a_row, self.last_failure
        reason = f"none of {prompts} prompts got a completion from the rollout workers: {failure}"
        if isinstance(failure, RequestRefusedError):
            # They would be refused after a restart, too.
            return ConfigurationError(f"{reason}; do MAX_PROMPT_TOKENS and MAX_NEW_TOKENS fit the model's context?")
        return DependencyLostError(reason)
