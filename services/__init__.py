"""The services of the job group: data, rollouts, rewards and replay, and what they share."""
