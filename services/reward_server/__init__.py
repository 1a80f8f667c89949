"""The reward-server: scores answers against ground truths."""
