"""An episode under way, as the evaluation head and a pushing environment server keep track of it."""

from __future__ import annotations

from dataclasses import dataclass

from services.protocol.evaluation import Action, EpisodePosition, FinishedEpisode, State, StepItem, StepResult


@dataclass
class RunningEpisode:
    """An episode and the state that its next action must answer."""

    episode: str
    seed: int
    state: State
    steps: int = 0
    episode_return: float = 0.0

    @property
    def position(self) -> EpisodePosition:
        """The episode's entry in a request for actions."""
        return EpisodePosition.model_construct(
            episode=self.episode, step=self.steps, episode_return=self.episode_return
        )

    @property
    def report(self) -> FinishedEpisode:
        """The report of the episode's end."""
        return FinishedEpisode.model_construct(
            episode=self.episode, steps=self.steps, episode_return=self.episode_return, seed=self.seed
        )

    def step_with(self, action: Action) -> StepItem:
        """Return the next step, with ``action``."""
        return StepItem.model_construct(episode=self.episode, step=self.steps, action=action)

    def follow(self, result: StepResult) -> None:
        """Move on to the state after a step."""
        assert result.state is not None
        self.state, self.steps = result.state, result.steps
        self.episode_return += result.reward
