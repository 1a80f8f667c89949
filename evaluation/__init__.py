"""Evaluation of checkpoints over any number of inference servers; ``grpo evaluate`` is the command."""
