"""From a prompt to a group: generate its completions, score them, group them. Steps and collectors share this code."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

from prometheus_client import Counter

from services.agents import AgentFailedError
from services.clients.data import DataClient
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.http.client import RequestRefusedError
from services.protocol.base import derive_seed
from services.protocol.groups import Completion, Experience, Group
from services.protocol.prompts import Prompt
from services.protocol.rewards import CORRECT, RewardItem, RewardResult, RewardStatus, is_correct
from services.run_page.activity import Activity
from services.run_page.directory import FIRST_FAILURE
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
"""After this many prompts in a row whose every answer failed, the prompts are not at fault."""
OWN_BATCHES = 2
"""After this many batches of prompts in a row whose every answer failed by the user's own code, the run ends."""
OWN_REASONS = frozenset({"exception", "reward", "reward_error", "turn_rewards", "environment", "refused"})
"""The reasons of failures of the user's own code: not of limits, and not of services that were lost."""


class GroupMaker:
    """The maker of groups from prompts. It leaves out and counts a prompt that gets no completion.

    A run whose every answer fails can learn nothing, so many failed prompts in a row end it; see ``check``.
    """

    def __init__(self, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> None:
        self.settings = settings
        self.rollouts = rollouts
        self.rewards = rewards
        self.last_generated = 0.0
        """The time of the newest completions (time.perf_counter): what a step waits after it, it waits for rewards."""
        self.failed_in_a_row = 0
        """Prompts whose every answer failed since the last prompt with another answer."""
        self.last_failure: Exception | None = None
        self._has_told = False
        self.activity = Activity()
        """Told how many prompts are answered."""

    async def make_groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Generate and score the groups of ``prompts``, all at once; a prompt without a completion gets no group.

        Raises:
            ConfigurationError, DependencyLostError: too many prompts in a row failed; see ``check``.
        """
        made = await self.activity.gather(map(self.make_group, prompts), "prompts answered")
        groups = [group for group in made if group is not None]
        self.judge(groups)
        return groups

    def judge(self, groups: Sequence[Group]) -> None:
        """Count the groups, new ones of any collector, at whose every answer the reward function failed.

        Raises:
            ConfigurationError, DependencyLostError: too many prompts in a row failed; see ``check``.
        """
        failures = [reward_failure(group) for group in groups]
        if None in failures:
            self.failed_in_a_row = 0
            return
        for failure in failures:
            self.failed_in_a_row += 1
            self.last_failure = AgentFailedError(str(failure), "reward_error")
            self.tell("reward_error", str(failure))
        self.check()

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
        items = [
            RewardItem(
                prompt=prompt.prompt,
                response=completion.completion,
                ground_truth=prompt.ground_truth,
                completion_tokens=completion.completion_tokens,
                finish_reason=completion.finish_reason,
            )
            for completion in completions
        ]
        results = await self.score(items)
        scored = zip(completions, results, strict=True)
        group = self.group(prompt, prompt.prompt_ids, [Experience(**dict(c), result=result) for c, result in scored])
        if reward_failure(group) is None:
            self.failed_in_a_row = 0
        return group

    def group(self, prompt: Prompt, prompt_ids: list[int], experiences: list[Experience]) -> Group:
        """Return the experiences of a prompt as a group, in which answers over a limit have a reward."""
        return Group(
            group_id=f"{self.settings.run_id}-{prompt.epoch}-{prompt.position}",
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            prompt_ids=prompt_ids,
            epoch=prompt.epoch,
            position=prompt.position,
            experiences=with_rewards_over_limit(experiences, self.settings.over_limit_reward),
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
            unscored = [i for i, result in enumerate(results) if is_correct(result) is None]
            if not unscored:
                break
            for i, result in zip(unscored, await self.rewards.score([items[i] for i in unscored]), strict=True):
                results[i] = result
        for result in results:
            if is_correct(result) is None:
                UNSCORABLE.labels(result.status.value).inc()
            if result.status is RewardStatus.ERROR:
                self.tell("reward_error", result.reason or "")
        return results

    def tell(self, reason: str, text: str) -> None:
        """Log the run's first failure of the user's own code, and write it where terminal, page and status read it."""
        if self._has_told:
            return
        self._has_told = True
        log.error("an answer failed by an exception", reason=reason, text=text)
        # The file exists where another process of the run has told of a failure. A full disk ends the run elsewhere.
        with contextlib.suppress(OSError), (self.settings.run_dir / FIRST_FAILURE).open("x") as file:
            file.write(f"{reason}: {text}\n")

    def check(self) -> None:
        """Pass until every answer of a batch of prompts in a row failed, and no fewer than LEAST_FAILURES.

        Failures of the user's own code may be OWN_BATCHES batches.

        Raises:
            ConfigurationError: a restart would fail again: the user's own code failed, or the engine refuses them.
            DependencyLostError: no engine answers.
        """
        is_own = isinstance(self.last_failure, AgentFailedError) and self.last_failure.reason in OWN_REASONS
        batches = OWN_BATCHES if is_own else 1
        if self.failed_in_a_row >= max(batches * self.settings.batch_size, LEAST_FAILURES):
            raise self.all_failed()

    def all_failed(self) -> ConfigurationError | DependencyLostError:
        """Return the error to raise when every answer of the last prompts failed."""
        failure, prompts = self.last_failure, f"{self.failed_in_a_row} prompt{'s'[: self.failed_in_a_row != 1]}"
        if isinstance(failure, AgentFailedError):
            return ConfigurationError(
                f"the reward function failed at every answer of {prompts} in a row: {failure}; correct it"
            )
        reason = f"none of {prompts} got a completion from the rollout workers: {failure}"
        if isinstance(failure, RequestRefusedError):
            # The engine would refuse them after a restart, too.
            return ConfigurationError(f"{reason}; do MAX_PROMPT_TOKENS and MAX_NEW_TOKENS fit the model's context?")
        return DependencyLostError(reason)


def with_rewards_over_limit(experiences: Sequence[Experience], most: float) -> list[Experience]:
    """Give answers over a limit the lowest reward of their group (in a game, of their seat), and ``most`` at most."""
    lowest: defaultdict[int | None, float] = defaultdict(lambda: most)
    for e in experiences:
        if e.reward is not None:
            lowest[e.seat] = min(lowest[e.seat], e.reward)
    return [
        e.model_copy(update={"result": e.result.model_copy(update={"reward": lowest[e.seat]})})
        if e.result.status is RewardStatus.OVER_LIMIT
        else e
        for e in experiences
    ]


def reward_failure(group: Group) -> str | None:
    """Return the first failure of the reward function if it failed at every answer of a group of completions."""
    results = [experience.result for experience in group.experiences]
    if group.episodes_failed is not None or any(result.status is not RewardStatus.ERROR for result in results):
        return None
    return results[0].reason or "it gave no reason"


RECORD_SECONDS = 10.0
"""The longest wait for the data-server: the order of prompts is not worth more."""


class SuccessRates:
    """A sender of success rates, one batch of prompts a request. A failed request costs only these rates."""

    def __init__(self, data: DataClient, batch_size: int) -> None:
        self.data = data
        self.batch_size = batch_size
        self._rates: dict[str, float] = {}
        self._are_wanted: bool | None = None
        """True if the data-server has a curriculum; None before it was asked."""

    async def record(self, groups: Sequence[Group]) -> None:
        """Collect the rates of scored groups, and send them as soon as they cover one batch of prompts."""
        if self._are_wanted is False:
            return
        self._rates |= {g.prompt_id: rate for g in groups if (rate := success_rate(g)) is not None}
        if len(self._rates) < self.batch_size:
            return
        rates, self._rates = self._rates, {}
        try:
            async with asyncio.timeout(RECORD_SECONDS):
                if self._are_wanted is None:
                    self._are_wanted = (await self.data.stats()).curriculum != "off"
                if self._are_wanted:
                    await self.data.record_success_rates(rates)
        except (DependencyLostError, RequestRefusedError, TimeoutError) as error:
            log.warning("success rates not recorded", prompts=len(rates), reason=str(error) or "timed out")


def success_rate(group: Group) -> float | None:
    """Return the share of right completions among a group's scored ones; None if none was scored."""
    rewards = [reward for reward in group.rewards if not math.isnan(reward)]
    return statistics.fmean(reward >= CORRECT for reward in rewards) if rewards else None
