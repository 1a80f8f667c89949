"""Play CartPole with actions from an evaluation head: ``python -m evaluation.head_agent http://127.0.0.1:8080``."""

import sys

import gymnasium

from services.clients.evaluation_head import EvaluationHeadClient
from services.protocol.evaluation import EpisodePosition, FinishedEpisode


def play(url: str, seeds: range) -> list[float]:
    """Play an episode a seed and return their returns; the head's dashboard shows them under the agent's name."""
    environment = gymnasium.make("CartPole-v1")
    finished: list[FinishedEpisode] = []
    with EvaluationHeadClient(url, server="my-agent", environment="CartPole-v1").sync() as head:
        for seed in seeds:
            observation, _ = environment.reset(seed=seed)
            steps, total, is_over = 0, 0.0, False
            while not is_over:
                position = EpisodePosition(episode=f"seed-{seed}", step=steps, episode_return=total)
                reply = head.act([observation.tolist()], episodes=[position])
                observation, reward, terminated, truncated, _ = environment.step(reply.actions[0])
                steps, total, is_over = steps + 1, total + float(reward), terminated or truncated
            finished.append(FinishedEpisode(episode=f"seed-{seed}", steps=steps, episode_return=total, seed=seed))
        head.act(finished=finished)
    return [episode.episode_return for episode in finished]


if __name__ == "__main__":
    print(play(sys.argv[1], range(3)))
