"""From a prompt to a group: generate its completions, score them, group them. Steps and collectors share this code."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from prometheus_client import Counter

from services.agents import AgentFailedError
from services.clients.environment import EnvironmentClient
from services.clients.play import scored
from services.clients.reward import RewardClient
from services.clients.rollout import RolloutClient, SamplingParams
from services.clients.teacher import TeacherClient
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.settings import Method
from services.core.tasks import TIMELINE
from services.http.client import RequestRefusedError, ServiceClient
from services.protocol.accuracy import is_judged
from services.protocol.base import derive_seed
from services.protocol.chat import EpisodeFigures
from services.protocol.groups import Group, TokenSequence
from services.protocol.prompts import Prompt
from services.protocol.rewards import UNASKED, FinishReason, RewardItem, RewardResult, RewardStatus
from services.run_page.directory import FIRST_FAILURE
from services.run_page.progress import Activity
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
"""After this many batches of prompts in a row whose every answer failed by the user's code, the run ends."""
OWN_REASONS = frozenset({"exception", "reward", "reward_error", "turn_rewards", "environment", "refused"})
"""The reasons of failures of the user's code, as opposed to limits and lost services."""


@dataclass
class Answers:
    """The scored answers to a prompt, before they are a group. With an ``error`` none of them is used."""

    prompt_ids: list[int] = field(default_factory=list)
    sequences: list[TokenSequence] = field(default_factory=list)
    generated: float = field(default_factory=time.perf_counter)
    """The time after which only scores were missing (time.perf_counter)."""
    error: Exception | None = None
    figures: dict[int, EpisodeFigures] | None = None
    """The traces of the episodes, by number; None for completions."""
    failed: Tally[str] = field(default_factory=Tally)
    """Failed episodes, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The message of one of those episodes, by reason."""


