"""The services of the job group: data, rollouts, rewards and replay, and what they share."""

from services.extras import explain_missing_packages

explain_missing_packages()
