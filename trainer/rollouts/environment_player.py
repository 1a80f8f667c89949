"""The agent of ROLLOUT=environment: it plays an episode of an environment-server with the model in training."""

from __future__ import annotations

from typing import Any

import httpx

from services.agents import AgentFailedError, Example
from services.clients.environment import EnvironmentClient, Episode, EpisodeLostError
from services.core.errors import DependencyLostError
from services.http.client import RequestRefusedError
from services.protocol.evaluation import Action, ActionKind, StateKind, StepStatus


class EnvironmentPlayer:
    """An agent whose reward is the return of the episode, and whose calls' rewards are the environment's."""

    def __init__(self, environments: EnvironmentClient) -> None:
        self._environments = environments

    async def __call__(self, example: Example, *, base_url: str, api_key: str, http_client: httpx.AsyncClient) -> float:
        """Play the episode of the seed that ``example`` names, and return the sum of its rewards.

        Each answer of the model is an action. ``example.turn_rewards`` gets the reward of each.

        Raises:
            AgentFailedError: the environment is not of text, or the episode was lost.
            httpx.HTTPStatusError: the gateway refused a call over a limit of the session.
        """
        try:
            async with await self._environments.begin(_seed_of(example), _split_of(example)) as episode:
                _check(episode)
                transcript = Transcript(episode)
                while not episode.is_over:
                    body = {"model": example.model, "messages": transcript.messages}
                    headers = {"Authorization": f"Bearer {api_key}"}
                    reply = await http_client.post(f"{base_url}/chat/completions", json=body, headers=headers)
                    text = reply.raise_for_status().json()["choices"][0]["message"]["content"] or ""
                    example.turn_rewards.append(await transcript.act(text))
                return episode.episode_return
        except EpisodeLostError as error:
            raise AgentFailedError(str(error), "lost") from error
        except (DependencyLostError, RequestRefusedError) as error:
            raise AgentFailedError(str(error), "server") from error


class Transcript:
    """The conversation of an episode: the environment's messages, and the answers that it did not take."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.messages: list[dict[str, Any]] = _messages_of(episode)

    async def act(self, text: str) -> float:
        """Take the model's answer as an action and return its reward.

        The model reads why an action was refused; that is a turn without a reward.

        Raises:
            EpisodeLostError: the episode is lost.
        """
        before = _messages_of(self._episode)
        action: Action = text
        result = await self._episode.step(action)
        if result.status is StepStatus.REFUSED:
            refusal = {"role": "user", "content": result.detail or "The action was refused."}
            self.messages = [*self.messages, {"role": "assistant", "content": text}, refusal]
            return 0.0
        after = _messages_of(self._episode)
        continues = after[: len(before)] == before
        self.messages = [*self.messages, *after[len(before) :]] if continues else after
        return result.reward


def _messages_of(episode: Episode) -> list[dict[str, Any]]:
    assert isinstance(episode.state, list)
    return list(episode.state)


def _seed_of(example: Example) -> int:
    if not (example.ground_truth.isascii() and example.ground_truth.isdecimal()):
        raise AgentFailedError(
            f"prompt {example.id} has the ground truth {example.ground_truth[:60]!r} in place of a seed; "
            "set DATASET=seeds for ROLLOUT=environment",
            "seed",
        )
    return int(example.ground_truth) % 2**31


def _split_of(example: Example) -> str | None:
    """Return the split that the prompt's id names, as in ``seeds/train/17``."""
    parts = example.id.split("/")
    return parts[-2] if len(parts) > 1 else None


def _check(episode: Episode) -> None:
    info = episode.environment
    if info.state.kind is not StateKind.MESSAGES or info.action.kind is not ActionKind.TEXT:
        raise AgentFailedError(
            f"ENVIRONMENT {info.id!r} has states of {info.state.kind} and actions of {info.action.kind}; a language "
            "model plays environments of messages and text",
            "environment",
        )