class Sampler(ABC):
    """A way of rolling out: it answers prompts with the clients that it needs. One serves a run, or a collector."""

    services: Sequence[ServiceClient | EnvironmentClient] = ()
    """Clients of the services that the run needs besides those of every run."""

    def __init__(self, settings: TrainerSettings, rewards: RewardClient) -> None:
        self.settings = settings
        self.rewards = rewards
        self._has_reported = False
        self.teacher: TeacherClient | None = None
        """The teacher behind TEACHER_URL."""
        if settings.teacher_url:
            longest, deadline = settings.answer_tokens, settings.service_deadline_seconds
            self.teacher = TeacherClient(settings.teacher_url, longest, deadline=deadline)
        self._may_be_judged = settings.needs_rewards
        """False once the reward-server said that it has no judge, and without one."""

    @classmethod
    @abstractmethod
    def of(cls, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> Self:
        """Make the way with the clients that it needs besides those of engines and rewards.

        Raises:
            ConfigurationError: AGENT cannot be imported.
        """

    async def open(self, stack: AsyncExitStack) -> None:
        """Open the clients; ``stack`` closes them."""
        for client in (*self.services, *([self.teacher] if self.teacher else ())):
            await stack.enter_async_context(client)

    def awaited(self) -> dict[str, Callable[[float], Awaitable[None]]]:
        """Return, by name, a wait for each service that must be healthy before the first answer; it takes seconds."""
        waits: dict[str, Callable[[float], Awaitable[None]]] = {c.task.value: c.wait_healthy for c in self.services}
        return waits | ({"teacher": self.teacher.wait_ready} if self.teacher else {})

    @abstractmethod
    async def answer(
        self, prompt: Prompt, params: SamplingParams, n: int, seed: int, *, is_group: bool = False
    ) -> Answers:
        """Answer a prompt ``n`` times and score the answers; as a group also by the rewards that compare them."""

    @abstractmethod
    def all_failed(self, failure: Exception | None, prompts: str) -> ConfigurationError | DependencyLostError:
        """Return the error to raise when every answer of ``prompts`` failed; ``failure`` is the last one."""

    async def statistics(self, deadline: float) -> dict[str, float]:
        """Return metrics of this way of rolling out and of the judge, asked for within ``deadline`` seconds.

        Raises:
            DependencyLostError, RequestRefusedError: the service that counts them does not answer.
        """
        if not self._may_be_judged:
            return {}
        judge = (await self.rewards.stats(deadline)).judge
        self._may_be_judged = judge is not None
        return judge or {}

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return a result for each answer, in order; ask again for those that could not be scored.

        Nobody is asked where the run needs no rewards.
        """
        if not self.settings.needs_rewards:
            return [UNASKED] * len(items)
        return self._noted(await self.rewards.score(items, tries=SCORING_TRIES))

    async def score_group(
        self, items: Sequence[RewardItem], own_rewards: Sequence[float] | None = None
    ) -> list[RewardResult]:
        """Return a result for each answer to a prompt, as ``RewardClient.score_group`` does.

        With REWARD_WEIGHT=0 nobody is asked.
        """
        if self.settings.reward_weight == 0:
            return [UNASKED] * len(items)
        return self._noted(await self.rewards.score_group(items, own_rewards, tries=SCORING_TRIES))

    def _noted(self, results: list[RewardResult]) -> list[RewardResult]:
        """Return the results; count and report the answers that could not be scored."""
        for result in results:
            if not is_judged(result):
                UNSCORABLE.labels(result.status.value).inc()
            if result.status is RewardStatus.ERROR:
                self.report("reward_error", result.reason or "")
        return results

    def report(self, reason: str, text: str) -> None:
        """Log the run's first failure of the user's code, and write it where terminal, page and status read it."""
        if self._has_reported:
            return
        self._has_reported = True
        log.error("an answer failed by an exception", reason=reason, text=text)
        # The file exists where another process of the run reported a failure. A full disk ends the run elsewhere.
        with contextlib.suppress(OSError), (self.settings.run_dir / FIRST_FAILURE).open("x") as file:
            file.write(f"{reason}: {text}\n")


class Completions(Sampler):
    """One completion answers a prompt."""

    def __init__(self, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> None:
        super().__init__(settings, rewards)
        self.rollouts = rollouts

    @classmethod
    def of(cls, settings: TrainerSettings, rollouts: RolloutClient, rewards: RewardClient) -> Self:
        """Make the way; it needs no further clients."""
        return cls(settings, rollouts, rewards)

    async def answer(
        self, prompt: Prompt, params: SamplingParams, n: int, seed: int, *, is_group: bool = False
    ) -> Answers:
        """Return at most ``n`` completions; none if the engine refuses the prompt or answers too late.

        A completion that cannot be scored stays with reward None, so that the record is whole; the loss leaves it out.
        """
        try:
            completions = await self.rollouts.complete(prompt, params, n, seed)
        except (DependencyLostError, RequestRefusedError) as error:
            return Answers(error=error)
        answers = Answers(prompt.prompt_ids)
        answers.sequences = await scored(self.score_group if is_group else self.score, prompt, completions)
        return answers

    def all_failed(self, failure: Exception | None, prompts: str) -> ConfigurationError | DependencyLostError:
        """Return the error to raise when every completion of ``prompts`` failed."""
        if isinstance(failure, AgentFailedError):
            return ConfigurationError(
                f"the reward function failed at every answer of {prompts} in a row: {failure}; correct it"
            )
        reason = f"none of {prompts} got a completion from the rollout workers: {failure}"
        if isinstance(failure, RequestRefusedError):
            # The engine would refuse them after a restart, too.
            return ConfigurationError(f"{reason}; do MAX_PROMPT_TOKENS and MAX_NEW_TOKENS fit the model's context?")
        return DependencyLostError(reason)


class GroupMaker:
    """The maker of groups from the prompts of a source. It leaves out and counts a prompt without a usable answer.

    A source whose every answer fails teaches nothing, so many failed prompts in a row end the run; see ``check``.
    """

    def __init__(
        self, settings: TrainerSettings, sampler: Sampler, source: str = "", batch_size: int | None = None
    ) -> None:
        """Make the maker of ``source``, which has these settings.

        Args:
            settings: the settings of the source.
            sampler: the way in which its prompts are answered.
            source: its name in SOURCES; "" without.
            batch_size: its groups in a step. Unset: BATCH_SIZE.
        """
        self.settings = settings
        self.sampler = sampler
        self.source = source
        self.batch_size = batch_size or settings.batch_size
        self.last_generated = 0.0
        """The time of the newest completions (time.perf_counter): a step that waits longer waits for rewards."""
        self.failed_in_a_row = 0
        """Prompts whose every answer failed since the last prompt with another answer."""
        self.last_failure: Exception | None = None
        self._failed: Tally[str] = Tally()
        """Failed episodes, by reason, of prompts that were left out since the last group."""
        self._examples: dict[str, str] = {}
        """The message of one of those episodes, by reason."""

    def judge(self, groups: Sequence[Group]) -> None:
        """Count the new groups, of any collector, in which the reward function failed at every answer.

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
            self.sampler.report("reward_error", str(failure))
        self.check()

    async def make_group(self, prompt: Prompt) -> Group | None:
        """Answer a prompt G times, as ``sample_group`` does, with the parameters and the seed of training.

        With METHOD=sft nobody is asked, because the prompt brings what is learned.
        """
        settings = self.settings
        if settings.method is Method.SFT:
            return demonstrated(settings, prompt)
        params = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
        place = (prompt.epoch, prompt.position)
        seed = derive_seed(settings.seed, *((prompt.source, *place) if prompt.source else place))
        group = await self.sample_group(prompt, params, settings.group_size, seed, is_group=True)
        return None if group is None else await self._taught(group)

    async def _taught(self, group: Group) -> Group:
        """Return a group with the log-probabilities of the teacher behind TEACHER_URL, if there is one.

        Raises:
            DependencyLostError: the teacher does not answer within SERVICE_DEADLINE_SECONDS.
        """
        if (teacher := self.sampler.teacher) is None:
            return group
        sequences = await asyncio.gather(*(teacher.taught(group.prompt_ids, s) for s in group.sequences))
        return group.model_copy(update={"sequences": sequences})

    async def sample_group(
        self, prompt: Prompt, params: SamplingParams, n: int, seed: int, *, is_group: bool = False
    ) -> Group | None:
        """Answer a prompt ``n`` times and return the answers as a group; None, counted, if none is usable.

        ``is_group`` compares the answers where REWARD_FN does. An evaluation does not: means of relative rewards say
        nothing about a policy.
        """
        began = time.perf_counter()
        answers = await self.sampler.answer(prompt, params, n, seed, is_group=is_group)
        self.last_generated = max(self.last_generated, answers.generated)
        track = f"group {group_id(self.settings, prompt)}" if is_group else f"evaluated {prompt.id}"
        TIMELINE.add(track, "generate", began, answers.generated)
        TIMELINE.add(track, "score", answers.generated, time.perf_counter())
        self._failed += answers.failed
        self._examples = answers.examples | self._examples
        if answers.error is not None:
            self._leave_out(prompt, answers.error)
            return None
        group = self._group(prompt, answers)
        if reward_failure(group) is None:
            self.failed_in_a_row = 0
        return group

    def _group(self, prompt: Prompt, answers: Answers) -> Group:
        """Return the answers to a prompt as a group, with the failed episodes since the last one."""
        failed, examples, self._failed, self._examples = self._failed, self._examples, Tally(), {}
        has_episodes = answers.figures is not None
        return Group(
            group_id=group_id(self.settings, prompt),
            prompt=prompt.model_copy(update={"prompt_ids": answers.prompt_ids}),
            sequences=with_rewards_over_limit(answers.sequences, self.settings.over_limit_reward),
            episode_figures=answers.figures,
            episodes_failed=dict(failed) if has_episodes else None,
            failure_examples=examples if has_episodes else None,
        )

    def _leave_out(self, prompt: Prompt, error: Exception) -> None:
        """Count a prompt without a usable answer; ``error`` is the reason."""
        self.last_failure = error
        self.failed_in_a_row += 1
        PROMPTS_FAILED.inc()
        log.warning("prompt left out: no completion could be generated", prompt_id=prompt.id, reason=str(error))

    def check(self) -> None:
        """End the run once every answer failed of the prompts of a step in a row, and of LEAST_FAILURES at least.

        Failures of the user's code may last OWN_BATCHES batches.

        Raises:
            ConfigurationError: a restart would fail again: the user's code failed, or the engine refuses them.
            DependencyLostError: no engine answers.
        """
        is_own = isinstance(self.last_failure, AgentFailedError) and self.last_failure.reason in OWN_REASONS
        batches = OWN_BATCHES if is_own else 1
        if self.failed_in_a_row >= max(batches * self.batch_size, LEAST_FAILURES):
            raise self.all_failed()

    def all_failed(self) -> ConfigurationError | DependencyLostError:
        """Return the error to raise when every answer of the last prompts failed."""
        prompts = f"{self.failed_in_a_row} prompt{'s'[: self.failed_in_a_row != 1]}"
        prompts += f" of source {self.source!r}" if self.source else ""
        return self.sampler.all_failed(self.last_failure, prompts)


Makers = Mapping[str, GroupMaker]
"""The maker of each source by its name; "" without SOURCES."""


def makers_of(settings: TrainerSettings, samplers: Mapping[str, Sampler]) -> Makers:
    """Return a maker for each source, with its own settings and its sampler."""
    sizes = {name: math.ceil(share * settings.batch_size) for name, share in settings.schedule.shares.items()}
    return {name: GroupMaker(own, samplers[name], name, sizes.get(name)) for name, own in settings.by_source().items()}


async def make_groups(
    makers: Makers,
    prompts: Sequence[Prompt],
    activity: Activity | None = None,
    arrive: Callable[[int, Group | None], None] = lambda place, group: None,
) -> list[Group]:
    """Generate and score the groups of ``prompts``, all at once; a prompt without a completion gets no group.

    ``activity`` counts the prompts that are answered, and ``arrive`` gets each prompt's group with the prompt's place.

    Raises:
        ConfigurationError, DependencyLostError: too many prompts of a source in a row failed.
    """

    async def make(place: int, prompt: Prompt) -> Group | None:
        group = await makers[prompt.source].make_group(prompt)
        arrive(place, group)
        return group

    works = (make(place, prompt) for place, prompt in enumerate(prompts))
    groups = [group for group in await (activity or Activity()).gather(works, "prompts answered") if group is not None]
    judge(makers, groups)
    return groups


def judge(makers: Makers, groups: Sequence[Group]) -> None:
    """Have the maker of each source count those of its new groups whose every score failed; see GroupMaker.judge."""
    for source, maker in makers.items():
        maker.judge([group for group in groups if group.prompt.source == source])


def demonstrated(settings: TrainerSettings, prompt: Prompt) -> Group:
    """Return the group of what is learned after a prompt as it is; no policy sampled it, so it has no reward.

    Raises:
        ConfigurationError: the prompt has nothing to learn.
    """
    if not prompt.demonstrations:
        raise ConfigurationError(
            f"METHOD is sft, but the data-server gives no tokens to learn after {prompt.id}; give it METHOD=sft and "
            "MODEL_NAME, too"
        )
    sequences = [
        TokenSequence(
            completion=demonstration.completion,
            completion_ids=demonstration.completion_ids,
            logprobs=np.zeros(len(demonstration.completion_ids)),
            policy_versions=np.zeros(len(demonstration.completion_ids), np.int32),
            loss_mask=demonstration.loss_mask,
            finish_reason=FinishReason.STOP,
            result=UNASKED,
            episode=demonstration.episode,
        )
        for demonstration in prompt.demonstrations
    ]
    prompt = prompt.model_copy(update={"demonstrations": []})
    return Group(group_id=group_id(settings, prompt), prompt=prompt, sequences=sequences)


def group_id(settings: TrainerSettings, prompt: Prompt) -> str:
    """Return the id of a prompt's group, which is the same when it is made again."""
    of_source = f"{prompt.source}-" if prompt.source else ""
    return f"{settings.run_id}-{of_source}{prompt.epoch}-{prompt.position}"


def with_rewards_over_limit(sequences: Sequence[TokenSequence], most: float) -> list[TokenSequence]:
    """Give answers over a limit the lowest reward of their group (in a game, of their seat), and ``most`` at most."""
    lowest: defaultdict[int | None, float] = defaultdict(lambda: most)
    for s in sequences:
        if s.reward is not None:
            lowest[s.seat] = min(lowest[s.seat], s.reward)
    return [
        s.model_copy(update={"result": s.scoring.model_copy(update={"reward": lowest[s.seat]})})
        if s.scoring.status is RewardStatus.OVER_LIMIT
        else s
        for s in sequences
    ]


def reward_failure(group: Group) -> str | None:
    """Return the first failure of the reward function if it failed at every answer of a group of completions."""
    results = [sequence.scoring for sequence in group.sequences]
    if group.episodes_failed is not None or any(result.status is not RewardStatus.ERROR for result in results):
        return None
    return results[0].reason or "it gave no reason"
