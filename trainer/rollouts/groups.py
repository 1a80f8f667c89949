"""From a prompt to a group: generate its completions, score them, group them. Steps and collectors share this code."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import Counter

from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.seeds import derive_seed
from services.http.client import RequestRefusedError
from services.protocol.groups import Completion, Experience, Group, RewardResult
from services.protocol.prompts import Prompt
from services.protocol.rewards import RewardItem
from services.run_page.activity import Activity
from trainer.config import TrainerSettings

log = get_logger(__name__)

PROMPTS_FAILED = Counter(
    "trainer_prompts_failed", "Prompts left out because no completion of theirs could be generated."
)
UNSCORABLE = Counter(
    "trainer_unscorable", "Completions left out because they could not be scored, by reason.", ["status"]
)

SCORING_TRIES = 2

LEAST_FAILURES = 8
"""After this many prompts in a row without a completion, the engine is at fault and not the prompts."""


class GroupMaker:
    """The maker of groups from prompts. It leaves out and counts a prompt that gets no completion."""

    def __init__(self, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> None:
        self.settings = settings
        self.rollouts = rollouts
        self.rewards = rewards
        self.last_generated = 0.0
        """The time of the newest completions (time.perf_counter): what a step waits after it, it waits for rewards."""
        self.failed_in_a_row = 0
        """Prompts without a completion since the last prompt with one."""
        self.last_failure: Exception | None = None
        self.activity = Activity()
        """Told how many prompts are answered."""

    async def make_groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Generate and score the groups of ``prompts``, all at once; a prompt without a completion gets no group.

        Raises:
            ConfigurationError, DependencyLostError: too many prompts in a row were left out; see ``check``.
        """
        made = await self.activity.gather(map(self.make_group, prompts), "prompts answered")
        groups = [group for group in made if group is not None]
        if prompts and not groups:
            self.check()
        return groups

    async def make_group(self, prompt: Prompt) -> Group | None:
        """Answer a prompt G times, as ``sample_group`` does, with the parameters and the seed of training."""
        settings = self.settings
        params = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
        seed = derive_seed(settings.seed, prompt.epoch, prompt.position)
        return await self.sample_group(prompt, params, settings.group_size, seed)

    async def sample_group(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> Group | None:
        """Generate ``n`` completions, score them and return them as a group; None when there is no completion.

        A completion that cannot be scored stays in the group with reward None, so that the record is whole; the loss
        leaves it out.
        """
        completions = await self._generate(prompt, params, n, seed)
        self.last_generated = time.perf_counter()
        if not completions:
            return None
        results = await self.score([RewardItem.of(prompt, completion) for completion in completions])
        scored = zip(completions, results, strict=True)
        return self.group(prompt, prompt.prompt_ids, [Experience(**dict(c), result=result) for c, result in scored])

    def group(self, prompt: Prompt, prompt_ids: list[int], experiences: list[Experience]) -> Group:
        """Return the experiences of a prompt as a group."""
        return Group(
            group_id=f"{self.settings.run_id}-{prompt.epoch}-{prompt.position}",
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            prompt_ids=prompt_ids,
            epoch=prompt.epoch,
            position=prompt.position,
            experiences=experiences,
        )

    async def _generate(self, prompt: Prompt, params: SamplingParams, n: int, seed: int) -> list[Completion]:
        """Return at most ``n`` completions; none, counted, when the engine refuses the prompt or answers too late."""
        try:
            answers = await self.rollouts.generate(prompt.prompt_ids, params, n=n, seed=seed)
            completions = [completion for completion in answers if completion.completion_ids]
            if not completions:
                raise DependencyLostError("every completion came back aborted or empty")
        except (DependencyLostError, RequestRefusedError) as error:
            self.leave_out(prompt, error)
            return []
        self.failed_in_a_row = 0
        return completions

    def leave_out(self, prompt: Prompt, error: Exception) -> None:
        """Count a prompt without a completion; ``error`` is the reason."""
        self.last_failure = error
        self.failed_in_a_row += 1
        PROMPTS_FAILED.inc()
        log.warning("prompt left out: no completion could be generated", prompt_id=prompt.id, reason=str(error))

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return a result for each answer, in order; ask again for those that could not be scored."""
        results = await self.rewards.score(items)
        for _ in range(SCORING_TRIES - 1):
            unscored = [i for i, result in enumerate(results) if result.reward is None]
            if not unscored:
                break
            for i, result in zip(unscored, await self.rewards.score([items[i] for i in unscored]), strict=True):
                results[i] = result
        for result in results:
            if result.reward is None:
                UNSCORABLE.labels(result.status.value).inc()
        return results

    def check(self) -> None:
        """Pass until a batch of prompts in a row, and no fewer than LEAST_FAILURES, got no completion.

        Raises:
            ConfigurationError: the engine refuses them.
            DependencyLostError: no engine answers.
        """
        if self.failed_in_a_row >= max(self.settings.batch_size, LEAST_FAILURES):
            raise self.all_failed()

    def all_failed(self) -> ConfigurationError | DependencyLostError:
        """Return the error to raise when no prompt got a completion."""
        failure = self.last_failure
        reason = f"none of {self.failed_in_a_row} prompts got a completion from the rollout workers: {failure}"
        if isinstance(failure, RequestRefusedError):
            # The engine would refuse them after a restart, too.
            return ConfigurationError(f"{reason}; do MAX_PROMPT_TOKENS and MAX_NEW_TOKENS fit the model's context?")
        return DependencyLostError(reason)
