"""The ways of rolling out, as far as settings decide them: a class for each name of ROLLOUT.

The class that answers prompts, with its clients, is named here by its path: settings are also read where nothing is
trained, and where its imports would only take time.
"""

from __future__ import annotations

from typing import ClassVar

from services.core.endpoints import Task
from services.protocol.base import MAX_SEQUENCES
from trainer.algorithm.methods import is_own_function
from trainer.config.sections import SELF, Rollout, SamplingSection


class Way:
    """A way of rolling out, by the settings of a run."""

    sampler: ClassVar[str]
    """The subclass of trainer.rollouts.groups.Sampler that answers prompts."""
    services: ClassVar[tuple[Task, ...]] = ()
    """The services that the run needs besides those of every run."""
    has_turns: ClassVar[bool] = False
    """True where an answer may have several turns."""

    def __init__(self, settings: SamplingSection) -> None:
        self.settings = settings

    def check(self) -> None:
        """Check the settings of this way.

        Raises:
            ValueError: one of them does not fit; the message has the variable, its value and what is allowed.
        """

    @property
    def own_functions(self) -> dict[str, str]:
        """The user's functions that answer prompts, by variable."""
        return {}

    @property
    def longest_answer(self) -> int:
        """Most tokens that the model samples for one answer to a prompt."""
        return self.settings.max_new_tokens

    @property
    def longest_answer_seconds(self) -> float:
        """Longest time that one answer to a prompt takes once it is in flight."""
        return self.settings.generation_deadline_seconds


class Completions(Way):
    """One completion answers a prompt."""

    sampler = "trainer.rollouts.groups:Completions"


class Episodes(Way):
    """An episode of several turns, which the gateway records, answers a prompt."""

    services: ClassVar[tuple[Task, ...]] = (Task.GATEWAY,)
    has_turns = True

    def check(self) -> None:
        """Check the lengths of episodes."""
        settings = self.settings
        if settings.agent_max_tokens < settings.max_new_tokens:
            raise ValueError(
                f"AGENT_MAX_TOKENS is {settings.agent_max_tokens}; allowed is at least MAX_NEW_TOKENS "
                f"({settings.max_new_tokens}), the longest turn"
            )
        sequences = settings.group_size * settings.agent_max_turns
        if sequences > MAX_SEQUENCES:
            raise ValueError(
                f"GROUP_SIZE times AGENT_MAX_TURNS is {sequences}; allowed is at most {MAX_SEQUENCES}, the most "
                "sequences of a group"
            )

    @property
    def longest_answer(self) -> int:
        """Most tokens that the model samples in an episode."""
        return self.settings.agent_max_tokens

    @property
    def longest_answer_seconds(self) -> float:
        """Longest time of an episode, in which calls of the model may take as long as AGENT_SECONDS."""
        return 2 * self.settings.agent_seconds


class Agents(Episodes):
    """AGENT, a function, plays the episodes."""

    sampler = "trainer.rollouts.episodes:Agents"

    def check(self) -> None:
        """Check AGENT too."""
        agent = self.settings.agent
        if not is_own_function(agent):
            raise ValueError(f"AGENT is {agent!r}, but ROLLOUT is agent; give the agent as module:function")
        super().check()

    @property
    def own_functions(self) -> dict[str, str]:
        """AGENT."""
        return {"AGENT": self.settings.agent}


class Programs(Episodes):
    """AGENT_COMMAND, a program in any language, plays the episodes."""

    sampler = "trainer.rollouts.episodes:Programs"

    def check(self) -> None:
        """Check AGENT_COMMAND too."""
        if not self.settings.agent_command.strip():
            raise ValueError("AGENT_COMMAND is empty, but ROLLOUT is program; give the agent as a shell command")
        super().check()


class Games(Episodes):
    """The model plays episodes of an environment, each of which begins with the seed that a prompt is."""

    sampler = "trainer.rollouts.game:Games"
    services = (Task.GATEWAY, Task.ENVIRONMENT_SERVER)

    def check(self) -> None:
        """Check OPPONENT too."""
        opponent = self.settings.opponent
        if opponent != SELF and not opponent.startswith(("http://", "https://")):
            raise ValueError(f"OPPONENT is {opponent!r}; allowed: `self` or a URL such as http://host:port")
        super().check()


WAYS: dict[Rollout, type[Way]] = {
    Rollout.COMPLETION: Completions,
    Rollout.AGENT: Agents,
    Rollout.PROGRAM: Programs,
    Rollout.ENVIRONMENT: Games,
}
