"""The policy on its ranks: loading, sharding, log-probabilities and the optimizer's step."""
