"""The services of the job group: data, rollouts, rewards and replay, and what they share."""

from services.core.extras import explain_missing_packages

explain_missing_packages()
